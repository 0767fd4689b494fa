"""``fastcoll info``: which tensors are served on this machine, what is available, and what is set.

Attach the output of ``-v``, or of ``--json``, to a bug report. In a training process
``groups`` returns the transport of each process group, and the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

from fastcoll import env
from fastcoll._built_for import recorded_torch
from fastcoll._checks import run_checks
from fastcoll._requirements import installed_version, nccl_owners
from fastcoll._version import __version__
from fastcoll.cuda import nccl_library

if TYPE_CHECKING:
    from fastcoll.cuda.engine import CudaEngine

__all__ = ["collect", "groups", "libraries", "main"]

_LIBRARIES = {
    "fastcoll._C": r"/fastcoll/_C\.[^/]*so$",
    "libtorch_cpu": r"/libtorch_cpu\.so$",
    "libtorch_cuda": r"/libtorch_cuda\.so$",
    "libnccl": r"/libnccl\.so[^/]*$",
    "libcudart": r"/libcudart\.so[^/]*$",
}


def groups() -> list[dict[str, Any]]:
    """Returns the process groups of this process, with the backend and the transport of each.

    Returns:
        A dictionary for each group, with these keys:

            - "name", "rank", "size"
            - "backends": the backend of each device, such as ``{"cpu": "fastcoll"}``, even if the program used
              another name to make the group
            - "transport" and "reason", if fastcoll serves the group: "shm", "shm+gloo", "gloo", "local" (one rank) or
              "undecided" (no collective yet)
            - "stores", with shared memory: "plain" or "streaming", the way in which the last large segment was written
            - "spin_us", with shared memory: microseconds that a wait spins before it sleeps; 0 if two ranks may
              share a core
            - "shared_bytes": shared memory that the process has reserved, in bytes, if fastcoll serves the group
            - "devices", if the group has used CUDA tensors: for each device, whether its ranks map each other's
              memory ("peers"), and the "reason" if they do not
            - "communicators", if the group has used CUDA tensors: "name" and "bytes" of each communicator of NCCL.
              "bytes" is what NCCL has allocated on the device. NCCL before 2.29.7 does not count it: None
            - "shares_with", if it shares resources of NCCL (``split_share``): names of the other groups. NCCL counts
              the bytes of all these groups together
    """
    compiled = sys.modules.get("fastcoll._C")  # not loaded: there is no group of fastcoll
    found = [] if compiled is None else [dict(group) for group in compiled.groups()]
    serving = _serving()
    for group in found:
        known_to_torch = serving.pop(group["name"], {})
        group["backends"] = known_to_torch.get("backends", {"cpu": "fastcoll"})
    found += serving.values()
    engine = sys.modules.get("fastcoll.cuda.engine")
    known = {} if engine is None else {one.group: one for one in engine.engines()}
    for group in found:
        if own := known.get(group["name"]):
            group.update(_of_devices(own, known.values()))
    return found


def _of_devices(own: CudaEngine, engines: Iterable[CudaEngine]) -> dict[str, Any]:
    """Returns what ``groups`` tells of a group that has used CUDA tensors."""
    found: dict[str, Any] = {}
    if own.all_reduces:
        found["devices"] = {
            index: {"peers": one.region.topology.peers, "reason": one.region.topology.reason}
            for index, one in own.all_reduces.items()
        }
    if memory := own.communicators.memory():
        found["communicators"] = [{"name": name, "bytes": count} for name, count in memory]
    family = own.communicators.family
    kin = [one.group for one in engines if one is not own and one.communicators.family == family]
    if kin:
        found["shares_with"] = sorted(kin)
    return found


def _memory(group: dict[str, Any]) -> str:
    """Returns ", NCCL 512 MiB with 'tp'" for a group whose communicators NCCL counts, else ""."""
    counts = [one["bytes"] for one in group.get("communicators", ()) if one["bytes"] is not None]
    if not counts:
        return ""
    kin = ", ".join(f"'{name}'" for name in group.get("shares_with", ()))
    sizes = ", ".join(f"{count / 2**20:.0f} MiB" for count in counts)
    return f", NCCL {sizes}{f' with {kin}' if kin else ''}"


def _serving() -> dict[str, dict[str, Any]]:
    """Returns name, rank, size and backends of each group of torch, by its name."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return {}
    found = {}
    for group in torch.distributed.distributed_c10d._world.pg_map:
        backends = {}
        for device in sorted(group._device_types, key=str):
            backend = group._get_backend(device)
            try:
                backends[device.type] = backend.name()
            except RuntimeError:  # this backend has no name
                backends[device.type] = type(backend).__name__
        found[group.group_name] = {
            "name": group.group_name,
            "rank": group.rank(),
            "size": group.size(),
            "backends": backends,
        }
    return found


def libraries() -> dict[str, list[str]]:
    """Returns the loaded libraries of this process that concern fastcoll: a list of paths for each name."""
    with open("/proc/self/maps") as file:
        paths = sorted({line.split(maxsplit=5)[5].rstrip("\n") for line in file if "/" in line})
    return {
        name: [path for path in paths if re.search(pattern, path)]
        for name, pattern in _LIBRARIES.items()
    }


def _versions() -> dict[str, str | None]:
    import torch

    versions: dict[str, str | None] = {
        "fastcoll": __version__,
        "torch": str(torch.__version__),
        "fastcoll was built for torch": recorded_torch(),
        "Python": platform.python_version(),
        "CUDA of torch": torch.version.cuda,
        "CuPy": installed_version("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "NCCL": installed_version("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        "NCCL as loaded": None,  # CuPy calls none, or an unusable one
        "Triton": installed_version("triton"),
        "NumPy": installed_version("numpy"),
        "Linux": platform.release(),
    }
    with contextlib.suppress(ImportError):
        loaded = nccl_library.load().version
        versions["NCCL as loaded"] = nccl_library.version_text(loaded)
    with contextlib.suppress(ImportError):  # the record of the build stays
        from fastcoll._load import C

        versions["fastcoll was built for torch"] = C.build_info().get("torch")
    return versions


def _environment() -> list[dict[str, Any]]:
    rows = []

    def add(name: str, value: object, given: bool, problem: str, meaning: str) -> None:
        row = {"name": name, "value": value, "set": given, "problem": problem}
        rows.append({**row, "meaning": meaning})

    for variable in env.VARIABLES:
        text = os.environ.get(variable.name) or None
        value, problem = variable.default, ""
        if text is not None:
            try:
                value = variable.parse(text)
            except ValueError as error:
                value, problem = text, str(error)
        add(variable.name, value, text is not None, problem, variable.meaning)
    for name in env.unknown():
        add(name, os.environ[name], True, "fastcoll has no such variable", "")
    return rows


def _tuning() -> dict[str, str]:
    """Returns which tuning table groups use, and the machine it was measured on; or the problem."""
    try:
        from fastcoll import tuning

        loaded = tuning.load()
    except (ImportError, ValueError) as error:
        return {"problem": str(error)}
    return {"table": loaded.source, "measured on": loaded.machine}


def collect() -> dict[str, Any]:
    """Returns the report of ``fastcoll info`` as a dictionary that JSON can hold.

    Returns:
        The keys "versions", "libraries", "available", "environment", "tuning", "groups" and "notes".
    """
    answers = run_checks()  # first: it loads the libraries
    loaded = libraries()
    notes = []
    if len(loaded["libnccl"]) > 1 and nccl_library.used(nccl_library.mapped()) is None:
        notes.append(
            "Two copies of NCCL are loaded, which often causes errors. Uninstall one of the packages that bring it, "
            "or set LD_PRELOAD to the path of the one to use."
        )
    notes += [
        f"{' and '.join(owners)} install one file, {path}, and one has overwritten the other's. Uninstall both, and "
        "reinstall the torch that is to be used."
        for path in loaded["libnccl"]
        if len(owners := nccl_owners(path)) > 1
    ]
    return {
        "versions": _versions(),
        "libraries": loaded,
        "available": answers,
        "environment": _environment(),
        "tuning": _tuning(),
        "groups": groups(),
        "notes": notes,
    }


_CPU = ('init_process_group("fastcoll")', "fastcoll._C")
"""The parts without which no group of CPU tensors can be made."""


def _verdict(report: dict[str, Any]) -> list[str]:
    """Returns a sentence for each kind of tensors: whether groups serve it, and how, or what is in the way."""
    rows = {row["part"]: row for row in report["available"]}
    broken = [rows[part] for part in _CPU if not rows[part]["available"]]
    if broken:
        return [f"CPU tensors: not ready. {row['part']}: {row['detail']}." for row in broken]
    shared, gloo = rows["CPU, shared memory"], rows["CPU, between hosts (Gloo)"]
    if shared["available"]:
        cpu = f"ready, through shared memory; {shared['detail']}"
    elif gloo["available"]:
        cpu = "ready, through Gloo, because memory cannot be shared"
    else:
        cpu = "not ready: neither memory nor Gloo connects ranks"
    missing = [
        row for part in ("CUDA", "NCCL, through CuPy") if not (row := rows[part])["available"]
    ]
    cuda = f"not served: {missing[0]['detail']}" if missing else f"ready; {rows['CUDA']['detail']}"
    if not missing and not rows["Triton"]["available"]:
        cuda += "; by NCCL alone, without kernels of Triton"
    return [f"CPU tensors: {cpu}.", f"CUDA tensors: {cuda}."]


def _sections(report: dict[str, Any], everything: bool) -> list[tuple[str, list[tuple[str, str]]]]:
    """Turns the report into titled lists of (name, text); without `everything` only what is there, wrong or set."""

    def noted(text: str, note: str) -> str:
        return f"{text}\n-> {note}" if note else text

    rows = report["available"]
    # What a GPU needs helps no torch that was built without CUDA.
    no_gpu = any(row["part"] == "CUDA" and not row["available"] for row in rows)
    available = []
    for row in rows:
        of_gpu = no_gpu and row["part"] in ("CUDA", "NCCL, through CuPy", "Triton")
        word = "yes" if row["available"] else "-" if of_gpu else "no"
        text = f"{word}: {row['detail']}"
        if everything or not of_gpu:
            available.append((row["part"], noted(text, "" if of_gpu else row["remedy"])))
    environment = [
        (row["name"], noted(f"{row['value']}{'' if row['set'] else ' (default)'}", row["problem"]))
        for row in report["environment"]
        if everything or row["set"]
    ]
    groups = [
        (
            str(group["name"]),
            f"rank {group['rank']}/{group['size']}, "
            + ", ".join(f"{device} by {name}" for device, name in group["backends"].items())
            + (f", {group['transport']}: {group['reason']}" if "transport" in group else "")
            + _memory(group),
        )
        for group in report["groups"]
    ]
    versions = [(k, v or "-") for k, v in report["versions"].items() if v or everything]
    loaded = [(name, "\n".join(paths) or "-") for name, paths in report["libraries"].items()]
    sections = [
        ("Available", available),
        ("Versions", versions),
        ("Loaded libraries", loaded if everything else []),
        ("Environment variables", environment),
        ("Tuning", list(report["tuning"].items())),
        ("Groups", groups),
        ("Notes", [("", note) for note in report["notes"]]),
    ]
    return [(title, rows) for title, rows in sections if rows]


def _print(report: dict[str, Any], everything: bool, file: TextIO) -> None:
    print(*_verdict(report), "", sep="\n", file=file)
    for title, rows in _sections(report, everything):
        print(title, file=file)
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            further = "\n" + " " * (width + 4)
            print(f"  {name:<{width}}  {further.join(text.splitlines())}", file=file)
    if not everything:
        print("\nfastcoll info -v lists defaults, libraries and parts for GPUs too.", file=file)


def main(arguments: list[str] | None = None) -> int:
    """Prints the report of ``fastcoll info``.

    Args:
        arguments: Arguments of the command line. None: those of the process.

    Returns:
        The exit status: 0 if groups of CPU tensors can be made, else 1.
    """
    parser = argparse.ArgumentParser(prog="fastcoll info", description=__doc__)
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print defaults and libraries too"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    report = collect()
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report, options.verbose, sys.stdout)
    return 0 if all(row["available"] for row in report["available"] if row["part"] in _CPU) else 1


if __name__ == "__main__":
    sys.exit(main())
