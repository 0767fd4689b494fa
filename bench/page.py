"""``python -m fastcoll.bench.page``: writes the tables of the pages in docs/ anew, from the records in bench/results.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``; what is between them is replaced, the rest stays.
So no figure of a table can differ from its record. ``--pictures`` draws the pictures that are older than their
records. ``--check`` changes nothing, and ends with status 1 where a table or a picture is not its record's.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastcoll.bench import pictures, plot, wire
from fastcoll.bench.options import size_text
from fastcoll.bench.simulate import parse_counts, parse_sizes, record_of
from fastcoll.costs import HGX_H200

__all__ = ["TABLES", "main", "rewritten"]

_ROOT = Path(__file__).resolve().parents[1]
_PAGES = _ROOT / "docs"
_RESULTS = _ROOT / "bench" / "results"
_SET_HERE = (
    "MALLOC_",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
)  # by bench/launch.py and bench/hosts.py
_TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((_RESULTS / name).read_text())
    return record


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> list[str]:
    """Returns a table in Markdown whose first columns are text and the others numbers."""
    rule = ["---" if column < text else "--:" for column in range(len(head))]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def _source(name: str, record: dict[str, Any]) -> list[str]:
    """Returns the lines under a table: command, date and machine."""
    machine = record.get("machine")
    # The benchmark sets the others itself.
    asked = {k: v for k, v in record.get("environment", {}).items() if not k.startswith(_SET_HERE)}
    settings = "".join(f"{name}={value} " for name, value in asked.items())
    where = f"; {machine['cpu']}, {machine['cores_allowed']} cores" if machine else ""
    return [
        "",
        f"`{settings}{record['command']}`  ",
        f"[{name}](../bench/results/{name}), {record['date'][:10]}{where}, torch {record['versions']['torch']}",
    ]


def _traffic() -> list[str]:
    name = "traffic_resnet50.json"
    record = _record(name)
    rows = [
        [row["name"], row["why"], f"{round(row['passes'], 3):g} S", str(row["launches"])]
        for row in record["paths"]
    ]
    head = ["path", "where the bytes come from", "bytes", "launches"]
    size = f"S = {record['size'] / 1e6:.1f} MB, {record['ranks']} ranks."
    size = f"{record['model']}: P = {record['tensors']} tensors, {size}"
    return [size, "", *_table(head, rows, 2), *_source(name, record)]


def _surroundings() -> list[str]:
    name = "surroundings_cuda_1rank.json"
    if not (_RESULTS / name).exists():
        return ["Never run on a GPU ([status.md](status.md))."]
    record = _record(name)
    rows = [
        [
            model["model"],
            row["name"],
            *(f"{row['added'][kind]:.0f}" for kind in ("host", "device")),
            _number(row.get("of_stock_host"), ".2f"),
            _number(row.get("around_microseconds"), ".0f"),
            _number(row.get("bytes_microseconds"), ".0f"),
            "-" if row["passes"] is None else f"{row['passes']:.3g} S",
            _number(row.get("observed_added", {}).get("calls"), ".0f"),
        ]
        for model in record["models"]
        for row in model["paths"]
        if row["name"] != row["base"]
    ]
    head = [
        "model",
        "path",
        "host, us",
        "device, us",
        "of stock DDP's host",
        "around collectives, us",
        "its bytes in a copy, us",
        "bytes",
        "calls",
    ]
    gpu = f"{record['machine']['gpus'][0]}; a copy moves {record['copy_gigabytes_per_second']:.0f} GB/s."
    return [f"{gpu} {record['one_rank']}", "", *_table(head, rows, 2), *_source(name, record)]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _ddp(name: str) -> list[str]:
    record = _record(name)
    rows = [
        [
            case["model"],
            one["backend"],
            one["buckets"],
            f"{one['added'] / 1e3:.1f}",
            f"{one['best_added'] / 1e3:.1f}",
            "-" if one["ratio"] is None else f"{one['ratio']:.2f}x",
        ]
        for case in record["cases"]
        for one in case["cases"]
    ]
    head = [
        "model",
        "path",
        "buckets",
        "added, ms (medians)",
        "added, ms (best)",
        "against the slowest",
    ]
    return [*_table(head, rows, 3), *_source(name, record)]


def _all_reduce() -> list[str]:
    name = "all_reduce_cpu_2ranks.json"
    record = _record(name)
    rows = []
    for case in record["cases"]:
        times = {key: one["time"]["median"] for key, one in case["backends"].items()}
        ours = times.pop("fastcoll")
        shared = times.pop("fastcoll-shared", None)
        best = min(
            (key for key in times if key != "gloo"), key=lambda key: times[key], default=None
        )
        rows.append([
            size_text(case["size"]),
            f"{ours:.1f}",
            "-" if shared is None else f"{shared:.1f}",
            f"{times['gloo']:.1f}",
            f"{times['gloo'] / ours:.1f}x",
            "-" if shared is None else f"{times['gloo'] / shared:.1f}x",
            "-" if best is None else f"{best} {times[best]:.1f}",
            "-" if best is None else f"{times[best] / ours:.2f}x",
            "-" if best is None or shared is None else f"{times[best] / shared:.2f}x",
        ])  # fmt: skip
    head = [
        "message",
        "fastcoll, us",
        "shared, us",
        "gloo, us",
        "gloo / fastcoll",
        "/ shared",
        "best other, us",
        "that / fastcoll",
        "/ shared",
    ]
    return [*_table(head, rows), *_source(name, record)]


def _exactness() -> list[str]:
    name = "exactness_cpu.json"
    record = _record(name)
    ways = {
        "one rounding of the exact mean": "least possible",
        "fastcoll": "fastcoll, real ranks",
        "float32, rounded once": "float32, rounded once",
        "gloo": "gloo, real ranks",
        "ring, each hop rounds": "ring, each hop rounds",
    }
    rows = []
    for case in record["cases"]:
        cells = [str(case["ranks"])]
        for way in ways:
            found = case.get(way)
            cells.append(
                f"{found['relative'] * 1e3:.2f}, {found['not_nearest']:.1%}" if found else "-"
            )
        rows.append(cells)
    return [*_table(["ranks", *ways.values()], rows), *_source(name, record)]


def _parity() -> list[str]:
    name = "parity_cpu_2ranks.json"
    record = _record(name)
    rows = [
        [
            task,
            f"{case['parameters']:,}",
            str(record["steps"]),
            *("yes" if same else "NO" for same in case["same"].values()),
            f"{case['moved']:.1e}",
            f"{case['noise']:.1e}",
        ]
        for task, case in record["tasks"].items()
    ]
    ways = [f"float32, {way}: gloo's bits" for way in next(iter(record["tasks"].values()))["same"]]
    head = ["task", "parameters", "steps", *ways, "moved by the bf16 wire", "noise"]
    return [*_table(head, rows), *_source(name, record)]


def _models() -> list[str]:
    gpus, sizes = "8,64,1024,16384", "64K,1M,32M,1G"
    record = record_of(HGX_H200, "all_reduce", parse_counts(gpus), parse_sizes(sizes))
    rows = []
    for case in record["cases"]:
        best = case["algorithms"][case["best"]]
        theirs = min(case["nccl"], key=lambda name: case["nccl"][name]["seconds"])
        rows.append([
            str(case["ranks"]),
            size_text(case["size"]),
            case["best"],
            f"{best['seconds'] * 1e6:.1f}",
            f"{case['algorithms']['ring']['seconds'] * 1e6:.1f}",
            theirs,
            f"{case['nccl'][theirs]['seconds'] * 1e6:.1f}",
        ])  # fmt: skip
    head = ["GPUs", "message", "best model", "us", "ring, us", "NCCL's own model: its choice", "us"]
    command = f"python -m fastcoll.bench --simulate --gpus {gpus} --sizes {sizes}"
    return [*_table(head, rows), "", f"`{command}` prints all algorithms, with the constants."]


def _hosts(link: str, shapes: tuple[str, ...]) -> list[str]:
    records = {name: _record(f"hosts_{name}_{link}_cpu.json") for name in shapes}
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for name, record in records.items():
        for case in record["cases"]:
            ours, gloo = case["fastcoll"], case["gloo"]
            ratio = ours["ms"] / gloo["ms"]
            cell = f"{ours['ms']:.3g} / {gloo['ms']:.3g}, {ratio:.2f}"
            least = wire.least_bytes(case["call"], case["bytes"], record["hosts"])
            if least and case["bytes"] >= 1 << 20:
                cell += f"; {ours['sent'] / least:.2f}, {gloo['sent'] / least:.2f}"
            cells.setdefault((case["call"], case["bytes"]), {})[name] = cell
    rows = [
        [call, size_text(size) if size else "", *(found.get(name, "-") for name in records)]
        for (call, size), found in cells.items()
    ]
    counts = (name.split("x") for name in records)
    head = ["call", "message", *(f"{hosts} hosts of {each}" for hosts, each in counts)]
    sources = [
        line
        for name, record in records.items()
        for line in _source(f"hosts_{name}_{link}_cpu.json", record)
    ]
    return [*_table(head, rows, 2), *sources]


TABLES: dict[str, dict[str, Callable[[], list[str]]]] = {
    "performance.md": {
        "traffic": _traffic,
        "ddp_fused": lambda: _ddp("ddp_fused_cpu_2ranks.json"),
        "ddp_kept": lambda: _ddp("ddp_kept_cpu_2ranks.json"),
        "ddp_shared": lambda: _ddp("ddp_shared_tensors_cpu_2ranks.json"),
        "ddp_stock": lambda: _ddp("ddp_cpu_2ranks.json"),
        "surroundings": _surroundings,
        "all_reduce": _all_reduce,
        "exactness": _exactness,
        "parity": _parity,
        "models": _models,
    },
    "hosts.md": {
        "hosts": lambda: _hosts("1000mbit", ("2x2", "2x4", "3x2", "4x1")),
        "hosts_unshaped": lambda: _hosts("unshaped", ("2x2", "2x4", "3x2")),
        "hosts_ddp": lambda: _ddp("ddp_hosts_2x2_1000mbit_cpu.json"),
    },
}
"""What makes each table's lines, by its page and the name in its mark."""


def rewritten(text: str, page: str) -> str:
    """Returns the text of a page with its tables made anew.

    Raises:
        ValueError: It names a table that is none of the page's :data:`TABLES`, or lacks one of them.
    """
    tables = TABLES[page]
    found = [match[1] for match in _TABLE.findall(text)]
    if sorted(found) != sorted(tables):
        raise ValueError(
            f"fastcoll.bench.page: expected the tables {', '.join(sorted(tables))}, each once, "
            f"got {', '.join(sorted(found))}"
        )
    return _TABLE.sub(
        lambda match: match[1] + "\n" + "\n".join(tables[match[2]]()) + "\n\n" + match[3], text
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites or checks the pages; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fastcoll.bench.page", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=_PAGES, help="of the pages (docs/)")
    parser.add_argument("--check", action="store_true", help="only tell whether one would change")
    parser.add_argument(
        "--pictures", action="store_true", help="draw the pictures beside them that are out of date"
    )
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.pictures and (problem := plot.missing()):
        parser.error(problem)
    if options.pictures and not options.check:
        pictures.redraw(options.folder)
    problems = []
    for name in TABLES:
        page = options.folder / name
        text = page.read_text()
        new = rewritten(text, name)
        if options.check and new != text:
            problems.append(
                f"the tables of {page} are not those of the records: run it without --check"
            )
        elif new != text:
            page.write_text(new)
    if options.check and options.pictures and (stale := pictures.stale(options.folder)):
        problems.append(
            f"{', '.join(stale)} in {options.folder}: not drawn from the records as they are: run it with --pictures "
            "and without --check"
        )
    for problem in problems:
        print(f"fastcoll.bench.page: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
