"""Runs programs of a new interpreter."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from suite_rules import bound


def python(
    *arguments: object, seconds: float = 60, variables: Mapping[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run this Python for so many seconds at most, on an idle machine, and return its status and output."""
    options = {"env": {**os.environ, **(variables or {})}, "timeout": bound(seconds), **more}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)
