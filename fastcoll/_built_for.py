"""Compares the torch that the compiled module was built for with the running torch, and names the remedy.

This module imports neither torch nor the compiled module, so it works when these do not fit together.
"""

from __future__ import annotations

import json
import platform
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fastcoll._version import __version__

__all__ = [
    "SUPPORTED",
    "Unusable",
    "UnusableBuild",
    "abi_release",
    "mismatch",
    "needed_torch",
    "recorded_torch",
    "remedy",
]

SUPPORTED = "torch>=2.11,<2.16"
"""The releases of torch that fastcoll can be built for, as a requirement for pip."""


class Unusable(ImportError):
    """A part of fastcoll does not work here.

    Attributes:
        form: The text of the error, with places for detail and remedy.
        detail: What was expected, and what was found.
        remedy: The command or the change that helps.
    """

    form = "{}: {}"

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(self.form.format(detail, remedy))
        self.detail = detail
        self.remedy = remedy


class UnusableBuild(Unusable):
    """There is no compiled module for this torch and this Python."""


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


def needed_torch() -> str:
    """Returns the torch that this build runs with, as a requirement for pip."""
    built = recorded_torch()
    return SUPPORTED if built is None else f"torch=={abi_release(built)}.*"


def mismatch(built: str | None, running: str) -> str | None:
    """Compares two torch versions.

    Args:
        built: The version that fastcoll was compiled against; None: unknown.
        running: The version that is imported.

    Returns:
        A clause that names both, or None if they fit together or ``built`` is unknown.
    """
    if built is None or abi_release(built) == abi_release(running):
        return None
    return f"fastcoll was built for torch {abi_release(built)} and runs with torch {running}"


def remedy(running: str) -> str:
    """Returns how to get a compiled module for this Python and a torch, by the way fastcoll was installed here.

    Args:
        running: The version of torch.
    """
    folder, editable = _sources()
    if folder is not None:
        how = "--editable" if editable else "--force-reinstall"
        build = f"`pip install --no-build-isolation --no-deps {how} {shlex.quote(str(folder))}`"
        if editable and _is_installed_beside():
            return f"leave the folder {folder}, which hides the fastcoll that is installed, or rebuild it, {build}"
        return f"rebuild it, {build}"
    minor, python = abi_release(running), ".".join(platform.python_version_tuple()[:2])
    wheel = f"fastcoll {__version__}+torch{minor} for Python {python}"
    sentence = f"install the wheel of {wheel} from the source of this one"
    if recorded_torch() in (None, minor):
        return sentence
    return f"{sentence}, or the torch that this one was built for, `pip install '{needed_torch()}'`"


def _is_installed_beside() -> bool:
    """Returns whether another fastcoll, with a compiled module, is installed for this Python."""
    installed = metadata.distributions(name="fastcoll")
    folders = (Path(str(one.locate_file("fastcoll"))) for one in installed)
    return any(
        not folder.samefile(Path(__file__).parent) and any(folder.glob("_C*.so"))
        for folder in folders
        if folder.is_dir()
    )


def _sources() -> tuple[Path | None, bool]:
    """Returns the source folder of this installation, if it still exists, and whether fastcoll runs from it."""
    root = Path(__file__).resolve().parents[1]
    if (root / "setup.py").is_file():
        return root, True
    try:
        text = metadata.distribution("fastcoll").read_text("direct_url.json")
        origin: dict[str, Any] = json.loads(text or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return None, False
    folder = Path(unquote(urlsplit(str(origin.get("url", ""))).path))
    if "dir_info" in origin and (folder / "setup.py").is_file():
        return folder, False
    return None, False
