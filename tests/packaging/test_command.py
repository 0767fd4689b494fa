"""The command `fastcoll`, and `python -m fastcoll`."""

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
from programs import python

from fastcoll import __version__, _command
from fastcoll.command import COMMANDS, main
from fastcoll.examples import ddp_train


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--help"], 0), (["-h"], 0), (["help"], 0), ([], 2), (["inof"], 2), (["other"], 2)],
)
def test_help_and_a_wrong_command_list_the_commands(capsys, arguments, status):
    assert main(arguments) == status
    printed = capsys.readouterr()
    text = printed.err if status else printed.out
    assert (printed.out if status else printed.err) == ""
    for name, command in COMMANDS.items():
        assert f"  {name:7} {command.meaning}\n" in text
    assert (
        "expected a command of info, demo, compare, bench, trace, top, tune, got" in text
    ) == bool(status)
    assert ("Did you mean fastcoll info?" in text) == (arguments == ["inof"])


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["benhc"], ["trace", "--help"]])
@pytest.mark.parametrize("started", [["-m", "fastcoll"], ["fastcoll"]])
def test_it_imports_no_torch_before_a_sub_command_needs_it(tmp_path, started, arguments):
    """The backend's name is registered by `import torch`, or by the sub-command."""
    script = tmp_path / "fastcoll"
    script.write_text("import sys\nfrom fastcoll.command import main\nsys.exit(main())\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\natexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
    )
    command = [*(started if started[0] == "-m" else [script]), *arguments]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = python(*command, variables={"PYTHONPATH": path})
    assert ended.returncode == (2 if arguments == ["benhc"] else 0), ended.stderr
    assert ended.stderr.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("python -m fastcoll.info", "fastcoll.info"),
        ("python -m fastcoll.bench.engine --rounds 3", "fastcoll.bench.engine"),
        ("python -mfastcoll bench all", "fastcoll.bench"),
        ("python /usr/bin/fastcoll tune", "fastcoll.tune"),
        ("python -m fastcoll trace x", None),
        ("python -m fastcoll --help", None),
        ("python train.py", None),
    ],
)
def test_without_torch_a_command_that_needs_it_is_one_sentence(monkeypatch, line, command):
    words = line.split()
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "argv", ["-m" if words[1].startswith("-m") else words[1]])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ends = pytest.raises(
        SystemExit, match=f"^{command}: fastcoll needs torch, .* pip install 'torch==2"
    )
    with ends if command else contextlib.nullcontext():
        _command.stop_without_torch()


@pytest.mark.parametrize("command", ["--help", "info"])
def test_a_pipe_that_is_closed_early_is_no_traceback(command):
    closed = f"{sys.executable} -m fastcoll {command} | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", closed], capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fastcoll {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_own_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_the_demo_names_what_is_missing(monkeypatch):
    present = {"torch": "a spec", "rich": "a spec"}
    monkeypatch.setattr(importlib.util, "find_spec", present.get)
    assert main(["demo"]) == "the demo needs scikit-learn: pip install scikit-learn"


def test_the_demo_compares_with_gloo(monkeypatch):
    trained = []

    def train(backends: list[str], ranks: int, settings: ddp_train.Settings) -> tuple[Any, float]:
        trained.append((backends, ranks))
        return [ddp_train.Outcome(each, [0.5] * 3, 0.99, [1.0], [1.0], 4) for each in backends], 1.0

    monkeypatch.setattr(ddp_train, "train_in_processes", train)
    assert main(["demo"]) is None
    assert main(["demo", "--compare", "nccl", "--nproc", "3"]) is None
    assert trained == [(["fastcoll", "gloo"], 2), (["fastcoll", "nccl"], 3)]


def outcome_of(backend: str, milliseconds: float) -> ddp_train.Outcome:
    return ddp_train.Outcome(backend, [0.5], 0.99, [milliseconds / 1e3], [1.0], 4)


@pytest.mark.parametrize(
    ("ours", "gloos", "others", "expected"),
    [
        (2.0, 5.0, 3.0, "fastcoll is 2.50 times as fast as gloo: 2.00 ms a step, gloo 5.00 ms."),
        (5.0, 2.0, 3.0, "fastcoll is not faster than gloo here: 5.00 ms a step, gloo 2.00 ms."),
        (2.0, 5.0, 30.0, "the times decide nothing: fastcoll took 2.00 ms a step, gloo 5.00 ms."),
    ],
)
def test_the_verdict_of_the_demo_holds(ours, gloos, others, expected):
    outcomes = [outcome_of("fastcoll", ours), outcome_of("gloo", gloos)]
    found = ddp_train.verdict(outcomes, others)
    assert expected in found and f"Other processes used {others:.0f}% of the machine" in found
