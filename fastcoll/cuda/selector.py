"""Which algorithm serves a call: pure functions of values that are equal on all ranks of a group.

Nothing here reads an address, a clock or the environment, so all ranks choose the same algorithm.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from fastcoll.cuda.algorithms import ALGORITHMS, Algorithm, Call, Topology
from fastcoll.cuda.algorithms.call import COPIED
from fastcoll.cuda.algorithms.launches import bucket_bytes
from fastcoll.cuda.thresholds import DEFAULT, Thresholds

__all__ = ["AUTO", "buckets", "candidates", "fuses", "select"]

AUTO = "auto"
_BY_TREE = {"one_shot": 24, "two_shot": 24, "all_to_all": 3072}
"""Algorithms that sum by the CPU's tree, and up to how many ranks; see ``_sum_of`` in kernels/_pieces.py."""

_BUCKET_BYTES = 25 << 20  # as DDP's and GradientSynchronizer's buckets by default
_RING = (("one_shot", "one_shot_bytes"), ("two_shot", "two_shot_bytes"), ("ring", "ring_bytes"))


def candidates(call: Call, topology: Topology, thresholds: Thresholds = DEFAULT) -> Iterator[str]:
    """Yields names of algorithms, the preferred one first; some may refuse the call."""
    size = call.wire_bytes
    if topology.peers and topology.ranks > 1:
        for name, limit in _RING:
            if size <= getattr(thresholds, limit) > 0:
                yield name
                break
        if call.wire is not None:  # NCCL needs two collectives and three kernels for it
            yield from ("two_shot", "one_shot")
    yield from ("nccl", "all_to_all")


def select(
    call: Call,
    topology: Topology,
    thresholds: Thresholds = DEFAULT,
    forced: str = AUTO,
    fixed: bool = False,
) -> Algorithm:
    """Returns the algorithm for a call.

    `forced` is the name of an algorithm, or "auto". "nccl" forces the library, not an algorithm: a narrower wire goes
    through all_to_all over NCCL, because NCCL's all-reduce would round it at every hop. "ring" also serves
    reduce-scatter and all-gather, which otherwise go to NCCL. `fixed`: where the order of a sum changes its bits, only
    algorithms with the CPU's tree.

    Raises:
        ValueError: The forced algorithm, or any algorithm, cannot serve the call; the error gives the reason.
    """
    fixed = fixed and topology.ranks > 1 and call.depends_on_order
    others = call.collective != "all_reduce" and forced != "ring"  # the ring has kernels for some
    if not fixed and (others or call.collective == "reduce"):
        return ALGORITHMS["nccl"]
    if forced == AUTO or others:
        names = list(candidates(call, topology, thresholds))
    elif forced == "nccl":
        names = ["nccl", "all_to_all"]
    elif forced in ALGORITHMS:
        names = [forced]
    else:
        raise ValueError(
            f"expected an algorithm of {', '.join([AUTO, *ALGORITHMS])}, got {forced!r}. Correct the name."
        )
    refusals = []
    for name in dict.fromkeys(names):
        refusal = ALGORITHMS[name].refusal(call, topology)
        if fixed and topology.ranks > (most := _BY_TREE.get(name, 0)):
            ranks = f" on more than {most} ranks" if most else ""
            refusal = f"it sums in another order{ranks}, and FASTCOLL_ORDER is fixed"
        if not refusal:
            return ALGORITHMS[name]
        refusals.append(f"{name}: {refusal}")
    free = others or forced in (AUTO, "nccl")
    what = "an algorithm" if forced == AUTO else f"the requested algorithm {forced}"
    raise ValueError(
        f"expected {what} to serve {call} on {topology.ranks} ranks, got refusals: {'; '.join(refusals)}. "
        f"Set {'FASTCOLL_ORDER=any' if fixed and free else 'FASTCOLL_ALGO=auto'}, or change the call."
    )


def fuses(
    call: Call, algorithm: str, topology: Topology, thresholds: Thresholds, forced: str = AUTO
) -> bool:
    """Returns whether the tensors of a list are reduced as one bucket by this algorithm.

    A narrower wire copies each tensor in any case, except in the ring. Else they must be many and small. One rank then
    gains nothing by it; but if an algorithm is forced, one rank takes the same path as several.
    """
    if not topology.kernels or call.dtype not in COPIED:
        return False
    if call.wire is not None and algorithm != "ring":
        return True
    return (
        (topology.ranks > 1 or forced != AUTO)
        and len(call.sizes) >= thresholds.list_tensors
        and call.elements * call.dtype.itemsize <= thresholds.list_bytes * len(call.sizes)
    )


def buckets(call: Call, topology: Topology) -> Iterator[slice]:
    """Yields the parts of a list that may each be one bucket; without a narrower wire, the whole list.

    A wire fuses tensors of any size. So a bucket ends with the tensor that fills it, as in DDP. If it has several
    tensors, it fits into the memory that the ranks map.
    """
    first, filled = 0, 0
    room = topology.bucket_bytes if topology.peers else sys.maxsize
    item = call.wire_dtype.itemsize
    for index, size in enumerate(call.sizes if call.wire is not None else ()):
        if index > first and bucket_bytes(call.sizes[first : index + 1], item) > room:
            yield slice(first, index)
            first, filled = index, 0
        filled += size * call.dtype.itemsize
        if filled >= _BUCKET_BYTES:
            yield slice(first, index + 1)
            first, filled = index + 1, 0
    if first < len(call.sizes):
        yield slice(first, len(call.sizes))
