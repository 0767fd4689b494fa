"""What the package does differently while a command starts: ``fastcoll ...`` or ``python -m fastcoll...``.

Without torch it ends with a sentence, not a traceback. And ``fastcoll`` itself imports torch only where a sub-command
needs it.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys

from fastcoll._built_for import needed_torch

__all__ = ["starts_command", "stop_without_torch"]

_WITHOUT_TORCH = ("fastcoll.trace", "fastcoll.top", "fastcoll.compare")


def stop_without_torch() -> None:
    """Ends the command that is about to start, if it needs torch and torch is not installed."""
    command = _command()
    if command in (None, *_WITHOUT_TORCH) or importlib.util.find_spec("torch") is not None:
        return
    sys.exit(
        f"{command}: fastcoll needs torch, and {sys.executable} has none: "
        f"pip install '{needed_torch()}'"
    )


def starts_command() -> bool:
    """Returns whether ``fastcoll`` or ``python -m fastcoll`` is about to start, which registers the backend itself."""
    program = getattr(sys, "argv", [])[:1]
    if program == ["-m"]:
        words = sys.orig_argv[1:]
        return "-mfastcoll" in words or ("-m", "fastcoll") in itertools.pairwise(words)
    return [os.path.basename(name) for name in program] == ["fastcoll"]


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
