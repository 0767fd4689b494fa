"""What NCCL's own model predicts for its ring and tree: the one by which it chooses between them.

    time = latency + S / bandwidth, for each of ring and tree with LL, LL128 and Simple; the least one is chosen.

Constants and rules are those of NVIDIA/nccl 5067397c (2.30.7), src/graph/tuning.cc (Apache-2.0), for Hopper and hosts
of Intel; NVLS and CollNet, which sum in the switches, are left out. The channels are what its search (search.cc and
topo.h in src/graph) should find for nodes of 8 GPUs with NVSwitch and 8 NDR cards: derived here, not read off a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["COLLECTIVES", "SOURCE", "NcclPrediction", "predict"]

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")

SOURCE = (
    "NVIDIA/nccl 5067397c (2.30.7), src/graph/tuning.cc: ncclTopoTuneModel, ncclTopoGetAlgoTime"
)

_PROTOCOLS = ("LL", "LL128", "Simple")

# Microseconds, by protocol.
_BASE = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_NVLINK = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}
_NET = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}
_NET_OVERHEAD = 1.0  # to post a message; three times that with Simple
_RING_PLATEAU = 1.4

# GB/s; by number of nodes: 1, 2, more.
_LL_MOST = (141.0, 39.0, 20.4)  # with several nodes it is the host's processor that counts
_RING_LL128_MOST = (36.7, 36.7, 36.7)  # of a channel, as the next ones
_TREE_LL128_MOST = (36.7, 36.7, 29.0)
_TREE_MOST = (38.7, 41.4, 36.0)

# (channels, GB/s of each). One node: 370.8 GB/s of NVLink; 60 is the first speed of the list that fits, 6 times, and
# channels of 50 and more are halved into twice as many. Several: 48 is the first speed that fits a card of 50 GB/s, for
# each card; more than 8 would not fit the NVLink of a GPU, as all rings pass through it.
_ONE_NODE = (12, 30.0)
_NODES = (8, 48.0)

# What is left of a tree's bandwidth, from 64 bytes on, by powers of two.
_TREE_CORRECTION = {
    "LL": (
        *(1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5),
        *(0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0),
    ),
    "LL128": (
        *(1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6),
        *(0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0, 1.0),
    ),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
    ),
}


@dataclass(frozen=True)
class NcclPrediction:
    """What the model says of one algorithm.

    Attributes:
        algorithm: "ring" or "tree".
        protocol: The one with the shortest time.
        seconds: Of a call.
    """

    algorithm: str
    protocol: str
    seconds: float


@dataclass(frozen=True)
class _Shape:
    ranks: int
    nodes: int
    channels: int
    each: float  # GB/s of a channel


def predict(collective: str, ranks: int, size: int, per_node: int = 8) -> list[NcclPrediction]:
    """Returns NCCL's prediction for the algorithms that it has for a collective.

    Args:
        collective: "all_reduce", "reduce_scatter" or "all_gather"; the latter two have the ring only.
        ranks: On one node, or on full ones; 2 or more.
        size: Bytes of the message; for reduce_scatter and all_gather of the whole one, as NCCL's model takes it.
        per_node: GPUs of a node, each with a network card.

    Raises:
        ValueError: The collective is none of these, there is one rank, or the last of several nodes is not full.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"fastcoll.costs.nccl: no model of {collective!r}")
    if ranks < 2:
        raise ValueError(f"fastcoll.costs.nccl: expected 2 ranks or more, got {ranks}")
    if per_node < 1 or (ranks > per_node and ranks % per_node):
        raise ValueError(
            f"fastcoll.costs.nccl: expected one node or full ones of {per_node}, got {ranks} ranks"
        )
    nodes = max(1, ranks // per_node)
    channels, each = _ONE_NODE if nodes == 1 else (min(per_node, _NODES[0]), _NODES[1])
    shape = _Shape(ranks, nodes, channels, each)
    found = []
    for algorithm in ("ring", "tree") if collective == "all_reduce" else ("ring",):
        options = [
            NcclPrediction(
                algorithm,
                protocol,
                1e-6 * _microseconds(algorithm, protocol, collective, shape, size),
            )
            for protocol in _PROTOCOLS
        ]
        found.append(min(options, key=lambda option: option.seconds))
    return found


def _microseconds(
    algorithm: str, protocol: str, collective: str, shape: _Shape, size: int
) -> float:
    ranks, nodes = shape.ranks, shape.nodes
    steps = 2 * (ranks - 1) if collective == "all_reduce" else ranks - 1
    bandwidth = _bus_bandwidth(algorithm, protocol, shape)
    if algorithm == "ring":
        bandwidth *= ranks / steps
        latency = _ring_latency(protocol, collective, steps, nodes)
        long = size / (shape.channels * ranks) >= 64
        if protocol == "Simple" and nodes > 1 and collective == "all_reduce" and long:
            latency *= _RING_PLATEAU
    else:
        bandwidth *= 0.5 * _tree_correction(protocol, size)
        latency = _tree_latency(protocol, ranks, nodes)
    return latency + size / (1e3 * bandwidth)


def _bus_bandwidth(algorithm: str, protocol: str, shape: _Shape) -> float:
    """Returns GB/s of all channels together."""
    channels, nodes = shape.channels, shape.nodes
    bandwidth, which = channels * shape.each, min(nodes, 3) - 1
    if algorithm == "ring":
        if protocol == "LL":
            return min(_LL_MOST[which], bandwidth * 0.5)
        if protocol == "LL128":
            return min(bandwidth * 0.92, channels * _RING_LL128_MOST[which])
        return bandwidth
    bandwidth = min(bandwidth * 0.92, channels * _TREE_MOST[which])
    if protocol == "LL":
        return min(bandwidth / 3.8, _LL_MOST[which])
    if protocol == "LL128":
        share = 7 / 9 if nodes == 1 else 120 / 128
        return min(bandwidth * share, channels * _TREE_LL128_MOST[which])
    return bandwidth


def _ring_latency(protocol: str, collective: str, steps: int, nodes: int) -> float:
    at = _PROTOCOLS.index(protocol)
    per_step = _NVLINK["ring"][at]
    if nodes > 1:
        per_step = max(per_step, _NET_OVERHEAD * (3 if protocol == "Simple" else 1))
    between = (2 if collective == "all_reduce" else 1) * (nodes - 1)
    # One rank per node exposes all of the network's latency: there NCCL takes the tree's.
    net = _NET["tree" if steps == between else "ring"][at]
    return _BASE["ring"][at] + (steps - between) * per_step + between * net


def _tree_latency(protocol: str, ranks: int, nodes: int) -> float:
    at = _PROTOCOLS.index(protocol)
    inside = (ranks // nodes - 1) * _NVLINK["tree"][at]
    return _BASE["tree"][at] + 2 * (inside + int(math.log2(nodes)) * _NET["tree"][at])


def _tree_correction(protocol: str, size: int) -> float:
    at = (size >> 6).bit_length() - 1
    return _TREE_CORRECTION[protocol][at] if 0 <= at < 23 else 1.0
