"""fastcoll on CUDA devices: NCCL through CuPy.

Importing this package imports neither; :func:`fastcoll.cuda.nccl_library.load` does.
"""

from __future__ import annotations

__all__: list[str] = []
