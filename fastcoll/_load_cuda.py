"""Loads the compiled module of device tensors, ``from fastcoll._load_cuda import CUDA``, or raises the cause."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fastcoll._load import C as _first  # noqa: F401, its functions are found by the loader

if TYPE_CHECKING:
    from fastcoll import _cuda as CUDA
else:
    try:
        from fastcoll import _cuda as CUDA
    except ImportError as error:
        if any(Path(__file__).parent.glob("_cuda.*.so")):
            raise
        raise ImportError(
            "this fastcoll was built without the part that moves device tensors: build it again with the torch in use, "
            "`USE_CUDA=1 pip install --no-build-isolation --no-deps .`"
        ) from error

__all__ = ["CUDA"]
