"""Ends ``fastcoll ...`` and ``python -m fastcoll...`` with a sentence, not a traceback, if torch is missing."""

from __future__ import annotations

import importlib.util
import os
import sys

from fastcoll._built_for import needed_torch

__all__ = ["stop_without_torch"]

_WITHOUT_TORCH = ("fastcoll.trace",)


def stop_without_torch() -> None:
    """Ends the command that is about to start, if it needs torch and torch is not installed."""
    command = _command()
    if command in (None, *_WITHOUT_TORCH) or importlib.util.find_spec("torch") is not None:
        return
    sys.exit(
        f"{command}: fastcoll needs torch, and {sys.executable} has none: "
        f"pip install '{needed_torch()}'"
    )


def _command() -> str | None:
    """Returns the command that is about to start, such as "fastcoll.info", or None.

    While ``python -m`` finds the module and imports the packages around it, ``sys.argv[0]`` is "-m".
    """
    program = getattr(sys, "argv", [])[:1]
    if program != ["-m"] and [os.path.basename(name) for name in program] != ["fastcoll"]:
        return None
    words = [os.path.basename(word.removeprefix("-m")) for word in sys.orig_argv[1:]]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("fastcoll."):
            return word
        if word == "fastcoll" and following[:1].isalpha():
            return f"fastcoll.{following}"
    return None
