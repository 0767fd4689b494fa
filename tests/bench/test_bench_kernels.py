"""The benchmark of the kernels, as far as no GPU is needed."""

import math

import pytest
import torch

from fastcoll.bench import kernel_cases, kernels
from fastcoll.bench.gradients import gpt2_medium, resnet50


def test_every_candidate_does_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted in this run, and the benchmark takes the GPU")
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
    case = kernel_cases.flatten_case("m", [[(9,)]], 1, torch.device("cpu"))
    monkeypatch.setattr(kernel_cases, "SCALE", 0.25)  # of the oracle, after the launch was prepared
    assert not case.verify["fastcoll"]()


@pytest.mark.parametrize(("shapes", "buckets"), [(resnet50(), 5), (gpt2_medium(), 37)])
def test_buckets_are_those_of_ddp(shapes: list[tuple[int, ...]], buckets: int) -> None:
    found = kernel_cases.bucketed(shapes)
    assert len(found) == buckets
    assert [shape for bucket in found for shape in bucket] == shapes[::-1]
    compute = torch._C._distributed_c10d._compute_bucket_assignment_by_size
    tensors = [torch.empty(shape, device="meta") for shape in reversed(shapes)]
    indices, _ = compute(tensors, [1 << 20, 25 << 20], [False] * len(tensors))
    assert sorted(map(len, indices)) == sorted(map(len, found))


def test_targets_are_read_off_the_rows() -> None:
    number = {"of_copy": 0.8, "times_fastcoll_eager": 4.0, "times_fastcoll_graph": 1.2}
    names = ("fastcoll", "ddp", "foreach", "cat", "stock")
    rows = {
        f"{kind} {what}": {"candidates": dict.fromkeys(names, number)}
        for kind, what in [
            *(
                (way, model)
                for way in ("flatten", "unflatten")
                for model in ("resnet50", "gpt2-medium")
            ),
            *(("bf16 hook", model) for model in ("resnet50", "gpt2-medium")),
            *(("reduce 8 x", dtype) for dtype in ("float32", "bfloat16")),
        ]
    }
    found = {row["name"]: row["met"] for row in kernels.targets(rows, {"prepared launch": math.pi})}
    assert found["flatten resnet50: share of copy bandwidth"]
    assert not found["flatten gpt2-medium: share of copy bandwidth"]
    assert found["flatten resnet50: times faster than DDP"]
    assert not found["flatten resnet50: times faster than cat"]
    assert not found["host microseconds a launch"]
