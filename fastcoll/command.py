"""The command ``fastcoll``, also ``python -m fastcoll``, whose sub-commands are modules of this package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from fastcoll._version import __version__

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True)
class Command:
    """A sub-command.

    Attributes:
        module: Module whose ``main`` takes the arguments and returns the exit status, or a message for ``sys.exit``.
        meaning: One line for ``fastcoll --help``.
        before: Arguments to put before those of the command line; the latter win.
    """

    module: str
    meaning: str
    before: tuple[str, ...] = ()


COMMANDS = {
    "info": Command("fastcoll.info", "show versions, libraries, settings and what is available"),
    "bench": Command(
        "fastcoll.bench.__main__", "time collectives or training steps beside other backends"
    ),
    "trace": Command(
        "fastcoll.trace.__main__", "read the traces of all ranks and name the rank that differs"
    ),
    "tune": Command("fastcoll.tune", "measure the tuning table of this host"),
    "demo": Command(
        "fastcoll.examples.ddp_train",
        "train a small network with fastcoll and with Gloo, and compare them",
        ("--compare", "gloo"),
    ),
}
"""The sub-commands, by name."""


def _usage() -> str:
    lines = [f"  {name:6} {command.meaning}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fastcoll [-h] [--version] COMMAND ...",
            "",
            "commands:",
            *lines,
            "",
            "fastcoll COMMAND --help lists the arguments of a command.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int | str | None:
    """Runs a sub-command.

    Args:
        arguments: Arguments of the command line, without the program's name.

    Returns:
        The sub-command's exit status, or its message for ``sys.exit``; 2 if there is no such command.
    """
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        print(f"fastcoll {__version__}")
        return 0
    if name not in COMMANDS:
        got = f"got {name!r}" if name else "got none"
        print(_usage(), file=sys.stderr)
        print(f"\nfastcoll: expected a command of {', '.join(COMMANDS)}, {got}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    status: int | str | None = importlib.import_module(command.module).main(
        [*command.before, *rest]
    )
    return status
