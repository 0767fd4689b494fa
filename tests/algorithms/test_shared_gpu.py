"""Several ranks on one GPU: NCCL's stand-in refuses that as NCCL does, unless ``FASTCOLL_SHARE_GPU`` is set."""

import contextlib
import io
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import peer_memory
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from peer_memory import DEVICE
from torch.distributed.device_mesh import DeviceMesh
from training import network, sharded, train
from world import here, init_group, worlds_fixture

import fastcoll
from fastcoll.cuda.nccl_library import let_ranks_share_gpus


def prepare():
    os.environ["FAKE_NCCL_ONE_GPU"] = "1"
    peer_memory.prepare()


_NEEDS = ("launcher", "without_nccl", "device_libraries")
one_gpu_world = worlds_fixture(*_NEEDS, prepare=prepare, scope="module")
shared_gpu_world = worlds_fixture(
    *_NEEDS,
    prepare=prepare,
    environ={"FASTCOLL_SHARE_GPU": "1", "FASTCOLL_ALGO": "nccl"},
    scope="module",
)


@on_ranks(2, world="one_gpu_world", fresh=True)
def test_nccl_refuses_two_ranks_of_a_host_on_one_gpu():
    with pytest.raises(dist.DistBackendError, match="Duplicate GPU detected"):
        dist.all_reduce(torch.ones(3, device=DEVICE))


@on_ranks(8, world="shared_gpu_world")
def test_eight_ranks_of_fsdp2_on_one_gpu_end_with_the_bits_of_the_cpu():
    fixed = dist.new_group(pg_options=fastcoll.Options(order="fixed"))
    results = []
    for device, group in (("cpu", dist.group.WORLD), (DEVICE, fixed)):
        model = network(torch.float).to(device)
        where = next(model.parameters()).device.type
        train(sharded(model, mesh=DeviceMesh.from_group(group, where)), 2)
        results.append([parameter.full_tensor().cpu() for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@on_ranks(2, world="shared_gpu_world", init=False, fresh=True)
def test_the_example_trains_on_one_gpu():
    path = Path(__file__).resolve().parents[2] / "examples" / "shared_gpu.py"
    main = runpy.run_path(str(path))["main"]
    own = {**vars(dist), "init_process_group": lambda name: init_group(seconds=40, backend=name)}
    main.__globals__.update(DEVICE=torch.device(DEVICE).type, dist=SimpleNamespace(**own))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main()
    if here().rank == 0:
        assert printed.getvalue().count("loss") == 3
        assert printed.getvalue().endswith("NCCL has 536870912 bytes on the GPU for rank 0\n")


@pytest.mark.parametrize(
    ("job", "socket"),
    [
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, "lo"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, None),
        ({}, None),
    ],
)
def test_each_process_is_a_host_for_nccl(job, socket):
    environ = {**job, "NCCL_MAX_CTAS": "4"}
    let_ranks_share_gpus(environ)
    assert str(os.getpid()) in environ["NCCL_HOSTID"]
    assert environ["NCCL_MAX_CTAS"] == "4"  # what is set stays
    assert environ.get("NCCL_SOCKET_IFNAME") == socket
