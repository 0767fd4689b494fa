"""What this machine and environment offer to fastcoll and, for what is missing, why and the remedy.

Each check answers for one part, raises nothing, and leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import platform
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from fastcoll._built_for import UnusableBuild, needed_torch
from fastcoll._requirements import nccl_owners

__all__ = ["CHECKS", "Answer", "allowed_cores", "installed_version", "run_checks"]

_GET_ROBUST_LIST = {"x86_64": 274, "aarch64": 100}


@dataclass(frozen=True)
class Answer:
    """The outcome of a check.

    Attributes:
        part: What was looked at.
        available: Whether fastcoll can use it.
        detail: What was found, or why it is not available.
        remedy: What to do where it is not available; empty otherwise.
    """

    part: str
    available: bool
    detail: str
    remedy: str = ""


def installed_version(*distributions: str) -> str | None:
    """Returns the version of the first of these distributions that is installed, without importing it."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def allowed_cores() -> float:
    """Returns how many cores this process may use: its affinity, and the cgroup's quota if there is one."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def check_compiled_module() -> Answer:
    """Does fastcoll._C load with this torch?"""
    part = "fastcoll._C"
    try:
        from fastcoll._load import C
    except UnusableBuild as error:
        return Answer(part, False, error.detail, error.remedy)
    return Answer(part, True, f"reductions use {C.reduce_isa()}")


def check_name() -> Answer:
    """Does torch.distributed know the name "fastcoll"?"""
    from fastcoll import _register

    part = 'init_process_group("fastcoll")'
    import torch.distributed as dist

    if not dist.is_available():
        return Answer(
            part,
            False,
            "this torch has no torch.distributed",
            "install a torch built with USE_DISTRIBUTED",
        )
    if _register.NAME not in dist.Backend.backend_list:
        return Answer(
            part,
            False,
            f"the registration failed: {_register.registration_error()!r}",
            f"install a torch that fastcoll supports: {needed_torch()}",
        )
    by_use = hasattr(dist.Backend, "_ensure_backend_registered")  # torch 2.14 and later
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0" and not by_use:
        return Answer(
            part, True, "only after `import fastcoll`: TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set"
        )
    group = "torch.distributed.backends" if by_use else "torch.backends"
    if not any(point.name == _register.NAME for point in metadata.entry_points(group=group)):
        return Answer(part, True, "only after `import fastcoll`: the package is not installed")
    return Answer(part, True, "with no import")


def check_shared_memory() -> Answer:
    """Can memory be reserved, sealed, passed to another process, and a death in it be seen?"""
    part = "CPU, shared memory"
    stage = "memfd_create with sealing"
    try:
        descriptor = os.memfd_create("fastcoll-info", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            stage = "fallocate on a memfd"
            os.posix_fallocate(descriptor, 0, 1 << 16)
            stage = "sealing a memfd"
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        finally:
            os.close(descriptor)
        stage = "an abstract unix socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0fastcoll-info-{secrets.token_hex(16)}")
        stage = "the robust futex list"
        if number := _GET_ROBUST_LIST.get(platform.machine()):
            head, size = ctypes.c_void_p(), ctypes.c_size_t()
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.syscall(number, 0, ctypes.byref(head), ctypes.byref(size)) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
    except (OSError, AttributeError) as error:
        return Answer(
            part,
            False,
            f"{stage}: {error}",
            "allow it in the container's seccomp profile or raise its memory limit; until then groups use Gloo",
        )
    return Answer(part, True, f"{allowed_cores():g} cores allowed")


def check_gloo() -> Answer:
    """Can ranks that share no memory be connected?"""
    import torch.distributed as dist

    part = "CPU, between hosts (Gloo)"
    if dist.is_available() and dist.is_gloo_available():
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        return Answer(part, True, f"on {interface}" if interface else "on the host name's address")
    return Answer(
        part,
        False,
        "this torch was built without Gloo",
        "install a torch with Gloo; until then all ranks must be on one host",
    )


def check_cuda() -> Answer:
    """Is there a CUDA device, and an engine for it in this fastcoll?"""
    import torch

    part = "CUDA"
    if torch.version.cuda is None:
        return Answer(
            part,
            False,
            f"torch {torch.__version__} is a build without CUDA",
            "on a machine with an NVIDIA GPU install a CUDA build of torch",
        )
    if not torch.cuda.is_available():
        return Answer(
            part,
            False,
            "torch finds no CUDA device",
            "check that nvidia-smi lists one, that CUDA_VISIBLE_DEVICES does not hide it and that the "
            f"driver is new enough for CUDA {torch.version.cuda}",
        )
    found = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return Answer(part, True, found)


def check_nccl() -> Answer:
    """Does CuPy reach NCCL, and is there only one?"""
    from fastcoll.cuda import nccl_library

    part = "NCCL, through CuPy"
    try:
        library = nccl_library.load()
    except nccl_library.UnusableNccl as error:
        return Answer(part, False, error.detail, error.remedy)
    owners = nccl_owners(library.path)
    origin = f"of {' and '.join(owners)}" if owners else "of no package of NCCL"
    version = nccl_library.version_text(library.version)
    return Answer(part, True, f"{version}, {library.path}, {origin}")


def check_triton() -> Answer:
    """Is Triton installed? It is not imported, which would take seconds."""
    part = "Triton"
    if importlib.util.find_spec("triton") is None:
        return Answer(
            part, False, "not installed", "a CUDA build of torch brings it; else pip install triton"
        )
    return Answer(part, True, installed_version("triton") or "version unknown")


CHECKS: tuple[Callable[[], Answer], ...] = (
    check_name,
    check_compiled_module,
    check_shared_memory,
    check_gloo,
    check_cuda,
    check_nccl,
    check_triton,
)


def run_checks() -> list[Answer]:
    """Runs all checks in order; one that fails to answer is an answer too."""
    answers = []
    for check in CHECKS:
        try:
            answers.append(check())
        except Exception as error:
            part = check.__name__.removeprefix("check_").replace("_", " ")
            remedy = "report this to the fastcoll authors with the whole output"
            answers.append(Answer(part, False, f"{type(error).__name__}: {error}", remedy))
    return answers
