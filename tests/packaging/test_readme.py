"""The commands of README.md, and the code of the quickstart and the page of gradients, print what the page has."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrun import torchrun

from fastcoll import tune

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "start" / "quickstart.md").read_text()


def blocks(page: str, kind: str = "") -> list[str]:
    """The fenced blocks of a page that have this word behind the fence."""
    return [
        text
        for word, text in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)
        if word == kind
    ]


def hello(backend: str) -> str:
    """hello.py of the quickstart, with that backend; README has the line that differs."""
    (script,) = (block for block in blocks(QUICKSTART, "python") if "all_reduce" in block)
    (diff,) = blocks(README, "diff")
    old, new = (line[1:] for line in diff.splitlines())
    assert (old, new) == tuple(
        f'dist.init_process_group("{name}")' for name in ("gloo", "fastcoll")
    )
    assert script.count(new) == 1
    return script.replace(new, new.replace("fastcoll", backend))


def shown(page: str, command: str) -> str:
    """What the page has below a command, up to the next one."""
    (text,) = (
        text
        for block in blocks(page, "console")
        for text in block.split("$ ")
        if text.startswith(command)
    )
    return text.partition("\n")[2]


def test_hello(launcher, tmp_path):
    expected = shown(QUICKSTART, "torchrun").splitlines(keepends=True)
    for rank, line in zip(launcher.ranks(hello("fastcoll"), 2, tmp_path), expected, strict=True):
        assert (rank.status, rank.stdout) == (0, line), rank.stderr


def test_the_page_has_what_the_example_prints():
    """tests/packaging/test_examples.py compares what they print with their docstrings."""
    hello = (ROOT / "examples" / "hello.py").read_text()
    for line in shown(README, "python examples/hello.py").splitlines():
        assert f"    {line}\n" in hello


def test_commands_of_the_tuner_parse(monkeypatch):
    """tools/check_pages.py parses those of the benchmark. The tuner needs torch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pages = [README, *(page.read_text() for page in (ROOT / "docs").rglob("*.md"))]
    given = re.findall(
        r"^(?:\$ )?(?:torchrun .*-m )?fastcoll[ .]tune\b(.*)", "\n".join(pages), re.M
    )
    assert " --device cuda" in given
    for arguments in given:
        tune._options(shlex.split(arguments, comments=True))


@pytest.mark.full
def test_the_script_for_gloo_under_torchrun(tmp_path):
    served = (
        "import fastcoll\n"
        "backend = fastcoll.info.groups()[0]['backends']['cpu']\n"
        "print(f'served by {backend}\\n', end='')\n"
        "dist.destroy"
    )
    (tmp_path / "hello.py").write_text(hello("gloo").replace("dist.destroy", served))
    replaced = {"FASTCOLL_REPLACE": "gloo"}
    printed = torchrun(str(tmp_path / "hello.py"), environment=replaced)
    lines = re.findall("^rank .*\n", printed, re.MULTILINE)
    assert sorted(lines) == shown(QUICKSTART, "torchrun").splitlines(keepends=True)
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
@pytest.mark.timeout(600)  # two ranks train two networks
def test_the_demo_ends_with_lines_like_those_of_the_page(launcher, tmp_path):
    ended = launcher.program(DEMO, tmp_path, limit=500)
    assert ended.status == 0, ended.stderr
    printed = ended.stdout.splitlines()
    for backend in ("fastcoll", "gloo"):
        assert re.search(
            rf"^│ {backend} +│ +0\.\d+ │ +9\d\.\d+% │ +[\d.]+ │ +\d+ │$", ended.stdout, re.M
        )
    (page,) = (block for block in blocks(QUICKSTART) if block.startswith("The loss curves"))
    numbers = re.compile(r"\d[\d.]*")
    same, verdict = (numbers.sub("#", line) for line in page.splitlines())
    assert numbers.sub("#", printed[-2]) == same
    found = numbers.sub("#", printed[-1])
    assert found == verdict or "decide nothing" in found or "is not faster" in found


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
def test_code_of_the_page_of_gradients(world, block):
    first, second = world(2).run(gradients, block)
    assert first == second
    assert first[0] != first[1]
