"""Small models trained with fastcoll's hook and on gloo: the same bits in float32, within noise with bfloat16."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo

from fastcoll.bench import parity, parity_plot
from fastcoll.bench.parity import compare, judge, train
from fastcoll.bench.parity_models import TASKS

STEPS = 30
ORDERS = 3


def compared(name):
    gloo = dist.new_group(backend="gloo")
    case = compare(TASKS[name], STEPS, ORDERS, gloo, None)
    dist.destroy_process_group(gloo)
    assert judge(name, case) == []
    return case


@beyond_gloo("the hook's average in the all-reduce")
@pytest.mark.full
@pytest.mark.parametrize("name", list(TASKS))
def test_training_is_gloos(world, name, tmp_path):
    cases = world(2).run(compared, name)
    # The ranks have data of their own, and one model.
    assert cases[0]["losses"]["gloo"] != cases[1]["losses"]["gloo"]
    for case in cases:
        assert len(case["losses"]["float32"]) == STEPS
        assert len(case["held_out"]["float32"]) == 15
    picture = tmp_path / "parity.png"
    record = {"steps": STEPS, "world_size": 2, "date": "2000-01-01", "tasks": {name: cases[0]}}
    parity_plot.draw(record, str(picture))
    assert picture.read_bytes()[1:4] == b"PNG"


def alone(name):
    """One rank: nothing is summed, and the average of one is itself."""
    gloo = dist.new_group(backend="gloo")
    first = train(TASKS[name], 15, parity.stock(gloo))
    dist.destroy_process_group(gloo)
    for wrap in (parity.hooked(None), parity.synchronized(None)):
        other = train(TASKS[name], 15, wrap)
        assert other.losses == first.losses and torch.equal(other.weights, first.weights)


@pytest.mark.full
@beyond_gloo("the hook's average in the all-reduce")
def test_one_rank(world):
    world(1).run(alone, "resnet-like")


def good():
    return {
        "losses": {"gloo": [3.0] * 10 + [1.0] * 10},
        "same": {"fused hook": True, "GradientSynchronizer": True},
        "other_weights": True,
        "noise": 0.1,
        "moved": 0.01,
    }


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"same": {"fused hook": False, "GradientSynchronizer": True}},
            "with the fused hook is not",
        ),
        ({"same": {"fused hook": True, "GradientSynchronizer": False}}, "with the GradientSyn"),
        ({"other_weights": False}, "was not used"),
        ({"moved": 0.2}, "moves the held-out loss"),
        ({"moved": math.nan}, "moves the held-out loss"),
        ({"losses": {"gloo": [1.0] * 20}}, "nothing was learnt"),
        ({"losses": {"gloo": [1.0] * 19 + [math.nan]}}, "nothing was learnt"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(change, match):
    assert judge("task", good()) == []
    (problem,) = judge("task", good() | change)
    assert match in problem


@pytest.mark.parametrize("flags", ["--steps 3", "--orders 2", "--nproc 4", "--tasks vgg"])
def test_wrong_flags(flags):
    with pytest.raises(SystemExit) as end:
        parity.main(flags.split())
    assert end.value.code == 2


@pytest.mark.full
def test_command(tmp_path, capfd):
    path = tmp_path / "parity.json"
    flags = f"--nproc 1 --steps 15 --orders 3 --tasks transformer --json {path}"
    assert parity.main(flags.split()) == 0, capfd.readouterr()
    record = json.loads(path.read_text())
    assert (record["steps"], record["world_size"], record["problems"]) == (15, 1, [])
    assert set(record["tasks"]["transformer"]["same"].values()) == {True}
    assert "the same bit for bit" in capfd.readouterr().out
