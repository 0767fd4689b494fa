"""The conditions of a run, for its record: date, command, versions, variables that affect it, and machine."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastcoll import info
from fastcoll._checks import first_match
from fastcoll.bench.sizes import parse_size

__all__ = [
    *("PRETENDED_HOSTS", "available_memory", "command_line", "describe_run", "last_level_cache"),
]

_CPU = torch.device("cpu")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_STARTS = ("FASTCOLL_", "DDP_", "OMP_", "MALLOC_", "GLOO_", "NCCL_", "TORCH_", "CCL_", "I_MPI_")
_NOT_THE_USERS = (  # set by fastcoll and torchrun if the user has set nothing
    ("DDP_DISABLE_COMM_MEM", "0"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
)

PRETENDED_HOSTS = "BENCH_PRETENDED_HOSTS"
"""The variable in which fastcoll.bench.hosts passes its own options to a benchmark that it runs."""


def available_memory() -> int:
    """Returns the bytes that processes may still allocate before the host swaps or kills, with caches freed."""
    kibibytes = first_match(r"^MemAvailable:\s+(\d+)", "/proc/meminfo")
    if kibibytes:
        return int(kibibytes) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def last_level_cache() -> int | None:
    """Returns the bytes of the cache that is nearest to memory; None if the kernel does not report it."""
    levels = {int((one / "level").read_text()): one for one in _CACHES.glob("index*")}
    return parse_size((levels[max(levels)] / "size").read_text()) if levels else None


def _machine(device: torch.device) -> dict[str, Any]:
    """Returns processor, cores, memory, kernel and load; the names of the GPUs for a CUDA run."""
    kibibytes = first_match(r"^MemTotal:\s+(\d+)", "/proc/meminfo")
    machine: dict[str, Any] = {
        "cpu": first_match(r"^model name\s*:(.*)$", "/proc/cpuinfo") or platform.processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "virtual": first_match(r"^flags\s*:.*\b(hypervisor)\b", "/proc/cpuinfo") is not None,
        "last_level_cache_bytes": last_level_cache(),
        "memory_bytes": int(kibibytes) * 1024 if kibibytes else None,
        "kernel": platform.release(),
        "transparent_huge_pages": first_match(
            r"\[(\w+)\]", "/sys/kernel/mm/transparent_hugepage/enabled"
        ),
        "load_average": list(os.getloadavg()),
    }
    if device.type == "cuda":
        machine["gpus"] = [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ]
    return machine


def _revision() -> str | None:
    """Returns the commit of fastcoll's checkout, followed by "+" if files differ.

    None without one: an installed package may be below the repository of its user.
    """
    files = "bench/conditions.py\nsetup.py\n"
    git = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    tracked = [*git, "ls-files", "--full-name", "--error-unmatch", *files.split()]
    describe = [*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        found, commit = (
            subprocess.check_output(command, text=True, timeout=10, stderr=subprocess.DEVNULL)
            for command in (tracked, describe)
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() if found == files else None  # full names are of the repository's top


def command_line(module: str, arguments: Sequence[str]) -> str:
    """Returns the command that ran a module of this package."""
    hosts = shlex.split(os.environ.get(PRETENDED_HOSTS, ""))
    start = ["fastcoll.bench.hosts", *hosts, "--"] if hosts else [module]
    return shlex.join(["python", "-m", *start, *arguments])


def describe_run(command: str, device: torch.device = _CPU) -> dict[str, Any]:
    """Returns the start of a record: date, command, versions, variables that affect a run, and machine."""
    report = info.collect()
    compiled = report["libraries"]["fastcoll._C"]  # it may be older than the sources
    digest = hashlib.sha256(Path(compiled[0]).read_bytes()).hexdigest() if compiled else None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "revision": _revision(),
        "compiled_module_sha256": digest,
        "versions": report["versions"],
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_STARTS) and (name, value) not in _NOT_THE_USERS
        },
        "machine": _machine(device),
    }
