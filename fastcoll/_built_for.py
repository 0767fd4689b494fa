"""Which torch the compiled module was made for, and whether that goes with the one that runs.

Free of torch and of the compiled module, so that it can answer when these do not work together.
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["REBUILD", "abi_release", "mismatch", "recorded_torch"]

REBUILD = (
    "rebuild it, in fastcoll's source folder, with "
    "`pip install --no-build-isolation --force-reinstall --no-deps .`"
)


def abi_release(version: str) -> str:
    """Returns the part of a torch version that c10d's ABI depends on: "2.13" of "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])


def recorded_torch() -> str | None:
    """Returns the torch release that setup.py recorded beside the extension, or None without a record."""
    try:
        record = json.loads(Path(__file__).with_name("_built_for.json").read_text())
        return str(record["torch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def mismatch(built: str | None, running: str) -> str | None:
    """Compares two torch versions.

    Args:
        built: The version fastcoll was compiled against, if it is known.
        running: The version that is imported.

    Returns:
        A sentence that says what to do, or None if they go together as far as is known.
    """
    if built is None or abi_release(built) == abi_release(running):
        return None
    return f"fastcoll was built for torch {abi_release(built)} and runs with torch {running}: {REBUILD}"
