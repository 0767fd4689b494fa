"""What the engine gives NCCL for an operation of torch's."""

import pytest
import torch.distributed as dist
from nccl_recorder import RecordedNccl

from fastcoll._load_cuda import CUDA

SOURCE, TARGET = 0x1000, 0x2000


@pytest.mark.parametrize(
    ("collective", "source", "target"),
    [
        ("broadcast", SOURCE, 0),  # of the root
        ("broadcast", 0, TARGET),
        ("reduce", SOURCE, TARGET),  # of the root
        ("reduce", SOURCE, 0),
    ],
)
def test_no_rank_gives_nccl_a_null_address(collective, source, target):
    """A graph registers what it is given, on all ranks or on none."""
    nccl = RecordedNccl()
    nccl.issue(collective, (source, 8 if source else 0), (target, 8 if target else 0))
    ((name, arguments),) = nccl.calls
    assert name.lower() == f"nccl{collective}"
    assert arguments[:3] == (source or target, target or source, 8)


def test_a_function_that_nccl_lacks_is_named():
    nccl = RecordedNccl()
    with pytest.raises(
        dist.DistBackendError, match=r"expected an NCCL that has ncclRecv, got 2\.18\.3"
    ):
        CUDA.NcclFunctions(lambda name: nccl._address(name) if name != "ncclRecv" else 0, 21803)
