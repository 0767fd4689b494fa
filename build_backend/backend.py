"""The build backend: that of setuptools, and the search for the torch to compile against.

fastcoll must be compiled against the torch that it will run with. pip starts an isolated build with the Python of the
target environment, but hides the packages of that environment. So this backend searches there for torch. If there is
none, as with `python -m build`, the build requires a pinned release; ``-C torch=2.14`` requires another one.
``-C version=torch`` adds the release to the version: 0.1.0+torch2.13.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from typing import Any

import supported
import toolchain
from setuptools import build_meta
from setuptools.build_meta import build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_Settings = dict[str, Any] | None

_LOOK = """
import json, sys
from importlib import metadata
print(json.dumps([[found.version for found in metadata.distributions(name="torch")], sys.path[1:]]))
"""


def get_requires_for_build_sdist(settings: _Settings = None) -> list[str]:
    """Returns nothing: a source distribution needs no torch."""
    return []


def get_requires_for_build_wheel(settings: _Settings = None) -> list[str]:
    """Returns torch, unless it is installed here or in the target environment."""
    if problem := toolchain.problem():
        raise SystemExit(problem)
    asked = (settings or {}).get("torch")
    version = _installed() or ("" if asked else _outside()[0])
    if version and (problem := supported.problem(version)):
        raise SystemExit(problem)
    if asked and asked not in supported.MINORS:
        raise SystemExit(f"-C torch={asked}: expected one of {', '.join(supported.MINORS)}")
    return [] if version else [supported.requirement(asked or supported.PINNED)]


def prepare_metadata_for_build_wheel(directory: str, settings: _Settings = None) -> str:
    """Writes the metadata, which require the torch."""
    _prepare(settings)
    return build_meta.prepare_metadata_for_build_wheel(directory, _for_setuptools(settings))


def build_wheel(
    directory: str, settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Compiles a wheel."""
    _prepare(settings)
    return build_meta.build_wheel(directory, _for_setuptools(settings), metadata_directory)


def build_editable(
    directory: str, settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Compiles in place."""
    _prepare(settings)
    return build_meta.build_editable(directory, _for_setuptools(settings), metadata_directory)


get_requires_for_build_editable = get_requires_for_build_wheel
prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def _installed() -> str:
    """Returns the version of the torch that can be imported here, or ""."""
    return next((found.version for found in metadata.distributions(name="torch")), "")


def _outside() -> tuple[str, list[str]]:
    """Returns the version of this Python's torch, and sys.path, without the frontend's isolation."""
    hiding = ("PYTHONPATH", "PYTHONNOUSERSITE")
    environment = {key: value for key, value in os.environ.items() if key not in hiding}
    answer = subprocess.run(
        [sys.executable, "-c", _LOOK], env=environment, capture_output=True, text=True
    )
    versions, path = json.loads(answer.stdout) if answer.returncode == 0 else ([], [])
    return (versions[0], path) if versions else ("", [])


def _prepare(settings: _Settings) -> None:
    """Makes torch importable for setup.py; a torch of this process comes first."""
    if problem := toolchain.problem():
        raise SystemExit(problem)
    if (settings or {}).get("version") == "torch":
        os.environ["FASTCOLL_VERSION_NAMES_TORCH"] = "1"
    if not _installed():
        version, path = _outside()
        if version:
            sys.path.extend(entry for entry in path if entry not in sys.path)


def _for_setuptools(settings: _Settings) -> _Settings:
    return {
        key: value for key, value in (settings or {}).items() if key not in ("torch", "version")
    }
