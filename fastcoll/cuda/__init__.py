"""fastcoll on CUDA devices: NCCL through CuPy.

Importing this package imports neither; :func:`fastcoll.cuda.nccl_library.load` does.
"""

from __future__ import annotations

__all__ = ["SERVED"]

SERVED = False
"""Whether the backend takes CUDA tensors: not before its engine for them has run on a GPU."""
