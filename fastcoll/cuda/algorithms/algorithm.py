"""Interface of the all-reduce algorithms on devices: name, refusal, number of launches, preparation."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastcoll.cuda.algorithms.call import Call, Topology
from fastcoll.cuda.memory import tensor_at

if TYPE_CHECKING:
    from fastcoll.cuda.nccl import NcclCommunicator
    from fastcoll.cuda.peer_memory import PeerMemory

__all__ = [
    "BUCKET_GRAIN",
    "FLOATS",
    "OPS",
    "Algorithm",
    "Launch",
    "PeerAlgorithm",
    "Piece",
    "Place",
    "Prepared",
    "Site",
    "bucket_elements",
]

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Dtypes that the kernels reduce."""

OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
"""Reductions that the kernels have."""


class Place(NamedTuple):
    """Addresses of a call's tensors.

    Attributes:
        source: Address of the input, or of a table on the device with all inputs' addresses.
        out: The same for the output.
    """

    source: int
    out: int


Launch = Callable[[Place], None]


@dataclass(frozen=True)
class Piece:
    """A tensor of this rank, by address.

    Attributes:
        source: Address of the input.
        out: Address of the result; may be `source`.
        count: Input elements of this rank.
    """

    source: int
    out: int
    count: int


@dataclass(frozen=True)
class Site:
    """Where a plan runs: one group, one device, one stream.

    Attributes:
        communicator: The NCCL communicator.
        stream: Handle of the stream, which is current.
        device: The device as kernels name it.
        peers: The peer-mapped memory, if there is any.
        workspace: Returns a tensor of at least so many bytes, for this stream; its user must hold it.
    """

    communicator: NcclCommunicator
    stream: int
    device: torch.device
    peers: PeerMemory | None
    workspace: Callable[[int], Tensor]

    def view(self, address: int, count: int, dtype: torch.dtype) -> Tensor:
        """Returns memory at an address as a tensor for kernels."""
        return tensor_at(address, count, dtype, self.device)


@dataclass(frozen=True)
class Prepared:
    """The launches of a plan for a call, independent of the tensors' addresses.

    Attributes:
        launches: In this order.
        held: Objects that must live as long.
        uses_peers: Whether a launch works on the peers' memory.
        tables: Whether the launches read the tensors' addresses from tables.
    """

    launches: tuple[Launch, ...]
    held: object = None
    uses_peers: bool = False
    tables: bool = False


class Algorithm(abc.ABC):
    """An all-reduce algorithm; the ring has reduce-scatter and all-gather too.

    Attributes:
        name: Its name for FASTCOLL_ALGO and the tuner.
    """

    name: str

    @abc.abstractmethod
    def refusal(self, call: Call, topology: Topology) -> str:
        """Returns why it cannot serve a call, or ""."""

    @abc.abstractmethod
    def launches(self, call: Call) -> int:
        """Returns how many kernels and NCCL calls a rank puts on its stream."""

    @abc.abstractmethod
    def prepare(self, call: Call, pieces: Sequence[Piece], site: Site) -> Prepared:
        """Returns the launches for a call that it does not refuse.

        They also serve other tensors with the same numbers of elements. Each of those must be aligned to 16 bytes, and
        in place, if the tensor here is.
        """


class PeerAlgorithm(Algorithm):
    """Base of the algorithms that read the peers' memory."""

    def refusal(self, call: Call, topology: Topology) -> str:
        """Returns why it cannot serve a call, or ""."""
        if not topology.peers:
            return f"the ranks map no memory of each other: {topology.reason}"
        if call.collective == "all_gather":  # only moves bytes
            return ""
        if call.op not in OPS:
            return f"the kernels have {', '.join(OPS)}, not {call.op}"
        if call.dtype not in FLOATS:
            return f"the kernels add {_names(FLOATS)}, not {_names([call.dtype])}"
        if call.wire is not None and (call.dtype, call.wire) not in _WIRES:
            return f"no kernel takes {_names([call.dtype])} over {_names([call.wire])}"
        return ""

    @staticmethod
    def room(call: Call, topology: Topology) -> str:
        """Returns why a list does not fit into the mapped memory, or ""."""
        needed = bucket_elements(call.sizes) * call.wire_dtype.itemsize if call.is_list else 0
        if needed <= topology.bucket_bytes:
            return ""
        return f"a bucket of {needed} bytes does not fit into the {topology.bucket_bytes} that ranks map"


BUCKET_GRAIN = 16
"""Elements: each tensor of a bucket begins at a multiple of this, so it is aligned in every dtype."""


def bucket_elements(sizes: Sequence[int]) -> int:
    """Returns an upper bound of the elements in a bucket for tensors of these sizes, gaps included."""
    return sum(-(-size // BUCKET_GRAIN) for size in sizes) * BUCKET_GRAIN


_WIRES = ((torch.float32, torch.bfloat16), (torch.float32, torch.float16))


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
