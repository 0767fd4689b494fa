"""The records in bench/results, and the lines below a table that name the command and the record behind it."""

from __future__ import annotations

from typing import Any

from repository import ROOT

from fastcoll.bench.record import read_record

__all__ = ["link", "origin", "record_of", "source"]

_RESULTS = ROOT / "bench" / "results"
_NOT_ASKED = (
    *("MALLOC_", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "I_MPI_"),  # by launchers, hosts.py
    *(
        "NCCL_VERSION",
        "TORCH_CUDA_ARCH_LIST",
        "TORCH_SYMM_MEM_",
    ),  # by images and tools/gpu.sh, without an effect
)
"""Begins of variables that a record has, and that a reader need not set."""


def record_of(name: str) -> dict[str, Any]:
    """Returns the record of that file name in bench/results."""
    return read_record(_RESULTS / name)


def source(*records: tuple[str, dict[str, Any]], more: str = "") -> list[str]:
    """Returns the folded lines under a table: command, date and machine of each record, by its name."""
    lines = ["", '<details markdown="1"><summary>How to repeat</summary>', ""]
    for name, record in records:
        # The benchmark sets the other variables itself.
        variables = record.get("environment", {}).items()
        asked = [f"{key}={value} " for key, value in variables if not key.startswith(_NOT_ASKED)]
        lines += [
            f"`{''.join(asked)}{record['command']}`  ",
            f"{link(name)}, {origin(record)}{more}",
            "",
        ]
    return [*lines, "</details>"]


def link(name: str) -> str:
    """Returns a link to a record, from a page in a folder of docs/."""
    return f"[{name}](../../bench/results/{name})"


def origin(record: dict[str, Any]) -> str:
    """Returns the date and the machine of a record."""
    machine, versions = record.get("machine"), record["versions"]
    where = f"; {machine['cpu']}, {machine['cores_allowed']} cores" if machine else ""
    return f"{record['date'][:10]}{where}, torch {versions['torch']}"
