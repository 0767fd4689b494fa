"""Loads the compiled module, ``from fastcoll._load import C``, or raises the cause.

c10d has no stable ABI: an extension works with the minor release of torch whose headers it was compiled
against. With another release it fails to load, or loads and misbehaves. So the versions are compared first.
"""

from __future__ import annotations

import importlib
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fastcoll._built_for import UnusableBuild, mismatch, recorded_torch, remedy

if TYPE_CHECKING:
    from types import ModuleType

    from fastcoll import _C as C

__all__ = ["C"]


def _import() -> ModuleType:
    running = str(torch.__version__)
    if problem := mismatch(recorded_torch(), running):
        raise UnusableBuild(problem, remedy(running))
    try:
        from fastcoll import _C
    except ImportError as error:
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        if not Path(__file__).with_name(f"_C{suffix}").exists():
            problem = (
                f"fastcoll has no compiled module for this Python (no file fastcoll/_C{suffix})"
            )
        else:
            problem = (
                f"fastcoll's compiled module, built for torch {recorded_torch() or '(unknown)'}, "
                f"does not load with torch {running} ({error})"
            )
        raise UnusableBuild(problem, remedy(running)) from error
    if problem := mismatch(_C.build_info().get("torch"), running):
        raise UnusableBuild(problem, remedy(running))
    importlib.import_module("fastcoll._operators")  # torch's compiler needs it with the operators
    return _C


if not TYPE_CHECKING:
    C = _import()
