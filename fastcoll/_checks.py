"""Checks what fastcoll can use in this environment, with the cause and the remedy if a part is missing.

Each check returns what it found, or raises the cause. It leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import platform
import re
import secrets
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

from fastcoll._built_for import Unusable, needed_torch
from fastcoll._requirements import installed_version, nccl_owners

__all__ = [
    *("CHECKS", "QUIET_PERCENT"),
    *("allowed_cores", "first_match", "run_checks", "used_by_cores"),
]

QUIET_PERCENT = 10.0
"""The most of the machine, in percent, that other processes may use while times are compared."""

_GET_ROBUST_LIST = {"x86_64": 274, "aarch64": 100}


def allowed_cores() -> float:
    """Returns how many cores this process may use: its affinity, and the cgroup's quota if there is one."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def first_match(pattern: str, path: str) -> str | None:
    """Returns what the group of a pattern, of lines, first matches in a file; None: it matches nothing, or no file."""
    try:
        found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1].strip() if found else None


def used_by_cores() -> tuple[float, float]:
    """Returns the seconds that all cores together were busy since the machine's start, and all their seconds."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    idle, second = ticks[3] + ticks[4], os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - idle) / second, sum(ticks) / second


def check_compiled_module() -> str:
    """Does fastcoll._C load with this torch?"""
    from fastcoll._load import C

    return f"reductions use {C.reduce_isa()}"


def check_name() -> str:
    """Is the name "fastcoll" registered in torch.distributed?"""
    import torch.distributed as dist

    from fastcoll import _register

    if not dist.is_available():
        raise Unusable(
            "this torch has no torch.distributed", "install a torch built with USE_DISTRIBUTED"
        )
    if _register.NAME not in dist.Backend.backend_list:
        raise Unusable(
            f"the registration failed: {_register.registration_error()!r}",
            f"install a torch that fastcoll supports: {needed_torch()}",
        )
    by_use = hasattr(dist.Backend, "_ensure_backend_registered")  # torch 2.14 and later
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0" and not by_use:
        return "only after `import fastcoll`: TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set"
    group = "torch.distributed.backends" if by_use else "torch.backends"
    if not any(point.name == _register.NAME for point in metadata.entry_points(group=group)):
        return "only after `import fastcoll`: the package is not installed"
    return "with no import"


def check_shared_memory() -> str:
    """Can memory be reserved, sealed and passed by a socket, and do robust futexes report a death?"""
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
        raise Unusable(
            f"{stage}: {error}",
            "allow it in the container's seccomp profile or raise its memory limit; until then groups use Gloo",
        ) from error
    return f"{allowed_cores():g} cores allowed"


def check_gloo() -> str:
    """Can fastcoll connect ranks that share no memory?"""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        raise Unusable(
            "this torch was built without Gloo",
            "install a torch with Gloo; until then all ranks must be on one host",
        )
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return f"on {interface}" if interface else "on the host name's address"


def check_cuda() -> str:
    """Is there a CUDA device, and an engine for it in this fastcoll?"""
    import torch

    if torch.version.cuda is None:
        raise Unusable(
            f"torch {torch.__version__} is a build without CUDA",
            "on a machine with an NVIDIA GPU install a CUDA build of torch",
        )
    if not torch.cuda.is_available():
        raise Unusable(
            "torch finds no CUDA device",
            "check that nvidia-smi lists one, that CUDA_VISIBLE_DEVICES does not hide it and that the "
            f"driver is new enough for CUDA {torch.version.cuda}",
        )
    try:
        import fastcoll._load_cuda  # noqa: F401
    except ImportError as error:
        raise Unusable(*str(error).split(": ", 1)) from error
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def check_nccl() -> str:
    """Can CuPy use NCCL, and is there only one copy?"""
    from fastcoll.cuda import nccl_library

    library = nccl_library.load()
    owners = nccl_owners(library.path)
    origin = f"of {' and '.join(owners)}" if owners else "of no package of NCCL"
    return f"{nccl_library.version_text(library.version)}, {library.path}, {origin}"


def check_triton() -> str:
    """Is Triton installed? It is not imported, which would take seconds."""
    if importlib.util.find_spec("triton") is None:
        raise Unusable("not installed", "a CUDA build of torch brings it; else pip install triton")
    return installed_version("triton") or "version unknown"


CHECKS = {
    'init_process_group("fastcoll")': check_name,
    "fastcoll._C": check_compiled_module,
    "CPU, shared memory": check_shared_memory,
    "CPU, between hosts (Gloo)": check_gloo,
    "CUDA": check_cuda,
    "NCCL, through CuPy": check_nccl,
    "Triton": check_triton,
}


def run_checks() -> list[dict[str, Any]]:
    """Runs all checks in order; an unexpected exception is a result too.

    Returns:
        For each check: the "part", whether it is "available", the "detail" (what was found, or the cause), and the
        "remedy" ("" if it is available).
    """
    answers = []
    for part, check in CHECKS.items():
        try:
            available, detail, remedy = True, check(), ""
        except Unusable as error:
            available, detail, remedy = False, error.detail, error.remedy
        except Exception as error:
            available, detail = False, f"{type(error).__name__}: {error}"
            remedy = "report this to the fastcoll authors with the whole output"
        answers.append({"part": part, "available": available, "detail": detail, "remedy": remedy})
    return answers
