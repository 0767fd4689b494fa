"""oneCCL, reached through its C interface on host buffers.

The interface has no barrier, gather or scatter, and its send and receive know GPUs only. Its types and reductions
are the numbers of oneapi/ccl/v2/types.h.
"""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from fastcoll.bench.collectives import Case
from fastcoll.bench.control import Control
from fastcoll.bench.peer import LocalPeer
from fastcoll.bench.turn import Call

__all__ = ["CclPeer"]

_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_ID_BYTES = 4096

_Size, _Int, _Pointer = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p


class _Id(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * _ID_BYTES),)


_BUFFERS = (_Pointer, _Pointer, _Size, _Int)  # sent, received, elements, type
_END = (_Pointer, _Pointer)  # communicator, stream
_ARGUMENTS = {
    "onecclGetVersion": (_Pointer,),
    "onecclGetUniqueId": (_Pointer,),
    "onecclCommInitRank": (_Pointer, _Size, _Id, _Int),
    "onecclCommDestroy": (_Pointer,),
    "onecclAllReduce": (*_BUFFERS, _Int, *_END),
    "onecclReduceScatter": (*_BUFFERS, _Int, *_END),
    "onecclBroadcast": (*_BUFFERS, _Int, *_END),
    "onecclAllGather": (*_BUFFERS, *_END),
    "onecclAllToAll": (*_BUFFERS, *_END),
    "onecclReduce": (*_BUFFERS, _Int, _Int, *_END),
}


def _checked(result: int) -> None:
    if result:
        raise RuntimeError(f"oneCCL returned {result}")


def _load() -> Any:
    library = ctypes.CDLL(os.environ["ONECCL_LIBRARY"], ctypes.RTLD_GLOBAL)
    for name, types in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, _checked
    return library


class CclPeer(LocalPeer):
    """A communicator of all companions."""

    def __init__(self, name: str, control: Control, timeout: timedelta) -> None:
        super().__init__(name, control, timeout)
        self._library = _load()
        version, mine, self._communicator = _Int(), _Id(), _Pointer()
        self._library.onecclGetVersion(ctypes.byref(version))
        if control.rank == 0:
            self._library.onecclGetUniqueId(ctypes.byref(mine))
        first = bytes.fromhex(control.all_gather(bytes(mine).hex())[0])
        self._library.onecclCommInitRank(
            ctypes.byref(self._communicator),
            control.world_size,
            _Id.from_buffer_copy(first),
            control.rank,
        )
        year, rest = divmod(version.value, 10_000)
        self.library = f"oneCCL {year}.{rest // 100}.{rest % 100}"

    def bind(self, case: Case) -> Call:
        """Returns one call, which returns when the result is there: host buffers have no stream."""
        library, end = self._library, (self._communicator, None)
        send, receive, root = case.send.data_ptr(), case.receive.data_ptr(), case.root
        kind = _TYPES[case.dtype]
        op = _OPS.get(case.op)
        buffers = (send, receive, case.count, kind)
        match case.collective.name:
            case "all_reduce":
                return partial(library.onecclAllReduce, *buffers, op, *end)
            case "all_gather":
                return partial(library.onecclAllGather, *buffers, *end)
            case "reduce_scatter":
                return partial(library.onecclReduceScatter, *buffers, op, *end)
            case "broadcast":
                return partial(library.onecclBroadcast, *buffers, root, *end)
            case "all_to_all":
                return partial(library.onecclAllToAll, *buffers, *end)
            case "reduce":
                return partial(library.onecclReduce, *buffers, op, root, *end)
        raise NotImplementedError(f"oneCCL's C interface has no {case.collective.name} on CPUs")

    def close(self) -> None:
        """Destroys the communicator."""
        self._library.onecclCommDestroy(self._communicator)
