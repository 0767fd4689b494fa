"""The repository's root, and ``import fastcoll.X`` for each X that needs no torch.

``fastcoll/__init__.py`` needs torch. In an environment without it, a package that is only a path takes its place.
A tool imports this module before it imports from fastcoll.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

__all__ = ["ROOT"]

ROOT = Path(__file__).resolve().parents[1]

if "fastcoll" not in sys.modules and not (find_spec("torch") and find_spec("fastcoll")):
    _package = ModuleType("fastcoll")
    _package.__path__ = [
        str(ROOT / "fastcoll"),
        str(ROOT),
    ]  # kernels, bench and examples are at the root
    sys.modules["fastcoll"] = _package
