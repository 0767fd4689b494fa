"""What the engine gives NCCL for an operation of torch's."""

from typing import Any

import pytest

from fastcoll._load import C
from fastcoll.cuda.engine import CudaEngine

SOURCE, TARGET = 0x1000, 0x2000


class Recorder:
    """Stands for a communicator: keeps the addresses of the last call."""

    addresses: tuple[int, int] = (0, 0)

    def broadcast(self, send: int, receive: int, *_: Any) -> None:
        self.addresses = send, receive

    reduce = broadcast


@pytest.mark.parametrize(
    ("collective", "source", "target"),
    [
        ("broadcast", SOURCE, 0),  # of the root
        ("broadcast", 0, TARGET),
        ("reduce", SOURCE, TARGET),  # of the root
        ("reduce", SOURCE, 0),
    ],
)
def test_no_rank_gives_nccl_a_null_address(collective: str, source: int, target: int) -> None:
    """A graph registers what it is given, on all ranks or on none."""
    engine = CudaEngine.__new__(CudaEngine)  # without NCCL
    engine._reductions = {}
    float32, total = C.DTYPES.index("float32"), C.REDUCE_OPS.index("SUM")
    number = C.COLLECTIVES.index(collective)
    record = Recorder()
    operation = (number, float32, total, 0, 0.0, 0, source, 8, target, 8)
    engine._call(record, operation, 0, -1)  # type: ignore[arg-type]
    assert record.addresses == (source or target, target or source)
