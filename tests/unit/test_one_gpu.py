"""The table of kernels, as its record has it."""

import one_gpu


def kernels_of(monkeypatch, flatten):
    """Return the last column of a table of kernels, and the sentence below, for flattens with these candidates."""
    cases = [
        {"name": name, "bytes": 1e6, "candidates": {
            by: {way: {"median": time} for way in ("graph", "eager")} for by, time in times.items()
        }}
        for name, times in (("copy 1024 MiB", {"copy": 1.0}), ("flatten m", flatten))
    ]  # fmt: skip
    record = {"command": "x", "date": "today", "versions": {"torch": "2"}, "cases": cases}
    monkeypatch.setattr(one_gpu, "record_of", lambda name: record)
    lines = one_gpu.kernels()
    shares = [line.split(" | ")[-1].rstrip(" |") for line in lines if line.startswith("| flatten")]
    return shares, lines[lines.index('<details markdown="1"><summary>How to repeat</summary>') - 2]


def test_flatten_is_compared_with_a_copy_of_its_buckets(monkeypatch):
    shares, text = kernels_of(monkeypatch, {"fastcoll": 4.0, "bucket copy": 2.0})
    assert (shares, text[:41]) == (["0.50", "1.00"], "The copy of flatten and unflatten is that")
    shares, text = kernels_of(monkeypatch, {"fastcoll": 4.0})
    assert (shares, text[-40:]) == (["0.25"], "1 GiB: this record has no copies of buckets."[-40:])
