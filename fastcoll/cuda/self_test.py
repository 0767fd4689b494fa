"""Self-test of the kernels on this device: known inputs, and a check of every bit of the result.

Triton can be installed and not work: a read-only home folder, an unsupported GPU, a driver that refuses its code. A
kernel can also be wrong on a GPU that has never run it. ``fastcoll.cuda.symmetric.open_region`` runs these tests before
a group's first call on a device; if one rank fails, all ranks use NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastcoll.buckets import GRAIN, BucketLayout

if TYPE_CHECKING:
    from fastcoll.cuda.symmetric import PeerMemory

__all__ = ["PEER_KERNELS", "prepare_peers", "require_lists", "require_peers"]

PEER_KERNELS = ("one_shot", "two_shot", "ring", "bucket_all_reduce")
"""Names of the kernels that ``require_peers`` launches."""

_SIZES = (100, 57, 99)
"""Elements of the list's tensors, 1 KiB of float32. A single tensor has one more, which vectors do not divide."""

_COUNT = sum(_SIZES) + 1

_works: set[torch.device] = set()  # devices on which the list kernels passed


def numbers(rank: int, count: int) -> Tensor:
    """Returns a rank's input: float32 [count], whole numbers below 2^18, because 32 of them add up exactly."""
    index = torch.arange(count, dtype=torch.int64, device="cpu")
    return ((index * 40_503 + rank * 25_717 + 1) % (1 << 18)).float()


def require_lists(device: torch.device) -> None:
    """Gathers a list into a bucket and scatters it again, unless this process has done so before.

    Launches on the current stream, and waits for it.

    Args:
        device: The device as kernels name it.

    Raises:
        RuntimeError: A bit is wrong.
        Exception: Any error of compiling and launching.
    """
    from fastcoll.kernels.flatten import Flatten, Unflatten

    if device in _works:
        return
    layout = BucketLayout(_SIZES, GRAIN)
    given = [numbers(0, _COUNT)[index : index + size] for index, size in enumerate(_SIZES)]
    tensors = [each.to(device) for each in given]
    bucket = torch.zeros(layout.elements, device=device)
    back = [torch.zeros_like(each) for each in tensors]
    Flatten(layout, torch.float32, torch.float32, device).prepare(tensors, bucket)()
    Unflatten(layout, torch.float32, torch.float32, device).prepare(bucket, back)()
    for size, offset, sent in zip(layout.sizes, layout.offsets, given, strict=True):
        _require_equal("flatten", bucket[offset : offset + size], sent)
    for got, sent in zip(back, given, strict=True):
        _require_equal("unflatten", got, sent)
    _works.add(device)


_Prepared = tuple[str, Sequence[Callable[[], None]], Tensor, Tensor]
"""A kernel of ``PEER_KERNELS``, ready to launch: its name, the launches in their order, where the result will be, and
the input, which launches do not hold."""


def prepare_peers(peers: PeerMemory) -> list[_Prepared]:
    """Returns the kernels of ``PEER_KERNELS``, compiled, for the current stream.

    Raises:
        Exception: Any error of compiling.
    """
    from fastcoll.kernels import ring
    from fastcoll.kernels.bucket_all_reduce import BucketAllReduce
    from fastcoll.kernels.flatten import Flatten
    from fastcoll.kernels.staged import one_shot, two_shot

    buffers = peers.buffers
    device = buffers.device
    launches: list[_Prepared] = []
    for name, prepare in (
        ("one_shot", one_shot.prepare_all_reduce),
        ("two_shot", two_shot.prepare_all_reduce),
        ("ring", ring.prepare_all_reduce),
    ):
        source = numbers(buffers.rank, _COUNT).to(device)
        out = torch.zeros_like(source)
        launches.append((name, [prepare(source, out, buffers)], out, source))
    layout = BucketLayout(_SIZES, GRAIN)
    out = numbers(buffers.rank, sum(_SIZES)).to(device)
    tensors = list(torch.split(out, list(_SIZES)))
    bucket = peers.bucket(layout.elements, torch.float32)
    flatten = Flatten(layout, torch.float32, torch.float32, device)
    reduce = BucketAllReduce(layout, torch.float32, torch.float32, buffers, peers.buckets)
    steps = [flatten.prepare(tensors, bucket), reduce.prepare(tensors)]
    launches.append(("bucket_all_reduce", steps, out, out))
    return launches


def require_peers(peers: PeerMemory) -> None:
    """Runs each kernel between the ranks once; all ranks call it. Launches on the current stream, and waits for it.

    After a failure this rank still launches the remaining kernels, because its peers wait for them.

    Args:
        peers: The peer-mapped memory; after an error launch nothing more on it.

    Raises:
        PeerFault: A rank has not launched the same kernel in time.
        RuntimeError: A bit is wrong.
        Exception: Any error of a launch.
    """
    buffers = peers.buffers
    everyone = [numbers(rank, _COUNT) for rank in range(buffers.world_size)]
    total = torch.stack(everyone).sum(0)
    errors: list[Exception] = []
    for kernel, steps, out, _ in prepare_peers(peers):
        try:
            for step in steps:
                step()
            got = out.cpu()  # waits for it
            buffers.check()
            _require_equal(kernel, got, total[: got.numel()])
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _require_equal(kernel: str, got: Tensor, wanted: Tensor) -> None:
    got = got.cpu()
    if torch.equal(got, wanted):
        return
    wrong: Sequence[int] = (got != wanted).nonzero().flatten().tolist()
    first = wrong[0]
    raise RuntimeError(
        f"the kernel {kernel} is wrong on this device: element {first} of {got.numel()} should be "
        f"{wanted[first].item():g} and is {got[first].item():g}; {len(wrong)} elements are wrong. Please report this."
    )
