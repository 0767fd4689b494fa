"""What every all-reduce algorithm on devices has: a name, what it can do, its launches, and how it is prepared."""

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
"""What the kernels add."""

OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
"""What the kernels do with them."""


class Place(NamedTuple):
    """Where a call's tensors lie.

    Attributes:
        source: Address of what this rank gives, or of the table on the device of all tensors' addresses.
        out: Of what it gets, likewise.
    """

    source: int
    out: int


Launch = Callable[[Place], None]


@dataclass(frozen=True)
class Piece:
    """A tensor of this rank, by address.

    Attributes:
        source: Where it lies.
        out: Where its result goes; may be `source`.
        count: Elements that this rank gives.
    """

    source: int
    out: int
    count: int


@dataclass(frozen=True)
class Site:
    """Where a plan runs: of one group, on one device and stream.

    Attributes:
        communicator: NCCL's.
        stream: Handle of the stream, which is current.
        device: As kernels name it.
        peers: The memory that ranks map of each other, if they do.
        workspace: Returns a tensor of at least so many bytes, for this stream; who uses it holds it.
    """

    communicator: NcclCommunicator
    stream: int
    device: torch.device
    peers: PeerMemory | None
    workspace: Callable[[int], Tensor]

    def view(self, address: int, count: int, dtype: torch.dtype) -> Tensor:
        """Returns memory as a tensor that kernels take."""
        return tensor_at(address, count, dtype, self.device)


@dataclass(frozen=True)
class Prepared:
    """What a plan does for a call, wherever its tensors lie.

    Attributes:
        launches: In this order.
        held: What must live as long.
        uses_peers: Whether a launch works on the peers' memory.
        tables: Whether the launches read the tensors' addresses from tables.
    """

    launches: tuple[Launch, ...]
    held: object = None
    uses_peers: bool = False
    tables: bool = False


class Algorithm(abc.ABC):
    """One way of doing an all-reduce; the ring has reduce-scatter and all-gather too.

    Attributes:
        name: By which FASTCOLL_ALGO and the tuner ask for it.
    """

    name: str

    @abc.abstractmethod
    def refusal(self, call: Call, topology: Topology) -> str:
        """Returns why it cannot serve a call, or ""."""

    @abc.abstractmethod
    def launches(self, call: Call) -> int:
        """Returns how many kernels and calls of NCCL a rank puts on its stream."""

    @abc.abstractmethod
    def prepare(self, call: Call, pieces: Sequence[Piece], site: Site) -> Prepared:
        """Returns the launches for a call that it does not refuse.

        They serve other tensors too: of the same numbers of elements, each aligned to 16 bytes where these are, and its
        own result where these are.
        """


class PeerAlgorithm(Algorithm):
    """Base of those that read the peers' memory."""

    def refusal(self, call: Call, topology: Topology) -> str:
        """Returns why it cannot serve a call, or ""."""
        if not topology.peers:
            return f"the ranks map no memory of each other: {topology.reason}"
        if call.collective == "all_gather":  # it moves bytes
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
"""Elements: each tensor begins at a multiple of them in a bucket, so that it is aligned in every dtype."""


def bucket_elements(sizes: Sequence[int]) -> int:
    """Returns the elements of the bucket that tensors of these sizes make, with its gaps, at most."""
    return sum(-(-size // BUCKET_GRAIN) for size in sizes) * BUCKET_GRAIN


_WIRES = ((torch.float32, torch.bfloat16), (torch.float32, torch.float16))


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
