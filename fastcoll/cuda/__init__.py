"""fastcoll on CUDA devices: NCCL through CuPy, and kernels over peer-mapped memory.

Importing this package imports neither CuPy nor Triton; ``fastcoll.cuda.nccl_library.load`` and the first plan do.
"""

from __future__ import annotations

__all__: list[str] = []
