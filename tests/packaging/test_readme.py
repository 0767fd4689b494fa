"""The code and commands of README.md and docs/guides/gradients.md run, and print what the page has."""

import re
from pathlib import Path

import pytest
import torch
from launcher import Launcher
from torch import nn
from torchrun import torchrun
from world import Worlds

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(page: str, kind: str = "") -> list[str]:
    """The fenced blocks of a page that have this word behind the fence."""
    return [
        text
        for word, text in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)
        if word == kind
    ]


def hello(sign: str) -> str:
    """hello.py with the lines of the diff that begin with this sign."""
    (diff,) = blocks(README, "diff")
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] in (" ", sign))


def shown(command: str) -> str:
    """What the page has below a command, up to the next one."""
    (text,) = (
        text for block in blocks(README) for text in block.split("$ ") if text.startswith(command)
    )
    return text.partition("\n")[2]


def test_hello(launcher: Launcher, tmp_path: Path) -> None:
    expected = shown(".venv/bin/torchrun").splitlines(keepends=True)
    for rank, line in zip(launcher.ranks(hello("+"), 2, tmp_path), expected, strict=True):
        assert (rank.status, rank.stdout) == (0, line), rank.stderr


@pytest.mark.full
def test_the_script_for_gloo_under_torchrun(tmp_path: Path) -> None:
    served = (
        "import fastcoll\n"
        "backend = fastcoll.info.groups()[0]['backends']['cpu']\n"
        "print(f'served by {backend}\\n', end='')\n"
        "dist.destroy"
    )
    (tmp_path / "hello.py").write_text(hello("-").replace("dist.destroy", served))
    replaced = {"FASTCOLL_REPLACE": "gloo"}
    printed = torchrun(str(tmp_path / "hello.py"), environment=replaced)
    lines = re.findall("^rank .*\n", printed, re.MULTILINE)
    assert sorted(lines) == shown(".venv/bin/torchrun").splitlines(keepends=True)
    assert printed.count("served by fastcoll") == 2
    assert "[fastcoll] serves the groups that name gloo (FASTCOLL_REPLACE)" in printed


# Ranks are forked, so none of them loads torch anew.
DEMO = """
import sys
from functools import partial
from torch.multiprocessing.spawn import start_processes
from fastcoll import command
from fastcoll.examples import ddp_train

ddp_train.spawn = partial(start_processes, start_method="fork")
sys.exit(command.main(["demo", "--epochs", "6"]))
"""


@pytest.mark.full
@pytest.mark.timeout(600)  # two trainings of two ranks
def test_the_demo_prints_a_table_like_that_of_the_page(launcher: Launcher, tmp_path: Path) -> None:
    ended = launcher.program(DEMO, tmp_path, limit=500)
    assert ended.status == 0, ended.stderr
    numbers = re.compile(r" +[\d.,]+")
    for line in shown("make demo").splitlines():
        assert numbers.sub(" #", line) in numbers.sub(" #", ended.stdout), ended.stdout


def gradients(text: str) -> list[float]:
    """Runs code of docs/guides/gradients.md; returns the sum of the weights before and after its step."""
    torch.manual_seed(1)
    names = {
        "torch": torch,
        "model": nn.Linear(8, 2),
        "inputs": torch.randn(4, 8),
        "targets": torch.randn(4, 2),
        "loss_function": nn.MSELoss(),
    }
    before = names["model"].weight.sum().item()
    exec(text, names)
    return [before, names["model"].weight.sum().item()]


@pytest.mark.parametrize(
    "block", blocks((ROOT / "docs" / "guides" / "gradients.md").read_text(), "python")
)
def test_code_of_the_page_of_gradients(world: Worlds, block: str) -> None:
    first, second = world(2).run(gradients, block)
    assert first == second
    assert first[0] != first[1]
