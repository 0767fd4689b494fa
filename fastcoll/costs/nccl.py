"""What NCCL's own model predicts for its algorithms: the one by which it chooses between them.

    time = latency + S / bandwidth, for each of ring and tree with LL, LL128 and Simple, and for sums in the switches of
    a node (NVLS; between nodes its tree) with Simple; the least one is chosen.

Constants and rules are those of NVIDIA/nccl 5067397c (2.30.7), src/graph/tuning.cc (Apache-2.0), for hosts of Intel;
CollNet, which sums in the switches between nodes, is left out. The channels are what its search (search.cc and topo.h
in src/graph) should find for nodes of 8 GPUs with NVSwitch and 8 NDR cards: derived here, not read off a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "BLACKWELL",
    "COLLECTIVES",
    "HOPPER",
    "SOURCE",
    "Generation",
    "NcclPrediction",
    "predict",
]

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
_NVLS = 25.0
_NVLS_TREE_NET = 20.9

# (channels, GB/s of each) of ring and tree between nodes: 48 is the first speed that fits a card of 50 GB/s, for each
# card; more than 8 would not fit the NVLink of a GPU, as all rings pass through it.
_NODES = (8, 48.0)


@dataclass(frozen=True)
class Generation:
    """What the model takes for one generation of GPUs; bandwidths in GB/s, by number of nodes: 1, 2, more.

    Attributes:
        nvlink: Of a GPU, each way.
        one_node: Channels of ring and tree in one node, and what each carries: the first speed of the search's list
            that fits, as often as it fits; channels of 50 and more are halved into twice as many.
        speeds: That list, in one node; `node_speeds`: in one of several.
        ll_most: Of LL; with several nodes it is the host's processor that counts.
        ring_ll128_most: Of a channel, as the next ones.
        tree_ll128_most: The same of the tree with LL128.
        tree_most: The same of the tree.
        nvls_tree_most: The same of NVLS between nodes.
        nvls_efficiency: Share of its bandwidth that NVLS reaches.
    """

    nvlink: float
    one_node: tuple[int, float]
    speeds: tuple[float, ...]
    node_speeds: tuple[float, ...]
    ll_most: tuple[float, float, float]
    ring_ll128_most: tuple[float, float, float]
    tree_ll128_most: tuple[float, float, float]
    tree_most: tuple[float, float, float]
    nvls_tree_most: tuple[float, float, float]
    nvls_efficiency: float


HOPPER = Generation(
    nvlink=370.8,
    one_node=(12, 30.0),
    speeds=(60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0),
    node_speeds=(48.0, 45.0, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5),
    ll_most=(141.0, 39.0, 20.4),
    ring_ll128_most=(36.7, 36.7, 36.7),
    tree_ll128_most=(36.7, 36.7, 29.0),
    tree_most=(38.7, 41.4, 36.0),
    nvls_tree_most=(0.0, 57.7, 45.5),
    nvls_efficiency=0.85,
)
"""H100, H200: 18 NVLinks of 20.6 GB/s."""

BLACKWELL = Generation(
    nvlink=721.8,
    one_node=(16, 45.0),
    speeds=(90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0),
    node_speeds=(48.0, 45.1, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0),
    ll_most=(282.0, 39.0, 20.4),
    ring_ll128_most=(40.0, 40.0, 40.0),
    tree_ll128_most=(55.6, 31.67, 20.0),
    tree_most=(70.0, 42.8, 24.0),
    nvls_tree_most=(0.0, 96.0, 80.0),
    nvls_efficiency=0.74,
)
"""B200: 18 NVLinks of 40.1 GB/s, with cards of 50 GB/s."""

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
        algorithm: "ring", "tree" or "nvls".
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
    of: Generation

    @property
    def which(self) -> int:
        """The index of what depends on the number of nodes."""
        return min(self.nodes, 3) - 1


def predict(
    collective: str, ranks: int, size: int, per_node: int = 8, generation: Generation = HOPPER
) -> list[NcclPrediction]:
    """Returns NCCL's prediction for the algorithms that it has for a collective.

    Args:
        collective: "all_reduce", "reduce_scatter" or "all_gather"; the latter two have no tree, and NVLS in a node.
        ranks: On one node, or on full ones; 2 or more.
        size: Bytes of the message; for reduce_scatter and all_gather of the whole one, as NCCL's model takes it.
        per_node: GPUs of a node, each with a network card.
        generation: Of the GPUs.

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
    channels, each = generation.one_node if nodes == 1 else (min(per_node, _NODES[0]), _NODES[1])
    shape = _Shape(ranks, nodes, channels, each, generation)
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
    if ranks // nodes > 1 and (nodes == 1 or collective == "all_reduce"):
        found.append(NcclPrediction("nvls", "Simple", 1e-6 * _nvls(collective, shape, size)))
    return found


def _nvls(collective: str, shape: _Shape, size: int) -> float:
    """Returns the microseconds of sums in the switches: each GPU of a node is the head of a channel.

    A channel loads the link of its own GPU twice and that of the others once. In one node the search then raises what
    it takes for the way between nodes, up to twice the one inside, as nothing holds it back there.
    """
    local, of = min(shape.ranks // shape.nodes, 8), shape.of
    speeds = of.speeds if shape.nodes == 1 else of.node_speeds
    inside = next((speed for speed in speeds if speed * (local + 1) <= of.nvlink), speeds[-1])
    larger = [speed for speed in reversed(speeds) if speed > inside]
    between = inside
    for speed in larger:
        if between < 2 * inside:
            between = speed
    carried = inside * of.nvls_efficiency * (local - 1) / local
    if collective != "all_reduce":
        return _NVLS + size / (1e3 * local * min(carried * (local - 1) / local, between))
    most = [2 * carried, between]
    if shape.nodes > 1:
        most = [
            2 * carried,
            between * (2 if shape.nodes == 2 else 1),
            of.nvls_tree_most[shape.which],
        ]
    latency = _NVLS + 2 * int(math.log2(shape.nodes)) * _NVLS_TREE_NET
    bandwidth = local * min(most) * shape.ranks / (2 * (shape.ranks - 1))
    return latency + size / (1e3 * bandwidth)


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
    bandwidth, which, of = channels * shape.each, shape.which, shape.of
    if algorithm == "ring":
        if protocol == "LL":
            return min(of.ll_most[which], bandwidth * 0.5)
        if protocol == "LL128":
            return min(bandwidth * 0.92, channels * of.ring_ll128_most[which])
        return bandwidth
    bandwidth = min(bandwidth * 0.92, channels * of.tree_most[which])
    if protocol == "LL":
        return min(bandwidth / 3.8, of.ll_most[which])
    if protocol == "LL128":
        share = 7 / 9 if nodes == 1 else 120 / 128
        return min(bandwidth * share, channels * of.tree_ll128_most[which])
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
