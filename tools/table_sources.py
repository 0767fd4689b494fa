"""The records in bench/results, and the lines below a table that name the command and the record behind it."""

from __future__ import annotations

from typing import Any

from repository import ROOT

from fastcoll.bench.record import read_record

__all__ = ["link", "origin", "record_of", "source"]

_RESULTS = ROOT / "bench" / "results"
_SET_HERE = ("MALLOC_", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "I_MPI_")  # by launchers, hosts.py


def record_of(name: str) -> dict[str, Any]:
    """Returns the record of that file name in bench/results."""
    return read_record(_RESULTS / name)


def source(name: str, record: dict[str, Any], more: str = "") -> list[str]:
    """Returns the lines under a table: command, date and machine."""
    # The benchmark sets the other variables itself.
    asked = {k: v for k, v in record.get("environment", {}).items() if not k.startswith(_SET_HERE)}
    settings = "".join(f"{name}={value} " for name, value in asked.items())
    return ["", f"`{settings}{record['command']}`  ", f"{link(name)}, {origin(record)}{more}"]


def link(name: str) -> str:
    """Returns a link to a record, from a page in a folder of docs/."""
    return f"[{name}](../../bench/results/{name})"


def origin(record: dict[str, Any]) -> str:
    """Returns the date and the machine of a record."""
    machine, versions = record.get("machine"), record["versions"]
    where = f"; {machine['cpu']}, {machine['cores_allowed']} cores" if machine else ""
    return f"{record['date'][:10]}{where}, torch {versions['torch']}"
