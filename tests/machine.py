"""Changes to the machine under a rank, for fault tests: namespaces, refused system calls, limits.

Each change ends with the process, or with the ``with`` block. If the machine does not permit it, the test is skipped.
"""

import contextlib
import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastcoll.bench import namespaces

NOBODY = 65534

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        if number == errno.EPERM:
            pytest.skip(f"needs root: {what}: {os.strerror(number)}")
        if number in (errno.EINVAL, errno.ENOSYS):
            pytest.skip(f"{what}: {os.strerror(number)}")
        raise OSError(number, what)


def own_namespaces(flags: int) -> None:
    """Give this process its own namespaces; no other process sees its later mounts."""
    _checked(_libc.unshare(flags), "unshare")
    if flags & CLONE_NEWNS:
        _checked(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount")


def own_process_ids(number: int) -> None:
    """Continue as process ``number`` of a new PID namespace; its parents wait for it."""
    own_namespaces(CLONE_NEWPID)  # for its children
    for _ in range(number):
        if child := os.fork():
            os.waitpid(child, 0)
            os._exit(0)


def next_process_id(number: int) -> None:
    """Let the next process or thread of this process's PID namespace have that number, if it is free."""
    try:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(number - 1))
    except OSError as error:
        pytest.skip(f"needs root: ns_last_pid: {error}")


def remount_shared_memory(size: str, fill: bool = False, read_only: bool = False) -> None:
    """Put a tmpfs of that size over /dev/shm, for this process only."""
    own_namespaces(CLONE_NEWNS)
    options = f"size={size},mode=1777".encode()
    _checked(_libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, options), "mount")
    if fill:
        with open("/dev/shm/filled", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass
    if read_only:
        flags = MS_REMOUNT | MS_RDONLY
        _checked(_libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", flags, options), "mount")


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[namespaces.Cluster, list[str]]]:
    """Yield two hosts with separate networks on one machine, and the id of a process in each network."""
    if reason := namespaces.missing():
        pytest.skip(f"needs {'iproute2' if 'installed' in reason else 'root'}: {reason}")
    with namespaces.Cluster(2, 0) as cluster:
        yield cluster, [cluster._inner(host) for host in range(2)]


def enter_network(pid: str) -> None:
    """Move this process to another process's network; existing connections stay in their network."""
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        _checked(_libc.setns(descriptor, CLONE_NEWNET), "setns")
    finally:
        os.close(descriptor)
    os.environ["GLOO_SOCKET_IFNAME"] = namespaces.INTERFACE


# Numbers of system calls, by name: on x86-64 and on aarch64.
_CALLS = {
    "fallocate": (285, 47),
    "memfd_create": (319, 279),
    "get_mempolicy": (239, 236),
    "set_mempolicy": (238, 237),
    "mbind": (237, 235),
    "madvise": (28, 233),
    "set_robust_list": (273, 99),
    "clone": (56, 220),
    "clone3": (435, 435),
}


def refuse_calls(*names: str, error: int = errno.ENOSPC) -> None:
    """Make the kernel refuse system calls of this whole process from now on, threads included."""
    column = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
    if column is None:
        pytest.skip(f"the numbers of system calls on {platform.machine()} are not known here")
    numbers = [_CALLS[name][column] for name in names]
    # A classic BPF program over struct seccomp_data: load nr; if it is in `numbers`, return the error.
    steps = [struct.pack("HBBI", 0x20, 0, 0, 0)]
    for i, number in enumerate(numbers):
        steps.append(struct.pack("HBBI", 0x15, len(numbers) - i, 0, number))
    steps.append(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))  # allow
    steps.append(struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | error))
    program = ctypes.create_string_buffer(b"".join(steps))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    filled = Program(len(steps), ctypes.addressof(program))
    no_new_privileges, seccomp, set_filter, all_threads = 38, (317, 277)[column], 1, 1
    _checked(_libc.prctl(no_new_privileges, 1, 0, 0, 0), "prctl")
    _checked(_libc.syscall(seccomp, set_filter, all_threads, ctypes.byref(filled)), "seccomp")


@contextlib.contextmanager
def memory_limit(mebibytes: int) -> Iterator[Path]:
    """Yield a memory cgroup with that limit in MiB; a process enters it by writing to its cgroup.procs."""
    name = f"fault{os.getpid()}"
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = root / name
        try:
            folder.mkdir()
        except OSError:
            continue
        if not (folder / limit).exists():
            folder.rmdir()
            continue
        try:
            (folder / limit).write_text(str(mebibytes << 20))
            yield folder
        finally:
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (root / "cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                folder.rmdir()
        return
    pytest.skip("needs root: memory cgroups cannot be made here")
