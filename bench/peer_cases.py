"""Collectives between ranks that are streams of one process on one GPU, compared with the traffic of their formulas.

Each rank launches what ships, with the channels and sizes of a ``RegionSizes``. So many channels are left out that the
programs of all ranks are on the device at once, because they wait for each other.

The head of each kernel's file has the bytes that a rank reads and writes. The traffic is their sum over all ranks, all
in the memory of one device. The bound is this traffic over the bandwidth of a copy in the same run. A message of some
MiB stays in the L2 cache and may be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from fastcoll.bench.kernel_cases import Case, total, verified
from fastcoll.buckets import BucketLayout
from fastcoll.cuda.mapping_decision import REGION_SIZES, RegionSizes
from fastcoll.kernels import ring
from fastcoll.kernels.bucket_all_reduce import BucketAllReduce
from fastcoll.kernels.peers import PeerBuffers, PeerLayout
from fastcoll.kernels.staged import one_shot, two_shot

__all__ = [
    "ALGORITHMS",
    "RANKS",
    "REGIONS",
    "SIZES",
    "all_reduce_case",
    "all_reduce_cases",
    "on_streams",
    "prepared_launches",
    "traffic",
]

ALGORITHMS = ("one_shot", "two_shot", "ring", "bucket")
RANKS = (2, 8)
REGIONS = (
    REGION_SIZES,
    RegionSizes(stage_bytes=REGION_SIZES.stage_bytes // 2, slot_bytes=REGION_SIZES.slot_bytes // 2),
    RegionSizes(stage_bytes=REGION_SIZES.stage_bytes * 2, slot_bytes=REGION_SIZES.slot_bytes * 2),
)
SIZES = (64 << 20, 1 << 10, 1 << 20, 256 << 20)
"""Bytes of a message."""

_PREPARE = {
    "one_shot": one_shot.prepare_all_reduce,
    "two_shot": two_shot.prepare_all_reduce,
    "ring": ring.prepare_all_reduce,
}
_DTYPES = (torch.float32, torch.bfloat16)
_RESIDENT = 2  # programs on a multiprocessor, by their registers
_SECONDS = 2.0  # of a wait


def traffic(algorithm: str, ranks: int, size: int, itemsize: int) -> int:
    """Returns the bytes that all ranks read and write for messages of `size` bytes, wire dtype that of the message.

    Args:
        algorithm: One of ``ALGORITHMS``.
        ranks: Number of ranks.
        size: Bytes of a message.
        itemsize: Bytes of an element of it; the ring's partial sums are float32.
    """
    others = 2 * (ranks - 1) * size // ranks  # fetched and written
    each = {
        # stage, read all ranks' staging, write
        "one_shot": 2 * size + ranks * size + size,
        # stage, reduce a share into staging and result, fetch the others
        "two_shot": 2 * size + (size + 2 * size // ranks) + others,
        # message and result; every slot that is sent is written and read
        "ring": 2 * size + 2 * ((ranks - 1) * (size + size * 4 // itemsize) // ranks),
        # reduce a share into bucket and result, fetch the others
        "bucket": (size + 2 * size // ranks) + others,
    }
    return ranks * each[algorithm]


def _case_name(
    algorithm: str, ranks: int, size: int, dtype: torch.dtype, shape: RegionSizes
) -> str:
    """Returns the row of the table."""
    mebibytes, kind = size / (1 << 20), str(dtype).removeprefix("torch.")
    sizes = (
        f" {shape.stage_bytes >> 10}/{shape.slot_bytes >> 10} KiB" if shape != REGION_SIZES else ""
    )
    return f"{algorithm} {ranks} streams {mebibytes:.4g} MiB {kind}{sizes}"


def _layout_for(ranks: int, shape: RegionSizes, device: torch.device) -> PeerLayout:
    channels = 1  # as a rank of the interpreter must not wait for another
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
        channels = min(shape.channels, _RESIDENT * count // ranks)
    return replace(shape, channels=channels)


def _aligned(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    space = torch.empty(elements + 128, dtype=dtype, device=device)
    start = -space.data_ptr() % 128 // dtype.itemsize
    return space[start : start + elements]


def _buffers(ranks: int, layout: PeerLayout, device: torch.device) -> list[PeerBuffers]:
    space = _aligned(ranks * layout.bytes, torch.uint8, device).zero_()
    regions = space.view(ranks, layout.bytes)
    addresses = [region.data_ptr() for region in regions]
    return [
        PeerBuffers(rank, region, addresses, layout, _SECONDS)
        for rank, region in enumerate(regions)
    ]


def on_streams(launches: Sequence[Callable[[], None]], device: torch.device) -> Callable[[], None]:
    """Returns a call that makes each launch on a stream of its own, between earlier and later work of the caller's.

    It can be captured: its streams begin and end at the caller's.
    """
    if len(launches) == 1:
        return launches[0]
    streams = [torch.cuda.Stream(device) for _ in launches]  # type: ignore[no-untyped-call]

    def call() -> None:
        current = torch.cuda.current_stream(device)
        for stream in streams:
            stream.wait_stream(current)
        for stream, launch in zip(streams, launches, strict=True):
            with torch.cuda.stream(stream):
                launch()
        for stream in streams:
            current.wait_stream(stream)

    return call


def all_reduce_case(
    algorithm: str,
    ranks: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    shape: RegionSizes = REGION_SIZES,
) -> Case:
    """Returns the all-reduce of `ranks` messages of `size` bytes, each rank on a stream of its own."""
    buffers = _buffers(ranks, _layout_for(ranks, shape, device), device)
    elements = size // dtype.itemsize
    sources = [_aligned(elements, dtype, device).normal_() for _ in range(ranks)]
    outs = [_aligned(elements, dtype, device) for _ in range(ranks)]
    if algorithm == "bucket":
        addresses = [source.data_ptr() for source in sources]
        buckets = torch.tensor(addresses, dtype=torch.int64, device=device)
        layout = BucketLayout([elements])
        launches = [
            BucketAllReduce(layout, dtype, dtype, each, buckets).prepare([out])
            for each, out in zip(buffers, outs, strict=True)
        ]
    else:
        sides = zip(sources, outs, buffers, strict=True)
        launches = [_PREPARE[algorithm](*side) for side in sides]
    work = on_streams(launches, device)

    def verify(_: str) -> bool:
        right = verified(work, sources, outs, lambda: [total(sources)] * ranks)
        check()
        return right

    def check() -> None:
        for each in buffers:
            each.check()

    name = _case_name(algorithm, ranks, size, dtype, shape)
    moved = traffic(algorithm, ranks, size, dtype.itemsize)
    return Case(name, moved, ranks, {"fastcoll": work}, verify, check)


def all_reduce_cases(device: torch.device, small: bool) -> Iterator[partial[Case]]:
    """Yields a maker of each case, the most important first."""
    if small:
        # Interpreted programs run one after another, so a rank that waits for another would wait forever.
        ranks = 2 if device.type == "cuda" else 1
        for algorithm, dtype in product(ALGORITHMS, _DTYPES):
            yield partial(all_reduce_case, algorithm, ranks, 3008, dtype, device)
        return
    for size, ranks, dtype, algorithm in product(SIZES, reversed(RANKS), _DTYPES, ALGORITHMS):
        yield partial(all_reduce_case, algorithm, ranks, size, dtype, device)
        if size == SIZES[0] and dtype == _DTYPES[0] and algorithm != "bucket":  # without staging
            for shape in REGIONS[1:]:
                yield partial(all_reduce_case, algorithm, ranks, size, dtype, device, shape)


def prepared_launches(
    source: torch.Tensor, out: torch.Tensor
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields name and prepared launch of each kernel between ranks, with one rank, so without waiting."""
    (buffers,) = _buffers(1, PeerLayout(2, 8192, 4, 4096), source.device)
    for name, prepare in _PREPARE.items():
        yield name, prepare(source, out, buffers)
