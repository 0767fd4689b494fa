"""docs/performance.md: its tables are those of the records, and its pictures and records are there."""

import json
import re
from pathlib import Path

import pytest

from fastcoll.bench import page, pictures, plot

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"


def test_the_tables_are_those_of_the_records():
    assert page.main(["--check"]) == 0, "run python -m fastcoll.bench.page"


def test_a_changed_figure_is_found_and_put_right(tmp_path, capsys):
    text = PAGE.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| stock DDP |"))
    assert "| 4 S | 322 |" in row
    changed = tmp_path / "performance.md"
    changed.write_text(text.replace("| 4 S | 322 |", "| 3 S | 322 |"))
    assert page.main([str(changed), "--check"]) == 1
    assert "not those of the records" in capsys.readouterr().err
    assert page.main([str(changed)]) == 0
    assert changed.read_text() == text


def test_the_pictures_are_those_of_the_records():
    assert page.main(["--check", "--pictures"]) == 0, "run python -m fastcoll.bench.page --pictures"
    assert set(re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE.read_text())) == set(pictures.PICTURES)


def test_a_picture_of_another_record_is_found_and_drawn_anew(tmp_path, capsys):
    changed = tmp_path / "performance.md"
    changed.write_text(PAGE.read_text())
    for name in pictures.PICTURES:
        (tmp_path / name).write_bytes((PAGE.parent / name).read_bytes())
    record, draw = pictures.PICTURES["exactness.png"]
    draw({**record(), "elements": 1}, str(tmp_path / "exactness.png"))
    assert pictures.stale(tmp_path) == ["exactness.png"]
    assert page.main([str(changed), "--check", "--pictures"]) == 1
    assert "exactness.png in" in capsys.readouterr().err
    assert page.main([str(changed), "--pictures"]) == 0
    assert plot.drawn_from(tmp_path / "exactness.png") == plot.digest(record())


@pytest.mark.parametrize("name", ["traffic", "other"])
def test_a_page_without_its_tables_is_refused(name):
    with pytest.raises(ValueError, match="expected the tables"):
        page.rewritten(f"<!-- table {name} -->\n<!-- end -->\n")


def test_what_the_page_points_to_is_there():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert sum(link.endswith(".png") for link in links) >= 4
    for link in links:
        assert (PAGE.parent / link).is_file(), link


@pytest.mark.parametrize(
    "text", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda path: path.name
)
def test_links_lead_to_files(text):
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        if not link.startswith(("https://", "#")):
            assert (text.parent / link.partition("#")[0]).exists(), link


def test_records_of_exactness_and_parity_hold_what_the_page_says():
    cases = json.loads((ROOT / "bench/results/exactness_cpu.json").read_text())["cases"]
    assert [case["ranks"] for case in cases] == [2, 4, 8, 16, 32, 64]
    for case in cases:
        least = case["one rounding of the exact mean"]["relative"]
        assert case["float32, rounded once"]["relative"] <= least * (1 + 1e-6)
    assert cases[2]["fastcoll"]["relative"] <= least_of(cases[2]) * (1 + 1e-6)
    assert cases[2]["gloo"]["relative"] > 1.5 * least_of(cases[2])
    record = json.loads((ROOT / "bench/results/parity_cpu_2ranks.json").read_text())
    assert (record["steps"], record["world_size"], record["problems"]) == (300, 2, [])
    for case in record["tasks"].values():
        assert case["losses"]["float32"] == case["losses"]["gloo"]
        assert len(case["losses"]["gloo"]) == 300
        assert case["moved"] < case["noise"]


def least_of(case):
    return case["one rounding of the exact mean"]["relative"]
