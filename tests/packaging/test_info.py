"""`fastcoll info` and what it is made of."""

import json
import os
import sys

import pytest

from fastcoll import _checks, info


@pytest.fixture(scope="module")
def report(launcher, tmp_path_factory):
    text = "import sys; from fastcoll import info; sys.exit(info.main(['--json']))"
    folder = tmp_path_factory.mktemp("info")
    process = launcher.program(text, folder, FASTCOLL_SPIN_US="never", FASTCOLL_DEBG="1")
    assert process.status in (0, 1), process.stderr
    return json.loads(process.stdout)


def test_versions_and_library_paths(report):
    import torch

    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["fastcoll"]
    (path,) = report["libraries"]["libtorch_cpu"]
    assert os.path.exists(path)


def test_what_is_not_available_comes_with_reason_and_remedy(report):
    parts = {answer["part"]: answer for answer in report["available"]}
    assert len(parts) == len(_checks.CHECKS)
    assert parts["CPU, shared memory"]["available"]
    for answer in parts.values():
        assert answer["detail"]
        assert bool(answer["remedy"]) != answer["available"]


def test_bad_and_misspelt_variables_are_named(report):
    problems = {row["name"]: row["problem"] for row in report["environment"] if row["problem"]}
    assert set(problems) == {"FASTCOLL_SPIN_US", "FASTCOLL_DEBG"}
    assert "expected an integer" in problems["FASTCOLL_SPIN_US"]


def printed(report: dict, everything: bool, capsys: pytest.CaptureFixture[str]) -> str:
    info._print(report, everything, sys.stdout)
    return capsys.readouterr().out


def test_the_verdict_comes_first_and_defaults_are_left_out(report, capsys):
    text = printed(report, False, capsys)
    cpu, cuda, *_ = text.splitlines()
    assert cpu.startswith("CPU tensors: ready, through shared memory; ")
    assert cuda.startswith("CUDA tensors: ")
    assert "FASTCOLL_DEBG" in text and "(default)" not in text
    assert report["versions"]["torch"] in text
    whole = printed(report, True, capsys)
    assert "FASTCOLL_TIMEOUT" in whole or "(default)" in whole
    assert report["libraries"]["libtorch_cpu"][0] in whole


def answers(**missing: str) -> list[dict]:
    """The answers of all checks, of which these parts are missing for a reason."""
    words = {"name": 'init_process_group("fastcoll")', "module": "fastcoll._C"}
    words |= {"shared": "CPU, shared memory", "gloo": "CPU, between hosts (Gloo)", "cuda": "CUDA"}
    words |= {"nccl": "NCCL, through CuPy", "triton": "Triton"}
    return [
        {"part": part, "available": word not in missing, "detail": missing.get(word, "it is here"),
         "remedy": f"install {word}" if word in missing else ""}
        for word, part in words.items()
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ({}, ["CPU tensors: ready, through shared memory; it is here.", "CUDA tensors: ready; it is here."]),
        ({"shared": "no room"}, ["CPU tensors: ready, through Gloo, because memory cannot be shared."]),
        ({"shared": "no room", "gloo": "none"}, ["CPU tensors: not ready: neither memory nor Gloo connects ranks."]),
        ({"module": "of another torch"}, ["CPU tensors: not ready. fastcoll._C: of another torch."]),
        ({"cuda": "no CUDA in torch", "nccl": "none"}, ["CUDA tensors: not served: no CUDA in torch."]),
        ({"triton": "none"}, ["CUDA tensors: ready; it is here; by NCCL alone, without kernels of Triton."]),
    ],
)  # fmt: skip
def test_the_verdict_says_what_serves_and_what_is_in_the_way(missing, expected):
    found = info._verdict({"available": answers(**missing)})
    assert set(expected) <= set(found)
    assert len(found) == (1 if "module" in missing else 2)


def test_no_remedy_is_offered_that_cannot_help(report, capsys):
    """Without CUDA in torch, CuPy and Triton are of no use."""
    changed = {**report, "available": answers(cuda="no CUDA in torch", nccl="none", gloo="none")}
    text = printed(changed, False, capsys)
    assert "install gloo" in text
    assert "install nccl" not in text and "install cuda" not in text
    assert "-: none" in printed(changed, True, capsys)


def test_a_check_that_fails_is_an_answer(monkeypatch):
    def check_weather() -> str:
        raise OSError("rain")

    monkeypatch.setattr(_checks, "CHECKS", {"weather": check_weather})
    (answer,) = _checks.run_checks()
    assert answer.pop("remedy")
    assert answer == {"part": "weather", "available": False, "detail": "OSError: rain"}


@pytest.mark.parametrize(
    ("communicators", "kin", "text"),
    [
        ([512, 100], [], ", NCCL 512 MiB, 100 MiB"),
        ([515], ["1", "2"], ", NCCL 515 MiB with '1', '2'"),
        ([None], ["1"], ""),  # an NCCL that does not count
        ([], [], ""),
    ],
)
def test_a_group_is_printed_with_the_memory_of_its_communicators(communicators, kin, text):
    bytes_of = [None if size is None else size << 20 for size in communicators]
    group = {"communicators": [{"name": "", "bytes": count} for count in bytes_of]}
    assert info._memory({**group, "shares_with": kin}) == text
