"""`fastcoll info` and what it is made of."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
from launcher import Launcher

from fastcoll import _checks, info


@pytest.fixture(scope="module")
def report(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict:
    text = "import sys; from fastcoll import info; sys.exit(info.main(['--json']))"
    folder = tmp_path_factory.mktemp("info")
    process = launcher.program(text, folder, FASTCOLL_SPIN_US="never", FASTCOLL_DEBG="1")
    assert process.status in (0, 1), process.stderr
    return json.loads(process.stdout)


def test_versions_and_library_paths(report: dict) -> None:
    import torch

    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["fastcoll"]
    (path,) = report["libraries"]["libtorch_cpu"]
    assert os.path.exists(path)


def test_what_is_not_available_comes_with_reason_and_remedy(report: dict) -> None:
    parts = {answer["part"]: answer for answer in report["available"]}
    assert len(parts) == len(_checks.CHECKS)
    assert parts["CPU, shared memory"]["available"]
    for answer in parts.values():
        assert answer["detail"]
        assert bool(answer["remedy"]) != answer["available"]


def test_bad_and_misspelt_variables_are_named(report: dict) -> None:
    problems = {row["name"]: row["problem"] for row in report["environment"] if row["problem"]}
    assert set(problems) == {"FASTCOLL_SPIN_US", "FASTCOLL_DEBG"}
    assert "expected an integer" in problems["FASTCOLL_SPIN_US"]


def test_text_says_the_same(report: dict, capsys: pytest.CaptureFixture[str]) -> None:
    info._print(report, sys.stdout)
    text = capsys.readouterr().out
    assert "FASTCOLL_DEBG" in text
    assert report["versions"]["torch"] in text
    assert "yes: " in text


def test_groups_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fastcoll._C", raising=False)
    assert info.groups() == []
    group = {"name": "g", "rank": 0, "size": 2, "transport": "shm", "reason": "same host"}
    monkeypatch.setitem(sys.modules, "fastcoll._C", SimpleNamespace(groups=lambda: [group]))
    assert info.groups() == [{**group, "backends": {"cpu": "fastcoll"}}]


def test_a_check_that_fails_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_weather() -> str:
        raise OSError("rain")

    monkeypatch.setattr(_checks, "CHECKS", {"weather": check_weather})
    (answer,) = _checks.run_checks()
    assert answer.pop("remedy")
    assert answer == {"part": "weather", "available": False, "detail": "OSError: rain"}
