"""The tables and pictures of the pages, from records in bench/results: one function makes the lines of each."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import partial

import one_gpu
from client_tables import clients, frameworks
from drawings import HOSTS
from pictures import PICTURES
from table_sources import link, origin, record_of, source

from fastcoll import env
from fastcoll.bench.derived import added, added_by_profile, least_bytes
from fastcoll.bench.record import medians
from fastcoll.bench.sizes import size_text
from fastcoll.bench.table import markdown, times_text

__all__ = ["TABLES"]


def _ddp(name: str) -> list[str]:
    record, rows = record_of(name), []
    head = "model | path | buckets | added, ms (medians) | added, ms (best) | against the slowest"
    for case in record["cases"]:
        for one, more in added(case):
            times = [f"{each / 1e3:.1f}" for each in (more.by_median, more.by_minimum)]
            row = [case["model"], one["backend"], one["buckets"], *times, times_text(more.ratio)]
            if work := added_by_profile(case, one):
                launches = work.launches + work.collectives
                microseconds = work.launch_microseconds + work.collective_microseconds
                row += [f"{launches:.0f}", f"{microseconds:.0f}"]
            rows.append(row)
    if len(rows[0]) > head.count("|") + 1:
        head += " | added launches | added on the GPU, us"
    return [*markdown(head, rows, 3), *source((name, record))]


_ONE_HOST = "collectives_cpu_2ranks.jsonl"


def _all_reduce() -> list[str]:
    record, rows = record_of(_ONE_HOST), []
    for case in record["cases"]:
        if case["collective"] != "all_reduce":
            continue
        times = medians(case)
        by = [times[f"fastcoll{way}"] for way in ("", "-shared", "-plan")]
        gloo, mpi = times["gloo"], times["mpi"]
        us = [f"{each:.1f}" for each in (*by, mpi, gloo)]
        ratios = [gloo / by[0], mpi / by[0], mpi / by[2]]
        rows.append([size_text(case["size"]), *map(times_text, ratios), *us])
    head = "message | gloo / dist | Intel MPI / dist | Intel MPI / plan"
    times_of = "dist, us | shared, us | plan, us | Intel MPI, us | gloo, us"
    return [*markdown(f"{head} | {times_of}", rows), *source((_ONE_HOST, record))]


def _all_reduce_16_cores() -> list[str]:
    names = {ranks: f"all_reduce_cpu_{ranks}ranks_16cores.jsonl" for ranks in (2, 8, 16)}
    records = {ranks: record_of(name) for ranks, name in names.items()}
    cells: dict[int, list[str]] = {}
    for record in records.values():
        for case in record["cases"]:
            ours, gloo = (medians(case)[name] for name in ("fastcoll", "gloo"))
            row = cells.setdefault(case["size"], [])
            row += [f"{ours:.1f}", f"{gloo:.1f}", times_text(gloo / ours)]
    rows = [[size_text(size), *row] for size, row in cells.items()]
    titles = [
        f"{what}, {ranks} ranks"
        for ranks in records
        for what in ("fastcoll, us", "gloo, us", "gloo / fastcoll")
    ]
    sources = [(names[ranks], record) for ranks, record in records.items()]
    return [*markdown(" | ".join(["message", *titles]), rows), *source(*sources)]


_OTHER_MPIS = {
    "MPICH": "communicator_mpich_cpu_2ranks.jsonl",
    "Open MPI": "communicator_openmpi_cpu_2ranks.jsonl",
}


def _communicator() -> list[str]:
    record = record_of(_ONE_HOST)
    others = {mpi: record_of(name) for mpi, name in _OTHER_MPIS.items()}
    ways = {"fastcoll": "dist, us", "fastcoll-direct": "call, us", "fastcoll-plan": "plan, us"}
    ways |= {"mpi": "Intel MPI, us", "gloo": "gloo, us"}
    known = {(case["collective"], case["size"]): medians(case) for case in record["cases"]}
    rows = []
    for cases in zip(*(each["cases"] for each in others.values()), strict=True):
        collective, size = cases[0]["collective"], cases[0]["size"]
        times = known[collective, size]
        row = [collective, size_text(size) if size else "-"]
        each = [times, *map(medians, cases)]
        row += [times_text(one["mpi"] / one["fastcoll-plan"]) for one in each]
        rows.append([*row, *(f"{times[one]:.2f}" for one in ways)])
    titles = ["collective", "message", *(f"{mpi} / plan" for mpi in ("Intel MPI", *others))]
    titles += ways.values()
    sources = [(_ONE_HOST, record), *((_OTHER_MPIS[mpi], other) for mpi, other in others.items())]
    return [*markdown(" | ".join(titles), rows, 2), *source(*sources)]


def _digest() -> list[str]:
    record, rows = record_of(name := "digest_cpu_2ranks.jsonl"), []
    for case in record["cases"]:
        times = medians(case)
        off, on, gloo = (times[name] for name in ("fastcoll", "fastcoll-digest", "gloo"))
        us = [f"{each:.2f}" for each in (off, on, gloo)]
        rows.append([case["collective"], size_text(case["size"]), *us, times_text(on / off)])
    head = "collective | message | off, us | all, us | gloo, us | all / off"
    return [*markdown(head, rows, 2), *source((name, record))]


def _vllm() -> list[str]:
    record, rows = record_of(name := "vllm_cpu_2ranks.jsonl"), []
    for case in record["cases"]:
        times = medians(case)
        by = [times[f"fastcoll{way}"] for way in ("", "-op", "-direct", "-plan")]
        us = [f"{each:.2f}" for each in (*by, times["vllm"])]
        ratios = [times_text(times["vllm"] / by[way]) for way in (1, 3)]
        rows.append([case["collective"], size_text(case["size"]), *us, *ratios])
    head = "collective | message | dist, us | operator, us | call, us | plan, us | vLLM, us"
    return [*markdown(f"{head} | vLLM / operator | vLLM / plan", rows, 2), *source((name, record))]


def _objects() -> list[str]:
    name = "objects_cpu_2ranks.jsonl"
    record, rows = record_of(name), []
    for case in record["cases"]:
        times = medians(case)
        by = [times[one] for one in ("gloo", "fastcoll", "fastcoll-direct")]
        row = [case["collective"], case["object"], *(f"{each:.1f}" for each in by)]
        rows.append([*row, times_text(by[0] / by[2])])
    head = "call | object | gloo, us | dist, us | communicator, us | gloo / communicator"
    return [*markdown(head, rows, 2), *source((name, record))]


def _compiled() -> list[str]:
    name = "compiled_cpu_2ranks.jsonl"
    record = record_of(name)
    (case,) = record["cases"]
    alone, times = case["alone"]["time"]["median"], medians(case)
    ways = {
        "gloo": "torch.compile on gloo",
        "fastcoll": "torch.compile on fastcoll",
        "fastcoll-compile": "fastcoll.compile",
    }
    rows = [["no collectives", f"{alone:.0f}", "-", "-"]]
    base = times["fastcoll"] - alone
    for peer, way in ways.items():
        over = times[peer] - alone
        rows.append([way, f"{times[peer]:.0f}", f"{over:.0f}", times_text(base / over)])
    head = "by | a token, us | of that communication, us | torch.compile on fastcoll / it"
    return [*markdown(head, rows, 1), *source((name, record))]


def _startup() -> list[str]:
    name = "startup_cpu.jsonl"
    record = record_of(name)
    rows = [
        [f"`{case['command']}`", *(f"{case['time'][key] / 1e3:.0f}" for key in ("median", "upper"))]
        for case in record["cases"]
    ]
    return [*markdown("command | median, ms | upper quartile, ms", rows), *source((name, record))]


_COMPARED = {
    "gloo / dist": ("gloo", "fastcoll"),
    "Intel MPI / dist": ("mpi", "fastcoll"),
    "Intel MPI / plan": ("mpi", "fastcoll-plan"),
}


def _collectives(name: str) -> list[str]:
    record = record_of(name)
    ratios: dict[tuple[str, str], dict[int, str]] = {}
    for case in record["cases"]:
        times = medians(case)
        for title, (theirs, ours) in _COMPARED.items():
            if theirs in times:
                cells = ratios.setdefault((case["collective"], title), {})
                cells[case["size"]] = times_text(times[theirs] / times[ours])
    sizes = sorted({case["size"] for case in record["cases"]})
    rows = [[*who, *(cells.get(size, "-") for size in sizes)] for who, cells in ratios.items()]
    head = " | ".join(["call", "times", *map(size_text, sizes)])
    return [*markdown(head, rows, 2), *source((name, record))]


def _hosts(link: str, shapes: tuple[str, ...]) -> list[str]:
    records = {name: record_of(f"hosts_{name}_{link}_cpu.jsonl") for name in shapes}
    times: dict[tuple[str, int], list[str]] = {}
    for record in records.values():
        for case in record["cases"]:
            ours, gloo = case["fastcoll"]["ms"], case["gloo"]["ms"]
            row = times.setdefault((case["call"], case["bytes"]), [f"{ours:.3g}"])
            row.append(f"{ours / gloo:.2f}")
    rows = [[call, size_text(n) if n else "", *row] for (call, n), row in times.items()]
    assert all(len(row) == 3 + len(shapes) for row in rows), "a record lacks a case"
    titles = [HOSTS[name] for name in shapes]
    head = " | ".join(["call", "message", f"fastcoll, ms, {titles[0]}", *titles])
    sources = [(f"hosts_{name}_{link}_cpu.jsonl", record) for name, record in records.items()]
    return [*markdown(head, rows, 2), *source(*sources)]


def _hosts_bytes(link: str, shapes: tuple[str, ...]) -> list[str]:
    """Returns a table of the bytes that the busiest host sends over the least possible, for the longest messages."""
    sent: dict[str, list[str]] = {}
    for name in shapes:
        record = record_of(f"hosts_{name}_{link}_cpu.jsonl")
        longest = max(case["bytes"] for case in record["cases"])
        for case in record["cases"]:
            least = least_bytes(case["call"], case["bytes"], record["hosts"])
            if least and case["bytes"] == longest:
                row = sent.setdefault(case["call"], [])
                row += [f"{case[backend]['sent'] / least:.2f}" for backend in ("fastcoll", "gloo")]
    titles = [f"{backend}, {HOSTS[name]}" for name in shapes for backend in ("fastcoll", "Gloo")]
    return markdown(" | ".join(["call", *titles]), [[call, *row] for call, row in sent.items()])


def _variables() -> list[str]:
    lines: list[str] = []
    for group in env.GROUPS:
        rows = []
        for one in (each for each in env.VARIABLES if each.group == group):
            default = "unset" if one.default == "" else f"{one.default}"
            rows.append([f"`{one.name}`", one.meaning, one.values, default])
        table = markdown("variable | meaning | values | default", rows, 4)
        lines += [*([""] if lines else []), f"## {group}", "", *table]
    return lines


def _picture(name: str) -> list[str]:
    """Returns the lines of a picture and its caption: content, records, date and machine."""
    picture = PICTURES[name]
    records = picture.read()
    links = ", ".join(link(f"{record}.jsonl") for record in picture.records)
    caption = f"{picture.caption(records)} {links}, {origin(records[0])}."
    return [
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="../pictures/{name}_dark.svg">',
        f'<img src="../pictures/{name}_light.svg" width="{picture.width}" alt="{picture.shows}">',
        "</picture>",
        "",
        *textwrap.wrap(caption, 100, break_long_words=False, break_on_hyphens=False),
    ]


def _pictures(*names: str) -> dict[str, Callable[[], list[str]]]:
    return {f"picture_{name}": partial(_picture, name) for name in names}


TABLES: dict[str, dict[str, Callable[[], list[str]]]] = {
    "README.md": {"frameworks": frameworks, "gpu": one_gpu.figures_table},
    "docs/guides/frameworks.md": {"clients": clients, **_pictures("frameworks")},
    "docs/guides/microseconds.md": {
        "communicator": _communicator,
        "vllm": _vllm,
        "objects": _objects,
    },
    "docs/guides/compile.md": {"compiled": _compiled},
    "docs/faults/compare-runs.md": {"digest": _digest},
    "docs/reference/command-line.md": {"startup": _startup},
    "docs/reference/environment.md": {"variables": _variables},
    "docs/benchmarks/index.md": _pictures("added", "all_reduce", "hosts", "faults"),
    "docs/benchmarks/one-host.md": {
        **_pictures("ranks"),
        "all_reduce": _all_reduce,
        "all_reduce_16_cores": _all_reduce_16_cores,
        "collectives": partial(_collectives, _ONE_HOST),
        "collectives_bfloat16": partial(_collectives, "collectives_bfloat16_cpu_2ranks.jsonl"),
    },
    "docs/benchmarks/training.md": {
        "ddp": lambda: _ddp("ddp_cpu_2ranks.jsonl"),
        "ddp_kept": lambda: _ddp("ddp_kept_cpu_2ranks.jsonl"),
    },
    "docs/benchmarks/one-gpu.md": {
        **_pictures("gpu"),
        "engine": one_gpu.engine,
        "kernels": one_gpu.kernels,
        "ddp_cuda": lambda: _ddp("ddp_cuda_1rank.jsonl"),
    },
    "docs/benchmarks/hosts.md": {
        "hosts": lambda: _hosts("1000mbit", tuple(HOSTS)),
        "hosts_bytes": lambda: _hosts_bytes("1000mbit", ("2x2", "3x2")),
        "hosts_unshaped": lambda: _hosts("unshaped", ("2x2",)),
        "hosts_ddp": lambda: _ddp("ddp_hosts_2x2_1000mbit_cpu.jsonl"),
    },
}
"""The function that makes the lines of each table and picture, by its page and the name in its mark."""
