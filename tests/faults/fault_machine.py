"""What the recorded times depend on."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

__all__ = ["machine"]


def machine() -> dict[str, Any]:
    """Return cores, kernel, versions and the revision of this tree."""
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "revision": revision,
    }
