"""Which algorithm serves a call: pure functions of values that are equal on all ranks of a group.

Nothing here reads an address, a clock or the environment, so all ranks choose the same algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastcoll.cuda.algorithms import ALGORITHMS, Algorithm, Call, Topology
from fastcoll.cuda.algorithms.call import FLOATS
from fastcoll.cuda.thresholds import DEFAULT, Thresholds

__all__ = ["AUTO", "candidates", "fuses", "select"]

AUTO = "auto"
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
    call: Call, topology: Topology, thresholds: Thresholds = DEFAULT, forced: str = AUTO
) -> Algorithm:
    """Returns the algorithm for a call.

    `forced` is the name of an algorithm, or "auto". "nccl" forces the library, not an algorithm: a narrower wire goes
    through all_to_all over NCCL, because NCCL's all-reduce would round it at every hop. "ring" also serves
    reduce-scatter and all-gather, which otherwise go to NCCL.

    Raises:
        ValueError: The forced algorithm, or any algorithm, cannot serve the call; the error gives the reason.
    """
    if call.collective != "all_reduce" and forced != "ring":  # only the ring has kernels for it
        return ALGORITHMS["nccl"]
    if forced == AUTO:
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
        if not refusal:
            return ALGORITHMS[name]
        refusals.append(f"{name}: {refusal}")
    what = "an algorithm" if forced == AUTO else f"the requested algorithm {forced}"
    raise ValueError(
        f"expected {what} to serve {call} on {topology.ranks} ranks, got refusals: {'; '.join(refusals)}. "
        "Set FASTCOLL_ALGO=auto, or change the call."
    )


def fuses(
    sizes: Sequence[int],
    call: Call,
    topology: Topology,
    thresholds: Thresholds,
    forced: str = AUTO,
) -> bool:
    """Returns whether tensors of so many elements are many and small enough to fuse into one bucket.

    `call` has all of them as one list. One rank gains nothing by it; but if an algorithm is forced, one rank takes the
    same path as several.
    """
    return (
        topology.kernels
        and (topology.ranks > 1 or forced != AUTO)
        and call.dtype in FLOATS
        and len(sizes) >= thresholds.list_tensors
        and sum(sizes) * call.dtype.itemsize <= thresholds.list_bytes * len(sizes)
    )
