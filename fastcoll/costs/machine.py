"""What a message meets on its way: links, nodes, and the memory that sums are made in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

__all__ = ["HGX_B200", "HGX_H200", "Link", "Machine", "Number", "Platform", "Protocol"]

Number = float | Fraction
"""Bytes and seconds. With fractions all costs are exact."""


@dataclass(frozen=True)
class Link:
    """What one rank can send, and at the same time receive.

    A message of m bytes takes ``latency + m * seconds_per_byte``: Hockney, "The communication challenge for MPP",
    Parallel Computing 20 (1994).

    Attributes:
        latency: Seconds until the first byte has arrived and the receiver knows it; alpha.
        seconds_per_byte: In each direction; beta.

    Raises:
        ValueError: One of them is not positive.
    """

    latency: Number
    seconds_per_byte: Number

    def __post_init__(self) -> None:
        if not (self.latency > 0 and self.seconds_per_byte > 0):
            raise ValueError(
                f"fastcoll.costs.Link: expected a latency and seconds per byte above 0, got {self.latency} and "
                f"{self.seconds_per_byte}"
            )


@dataclass(frozen=True)
class Machine:
    """Nodes of equally many ranks, numbered node by node; every rank has a port to its node and one to the others.

    Attributes:
        intra: A rank's link to the other ranks of its node, all of which it reaches at once (NVSwitch).
        inter: A rank's link to other nodes: each rank has a network card of its own.
        per_node: Ranks of a node.
        reduce_seconds_per_byte: To add a byte that has arrived to what is there; gamma.
        call: Seconds of a call before its first step.

    Raises:
        ValueError: A node has no rank, a time is negative, or the link in the node is slower than that between nodes.
    """

    intra: Link
    inter: Link
    per_node: int = 8
    reduce_seconds_per_byte: Number = 0.0
    call: Number = 0.0

    def __post_init__(self) -> None:
        if self.per_node < 1:
            raise ValueError(
                f"fastcoll.costs.Machine: expected per_node of 1 or more, got {self.per_node}"
            )
        if self.reduce_seconds_per_byte < 0 or self.call < 0:
            raise ValueError("fastcoll.costs.Machine: expected times of 0 or more")
        if (
            self.intra.latency > self.inter.latency
            or self.intra.seconds_per_byte > self.inter.seconds_per_byte
        ):
            raise ValueError(
                "fastcoll.costs.Machine: expected a link in the node that is not slower than that between nodes"
            )

    def nodes(self, ranks: int) -> int:
        """Returns how many nodes so many ranks fill.

        Raises:
            ValueError: There is no rank, or the last of several nodes is not full.
        """
        if ranks < 1:
            raise ValueError(f"fastcoll.costs: expected 1 rank or more, got {ranks}")
        if ranks > self.per_node and ranks % self.per_node:
            raise ValueError(
                f"fastcoll.costs: expected one node or full ones: up to {self.per_node} ranks, or a multiple of it, "
                f"got {ranks}"
            )
        return max(1, ranks // self.per_node)

    def local(self, ranks: int) -> int:
        """Returns how many of so many ranks are on one node."""
        return min(ranks, self.per_node)

    def spread(self) -> Machine:
        """Returns the machine with one rank per node: what those ranks see that have one place in their nodes."""
        return replace(self, per_node=1)


@dataclass(frozen=True)
class Protocol:
    """A way to know that bytes have arrived: earlier, or with less of the link spent on it.

    Attributes:
        intra_latency: Seconds of a step in the node.
        inter_latency: Seconds of a step between nodes.
        efficiency: Share of the link that carries the message.
    """

    intra_latency: float
    inter_latency: float
    efficiency: float


@dataclass(frozen=True)
class Platform:
    """A kind of node and network, with the constants of a model and where each is from.

    Attributes:
        name: Of the hardware.
        intra_bandwidth: Bytes per second that a rank can send, and receive, in its node.
        inter_bandwidth: The same, to other nodes.
        memory_bandwidth: Bytes per second of a device's memory.
        per_node: Ranks of a node.
        call: Seconds of a call before its first step.
        protocols: By name. Which is best depends on the size; each prediction takes the best.
        sources: What each constant is taken from.
    """

    name: str
    intra_bandwidth: float
    inter_bandwidth: float
    memory_bandwidth: float
    per_node: int
    call: float
    protocols: dict[str, Protocol]
    sources: dict[str, str] = field(default_factory=dict)

    def machine(self, protocol: str) -> Machine:
        """Returns what a message meets under one protocol.

        To reduce a byte, two are read and one is written.
        """
        chosen = self.protocols[protocol]
        return Machine(
            intra=Link(chosen.intra_latency, 1 / (self.intra_bandwidth * chosen.efficiency)),
            inter=Link(chosen.inter_latency, 1 / (self.inter_bandwidth * chosen.efficiency)),
            per_node=self.per_node,
            reduce_seconds_per_byte=3 / self.memory_bandwidth,
            call=self.call,
        )


_TUNING = "NVIDIA/nccl 5067397c (2.30.7), src/graph/tuning.cc, Apache-2.0"

HGX_H200 = Platform(
    name="nodes of 8 H200 (NVLink 4, NVSwitch), one InfiniBand NDR card for each GPU",
    intra_bandwidth=18 * 20.6e9,
    inter_bandwidth=400e9 / 8,
    memory_bandwidth=4.8e12,
    per_node=8,
    call=6.6e-6,
    protocols={
        "LL": Protocol(0.6e-6, 5.0e-6, 0.5),
        "LL128": Protocol(1.9e-6, 8.5e-6, 0.92),
        "Simple": Protocol(3.4e-6, 14.0e-6, 1.0),
    },
    sources={
        "intra_bandwidth": "18 NVLink 4 links (NVIDIA H200 data sheet: 900 GB/s, both directions together) of 20.6 "
        "GB/s each way, which is what NCCL reckons with (src/graph/topo.h, SM90_NVLINK_BW)",
        "inter_bandwidth": "400 Gb/s each way (NVIDIA ConnectX-7 data sheet); 8 cards for 8 GPUs (DGX H200 data sheet)",
        "memory_bandwidth": "4.8 TB/s (NVIDIA H200 data sheet)",
        "call": f"baseLatencies of ring with LL; {_TUNING}",
        "intra_latency": f"hwLatencies of NVLINK, ring; {_TUNING}",
        "inter_latency": "hwLatencies of NET, tree, which that model takes where all of a network's "
        f"latency is exposed; {_TUNING}",
        "efficiency": "LL sends 4 bytes of flag with 4 of data; 0.92 is what NCCL's model takes for LL128",
    },
)
"""An assumption of what is common, not a machine that anybody here has measured."""

HGX_B200 = replace(
    HGX_H200,
    name="nodes of 8 B200 (NVLink 5, NVSwitch), one InfiniBand NDR card for each GPU",
    intra_bandwidth=18 * 40.1e9,
    memory_bandwidth=8e12,
    sources={
        **HGX_H200.sources,
        "intra_bandwidth": "18 NVLink 5 links (NVIDIA B200 data sheet: 1.8 TB/s, both directions together) of 40.1 "
        "GB/s each way, which is what NCCL reckons with (src/graph/topo.h, SM100_NVLINK_BW)",
        "memory_bandwidth": "8 TB/s (NVIDIA B200 data sheet)",
    },
)
"""The same assumption."""
