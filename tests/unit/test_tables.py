"""The tables of the pages, as their records have them."""

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
    times = rows_of("docs/benchmarks/training.md", "ddp_stock")
    assert not any(title in row for row in times.values() for title in work)
