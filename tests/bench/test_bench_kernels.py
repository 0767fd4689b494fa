"""The benchmark of the kernels, as far as no GPU is needed."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fastcoll._measure import summarise
from fastcoll.bench import kernel_cases, kernels, peer_cases
from fastcoll.bench.gradients import gpt2_medium, resnet50
from fastcoll.bench.kernel_cases import Case
from fastcoll.bench.record import read_record
from fastcoll.kernels.peers import PeerFault


@pytest.mark.full
def test_every_candidate_does_the_same_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # kernels are interpreted here
    status = kernels.main(["--check"])
    assert (status, capsys.readouterr().out) == (0, "# wrong candidates: 0 OK\n")


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main([]) == 2
    assert capsys.readouterr().err == "fastcoll.bench.kernels: torch finds no CUDA device\n"


def test_a_wrong_candidate_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "SCALE", 0.5)
    case = kernel_cases.flatten_case("m", [[(9,)]], torch.device("cpu"))
    monkeypatch.setattr(kernel_cases, "SCALE", 0.25)  # of the oracle, after the launch was prepared
    assert not case.verify("fastcoll")


@pytest.mark.parametrize(("shapes", "buckets"), [(resnet50(), 5), (gpt2_medium(), 37)])
def test_buckets_are_those_of_ddp(shapes: list[tuple[int, ...]], buckets: int) -> None:
    found = kernel_cases.bucketed(shapes)
    assert len(found) == buckets
    assert [shape for bucket in found for shape in bucket] == shapes[::-1]


@pytest.fixture
def measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[list[Callable[[], Case]]], tuple[int, dict[str, Any]]]:
    """Measures cases on the CPU, where a graph replays nothing: exit status and record."""

    def bench(work: Callable[[], object], **_: object) -> list[float]:
        work()
        return [0.007]

    def measure(makers: list[Callable[[], Case]]) -> tuple[int, dict[str, Any]]:
        for name in ("Stream", "stream", "CUDAGraph", "graph", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
        monkeypatch.setattr("triton.testing.do_bench", bench)
        monkeypatch.setattr(kernels, "_cases", lambda *_, **__: iter(makers))
        monkeypatch.setattr(
            kernels, "time_on_host", lambda works, *_, **__: dict.fromkeys(works, summarise([2.5]))
        )
        path = tmp_path / "out" / "record.jsonl"
        options = argparse.Namespace(rounds=2, seconds=100.0, json=path)
        status = kernels._measure(options, [], torch.device("cpu"))
        return status, read_record(path)

    return measure


@pytest.mark.full
def test_a_measurement_is_recorded(measured: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cpu = torch.device("cpu")
    cases = [
        kernel_cases.copy_case(7000, cpu),
        kernel_cases.flatten_case("m", [[(9,)]], cpu),
        peer_cases.all_reduce_case("ring", 1, 3008, torch.float32, cpu),
    ]
    status, record = measured([lambda case=case: case for case in cases])
    assert (status, record["failed"], record["complete"]) == (0, {}, True)
    assert [row["name"] for row in record["cases"]] == [case.name for case in cases]
    copy = record["cases"][0]["candidates"]["copy"]
    assert copy["graph"]["median"] == pytest.approx(7.0)
    prepared = [
        f"prepared launch of {name}" for name in ("flatten", "one_shot", "two_shot", "ring")
    ]
    assert list(record["host_microseconds"])[:4] == prepared
    assert "host: prepared launch of ring: 2.50 us" in capsys.readouterr().out


def test_what_fails_is_recorded_and_the_rest_is_measured(measured: Any) -> None:
    """Time on a device is short: one wrong result must not cost all others."""
    cpu = torch.device("cpu")
    wrong = kernel_cases.flatten_case("wrong", [[(9,)]], cpu)
    wrong.verify = lambda candidate: candidate != "ddp"
    late = kernel_cases.flatten_case("late", [[(9,)]], cpu)

    def give_up() -> None:
        raise PeerFault("rank 1 is late", 0, 1, 1, [])

    late.check = give_up
    fine = kernel_cases.flatten_case("fine", [[(9,)]], cpu)

    def no_room() -> Case:
        raise MemoryError("no room for it")

    copy = kernel_cases.copy_case(7000, cpu)
    status, record = measured([lambda: copy, lambda: wrong, lambda: late, no_room, lambda: fine])
    assert (status, record["complete"]) == (1, True)
    assert [row["name"] for row in record["cases"]] == ["copy 0 MiB", "flatten fine"]
    assert list(record["failed"]) == ["flatten wrong", "flatten late", "case 3"]
    assert "wrong: ddp" in record["failed"]["flatten wrong"]
    assert "rank 1 is late" in record["failed"]["flatten late"]
    assert "no room for it" in record["failed"]["case 3"]


@pytest.mark.full
def test_without_the_bandwidth_of_a_copy_there_is_no_share_of_it(measured: Any) -> None:
    cpu = torch.device("cpu")
    copy = kernel_cases.copy_case(7000, cpu)
    copy.verify = lambda _: False
    flatten = kernel_cases.flatten_case("m", [[(9,)]], cpu)
    status, record = measured([lambda: copy, lambda: flatten])
    assert (status, record["cases"]) == (1, [])
    assert "expected the copy to be measured first" in record["failed"]["flatten m"]


@pytest.mark.parametrize(
    ("algorithm", "total"),
    [  # read and written by each of 4 ranks, in units of a quarter of the message
        ("one_shot", 4 * (1 + 1 + 4 + 1)),
        ("two_shot", 4 * (1 + 1) + 4 + 1 + 1 + 3 + 3),
        ("ring", 4 * (1 + 1) + 2 * (2 * 3 + 3)),  # partial sums in float32
        ("bucket", 4 + 1 + 1 + 3 + 3),
    ],
)
def test_traffic_is_that_of_the_formulas(algorithm: str, total: int) -> None:
    assert peer_cases.traffic(algorithm, 4, 4 * 1024, 2) == 4 * total * 1024
