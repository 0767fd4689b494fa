"""What csrc/bindings.cpp exports."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, ErrorType, Store

__all__ = [
    "Options",
    "ProcessGroupFastcoll",
    "build_info",
    "groups",
    "reduce_isa",
    "set_gloo_factory",
]

class Options(Backend.Options):
    """Options of one group. The environment variables of fastcoll.env win over them.

    Attributes:
        timeout: Limit of each operation; afterwards it fails on all ranks.
        transport: "auto" (shared memory where all ranks can map each other, else Gloo), "shm" or "gloo".
        ring_bytes: Shared memory, for each group, through which the data of a rank goes.
        spin_us: How long a wait spins before it sleeps, in microseconds; -1 chooses by the cores.

    Inherited from torch: group_name, and global_ranks_in_group, the global rank of each group rank
    (empty for the default group); both are set when the group is created.
    """

    timeout: timedelta
    transport: str
    ring_bytes: int
    spin_us: int
    group_name: str  # type: ignore[assignment]

    def __init__(
        self,
        timeout: timedelta = ...,
        transport: str = "auto",
        ring_bytes: int = 2097152,
        spin_us: int = -1,
    ) -> None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> Options: ...

class ProcessGroupFastcoll(Backend):
    """The backend of one group on one rank; made by fastcoll._backend.create."""

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None: ...
    @property
    def options(self) -> Options: ...
    def transport(self) -> str:
        """Returns what moves the group's bytes: "shm", "gloo", or "none" before the first use."""

    def get_error(self) -> ErrorType: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...
    def comm_split_count(self) -> int: ...
    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns a 1-D tensor of `size` elements in memory that the other ranks can map."""

    def _set_default_timeout(self, timeout: timedelta) -> None: ...

def build_info() -> dict[str, str]:
    """Returns "fastcoll" and "torch", the versions of the build, and facts about the compiler."""

def groups() -> list[dict[str, Any]]:
    """Returns name, rank, size, transport and reason of each live group of this process."""

def reduce_isa() -> str:
    """Returns the instruction set that reductions use: "avx512", "avx2" or "baseline"."""

def set_gloo_factory(factory: Callable[[Store, int, int, timedelta], Backend]) -> None:
    """Sets what makes the Gloo backend of a group whose ranks cannot share memory."""
