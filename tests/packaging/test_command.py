"""The command `fastcoll`, and `python -m fastcoll`."""

import importlib
import importlib.util
from pathlib import Path

import pytest
from launcher import Launcher

from fastcoll import __version__
from fastcoll.command import COMMANDS, main
from fastcoll.examples import ddp_train


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--help"], 0), (["-h"], 0), ([], 2), (["inof"], 2)]
)
def test_help_and_a_wrong_command_list_the_commands(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int
) -> None:
    assert main(arguments) == status
    printed = capsys.readouterr()
    text = printed.err if status else printed.out
    assert (printed.out if status else printed.err) == ""
    for name, command in COMMANDS.items():
        assert f"  {name:6} {command.meaning}\n" in text
    assert ("expected a command of info, bench, trace, tune, demo, got" in text) == bool(status)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fastcoll {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_own_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_the_module_is_the_command(launcher: Launcher, tmp_path: Path) -> None:
    arguments = ["fastcoll", "trace", str(tmp_path / "nothing_")]
    text = f"import runpy, sys; sys.argv = {arguments}; runpy.run_module('fastcoll', run_name='__main__')"
    process = launcher.program(text, tmp_path)
    assert (process.status, process.stdout) == (2, "")
    assert process.stderr.startswith("fastcoll.trace: ")


def test_the_demo_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"torch": "a spec", "rich": "a spec"}
    monkeypatch.setattr(importlib.util, "find_spec", present.get)
    assert main(["demo"]) == "the demo needs scikit-learn: pip install scikit-learn"


def test_the_demo_compares_with_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    def train(backend: str, ranks: int, settings: ddp_train.Settings) -> ddp_train.Outcome:
        trained.append((backend, ranks))
        return ddp_train.Outcome(backend, [0.5] * 3, 0.99, [1.0], [1.0], 4)

    monkeypatch.setattr(ddp_train, "train_in_processes", train)
    assert main(["demo"]) is None
    assert main(["demo", "--compare", "nccl", "--nproc", "3"]) is None
    assert trained == [("fastcoll", 2), ("gloo", 2), ("fastcoll", 3), ("nccl", 3)]
