"""The benchmark of the kernels, as far as no GPU is needed."""

import argparse
from unittest import mock

import pytest
import torch

from fastcoll._measure import summarise
from fastcoll.bench import engine, kernel_cases, kernels
from fastcoll.bench.gradients import gpt2_medium, resnet50
from fastcoll.bench.kernel_cases import Case
from fastcoll.bench.record import read_record
from fastcoll.kernels.peers import PeerFault


@pytest.mark.full
def test_every_candidate_does_the_same_work(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # kernels are interpreted here
    status = kernels.main(["--check"])
    assert (status, capsys.readouterr().out) == (0, "# wrong candidates: 0 OK\n")


@pytest.mark.parametrize("bench", [kernels, engine], ids=["kernels", "engine"])
def test_without_a_gpu_it_says_so(bench, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2
    assert capsys.readouterr().err.startswith(f"{bench.__name__}: torch finds no CUDA device")


def test_a_wrong_candidate_is_found(monkeypatch):
    monkeypatch.setattr(kernel_cases, "SCALE", 0.5)
    case = kernel_cases.flatten_case("m", [[(9,)]], torch.device("cpu"))
    monkeypatch.setattr(kernel_cases, "SCALE", 0.25)  # of the oracle, after the launch was prepared
    assert not case.verify("fastcoll")


@pytest.mark.parametrize(("shapes", "buckets"), [(resnet50(), 5), (gpt2_medium(), 37)])
def test_buckets_are_those_of_ddp(shapes, buckets):
    found = kernel_cases.bucketed(shapes)
    assert len(found) == buckets
    assert [shape for bucket in found for shape in bucket] == shapes[::-1]


def test_what_fails_is_recorded_and_the_rest_is_measured(monkeypatch, tmp_path):
    """Time on a device is short: one wrong result must not cost all others. Here a graph replays nothing."""
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
    makers = [lambda: copy, lambda: wrong, lambda: late, no_room, lambda: fine]
    monkeypatch.setattr(kernels, "_cases", lambda *_, **__: iter(makers))
    for name in ("Stream", "stream", "CUDAGraph", "graph", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr("triton.testing.do_bench", lambda work, **_: [0.007])
    host = summarise([2.5])
    monkeypatch.setattr(kernels, "time_on_host", lambda works, *_, **__: dict.fromkeys(works, host))
    options = argparse.Namespace(rounds=2, seconds=100.0, json=tmp_path / "record.jsonl")
    status, record = kernels._measure(options, [], cpu), read_record(options.json)
    assert (status, record["complete"]) == (1, True)
    assert record["cases"][0]["candidates"]["copy"]["graph"]["median"] == pytest.approx(7.0)
    assert record["host_microseconds"]["prepared launch of ring"] == 2.5
    assert [row["name"] for row in record["cases"]] == ["copy 0 MiB", "flatten fine"]
    assert list(record["failed"]) == ["flatten wrong", "flatten late", "case 3"]
    assert "wrong: ddp" in record["failed"]["flatten wrong"]
    assert "rank 1 is late" in record["failed"]["flatten late"]
    assert "no room for it" in record["failed"]["case 3"]
