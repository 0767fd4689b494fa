"""Who maps memory of the peers, by type of device: torch symmetric memory on CUDA devices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from fastcoll._load import C
from fastcoll.cuda.errors import Member
from fastcoll.cuda.peer_atomics import without_atomics

__all__ = ["MAPPERS", "Mapper", "TorchSymmetricMemory", "rendezvous"]


class Mapper(Protocol):
    """Makes memory that the ranks of a group map of each other.

    Attributes:
        polls_per_second: How often a wait of a kernel looks at a flag, at most.
    """

    polls_per_second: int

    def host(self) -> str:
        """Returns what ranks have in common that can map memory of each other."""

    def device_identity(self, device: torch.device) -> str:
        """Returns what no other device of the host has; "" where ranks may share one."""

    def missing(self) -> str:
        """Returns what is missing for it in this process, or ""."""

    def require_atomics(self, device: torch.device, peers: Sequence[str]) -> None:
        """Checks that kernels on the device can set flags in the peers' memory, by what is known of them here.

        Args:
            device: Of this rank.
            peers: ``device_identity`` of all ranks.

        Raises:
            RuntimeError: They cannot.
        """

    def allocate(self, size: int, device: torch.device) -> Tensor:
        """Returns uint8 [size] that can be mapped; of that device, as kernels name it."""

    def map(
        self, memory: Tensor, name: str, member: Member, store: Store, seconds: float
    ) -> Sequence[int]:
        """Returns the addresses of all ranks' memory; all ranks call it. They stay mapped as long as `memory` lives.

        Holds no GIL while it waits, which it may do for good where a rank has died: call it on a thread. `seconds` is
        for what another group of this process is mapping.
        """

    def free(self, memory: Tensor) -> None:
        """Unmaps what ``map`` has mapped; holds no GIL while it waits for the device."""

    def kernel_device(self, device: torch.device) -> torch.device:
        """Returns the device by which kernels know memory of `device`."""

    def apart(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Runs a block's launches on a stream of their own, and waits for them, and for no others, at its end."""


class TorchSymmetricMemory:
    """CUDA memory, by ``torch.distributed._symmetric_memory``.

    Several ranks on one device are possible with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, which torch reads too;
    the device then gives each process a slice of time in turn, so that a step takes milliseconds.
    """

    # A poll is an atomic operation on the own memory, which no GPU answers within 100 ns; the next one waits for that.
    # With a number too small a wait would end before the group's timeout; with one too large it ends after it, when the
    # watchdog has spoken. tests/kernels/test_peer_streams.py holds it to what a GPU does.
    polls_per_second = 10_000_000

    def host(self) -> str:
        """Returns the boot, and what passing memory on takes in common: process ids, and the folder of sockets."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            processes = os.readlink("/proc/self/ns/pid")
            folder = os.stat(_socket_folder())
        except OSError:
            return os.uname().nodename
        return f"{boot} {processes} {folder.st_dev}:{folder.st_ino}"

    def device_identity(self, device: torch.device) -> str:
        """Returns the GPU's UUID; "" if devices may overlap."""
        overlaps = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
        return "" if overlaps else self._uuid(device)

    @staticmethod
    def _uuid(device: torch.device) -> str:
        return str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))

    def missing(self) -> str:
        """Returns what torch lacks, or that another kind of its symmetric memory was chosen, or ""."""
        try:
            from torch._C._distributed_c10d import _SymmetricMemory
        except ImportError:
            return f"torch {torch.__version__} has no symmetric memory"
        # An allocation of NVSHMEM's would wait for all processes of the job, not of the group.
        chosen = _SymmetricMemory.get_backend(torch.device("cuda"))
        if chosen not in (None, "CUDA"):
            return (
                f"torch's symmetric memory is that of {chosen} here, and fastcoll maps that of CUDA"
            )
        return ""

    def require_atomics(self, device: torch.device, peers: Sequence[str]) -> None:
        """Asks the driver about those GPUs that this process sees."""
        seen = {
            self._uuid(torch.device("cuda", index)): index
            for index in range(torch.cuda.device_count())
        }
        ranks = {seen[peer]: rank for rank, peer in enumerate(peers) if peer in seen}
        if lacking := without_atomics(device.index, ranks):
            raise RuntimeError(
                f"the GPU of rank {ranks[lacking[0]]} takes no atomic operations from {device}, without which kernels "
                "cannot set flags (PCIe without NVLink, as a rule)"
            )

    def allocate(self, size: int, device: torch.device) -> Tensor:
        """Returns an allocation by itself: one from a pool may lie behind the start of what is mapped."""
        return C.symmetric_empty(size, device).zero_()

    def map(
        self, memory: Tensor, name: str, member: Member, store: Store, seconds: float
    ) -> Sequence[int]:
        """Returns the addresses of all ranks' memory."""
        with torch.cuda.device(memory.device):
            handle = rendezvous(memory, name, member, store, seconds)
        memory.symmetric_memory = handle  # type: ignore[attr-defined]
        return list(handle.buffer_ptrs)

    def free(self, memory: Tensor) -> None:
        """Unmaps it."""
        memory.symmetric_memory = None  # type: ignore[attr-defined]
        C.symmetric_free(memory)

    def kernel_device(self, device: torch.device) -> torch.device:
        """Returns the device itself."""
        return device

    @contextlib.contextmanager
    def apart(self, device: torch.device) -> Iterator[None]:
        """Runs the block on a stream of torch's pool, which waits for no other, the default one neither."""
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()


def _socket_folder() -> str:
    """Returns where torch puts the sockets by which ranks pass memory on."""
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
    return next((os.environ[name] for name in names if name in os.environ), "/tmp")


def rendezvous(memory: Tensor, name: str, member: Member, store: Store, seconds: float) -> Any:
    """Returns torch's handle of memory that all ranks have mapped; all ranks call it. Holds no GIL meanwhile.

    Releases of torch look up the ranks and their store by the name of a process group, or in a table of their own.
    The caller's group may not be registered yet, so one is made for this.

    Args:
        memory: From ``C.symmetric_empty``.
        name: Of no other group.
        member: This rank.
        store: For this call alone.
        seconds: For what another group of this process is mapping.
    """
    c10d: Any = torch._C._distributed_c10d  # whose names for groups are types of their own
    group = dist.ProcessGroup(store, member.rank, member.size)  # the registry does not keep it
    c10d._register_process_group(name, group)
    try:
        try:
            return C.symmetric_rendezvous(memory, name, seconds)
        except RuntimeError as error:
            if "no group info" not in str(error):
                raise
        c10d._SymmetricMemory.set_group_info(name, member.rank, member.size, store)
        return C.symmetric_rendezvous(memory, name, seconds)
    finally:
        c10d._unregister_process_group(name)
        del group


MAPPERS: dict[str, Mapper] = {"cuda": TorchSymmetricMemory()}
"""By type of device."""
