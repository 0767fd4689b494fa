"""The tables of the pages, as their records have them."""

import tables
from tables import TABLES


def rows_of(page, name):
    """Return the rows of a table, by their text columns, each by the titles of its other columns."""
    lines = [line for line in TABLES[page][name]() if line.startswith("| ")]
    titles, rule, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    text = rule.count("---")
    return {tuple(row[:text]): dict(zip(titles[text:], row[text:], strict=True)) for row in rows}


def test_work_of_the_gpu_is_beside_the_time_of_a_step():
    rows = rows_of("docs/benchmarks/one-gpu.md", "ddp_cuda")
    work = "added launches", "added on the GPU, us"
    stock, ours = (
        [rows["resnet50", path, "default buckets"][title] for title in work]
        for path in ("nccl", "fastcoll-sync")
    )
    assert (stock, ours) == (["322", "411"], ["35", "146"])
    times = rows_of("docs/benchmarks/training.md", "ddp")
    assert not any(title in row for row in times.values() for title in work)


def kernels_of(monkeypatch, flatten):
    """Return the last column of a table of kernels, and the sentence below, for flattens with these candidates."""
    cases = [
        {"name": name, "bytes": 1e6, "candidates": {
            by: {way: {"median": time} for way in ("graph", "eager")} for by, time in times.items()
        }}
        for name, times in (("copy 1024 MiB", {"copy": 1.0}), ("flatten m", flatten))
    ]  # fmt: skip
    record = {"command": "x", "date": "today", "versions": {"torch": "2"}, "cases": cases}
    monkeypatch.setattr(tables, "record_of", lambda name: record)
    lines = tables._kernels()
    shares = [line.split(" | ")[-1].rstrip(" |") for line in lines if line.startswith("| flatten")]
    return shares, lines[lines.index('<details markdown="1"><summary>How to repeat</summary>') - 2]


def test_flatten_is_compared_with_a_copy_of_its_buckets(monkeypatch):
    shares, text = kernels_of(monkeypatch, {"fastcoll": 4.0, "bucket copy": 2.0})
    assert (shares, text[:41]) == (["0.50", "1.00"], "The copy of flatten and unflatten is that")
    shares, text = kernels_of(monkeypatch, {"fastcoll": 4.0})
    assert (shares, text[-40:]) == (["0.25"], "1 GiB: this record has no copies of buckets."[-40:])
