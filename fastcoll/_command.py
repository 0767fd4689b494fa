"""What ``python -m fastcoll...`` says where there is no torch: a sentence, and no traceback."""

from __future__ import annotations

import importlib.util
import sys

from fastcoll._built_for import needed_torch

__all__ = ["stop_without_torch"]

_WITHOUT_TORCH = ("fastcoll.trace",)


def stop_without_torch() -> None:
    """Ends a command of fastcoll's that is about to start and needs a torch that is not installed.

    While ``python -m`` looks for the module, and imports the packages around it, ``sys.argv[0]`` is "-m".
    """
    if getattr(sys, "argv", [])[:1] != ["-m"] or importlib.util.find_spec("torch") is not None:
        return
    words = (word.removeprefix("-m") for word in sys.orig_argv)
    command = next((word for word in words if word.startswith("fastcoll.")), None)
    if command is not None and command not in _WITHOUT_TORCH:
        sys.exit(
            f"{command}: fastcoll needs torch, and {sys.executable} has none: "
            f"pip install '{needed_torch()}'"
        )
