"""Tables and a picture of what cost models predict."""

from __future__ import annotations

from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastcoll.bench.options import size_text
from fastcoll.bench.plot import new_figure, save
from fastcoll.costs import ALGORITHMS, IMPLEMENTED

__all__ = ["draw", "print_formulas", "print_implemented", "print_predictions"]

_WIDE = 400  # columns where no terminal says how many
_BEST = "*"


def _console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() else _WIDE, highlight=False)


def _time(seconds: float) -> str:
    microseconds = seconds * 1e6
    if microseconds < 1e3:
        return f"{microseconds:.1f} us"
    return f"{microseconds / 1e3:.2f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.2f} s"


def _constants(platform: dict[str, Any]) -> list[str]:
    sources = platform["sources"]
    lines = [
        f"{platform['name']}; {platform['per_node']} GPUs a node. Constants and their sources:"
    ]
    for name, what in (
        ("intra_bandwidth", "NVLink"),
        ("inter_bandwidth", "network card"),
        ("memory_bandwidth", "memory"),
    ):
        lines.append(f"  {what} {platform[name] / 1e9:.1f} GB/s: {sources[name]}")
    lines.append(f"  call {platform['call'] * 1e6:.1f} us: {sources['call']}")
    for name, what in (
        ("intra_latency", "step in a node"),
        ("inter_latency", "step between nodes"),
        ("efficiency", "share of the link that carries the message"),
    ):
        scale, unit = (1, "") if name == "efficiency" else (1e6, " us")
        values = ", ".join(
            f"{key} {value[name] * scale:.2g}{unit}" for key, value in platform["protocols"].items()
        )
        lines.append(f"  {what}, {values}: {sources[name]}")
    return lines


def print_predictions(record: dict[str, Any], stream: TextIO) -> None:
    """Prints a table for each world size: the best algorithm is marked, NCCL's own model stands at the right.

    Args:
        record: Of :func:`fastcoll.bench.simulate.record_of`.
        stream: Where to.
    """
    console = _console(stream)
    console.print("A MODEL, NOT A MEASUREMENT: no GPU was used for these numbers.", style="bold")
    console.print("\n".join(_constants(record["platform"])), soft_wrap=True)
    console.print(
        "Steps are in lockstep: on several nodes the flat ring pays the network's latency in every step, where NCCL's "
        "model counts only the hops that cross nodes. Only the pipelined algorithms use the links in nodes and those "
        "between them at once, beside the flat ring.",
        soft_wrap=True,
    )
    console.print(
        f"NCCL: what its own model predicts for ring, tree and NVLS, with the channels of nodes of 8 H100 or "
        f"H200 and NDR cards; {record['nccl_model']}. Each entry takes the best of LL, LL128 and Simple. {_BEST}: the "
        "least of our models. -: no model for so many ranks, or on several nodes.",
        soft_wrap=True,
    )
    names = list(ALGORITHMS[record["collective"]])
    theirs = list(dict.fromkeys(name for case in record["cases"] for name in case["nccl"]))
    for ranks in dict.fromkeys(case["ranks"] for case in record["cases"]):
        table = Table(
            title=f"{record['collective']}, {ranks} GPUs (model)",
            title_justify="left",
            box=box.SIMPLE_HEAD,
        )
        table.add_column("message", justify="right", no_wrap=True)
        for name in names:
            table.add_column(
                name.replace("l_", "l\n").replace("pipelined_", "pipelined\n"), justify="right"
            )
        for name in theirs:
            table.add_column(f"NCCL's model:\n{name}", justify="right")
        for case in record["cases"]:
            if case["ranks"] != ranks:
                continue
            cells = [_cell(case, name) for name in names]
            cells += [
                Text(_time(case["nccl"][name]["seconds"]) if name in case["nccl"] else "-")
                for name in theirs
            ]
            table.add_row(size_text(case["size"]), *cells)
        console.print(table)


def _cell(case: dict[str, Any], name: str) -> Text:
    found = case["algorithms"].get(name)
    if found is None:
        return Text("-")
    best = name == case["best"]
    return Text(f"{_BEST if best else ''}{_time(found['seconds'])}", style="bold" if best else "")


def print_formulas(stream: TextIO) -> None:
    """Prints all algorithms with steps, bytes on the wire and time."""
    console = _console(stream)
    console.print(
        "n ranks, R of a node, N nodes, S bytes of the message; a and b: latency and seconds per byte of a link in the "
        "node, A and B: between nodes; c: seconds to reduce a byte; k: segments of the tree or chain, p: parts of a "
        "pipeline, both the best. Bytes: the most that a rank sends. Formulas for powers of two, flat "
        "algorithms in one node.",
        soft_wrap=True,
    )
    for collective, algorithms in ALGORITHMS.items():
        table = Table(title=collective, title_justify="left", box=box.SIMPLE_HEAD)
        for column in ("algorithm", "steps", "bytes on the wire", "time", "source"):
            table.add_column(column, overflow="fold")
        for algorithm in algorithms.values():
            table.add_row(
                algorithm.name,
                algorithm.steps,
                algorithm.wire_bytes,
                algorithm.time,
                algorithm.source,
            )
        console.print(table)


def print_implemented(stream: TextIO) -> None:
    """Prints which model each algorithm of fastcoll follows."""
    table = Table(
        title="fastcoll's own algorithms, and the models above that they follow",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in ("tensors", "collective", "algorithm", "model", "source", "remark"):
        table.add_column(column, overflow="fold")
    for one in IMPLEMENTED:
        table.add_row(
            one.tensors, one.collective, one.name, " or ".join(one.models), one.source, one.remark
        )
    _console(stream).print(table)


def draw(record: dict[str, Any], path: str) -> None:
    """Writes a picture: time against size, a panel for each world size.

    Args:
        record: As for :func:`print_predictions`.
        path: The file; its suffix selects the format.
    """
    counts = list(dict.fromkeys(case["ranks"] for case in record["cases"]))
    columns = 2 if len(counts) in (2, 4) else min(3, len(counts))
    rows = -(-len(counts) // columns)
    figure = new_figure(5 * columns, 3.6 * rows + 1)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    names = list(ALGORITHMS[record["collective"]])
    for panel, ranks in zip(panels, counts, strict=False):
        cases = [case for case in record["cases"] if case["ranks"] == ranks]
        for index, name in enumerate(names):
            there = [case for case in cases if name in case["algorithms"]]
            if there:
                panel.plot(
                    [case["size"] for case in there],
                    [case["algorithms"][name]["seconds"] * 1e6 for case in there],
                    color=f"C{index % 10}",
                    linestyle="-." if index > 9 else "-",
                    label=name,
                )
        for name, style in zip(cases[0]["nccl"], (":", "--", "-."), strict=False):
            panel.plot(
                [case["size"] for case in cases],
                [case["nccl"][name]["seconds"] * 1e6 for case in cases],
                color="black",
                linestyle=style,
                label=f"NCCL's model: {name}",
            )
        panel.set(yscale="log", xlabel="message (bytes)", ylabel="predicted time (us)")
        panel.set_xscale("log", base=2)
        panel.set_title(f"{record['collective']}, {ranks} GPUs")
        panel.grid(True, which="major", alpha=0.3)
    for panel in list(figure.axes)[len(counts) :]:
        panel.remove()
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(
        list(lines.values()), list(lines), loc="outside lower center", ncols=3, fontsize=8
    )
    figure.suptitle(f"A model, not a measurement: {record['platform']['name']}")
    save(figure, record, path, dpi=90)
