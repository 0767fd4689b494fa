"""The ranks' GPUs, as a run of the benchmark on CUDA devices checks them first."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from world import here

from fastcoll._measure import Control
from fastcoll.bench.run import describe_gpus


def gathered(gpus: int) -> object:
    """As on a host with so many GPUs, each reaching all others but the last."""
    store = torch.distributed.FileStore(str(here().scratch / "store"), here().size)
    control = Control(store, here().rank, here().size)
    found = SimpleNamespace(
        device_count=lambda: gpus,
        get_device_properties=lambda index: SimpleNamespace(name="H200", uuid=f"gpu-{index}"),
        can_device_access_peer=lambda one, other: gpus - 1 not in (one, other),
    )
    device = torch.device("cuda", here().rank % gpus)
    with mock.patch.object(torch, "cuda", found):
        try:
            return describe_gpus(control, device)
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("gpus", [2, 3])
def test_all_ranks_learn_the_same(world, gpus):
    answers = world(3).run(gathered, gpus, init=False)
    assert answers[0] == answers[1] == answers[2]
    if gpus == 2:
        assert "ranks 0, 2 have the same one" in answers[0] and "--nproc-per-node 2" in answers[0]
    else:
        assert [(rank["gpu"], rank["peers"]) for rank in answers[0]] == [
            ("H200", 1),
            ("H200", 1),
            ("H200", 0),
        ]
