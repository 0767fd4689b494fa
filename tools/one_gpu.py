"""The tables of one GPU, and the figures of it that README and a picture have."""

from __future__ import annotations

import re
from typing import NamedTuple

from table_sources import record_of, source

from fastcoll.bench.derived import BAR, ENGINE_COLUMNS, added_by_profile, copy_bandwidth
from fastcoll.bench.table import markdown

__all__ = ["RECORDS", "Figure", "engine", "figures", "figures_table", "kernels"]

RECORDS = ("ddp_cuda_1rank", "kernels_cuda", "engine_cuda")
"""Those of the figures."""


# Rows of the page; the record has more.
_KERNELS = re.compile(
    r"copy .*|(un)?flatten \S+|bf16 hook \S+|reduce .*32|reduce .*16|\S+ 8 streams 64 MiB \S+"
)


def kernels(name: str = "kernels_cuda.jsonl") -> list[str]:
    """Returns the table of kernels."""
    record = record_of(name)
    rows: list[list[str]] = []
    fastest, own = 0.0, False
    for case in record["cases"]:
        if not _KERNELS.fullmatch(case["name"]):
            continue
        fastest = copy_bandwidth(case, "copy") or fastest
        bar = copy_bandwidth(case, BAR) or fastest
        own |= BAR in case["candidates"]
        for candidate, times in case["candidates"].items():
            graph, eager = (times[way]["median"] for way in ("graph", "eager"))
            bandwidth = case["bytes"] / graph / 1e3
            if candidate in ("copy", BAR):
                bandwidth = bar
            row = [case["name"], candidate, f"{graph:.1f}", f"{eager:.1f}", f"{bandwidth:.0f}"]
            rows.append([*row, f"{bandwidth / bar:.2f}"])
    head = "work | by | in a graph, us | as calls, us | GB/s | of the copy's"
    bars = (
        "The copy of flatten and unflatten is that of the same buckets, one launch each."
        if own
        else "The copy of each row is that of 1 GiB: this record has no copies of buckets."
    )
    return [*markdown(head, rows, 2), "", bars, *source((name, record))]


def engine() -> list[str]:
    """Returns the table of the host's time for a call."""
    record, rows = record_of(name := "engine_cuda.jsonl"), []
    columns = [
        one for one in ENGINE_COLUMNS if any(one in each["time"] for each in record["cases"])
    ]
    for case in record["cases"]:
        times = {column: one["median"] for column, one in case["time"].items()}
        us = [f"{times[column]:.1f}" if column in times else "-" for column in columns]
        rows.append([case["case"], *us, f"{times['fastcoll'] / times['nccl']:.2f}"])
    titles = [f"{column}, us" for column in columns]
    return [*markdown(" | ".join(["call", *titles, "ratio"]), rows, 1), *source((name, record))]


class Figure(NamedTuple):
    """What README has of one GPU: fastcoll's value and PyTorch's."""

    what: str
    against: str
    unit: str
    fastcoll: float
    pytorch: float
    digits: int = 0


def figures() -> list[Figure]:
    """Returns four figures of one GPU."""
    calls = {one["case"]: one["time"] for one in record_of("engine_cuda.jsonl")["cases"]}
    works = {one["name"]: one for one in record_of("kernels_cuda.jsonl")["cases"]}
    steps = record_of("ddp_cuda_1rank.jsonl")["cases"]
    host = calls["all_reduce, async"]
    copies = works["flatten resnet50"]["candidates"]
    total = works["reduce 8 x float32"]
    step = next(one for one in steps if one["model"] == "resnet50")
    launches = {}
    for case in step["cases"]:
        if case["buckets"] == "default buckets" and (work := added_by_profile(step, case)):
            launches[case["backend"]] = work.launches + work.collectives

    def us(by: str) -> float:
        return float(copies[by]["graph"]["median"])

    def bandwidth(by: str) -> float:
        return float(total["bytes"] / total["candidates"][by]["graph"]["median"] / 1e3)

    return [
        Figure(
            *("launches that a step of ResNet-50 gets", "DDP on NCCL", ""),
            *(launches["fastcoll-sync"], launches["nccl"]),
        ),
        Figure(
            *("copy of its 161 gradients into buckets", "a copy of each", "us"),
            *(us("fastcoll"), us("ddp"), 1),
        ),
        Figure(
            *("host's time of an asynchronous `all_reduce` of 1 KiB", "", "us"),
            *(host["fastcoll"]["median"], host["nccl"]["median"], 1),
        ),
        Figure(
            *("sum of 8 buffers of float32", "additions", "GB/s"),
            *(bandwidth("fastcoll"), bandwidth("adds")),
        ),
    ]


def figures_table() -> list[str]:
    """Returns the table of README."""
    rows = []
    for one in figures():
        title = ", ".join(
            filter(None, (one.what, one.against and f"against {one.against}", one.unit))
        )
        rows.append([title, *(f"{value:.{one.digits}f}" for value in (one.fastcoll, one.pytorch))])
    return markdown("one H200 | fastcoll | PyTorch", rows, 1)
