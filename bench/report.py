"""The printed table and what is derived from the times in it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

__all__ = ["add_ratios", "closing", "heading", "table_head", "table_rows"]

_COLUMNS = (
    ("size", "(B)", 11),
    ("count", "(elements)", 11),
    ("type", "", 9),
    ("redop", "", 6),
    ("backend", "", 11),
    ("time", "(us)", 10),
    ("q1", "(us)", 10),
    ("q3", "(us)", 10),
    ("min", "(us)", 10),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 7),
    ("ratio", "median", 8),
    ("ratio", "best", 8),
    ("lead", "median", 8),
    ("lead", "best", 8),
    ("floor", "(us)", 10),
    ("/floor", "", 8),
    ("others", "(cpu%)", 7),
)


def add_ratios(row: dict[str, Any], among: Collection[str], baseline: str | None = None) -> None:
    """Adds to each backend of a case how it compares with others.

    ``ratio`` and ``best_ratio``: how many times faster it is than the baseline, by medians and by minima.
    The baseline is the slowest backend unless one is asked for; its name is the ``baseline`` of the case.
    ``lead`` and ``best_lead``: how many times faster it is than the fastest other backend, again by medians and
    by minima; less than 1 where another one is faster. ``runner_up`` is that other one, by medians.
    ``over_floor`` and ``best_over_floor``: how many times longer than the floor it takes.

    Args:
        row: A case; changed in place.
        among: Backends that are compared with; the others are shown beside them.
        baseline: The backend that the ratios are over; where it has no times they are None.
    """
    backends = row["backends"]
    times = {name: backend["time"] for name, backend in backends.items()}
    compared = [name for name in backends if name in among] or list(backends)
    slowest = max(compared, key=lambda name: times[name]["median"], default=None)
    row["baseline"] = baseline or slowest
    for name, backend in backends.items():
        others = [other for other in compared if other != name]
        fastest = min(others, key=lambda other: times[other]["median"], default=None)
        backend["runner_up"] = fastest
        for prefix, key in (("", "median"), ("best_", "minimum")):
            own = times[name][key]
            lead = min((times[other][key] for other in others), default=None)
            above = times.get(row["baseline"])
            floor = row["floor"] and row["floor"]["time"][key]
            backend[f"{prefix}ratio"] = above and _over(above[key], own)
            backend[f"{prefix}lead"] = lead and _over(lead, own)
            backend[f"{prefix}over_floor"] = floor and _over(own, floor)


def _over(above: float, below: float) -> float | None:
    return above / below if below > 0 else None


def _time(microseconds: float) -> str:
    return f"{microseconds:.2f}" if microseconds < 1000 else f"{microseconds:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def _join(cells: Collection[str]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, (_, _, width) in zip(cells, _COLUMNS, strict=True))


def heading(record: dict[str, Any], legend: str) -> list[str]:
    """Returns the lines above all tables; none on ranks without a record.

    Args:
        record: Of the run.
        legend: What the columns mean.
    """
    if "machine" not in record:
        return []
    machine, versions = record["machine"], record["versions"]
    hosts = record.get("hosts", 1)
    memory = (machine["memory_bytes"] or 0) / 2**30
    lines = [
        f"# {record['command']}",
        f"# {record['date']}  {machine['cpu']}, {machine['cores_allowed']} cores, {memory:.0f} GiB, "
        f"Linux {machine['kernel']}, load {machine['load_average'][0]:.2f}",
        f"# fastcoll {versions['fastcoll']}, torch {versions['torch']}; {record['world_size']} ranks"
        f"{f' on {hosts} hosts' if hosts > 1 else ''}, "
        f"{record['device']}; at least {record['iterations']} timed calls each, in {record['rounds']} rounds",
        f"# {legend}",
    ]
    lines += [f"# {name}: {library}" for name, library in record["libraries"].items() if library]
    lines += [f"# {name} is left out: {why}" for name, why in record["left_out"].items()]
    return lines


def table_head(collective: str) -> list[str]:
    """Returns the two lines of column titles, with the collective's name."""
    titles = _join([title for title, _, _ in _COLUMNS])
    return [f"# {collective}", f"#{titles[1:]}", f"#{_join([unit for _, unit, _ in _COLUMNS])[1:]}"]


def table_rows(row: dict[str, Any]) -> list[str]:
    """Returns a line for each backend of a case, and one for each that cannot do it."""
    lines = []
    others = row["other_processes_percent"]
    for name, backend in row["backends"].items():
        time = backend["time"]
        cells = [
            str(row["size"]),
            str(row["count"]),
            row["dtype"],
            row["op"],
            name,
            *(_time(time[key]) for key in ("median", "lower", "upper", "minimum")),
            f"{backend['algbw']:.2f}",
            f"{backend['busbw']:.2f}",
            "N/A" if backend["wrong"] is None else str(backend["wrong"]),
            _ratio(backend["ratio"]),
            *(_ratio(backend[key]) for key in ("best_ratio", "lead", "best_lead")),
            _time(row["floor"]["time"]["median"]) if row["floor"] else "-",
            _ratio(backend["over_floor"]),
            "-" if others is None else f"{others:.0f}",
        ]
        lines.append(_join(cells))
    if wire := row.get("wire"):
        least = wire["least"]
        sent = [
            f"{name} {bytes_sent:.0f}" + (f" ({bytes_sent / least:.2f})" if least else "")
            for name, bytes_sent in wire["sent"].items()
        ]
        over = f", and over the least, {least:.0f} B" if least else ""
        lines.append(f"# {row['size']} B: leaves the busiest host{over}: {', '.join(sent)}")
    for name, why in row["unsupported"].items():
        lines.append(f"# {row['size']} B: {name} cannot do this: {why}")
    return lines


def closing(wrong: int, checked: bool, measured: int) -> list[str]:
    """Returns the verdict below all tables."""
    if not measured:
        return ["# nothing was measured: no backend is left"]
    if not checked:
        return ["# results were not verified"]
    return [f"# wrong elements: {wrong} {'FAILED' if wrong else 'OK'}"]
