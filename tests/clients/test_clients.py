"""What a training prints is read right, and compared with gloo's."""

import json
from pathlib import Path

import pytest
import torch
from client_record import bound, compared, parsed
from clients import CLIENTS, ENVIRONMENTS, Client
from torch import nn
from trainings.measured import build_mlp, digits

RESULT = {
    "losses": ["0x1.0p+1", "0x1.0p+0"],
    "step_seconds": 0.25,
    "steps": 2,
    "ranks": 2,
    "served_by": ["fastcoll"],
    "ended": "well",
    "versions": {"torch": "2.13.0"},
}


def printed(**changed):
    return f"a warning\nCLIENT {json.dumps({**RESULT, **changed})}\nanother\n"


def runs(ours, theirs, ranks=2):
    of = {"fastcoll": (ours, 0.25), "gloo": (theirs, 0.5)}
    some = {
        name: [{**RESULT, "losses": losses, "step_seconds": seconds}] * 3
        for name, (losses, seconds) in of.items()
    }
    return compared(some, ranks)


def test_each_client_has_its_script_and_its_environment():
    scripts = {path.name for path in Path(__file__).with_name("trainings").iterdir()}
    for client in CLIENTS.values():
        assert client.script in scripts
        assert client.environment in ENVIRONMENTS


@pytest.mark.parametrize("packages", ENVIRONMENTS.values())
def test_packages_are_pinned(packages):
    assert all("==" in package for package in packages)


def test_a_setting_is_for_fastcoll_only():
    variable = Client("", "", "", "FASTCOLL_REPLACE=gloo")
    assert variable.variables("fastcoll") == {"FASTCOLL_REPLACE": "gloo"}
    assert variable.variables("gloo") == {}
    assert Client("", "", "", 'backend="fastcoll"').variables("gloo") == {"BACKEND": "gloo"}


def test_a_result_is_read_between_other_lines():
    assert parsed(printed(), "fastcoll", 2) == RESULT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "expected one line"),
        (printed() + printed(), "got 2"),
        (printed(served_by=["gloo"]), "expected groups served by fastcoll, got .'gloo'"),
        (printed(served_by=["fastcoll", "gloo"]), "expected groups served by fastcoll"),
        (printed(ranks=1), "expected 2 ranks, got 1"),
        ('CLIENT {"losses": []}', "got none of step_seconds"),
    ],
)
def test_what_is_no_result_is_an_error(text, message):
    with pytest.raises(RuntimeError, match=message):
        parsed(text, "fastcoll", 2)


def test_medians_ratio_and_equal_bits():
    case = runs(RESULT["losses"], RESULT["losses"])
    assert case["ratio"] == 2.0
    assert (case["same_bits"], case["difference"], case["agrees"]) == (True, 0.0, True)


def test_a_last_bit_is_a_difference_with_two_ranks_and_within_the_bound_with_four():
    last = [RESULT["losses"][0], "0x1.000002p+0"]
    assert not runs(last, RESULT["losses"])["agrees"]
    case = runs(last, RESULT["losses"], ranks=4)
    assert case["agrees"] and not case["same_bits"]
    assert case["difference"] == 2.0**-23 <= bound(4)
    assert not runs(["0x1.0p+1", "0x1.01p+0"], RESULT["losses"], ranks=4)["agrees"]


def test_a_nan_is_no_agreement():
    assert not runs(["0x1.0p+1", "nan"], RESULT["losses"], ranks=4)["agrees"]


def trained(order: list[int], ranks: int = 4, steps: int = 10) -> list[str]:
    """The losses of rank 0 in train_ddp.py, the gradients of these ranks summed in this order."""
    batch = 64
    inputs, labels = digits(steps * batch * ranks).tensors
    model = build_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        gradients = []
        for rank in range(ranks):
            mine = slice(step * batch * ranks + rank, (step + 1) * batch * ranks, ranks)
            loss = nn.functional.cross_entropy(model(inputs[mine]), labels[mine])
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
            if rank == 0:
                losses.append(loss.item().hex())
        for parameter, *each in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = sum(each[rank] for rank in order) / ranks
        optimizer.step()
    return losses


@pytest.mark.full
def test_the_bound_for_four_ranks_lets_orders_pass_and_no_lacking_rank():
    gloos = trained([3, 1, 0, 2])
    ours = runs(trained([0, 1, 2, 3]), gloos, ranks=4)
    assert ours["agrees"] and not ours["same_bits"]
    for lacking in (0, 3):
        others = [rank for rank in range(4) if rank != lacking]
        case = runs(trained(others), gloos, ranks=4)
        assert not case["agrees"] and case["difference"] > 3 * bound(4), lacking
