"""Collectives whose ranks all run in one launch on one GPU, compared with the traffic of their formulas.

The head of each kernel's file has the bytes that a rank reads and writes. The traffic is their sum over all ranks, all
in the memory of one device. The bound is this traffic over the bandwidth of a copy in the same run. A message of some
MiB stays in the L2 cache and may be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from fastcoll.bench.kernel_cases import Case, total, verified
from fastcoll.kernels.peers import PeerBuffers, PeerLayout

__all__ = [
    "ALGORITHMS",
    "RANKS",
    "SIZES",
    "all_reduce_case",
    "all_reduce_cases",
    "prepared_launches",
    "traffic",
]

ALGORITHMS = ("one_shot", "two_shot", "ring")
RANKS = (2, 4, 8)
SIZES = (1 << 20, 16 << 20, 64 << 20, 256 << 20)
"""Bytes of a message."""

_DTYPES = (torch.float32, torch.bfloat16)
_SPINS = 2_000_000  # seconds


def traffic(algorithm: str, ranks: int, size: int, itemsize: int) -> int:
    """Returns the bytes that all ranks read and write for messages of `size` bytes, wire dtype that of the message.

    Args:
        algorithm: One of ``ALGORITHMS``.
        ranks: Number of ranks.
        size: Bytes of a message.
        itemsize: Bytes of an element of it; the ring's partial sums are float32.
    """
    each = {
        # stage, read all ranks' staging, write
        "one_shot": 2 * size + ranks * size + size,
        # stage, reduce a share into staging and result, fetch the others
        "two_shot": 2 * size + (size + 2 * size // ranks) + 2 * (ranks - 1) * size // ranks,
        # message and result; every slot that is sent is written and read
        "ring": 2 * size + 2 * ((ranks - 1) * (size + size * 4 // itemsize) // ranks),
    }
    return ranks * each[algorithm]


def _case_name(algorithm: str, ranks: int, size: int, dtype: torch.dtype) -> str:
    """Returns the row of the table."""
    text = str(dtype).removeprefix("torch.")
    return f"{algorithm} {ranks} ranks {size / (1 << 20):g} MiB {text}"


def _layout_for(ranks: int, device: torch.device) -> PeerLayout:
    """Returns a layout whose ranks together have a channel for every multiprocessor, so all programs are resident."""
    if device.type != "cuda":
        return PeerLayout(1, 1024, 4, 512)
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return PeerLayout(count // ranks, 512 << 10, 8, 128 << 10)


def _buffers(ranks: int, layout: PeerLayout, device: torch.device) -> list[PeerBuffers]:
    space = torch.zeros(ranks * layout.bytes + 128, dtype=torch.uint8, device=device)
    start = -space.data_ptr() % 128
    regions = [space[start + rank * layout.bytes :][: layout.bytes] for rank in range(ranks)]
    addresses = [region.data_ptr() for region in regions]
    return [
        PeerBuffers(rank, region, addresses, layout, _SPINS) for rank, region in enumerate(regions)
    ]


def _aligned(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    space = torch.empty(elements + 16, dtype=dtype, device=device)
    start = -space.data_ptr() % 16 // dtype.itemsize
    return space[start : start + elements]


def all_reduce_case(
    algorithm: str, ranks: int, size: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """Returns the all-reduce of `ranks` messages of `size` bytes in one launch."""
    from fastcoll.kernels.every_rank import prepare_every_rank

    buffers = _buffers(ranks, _layout_for(ranks, device), device)
    elements = size // dtype.itemsize
    sources = [_aligned(elements, dtype, device).normal_() for _ in range(ranks)]
    outs = [_aligned(elements, dtype, device) for _ in range(ranks)]
    work = prepare_every_rank(algorithm, "all_reduce", sources, outs, buffers)

    def verify(_: str) -> bool:
        right = verified(work, sources, outs, lambda: [total(sources)] * ranks)
        check()
        return right

    def check() -> None:
        for each in buffers:
            each.check()

    name = _case_name(algorithm, ranks, size, dtype)
    moved = traffic(algorithm, ranks, size, dtype.itemsize)
    return Case(name, moved, 1, {"fastcoll": work}, verify, check)


def all_reduce_cases(device: torch.device, small: bool) -> Iterator[partial[Case]]:
    """Yields a maker of each case."""
    if small:
        # Interpreted programs run one after another, so a rank that waits for another would wait forever.
        ranks = 2 if device.type == "cuda" else 1
        for algorithm, dtype in product(ALGORITHMS, _DTYPES):
            yield partial(all_reduce_case, algorithm, ranks, 3008, dtype, device)
        return
    every = list(product(RANKS, ALGORITHMS, SIZES, _DTYPES))
    every.sort(key=lambda case: case[2] != SIZES[-1])  # first those that the page shows
    for ranks, algorithm, size, dtype in every:
        yield partial(all_reduce_case, algorithm, ranks, size, dtype, device)


def prepared_launches(
    source: torch.Tensor, out: torch.Tensor
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields name and prepared launch of each kernel between ranks, with one rank, so without waiting."""
    from fastcoll.kernels import one_shot, ring, two_shot

    (buffers,) = _buffers(1, PeerLayout(2, 8192, 4, 4096), source.device)
    for name, prepare in (
        ("one_shot", one_shot.prepare_all_reduce),
        ("two_shot", two_shot.prepare_all_reduce),
        ("ring", ring.prepare_all_reduce),
    ):
        yield name, prepare(source, out, buffers)
