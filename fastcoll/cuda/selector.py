"""Which algorithm serves a call: pure functions of what all ranks of a group know alike.

Nothing here looks at an address, a clock or the environment, so all ranks choose the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastcoll.cuda.algorithms import ALGORITHMS, Algorithm, Call, Topology
from fastcoll.cuda.algorithms.algorithm import FLOATS
from fastcoll.cuda.thresholds import DEFAULT, Thresholds

__all__ = ["AUTO", "candidates", "fuses", "select"]

AUTO = "auto"
_RING = (("one_shot", "one_shot_bytes"), ("two_shot", "two_shot_bytes"), ("ring", "ring_bytes"))


def candidates(call: Call, topology: Topology, thresholds: Thresholds = DEFAULT) -> Iterator[str]:
    """Yields names of algorithms, the one to be preferred first; some may refuse the call.

    Args:
        call: What is called.
        topology: Of the group.
        thresholds: From the tuning table.
    """
    size = call.wire_bytes
    if topology.peers and topology.ranks > 1:
        for name, limit in _RING:
            if size <= getattr(thresholds, limit) > 0:
                yield name
                break
        if call.wire is not None:  # with NCCL it takes two collectives and three kernels
            yield from ("two_shot", "one_shot")
    yield from ("nccl", "all_to_all")


def select(
    call: Call, topology: Topology, thresholds: Thresholds = DEFAULT, forced: str = AUTO
) -> Algorithm:
    """Returns the algorithm for a call.

    Args:
        call: What is called.
        topology: Of the group.
        thresholds: From the tuning table.
        forced: The name of an algorithm, or "auto". "nccl" forces the library and no algorithm: a narrower wire, which
            its all-reduce would round at every hop, goes through it by all_to_all. "ring" serves reduce-scatter and
            all-gather too; they are NCCL's otherwise.

    Raises:
        ValueError: The forced one, or none at all, can serve the call; the message says why.
    """
    if call.collective != "all_reduce" and forced != "ring":  # the others have no kernel for it
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
    """Tells whether tensors that are reduced together are many and small enough to be fused into one bucket.

    One rank has nothing to gain by it; where an algorithm is forced it goes the way that several ranks would go.

    Args:
        sizes: Their elements.
        call: All of them as one list.
        topology: Of the group.
        thresholds: From the tuning table.
        forced: As of ``select``.
    """
    return (
        topology.kernels
        and (topology.ranks > 1 or forced != AUTO)
        and call.dtype in FLOATS
        and len(sizes) >= thresholds.list_tensors
        and sum(sizes) * call.dtype.itemsize <= thresholds.list_bytes * len(sizes)
    )
