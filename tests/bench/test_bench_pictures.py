"""The pictures of the pages: drawn from their records, as text and short paths, and known to be out of date."""

import re

import pytest
from suite_rules import full

pytest.importorskip("matplotlib")

import drawings
import pictures
from svg import carried_digest, digest


@pytest.mark.parametrize("theme", ["light", full("dark")])
@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_carries_the_digest_of_its_records(tmp_path, name, theme):
    path = tmp_path / f"{name}_{theme}.svg"
    pictures.redraw(path)
    svg = path.read_text()
    assert carried_digest(path) == digest(pictures.PICTURES[name].read())
    assert "fastcoll" in "".join(re.findall(r"<text[^>]*>([^<]*)", svg))
    assert "matplotlib.org" not in svg and len(svg.splitlines()) < 500
    pictures.redraw(path)
    assert path.read_text() == svg


def test_a_picture_that_is_missing_or_of_another_record_is_stale(tmp_path):
    files = [f"{name}_{theme}.svg" for name in pictures.PICTURES for theme in drawings.THEMES]
    assert pictures.stale(tmp_path) == files
    pictures.redraw(tmp_path / files[0])
    assert pictures.stale(tmp_path) == files[1:]
    text = (tmp_path / files[0]).read_text()
    (tmp_path / files[0]).write_text(re.sub(r"(records: )\w", r"\1x", text))
    assert pictures.stale(tmp_path) == files


def test_faults_are_those_of_both_backends_in_the_order_of_gloo():
    verdicts = [
        ("hang", "as wanted"),
        ("not played", "as wanted"),
        ("as wanted", "too slow"),
        ("not as wanted", "crash"),
    ]
    cases = [
        {"backends": {"gloo": {"verdict": gloo}, "fastcoll": {"verdict": ours}}}
        for gloo, ours in verdicts
    ]
    assert drawings.faults_of_both({"cases": [*cases, {"backends": {}}]}) == [
        (0, 1),
        (1, 4),
        (3, 0),
    ]


def case_of(size: int, collective: str = "all_reduce", **times: float) -> dict[str, object]:
    backends = {name.replace("_", "-"): {"time": {"median": time}} for name, time in times.items()}
    return {"collective": collective, "size": size, "backends": backends}


def test_the_caption_of_all_reduce_is_about_its_cases_only():
    cases = [
        case_of(4, gloo=100.0, mpi=1.0, fastcoll=4.0, fastcoll_plan=0.5),
        case_of(1024, gloo=90.0, mpi=3.0, fastcoll=4.0, fastcoll_plan=5.0),
        case_of(4096, gloo=31.0, mpi=9.0, fastcoll=4.0, fastcoll_plan=4.0),
        case_of(9999, "broadcast", gloo=1.0, mpi=1.0, fastcoll=4.0, fastcoll_plan=4.0),
    ]
    assert pictures.PICTURES["all_reduce"].caption([{"cases": cases}]) == (
        "fastcoll is at least 7.7x faster than Gloo at each size. Intel MPI is faster up to 1 KiB. A plan is faster "
        "than Intel MPI at 2 of 3 sizes. float32, 2 ranks, medians."
    )


def test_the_floor_is_drawn_from_64_kib():
    (record,) = pictures.PICTURES["all_reduce"].read()
    floor, *_ = drawings.draw_all_reduce([record], drawings.THEMES["light"]).axes[0].lines[::-1]
    drawn = [size for size, time in zip(*floor.get_data(), strict=True) if time == time]
    assert min(drawn) == 64 << 10
