"""Memory that all ranks of a group map, by device type: torch symmetric memory on CUDA devices."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, _SymmetricMemory

from fastcoll._load_cuda import CUDA
from fastcoll.cuda.errors import Member

__all__ = ["MAPPERS", "TorchSymmetricMemory", "rendezvous"]

_NATIVE_ATOMIC_SUPPORTED = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, in cuda.h


class TorchSymmetricMemory:
    """CUDA memory, by ``torch.distributed._symmetric_memory``.

    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, which torch reads too, allows several ranks on one device. The device
    then runs the processes in time slices, so a step takes milliseconds.
    """

    def host(self) -> str:
        """Returns a text that is equal on ranks that can map each other's memory.

        It has the boot id and what ranks must share to pass memory on: pid namespace and folder of sockets.
        """
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            processes = os.readlink("/proc/self/ns/pid")
            folder = os.stat(_socket_folder())
        except OSError:
            return os.uname().nodename
        return f"{boot} {processes} {folder.st_dev}:{folder.st_ino}"

    def device_identity(self, device: torch.device) -> str:
        """Returns the GPU's UUID, which is unique on the host; "" if ranks may share a device."""
        overlaps = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
        return "" if overlaps else self._uuid(device)

    @staticmethod
    def _uuid(device: torch.device) -> str:
        return str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))

    def missing(self) -> str:
        """Returns what is missing in this process, or "": torch's symmetric memory has another backend."""
        # An NVSHMEM allocation would wait for all processes of the job, not only of the group.
        chosen = _SymmetricMemory.get_backend(torch.device("cuda"))
        if chosen not in (None, "CUDA"):
            return (
                f"torch's symmetric memory is that of {chosen} here, and fastcoll maps that of CUDA"
            )
        return ""

    def require_atomics(self, device: torch.device, peers: Sequence[str]) -> None:
        """Checks through the driver that kernels on the device can set flags in the memory of the peers.

        Args:
            device: This rank's device.
            peers: ``device_identity`` of all ranks. Only GPUs that this process sees are checked.

        Raises:
            RuntimeError: They cannot.
        """
        seen = {
            self._uuid(torch.device("cuda", index)): index
            for index in range(torch.cuda.device_count())
        }
        ranks = {seen[peer]: rank for rank, peer in enumerate(peers) if peer in seen}
        if lacking := _without_atomics(device.index, ranks):
            raise RuntimeError(
                f"the GPU of rank {ranks[lacking[0]]} takes no atomic operations from {device}, without which kernels "
                "cannot set flags (PCIe without NVLink, as a rule)"
            )

    def allocate(self, size: int, device: torch.device) -> Tensor:
        """Returns uint8 [size] that can be mapped; `device` is as kernels name it.

        It is a separate allocation: memory from a pool may begin behind the start of the mapped block.
        """
        return CUDA.symmetric_empty(size, device).zero_()

    def map(
        self, memory: Tensor, name: str, member: Member, store: Store, seconds: float
    ) -> Sequence[int]:
        """Returns the addresses of all ranks' memory; all ranks call it. They stay mapped as long as `memory` lives.

        Waits without the GIL, and forever if a rank has died, so call it on a thread. `seconds` limits the wait for
        another group of this process that is mapping.
        """
        with torch.cuda.device(memory.device):
            handle = rendezvous(memory, name, member, store, seconds)
        memory.symmetric_memory = handle  # type: ignore[attr-defined]
        return list(handle.buffer_ptrs)

    def free(self, memory: Tensor) -> None:
        """Unmaps the memory that ``map`` mapped; waits for the device without the GIL."""
        memory.symmetric_memory = None  # type: ignore[attr-defined]
        CUDA.symmetric_free(memory)

    def kernel_device(self, device: torch.device) -> torch.device:
        """Returns the name that kernels use for memory of `device`: the same."""
        return device

    @contextlib.contextmanager
    def apart(self, device: torch.device) -> Iterator[None]:
        """Runs a block's launches on a separate stream; waits at its end for these launches only.

        The stream is of torch's pool, and waits for no other stream, not even the default one.
        """
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")  # torch has loaded and initialized it


def _without_atomics(own: int, others: Iterable[int]) -> list[int]:
    """Returns the other devices whose memory takes no atomic operations from a device, as the driver reports.

    Kernels set flags in the peers' memory by atomic operations. NVLink carries them. Over PCIe many machines do not,
    even if peers can map each other's memory, and a flag may then be lost.

    Args:
        own: Index of the device in this process.
        others: Indices of other devices. A device that the driver has no data for is not returned.
    """
    try:
        driver = _driver()
        ask, find = driver.cuDeviceGetP2PAttribute, driver.cuDeviceGet
    except (OSError, AttributeError):
        return []

    def handle(index: int) -> ctypes.c_int | None:
        found = ctypes.c_int(-1)
        return None if find(ctypes.byref(found), ctypes.c_int(index)) else found

    def lacks(other: int) -> bool:
        value, source, target = ctypes.c_int(1), handle(own), handle(other)
        if source is None or target is None:
            return False
        return (
            ask(ctypes.byref(value), _NATIVE_ATOMIC_SUPPORTED, source, target) == 0
            and value.value == 0
        )

    return [other for other in others if other != own and lacks(other)]


def _socket_folder() -> str:
    """Returns the folder of torch's sockets, by which ranks pass memory on."""
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
    return next((os.environ[name] for name in names if name in os.environ), "/tmp")


def rendezvous(memory: Tensor, name: str, member: Member, store: Store, seconds: float) -> Any:
    """Returns torch's handle of memory that all ranks have mapped; all ranks call it. Waits without the GIL.

    Some releases of torch look up ranks and store by the name of a process group, others in a separate table. The
    caller's group may not be registered yet, so this call registers a temporary one.

    Args:
        memory: From ``CUDA.symmetric_empty``.
        name: Unique among the groups.
        member: This rank.
        store: For this call only.
        seconds: Limit of the wait for another group of this process that is mapping.
    """
    c10d: Any = torch._C._distributed_c10d  # Any: it types group names
    group = dist.ProcessGroup(store, member.rank, member.size)  # the registry does not keep it
    c10d._register_process_group(name, group)
    try:
        try:
            return CUDA.symmetric_rendezvous(memory, name, seconds)
        except RuntimeError as error:
            if "no group info" not in str(error):
                raise
        c10d._SymmetricMemory.set_group_info(name, member.rank, member.size, store)
        return CUDA.symmetric_rendezvous(memory, name, seconds)
    finally:
        c10d._unregister_process_group(name)
        del group


MAPPERS: dict[str, TorchSymmetricMemory] = {"cuda": TorchSymmetricMemory()}
"""By device type."""
