"""The command ``fastcoll``, also ``python -m fastcoll``, whose sub-commands are modules of this package.

It imports torch only in a sub-command that needs it, so ``fastcoll --help`` is immediate.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from fastcoll._register import register
from fastcoll._version import __version__

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True)
class Command:
    """A sub-command.

    Attributes:
        module: Module whose ``main`` takes the arguments and returns the exit status, or a message for ``sys.exit``.
        meaning: One line for ``fastcoll --help``.
        example: A command line to begin with, without "fastcoll".
        before: Arguments to put before those of the command line; the latter win.
        torch: Whether it needs torch.
    """

    module: str
    meaning: str
    example: str
    before: tuple[str, ...] = ()
    torch: bool = True


COMMANDS = {
    "info": Command(
        "fastcoll.info", "show what works on this machine, and how to repair what does not", "info"
    ),
    "demo": Command(
        "fastcoll.examples.ddp_train",
        "train a small network on fastcoll and on Gloo, and compare them",
        "demo",
        ("--compare", "gloo"),
    ),
    "compare": Command(
        "fastcoll.compare",
        "run your job as it is and on fastcoll, and compare losses, times and errors",
        "compare -- torchrun --nproc-per-node 2 train.py",
        torch=False,
    ),
    "bench": Command(
        "fastcoll.bench.__main__",
        "time collectives or training steps beside other backends",
        "bench all_reduce -b 4 -e 64M --backend fastcoll,gloo",
    ),
    "trace": Command(
        "fastcoll.trace.__main__",
        "compare the traces of all ranks, and name the rank that differs",
        "trace traces/rank_",
        torch=False,
    ),
    "top": Command(
        "fastcoll.trace.top",
        "show the ranks of a job that runs or hangs, and which of them makes the others wait",
        "top $(pgrep -f torchrun)",
        torch=False,
    ),
    "tune": Command("fastcoll.tune", "measure the tuning table of this host", "tune --nproc 4"),
}
"""The sub-commands, by name."""


def _usage() -> str:
    meanings = [f"  {name:7} {command.meaning}" for name, command in COMMANDS.items()]
    examples = [f"  fastcoll {command.example}" for command in COMMANDS.values()]
    return "\n".join([
        "usage: fastcoll [-h] [--version] COMMAND ...",
        "",
        "commands:",
        *meanings,
        "",
        "examples:",
        *examples,
        "",
        "fastcoll COMMAND --help lists the arguments of a command.",
    ])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int | str | None:
    """Runs a sub-command.

    Args:
        arguments: Arguments of the command line, without the program's name.

    Returns:
        The sub-command's exit status, or its message for ``sys.exit``; 1 if the output was closed; 2 if there is no
        such command.
    """
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # `fastcoll info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _run(arguments: Sequence[str]) -> int | str | None:
    name, *rest = arguments or [""]
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if name in ("--version", "version"):
        print(f"fastcoll {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"{_usage()}\n\n{_unknown(name)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    if command.torch:
        register()
    status: int | str | None = importlib.import_module(command.module).main(
        [*command.before, *rest]
    )
    return status


def _unknown(name: str) -> str:
    """Returns the error for a word that is no command."""
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    guess = f" Did you mean fastcoll {close[0]}?" if close else ""
    got = f"got {name!r}" if name else "got none"
    return f"fastcoll: expected a command of {', '.join(COMMANDS)}, {got}.{guess}"
