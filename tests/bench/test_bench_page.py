"""Pages with tables of records: the tables are the records', and pictures and records are there."""

import json
import re
import shutil
from pathlib import Path

import pytest

from fastcoll.bench import page, pictures, plot

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"


def test_the_tables_are_those_of_the_records():
    assert page.main(["--check"]) == 0, "run python -m fastcoll.bench.page"


@pytest.fixture
def pages(tmp_path):
    for name in page.TABLES:
        shutil.copy(PAGE.parent / name, tmp_path)
    return tmp_path


def test_a_changed_figure_is_found_and_put_right(pages, capsys):
    for name, start in [("performance.md", "| stock DDP |"), ("hosts.md", "| barrier |")]:
        text = (pages / name).read_text()
        row = next(line for line in text.splitlines() if line.startswith(start))
        figure = re.search(r"\d", row[len(start) :])
        changed = row[: len(start)] + row[len(start) :].replace(
            figure[0], str(9 - int(figure[0])), 1
        )
        (pages / name).write_text(text.replace(row, changed))
        assert page.main([str(pages), "--check"]) == 1
        assert f"{name} are not those of the records" in capsys.readouterr().err
        assert page.main([str(pages)]) == 0
        assert (pages / name).read_text() == text


def test_the_pictures_are_those_of_the_records():
    assert page.main(["--check", "--pictures"]) == 0, "run python -m fastcoll.bench.page --pictures"
    assert set(re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE.read_text())) == set(pictures.PICTURES)


def test_a_picture_of_another_record_is_found_and_drawn_anew(pages, capsys):
    for name in pictures.PICTURES:
        shutil.copy(PAGE.parent / name, pages)
    record, draw = pictures.PICTURES["exactness.png"]
    draw({**record(), "elements": 1}, str(pages / "exactness.png"))
    assert pictures.stale(pages) == ["exactness.png"]
    assert page.main([str(pages), "--check", "--pictures"]) == 1
    assert "exactness.png in" in capsys.readouterr().err
    assert page.main([str(pages), "--pictures"]) == 0
    assert plot.drawn_from(pages / "exactness.png") == plot.digest(record())


@pytest.mark.parametrize("name", ["traffic", "other"])
def test_a_page_without_its_tables_is_refused(name):
    with pytest.raises(ValueError, match="expected the tables"):
        page.rewritten(f"<!-- table {name} -->\n<!-- end -->\n", "performance.md")


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
