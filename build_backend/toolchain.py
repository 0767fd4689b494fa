"""The tools that compiling needs besides torch, and the errors about missing ones."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

__all__ = ["compiler_version", "failure", "problem"]

_DEBIAN = "on Debian and Ubuntu `apt-get install {}`"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]  # as torch chooses it


def problem() -> str:
    """Returns the error about a tool that is not installed, or ""."""
    compiler = _compiler()[0]
    if shutil.which(compiler) is None:
        return (
            f"fastcoll is compiled from C++, and there is no compiler `{compiler}` here: install one "
            f"({_DEBIAN.format('g++')}), or set CXX to the one to use, and run the command again"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        return (
            f"fastcoll is compiled against Python, and {headers} has no Python.h: install Python's headers "
            f"({_DEBIAN.format('python3-dev')}), and run the command again"
        )
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja", path=f"{scripts}{os.pathsep}{os.environ['PATH']}") is None:
        return (
            "fastcoll is compiled with ninja, which is not installed here: "
            "`pip install ninja`, and run the command again"
        )
    return ""


def compiler_version() -> str:
    """Returns the first line of the compiler's ``--version``."""
    command = _compiler()  # all of it: the first word may be ccache, whose version says nothing
    answer = subprocess.run([*command, "--version"], capture_output=True, text=True)
    return (answer.stdout.splitlines() or command)[0]


def failure() -> str:
    """Returns the error to print after the output of a failed compiler."""
    return (
        f"fastcoll did not compile with {compiler_version()}; g++ 12 does it: the first line above with `error:` "
        "says why, and where one says `Killed`, set MAX_JOBS=1, for memory ran out"
    )
