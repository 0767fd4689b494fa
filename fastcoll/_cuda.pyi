"""The compiled module of device tensors, csrc/cuda/bindings/module.cpp."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from fastcoll._C import Options

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "REDUCE_OPS",
    "Communicators",
    "Kernel",
    "Launch",
    "NcclCalls",
    "NcclFunctions",
    "Plan",
    "PlanPart",
    "PlannedCalls",
    "Plans",
    "Roster",
    "set_device_factory",
    "set_nccl_allocator",
    "symmetric_empty",
    "symmetric_free",
    "symmetric_rendezvous",
]

COLLECTIVES: tuple[str, ...]
"""torch.distributed's names of the collectives, indexed by the numbers that the device engine passes."""

DTYPES: tuple[str, ...]
"""torch's names of dtypes, indexed by number; the last, "opaque", is for bytes of any other dtype."""

REDUCE_OPS: tuple[str, ...]
"""The names of ReduceOp's members, indexed by number."""

class NcclFunctions:
    """The functions of the loaded NCCL, for callers in C++."""

    def __init__(self, address_of: Callable[[str], int], version: int) -> None:
        """Looks up the functions.

        Args:
            address_of: Returns the address of the function with a name, or 0.
            version: The library's version, such as 22907.

        Raises:
            DistBackendError: A function is missing.
        """

    def describe(self, status: int) -> str:
        """Returns NCCL's text for a status, NCCL's text for the last error, and the remedy."""

class NcclCalls:
    """The calls of one communicator; see csrc/cuda/nccl.hpp. The GIL is free during each.

    Args:
        functions: Functions of the library.
        communicator: NCCL's handle.
        ranks: Number of ranks of the communicator.
        patience: Limit of waiting for a call in which NCCL does not block.
    """

    def __init__(
        self, functions: NcclFunctions, communicator: int, ranks: int, patience: timedelta
    ) -> None: ...
    def issue(
        self,
        collective: int,
        dtype: int,
        op: int,
        root: int,
        factor: float,
        factor_on_device: int,
        given: int,
        given_count: int,
        result: int,
        result_count: int,
        stream: int,
        /,
    ) -> None:
        """Puts one operation on a stream. Numbers index COLLECTIVES, DTYPES and REDUCE_OPS; counts are elements."""

    def end(self) -> None:
        """Makes every later call an error, without calling NCCL."""

class Communicators:
    """A group's communicators, for the engine and for the watchdog, which never take the GIL.

    Args:
        group: Name of the group, for messages.
    """

    def __init__(self, group: str = "") -> None: ...
    def join(self, other: Communicators) -> None:
        """Makes the group one of another's family, because their communicators share NCCL's resources.

        Groups of a family make their calls in turn, and if one is aborted, all fail. Call it before the first ``add``.
        """

    def end_family(self, cause: str) -> None:
        """Fails all groups of the family with this text."""

    @property
    def family(self) -> int:
        """A number, equal for all groups of a family in this process."""

    def memory(self) -> list[tuple[str, int | None]]:
        """Returns name and bytes of each communicator on its device; None if this NCCL does not count them.

        NCCL counts the memory of a whole family.
        """

    def add(self, calls: NcclCalls, device: int, name: str, instance: str, peer: int) -> bool:
        """Adds a communicator; False if the group was aborted before.

        Args:
            calls: Calls of the communicator.
            device: Index of its device.
            name: Name for messages.
            instance: Id, equal on all its ranks and of no other communicator; "" if there is none.
            peer: The one other rank of the communicator; -1: all ranks of the group.
        """

    def remove(self, calls: NcclCalls) -> bool:
        """Removes a communicator, which the caller then ends; False if it was aborted."""

    def find(self, device: int, peer: int) -> NcclCalls | None:
        """Returns the calls of a device's communicator, or a pair's; None if there is none or it was aborted."""

    def add_kernels(self, words: torch.Tensor, prefix: str, size: int) -> None:
        """Adds the words that end kernels between ranks with the communicators, and that report their faults.

        Args:
            words: int64 [2] on the host, as ``fastcoll.kernels.PeerBuffers`` takes them; kept from now on.
            prefix: Prefix of messages.
            size: Number of ranks.
        """

    def abort_all(self, cause: str) -> None:
        """Aborts all communicators. Returns when NCCL does, which may be never."""

    def begin_calls(self) -> None:
        """Blocks other threads' calls on the communicators until this thread calls ``end_calls``."""

    def end_calls(self) -> None:
        """Ends ``begin_calls``."""

    @property
    def aborted(self) -> bool: ...
    @property
    def abort_cause(self) -> str:
        """Why the group was aborted, or another one of its family; "" if it was not."""

class Kernel:
    """Machine code that the CUDA driver has loaded on a device; see csrc/cuda/kernel.hpp.

    Raises:
        DistBackendError: There is no driver, or it cannot load the code.
    """

    def __init__(
        self,
        device: torch.device,
        name: str,
        code: bytes,
        entry: str,
        threads: int,
        shared_bytes: int,
    ) -> None:
        """Takes a name for messages, a cubin, its function, and a program's threads and dynamic shared memory."""

    @staticmethod
    def interpreted(function: Callable[[int, tuple[int, ...]], None]) -> Kernel:
        """Returns a kernel that is a function on the host of the number of programs and the arguments."""

class Launch:
    """A kernel with its arguments; see csrc/cuda/kernel.hpp. `pieces`: the fields of ``Pieces`` there."""

    def __init__(
        self,
        kernel: Kernel,
        programs: int,
        arguments: Sequence[int],
        held: object,
        source_at: int = -1,
        out_at: int = -1,
        squares_at: int = -1,
        pieces: tuple[int, int, int, int, int, int] | None = None,
    ) -> None: ...
    def fixed(self) -> Launch:
        """Returns the launch with addresses that no plan replaces."""

    def __call__(self) -> None:
        """Launches on the current stream of the kernel's device, with the arguments as they are.

        Raises:
            DistBackendError: The driver reports an error.
        """

class PlannedCalls:
    """Calls of NCCL in a plan; see csrc/cuda/plans.hpp."""

    def __init__(
        self,
        calls: Sequence[tuple[int, int, int, int, int, int, int, int]],
        from_source: bool = False,
        to_out: bool = False,
    ) -> None:
        """Takes indices of collective, dtype and operation, the other rank, and address and elements of both sides."""

class PlanPart:
    """One algorithm's part of a plan; see csrc/cuda/plans.hpp."""

    def __init__(
        self,
        algorithm: str,
        tasks: Sequence[int],
        steps: Sequence[Launch | PlannedCalls],
        tables: bool,
        held: object,
    ) -> None: ...
    @property
    def algorithm(self) -> str: ...

class Plan:
    """The steps for a kind of call; see csrc/cuda/plans.hpp."""

    def __init__(
        self, parts: Sequence[PlanPart], left: Sequence[int], uses_peers: bool, of_count: bool
    ) -> None: ...
    @property
    def parts(self) -> list[PlanPart]: ...
    @property
    def launches(self) -> int:
        """Number of steps."""

class Plans:
    """The plans of one group on one device; see csrc/cuda/plans.hpp."""

    def __init__(self, kernel_bytes: int, limits: Sequence[int]) -> None: ...
    @property
    def built(self) -> int:
        """How many plans were made so far."""

    @property
    def placed(self) -> int:
        """How many lists of tensors have tables."""

    @property
    def pinned(self) -> list[Plan]:
        """Plans that users' graphs have captured."""

    def forget(self) -> None:
        """Drops the plans and tables that no graph has captured."""

    def clear(self) -> None:
        """Drops all plans and tables."""

    def values(self) -> list[Plan]:
        """Returns all plans, the most recently used last."""

class Roster:
    """The rendezvous of a device group's ranks through a store; see csrc/group/roster.hpp.

    A wait calls ``on_poll`` between two polls of the store; an exception ends the wait. The GIL is free otherwise.

    Args:
        store: Store of the group.
        folder: Folder of the keys.
        rank: Rank of this process in the group.
        size: Number of ranks.
        record: Record of this rank, with a nonce drawn now. All ranks' records are equally long.
        magic: Number of bytes at the head of a record that are equal on all ranks.

    Attributes:
        id: Id of this instance of the group, equal on all ranks; "" before the ranks' records were gathered.
    """

    def __init__(
        self, store: Store, folder: str, rank: int, size: int, record: bytes = b"", magic: int = 0
    ) -> None: ...
    @property
    def id(self) -> str: ...
    def publish(self) -> None:
        """Publishes this rank's record; does not wait."""
    def read(self, rank: int) -> bytes | None:
        """Returns a rank's record as it is in the store now; None if there is none."""
    def gather(self, on_poll: Callable[[], None]) -> list[bytes]:
        """Waits for the records of all ranks, and returns them in rank order.

        Raises:
            DistStoreError: The store holds something other than a record.
        """
    def exchange(
        self, round: str, text: bytes, on_poll: Callable[[], None], watch: bool = False
    ) -> list[bytes] | None:
        """Posts a text in a round, waits for the texts of all ranks, and returns them in rank order.

        With ``watch``, returns None if the records change meanwhile; then gather them again.
        """
    def post(self, round: str, text: bytes) -> None:
        """Posts a text in a round; does not wait."""
    def missing(self, round: str) -> list[int]:
        """Returns the other ranks that have posted nothing in a round."""
    def tell(self, text: str) -> None:
        """Publishes a fault for the other ranks, unless one was published before."""
    def told(self) -> str | None:
        """Returns the fault that was published first; None if there is none."""
    def erase(self) -> None:
        """Deletes the keys that this rank has set, as far as the store can."""

def symmetric_empty(bytes: int, device: torch.device) -> torch.Tensor:
    """Returns uint8 [bytes] of torch's symmetric memory, without a group or an allocation id of torch."""

def symmetric_free(memory: torch.Tensor) -> None:
    """Frees the memory of a tensor of ``symmetric_empty``.

    torch waits for the device; other threads run meanwhile.
    """

def symmetric_rendezvous(memory: torch.Tensor, group: str, seconds: float) -> Any:
    """Returns torch's ``_SymmetricMemory`` of a tensor of ``symmetric_empty``, once all ranks have called this.

    Other threads run meanwhile. One call runs at a time in a process; `seconds` limits the wait for another call.
    Whatever the environment is, ranks may be on devices of one index, and no multicast object is made: the variables
    ``fastcoll.env.SYMMETRIC_SWITCHES`` are "1" meanwhile.

    Raises:
        DistBackendError: Another call has not ended in time.
        RuntimeError: torch's error.
    """

def set_nccl_allocator(allocate: int, free: int) -> None: ...
def set_device_factory(
    factory: Callable[[Store, str, int, int, Options, str, str], object],
) -> None: ...
