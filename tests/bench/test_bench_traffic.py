"""The traffic around a step's collectives, counted: what stock DDP reads and writes, and what fastcoll does."""

import json

import pytest
import torch
import torch.distributed as dist
from backend import TORCH

from fastcoll.bench import traffic
from fastcoll.bench.attachments import STOCK_WAYS
from fastcoll.bench.immediate_group import immediate_group
from fastcoll.bench.step_paths import Groups, StepPath, step_paths
from fastcoll.bench.traffic import Traffic, count
from fastcoll.bench.traffic_paths import GRADIENT_PATHS, GradientPath

pytestmark = pytest.mark.full  # a study


# Two megabytes, so that there are two buckets: DDP's first one is of 1 MiB.
SHAPES = [(400, 500), (500,), (600, 400), (100,), (300, 200)]
P, B, RANKS = len(SHAPES), 2, 4

# Passes over all gradients, and launches.
EXPECTED = {
    "stock DDP": (4, 2 * P),
    "stock DDP, bucket views": (2, P),
    "stock DDP, batched_grad_copy": (6, (B if TORCH >= (2, 15) else P) + 2 * B),
    "stock DDP, batched_grad_copy, bucket views": (4, 2 * B),
    "bf16_compress_hook": (8, 2 * P + 3 * B),
    "bf16_compress_hook, bucket views": (6, P + 3 * B),
    "fused hook": (4, 2 * P),
    "fused hook, bucket views": (2, P),
    "fused hook, bucket views, gradients kept": (0, 0),
    "fused hook, bf16 wire, bucket views; CPU": (2, P),
    "fused hook, bf16 wire, bucket views; device": (5, P + 2 * B),
    "GradientSynchronizer; CPU": (0, 0),
    "GradientSynchronizer, bf16 wire; CPU": (0, 0),
    "GradientSynchronizer; device": (4, 2 * B),
    "GradientSynchronizer, bf16 wire; device": (7, 4 * B),
    "stock DDP, bucket views; clip_grad_norm_": (5, None),
    "stock DDP, bucket views; AMP's unscale_ and clip_grad_norm_": (7, None),
    "GradientSynchronizer, clip_in_step; CPU": (0, None),
    "GradientSynchronizer, clip_in_step; device": (4 + 1 / RANKS, None),
}


@pytest.mark.parametrize("path", GRADIENT_PATHS, ids=lambda path: path.name)
def test_passes_over_the_gradients(path: GradientPath) -> None:
    counted = count(path, SHAPES, RANKS)
    passes, launches = EXPECTED[path.name]
    # Norms and flags are a few bytes; shares are rounded up.
    assert counted.passes == pytest.approx(passes, abs=1e-3)
    if launches is not None:
        assert counted.launches == launches
    assert not dist.is_initialized()


def stepped():
    """What surroundings times by operators that this mode sees: all but fastcoll's kernels on lists."""
    paths = step_paths(Groups(None, None, None), torch.device("cpu"), SHAPES, [SHAPES])
    return [path for path in paths if path.name in STOCK_WAYS or path.name.startswith("fused hook")]


@pytest.mark.parametrize("path", stepped(), ids=lambda path: path.name)
def test_passes_by_design_are_those_that_are_counted(path: StepPath) -> None:
    """The groups are the default one, which reduces nothing."""
    counted = count(GradientPath(path.name, "", path.attach, path.kept), SHAPES, RANKS)
    assert counted.passes == pytest.approx(path.passes, abs=1e-3)


@pytest.mark.parametrize(
    ("operation", "floats"),
    [
        (lambda a, b: a + b, 300),
        (lambda a, b: a.add_(b), 300),
        (lambda a, b: a.mul_(2.0), 200),
        (lambda a, b: a.copy_(b), 200),
        (lambda a, b: torch.mul(a, 2.0, out=b), 200),
        (lambda a, b: a.zero_(), 100),
        (lambda a, b: torch.full_like(a, 1.0), 100),
        (lambda a, b: torch.empty_like(a), 0),
        (lambda a, b: a.view(10, 10)[2:4].t(), 0),
        (lambda a, b: torch._foreach_copy_([a, b], [b, a]), 400),
        (lambda a, b: torch.cat([a, b]), 400),
        (lambda a, b: a.to(torch.bfloat16), 150),
        (lambda a, b: torch.linalg.vector_norm(a), 100),
        (lambda a, b: a[:1].expand(100) + b, 201),
    ],
)
def test_what_an_operator_reads_and_writes(operation, floats):
    a, b = torch.ones(100), torch.ones(100)
    with Traffic() as traffic:
        operation(a, b)
    assert traffic.bytes == 4 * floats
    assert traffic.launches == (1 if floats else 0)


def test_a_group_in_a_group_is_refused():
    with (
        immediate_group(2),
        pytest.raises(ValueError, match="expected no default group"),
        immediate_group(2),
    ):
        pass
    assert not dist.is_initialized()


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(traffic.MODELS, "mlp", lambda: SHAPES)
    monkeypatch.setattr(traffic, "GRADIENT_PATHS", GRADIENT_PATHS[:2])
    path = tmp_path / "traffic.json"
    assert traffic.main(["--model", "mlp", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    elements = sum(torch.empty(shape).numel() for shape in SHAPES)
    assert (record["tensors"], record["size"]) == (P, 4 * elements)
    assert [row["name"] for row in record["paths"]] == [path.name for path in GRADIENT_PATHS[:2]]
    printed = capsys.readouterr().out
    for row in record["paths"]:
        assert f"{row['passes']:.3f}" in printed and row["why"]
