"""A NCCL of Python functions, which only keep what they are called with."""

import ctypes
from datetime import timedelta
from typing import Any

from fastcoll._load_cuda import CUDA

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_REDUCTION = [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER]
_ARGUMENTS = {
    "ncclAllReduce": _REDUCTION,
    "ncclReduceScatter": _REDUCTION,
    "ncclReduce": [*_REDUCTION[:5], _INT, *_REDUCTION[5:]],
    "ncclBroadcast": _REDUCTION,
    "ncclAllGather": [*_REDUCTION[:4], *_REDUCTION[5:]],
}


class RecordedNccl:
    """Its functions succeed.

    Attributes:
        calls: Names and arguments of what was called with data, in order: addresses and elements come first.
    """

    def __init__(self, version: int = 23000, ranks: int = 2) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._functions: list[Any] = []
        functions = CUDA.NcclFunctions(self._address, version)
        self._calls = CUDA.NcclCalls(functions, 0x77, ranks, timedelta(seconds=5))

    def issue(
        self,
        collective: str,
        source: tuple[int, int],
        target: tuple[int, int],
        op: str = "SUM",
        dtype: str = "float32",
        root: int = 0,
    ) -> None:
        """Makes a call, of addresses and elements."""
        number = CUDA.REDUCE_OPS.index(op)
        kinds = CUDA.COLLECTIVES.index(collective), CUDA.DTYPES.index(dtype), number
        self._calls.issue(*kinds, root, 2.0, 0, *source, *target, 0)

    def _address(self, name: str) -> int:
        kinds = _ARGUMENTS.get(name, [])

        def call(*arguments: int | None) -> int:
            if kinds:
                self.calls.append((name, tuple(one or 0 for one in arguments)))
            return 0

        self._functions.append(ctypes.CFUNCTYPE(_INT, *kinds)(call))
        return ctypes.cast(self._functions[-1], _POINTER).value or 0
