"""``fastcoll.communicator``: the calls of a group, made straight from Python.

A call of ``dist.*`` passes torch's Python code and dispatcher before it reaches a backend. A call of a communicator
is one C call. On CPU tensors it blocks, works in place, and makes no ``Work``. Engine, order, errors, timeouts and
trace are those of ``dist.*`` on that group. Both kinds of calls may be mixed. A plan is checked only once.

An object travels as a pickle of protocol 5, with buffers and long bytes outside of the pickle. Long texts are separate
pieces of the pickle. Each rank that sends an object begins with one block of ``BLOCK`` bytes. The block has three
counts and, if they fit, the sizes and all parts below ``LONG`` bytes. Otherwise these follow as one message. Each
longer part then goes from the sender's memory into new memory of the receiver.
The ranks first make sure that each of them has the memory for such messages.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import struct
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.utils.dlpack import from_dlpack

from fastcoll._group_backend import needed_cpu_backend
from fastcoll._load import C

__all__ = ["Communicator", "as_tensor", "communicator"]

BLOCK = 4096
LONG = 64 * 1024
"""A buffer of at least this many bytes travels in its own message."""
PIECE = 4 * LONG
"""So do bytes and texts within a pickle. The frames of a pickle, of about 64 KiB, are shorter, and travel together."""

_COUNTS = struct.Struct("<qqq")
"""Parts, or the negative length of an error; pieces of the pickle; bytes of the sizes and the short parts."""
_BYTES = struct.Struct("<cI")
"""How bytes begin in a pickle."""


class _Block:
    """Memory that is a tensor too."""

    __slots__ = ("memory", "tensor")

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)


class Communicator(C.Communicator):
    """The calls of ``fastcoll._C.Communicator``, and those for objects; made by ``fastcoll.communicator``."""

    __slots__ = ("_blocks",)

    _blocks: list[_Block]

    def __init__(self, backend: Any) -> None:
        self._blocks = []

    def broadcast_object(self, value: Any, src: int) -> Any:
        """Returns the object of rank ``src``: there ``value`` itself, on other ranks a copy.

        Args:
            value: Any object that can be pickled; ignored on other ranks.
            src: A rank of the group.

        Raises:
            ValueError: There is no such rank, or as below.
            TypeError, ValueError, AttributeError, pickle.PicklingError: Rank ``src`` cannot pickle the object. All
                ranks raise this error.
            MemoryError: A rank lacks the memory for its copy. All ranks raise this error.
        """
        sends = self.rank == src
        block = self._block()
        own = _Parts(value) if sends else None
        if own is not None:
            own.write(block.memory)
        self.broadcast(block.tensor, src)
        parts = self._exchange(memoryview(block.memory), own, src)
        self._blocks.append(block)
        found = _loads(parts)
        return value if sends else found

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the objects of all ranks in the order of the ranks; at this rank's place is ``value`` itself.

        Raises:
            TypeError, ValueError, AttributeError, pickle.PicklingError: A rank cannot pickle its object. All ranks
                raise this error.
            MemoryError: A rank lacks the memory for its copies. All ranks raise this error.
        """
        block, blocks = self._block(), _Block(self.size * BLOCK)
        own = _Parts(value)
        own.write(block.memory)
        self.all_gather(blocks.tensor, block.tensor)
        self._blocks.append(block)
        content = memoryview(blocks.memory)
        parts = [
            self._exchange(
                content[rank * BLOCK :][:BLOCK], own if rank == self.rank else None, rank
            )
            for rank in range(self.size)
        ]
        found = [_loads(each) for each in parts]
        found[self.rank] = value
        return found

    def _block(self) -> _Block:
        """Lends a block. Each thread gets its own."""
        try:
            return self._blocks.pop()
        except IndexError:
            return _Block(BLOCK)

    def _exchange(self, content: memoryview, own: _Parts | None, src: int) -> list[Any]:
        """Moves the rest of the object of rank ``src``. Returns its parts, or its error alone; on ``src`` no parts."""
        count, pieces, length = _COUNTS.unpack_from(content)
        if count < 0:
            return [pickle.loads(content[_COUNTS.size : _COUNTS.size - count])]
        if _COUNTS.size + length <= BLOCK:
            stream = content[_COUNTS.size : _COUNTS.size + length]
        else:
            sent = None if own is None else [torch.frombuffer(own.stream, dtype=torch.uint8)]
            arrived = self._move([length], sent, src)
            stream = memoryview(arrived[0] if own is None else own.stream)
        sizes = struct.unpack_from(f"<{count}q", stream)
        longer = [size for size in sizes if abs(size) >= LONG]
        sent = None if own is None else own.long
        long = iter(self._move(longer, sent, src) if longer else [])
        if own is not None:
            return []
        place, parts = 8 * count, []
        for size in sizes:
            if abs(size) >= LONG:
                parts.append(next(long))
            else:
                parts.append(bytearray(stream[place : place + size]))
                place += size
        return parts if pieces == 1 else [_Pieces(parts[:pieces]), *parts[pieces:]]

    def _move(self, sizes: list[int], sent: list[Tensor] | None, src: int) -> list[Any]:
        """Moves memory of these sizes from rank ``src``, which has ``sent``. If one rank lacks memory, all raise.

        Returns:
            Buffers, and bytes where a size is negative; on ``src`` none.
        """
        memories, lacking = [], torch.zeros(1, dtype=torch.int64, device="cpu")
        try:
            if sent is None:
                memories = [
                    # Not on the default device.
                    _memory_of(torch.empty(size, dtype=torch.uint8, device="cpu"))
                    if size >= 0
                    else bytes(-size)
                    for size in sizes
                ]
        except (MemoryError, RuntimeError):
            lacking += self.rank + 1
        self.all_reduce(lacking, ReduceOp.MAX)
        if lacking:
            total = sum(map(abs, sizes))
            raise MemoryError(
                f"fastcoll: rank {lacking.item() - 1} lacks the memory for an object of rank {src} ({total} bytes)"
            )
        for tensor in sent or map(_bytes_of, memories):
            self.broadcast(tensor, src)
        return memories


def communicator(group: ProcessGroup | None = None) -> Communicator:
    """Returns a communicator of a group. Its calls take tensors, numpy arrays, and CPU arrays with ``__dlpack__``.

    Args:
        group: A group that fastcoll serves and that has this rank. None: the default group.

    Returns:
        A communicator. It does not keep the group alive: calls after ``destroy_process_group`` raise.

    Raises:
        ValueError: There is no such group, or another backend serves its CPU tensors.
    """
    return Communicator(
        needed_cpu_backend(group, "communicator", "call dist.* for a group of another backend")
    )


def as_tensor(value: Any) -> Tensor:
    """Returns a tensor that shares the memory of an array.

    Raises:
        TypeError: It is no array, or one that cannot be written or shared.
    """
    what = f"fastcoll: expected a tensor, a numpy array or an array with __dlpack__, got {type(value).__name__}"
    if not hasattr(value, "__dlpack__"):
        raise TypeError(what)
    flags = getattr(value, "flags", None)
    if flags is not None and not flags.writeable:
        raise TypeError(f"{what} that is read-only. Pass a copy.")
    try:
        # torch refuses some numpy types and byte orders by DLPack, and names them by from_numpy.
        from_array: Any = torch.from_numpy if flags is not None else from_dlpack
        tensor: Tensor = from_array(value)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise TypeError(f"{what} that torch cannot share: {error}") from None
    return tensor


# --- objects -------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Keeps the memory of long tensors out of the pickle. Tensors that share memory arrive as separate copies."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is Tensor and value.is_cpu and value.layout == torch.strided
        if not plain or value.nbytes < LONG or not value.is_contiguous() or value.requires_grad:
            return NotImplemented
        if value.is_quantized or value.is_conj() or value.is_neg() or value.__dict__:
            return NotImplemented
        return _tensor_of, (pickle.PickleBuffer(_memory_of(value)), value.dtype, value.shape)


def _memory_of(tensor: Tensor) -> Any:
    """Returns the memory of a contiguous tensor as a buffer that keeps it alive. numpy would fix the tensor's size."""
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memory


def _tensor_of(memory: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    tensor: Tensor = memory.tensor
    return tensor.view(dtype).view(shape)


class _Parts:
    """The pickle and the buffers of an object, or the error of its pickling, ready to be sent.

    Attributes:
        sizes: Bytes of each part; negative if it must arrive as ``bytes``.
        pieces: How many of the parts, the first ones, make up the pickle.
        stream: The sizes, and the short parts.
        long: The long parts, in their order.
        error: The pickle of the error; empty if there is none.
    """

    def __init__(self, value: Any) -> None:
        self.stream, self.error = bytearray(), b""
        self.long: list[Tensor] = []
        written: list[bytes] = []
        outside: list[Any] = []

        def write(piece: Any) -> None:
            # The pickler passes long bytes without a copy, after their header. NEXT_BUFFER takes its place, so
            # that the unpickler uses the bytes as they arrive. A bytearray may change until it is sent.
            header = (
                _BYTES.pack(pickle.BINBYTES, len(piece)) if PIECE <= len(piece) < 1 << 32 else b""
            )
            if header and type(piece) is bytes and written and written[-1].endswith(header):
                written[-1] = written[-1][: -len(header)] + pickle.NEXT_BUFFER
                outside.append(piece)
            else:
                written.append(piece if type(piece) is bytes else bytes(piece))

        try:
            _Pickler(SimpleNamespace(write=write), 5, buffer_callback=outside.append).dump(value)
            pieces = _joined(written)
            parts = [*pieces, *(one if type(one) is bytes else one.raw() for one in outside)]
        except Exception as error:
            self.error = _portable(error)
            return
        self.pieces = len(pieces)
        self.sizes = [len(piece) for piece in pieces]
        self.sizes += [
            -len(one) if type(one) is bytes else len(one) for one in parts[len(pieces) :]
        ]
        self.stream += struct.pack(f"<{len(parts)}q", *self.sizes)
        for part in parts:
            if len(part) < LONG:
                self.stream += part
                continue
            self.long.append(_bytes_of(part))

    def write(self, content: bytearray) -> None:
        """Fills the block that is sent first: the counts, and the stream if it fits; or the error."""
        if self.error:
            _COUNTS.pack_into(content, 0, -len(self.error), 0, 0)
            content[_COUNTS.size : _COUNTS.size + len(self.error)] = self.error
            return
        _COUNTS.pack_into(content, 0, len(self.sizes), self.pieces, len(self.stream))
        if _COUNTS.size + len(self.stream) <= BLOCK:
            content[_COUNTS.size : _COUNTS.size + len(self.stream)] = self.stream


def _joined(written: list[bytes]) -> list[bytes]:
    """Returns what a pickler has written, with the pieces below ``PIECE`` joined to their neighbours."""
    pieces: list[bytes] = []
    for short, group in itertools.groupby(written, lambda piece: len(piece) < PIECE):
        if short:
            pieces.append(b"".join(group))
        else:
            pieces.extend(group)
    return pieces


def _bytes_of(part: Any) -> Tensor:
    """Returns the part as a tensor of bytes. ``bytes`` may be written only while nobody else has them."""
    if type(part) is bytes:  # torch.frombuffer warns if it may not write the memory
        memory = (ctypes.c_ubyte * len(part)).from_address(ctypes.cast(part, ctypes.c_void_p).value)  # type: ignore[arg-type]
        memory.owner = part  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)
    writable = bytearray(part) if memoryview(part).readonly else part
    return torch.frombuffer(writable, dtype=torch.uint8)


class _Pieces:
    """A file of the pieces of a pickle, for an unpickler, which reads within one piece at a time."""

    def __init__(self, pieces: list[Any]) -> None:
        self._pieces = iter(pieces)
        self._piece = memoryview(b"")

    def _take(self, size: int) -> memoryview:
        if not self._piece:
            self._piece = memoryview(next(self._pieces, b"")).cast("B")
        taken, self._piece = self._piece[:size], self._piece[size:]
        return taken

    def read(self, size: int) -> bytes:
        return bytes(self._take(size))

    def readinto(self, target: memoryview) -> int:
        taken = self._take(len(target))
        target[: len(taken)] = taken
        return len(taken)

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("fastcoll: a pickle of protocol 5 has no lines")


def _loads(parts: list[Any]) -> Any:
    """Returns the object that the parts make up; None if there are none. Raises the error if it is the only part."""
    if not parts:
        return None
    if isinstance(parts[0], Exception):
        raise parts[0]
    if isinstance(parts[0], _Pieces):
        return pickle.Unpickler(parts[0], buffers=parts[1:]).load()
    return pickle.loads(parts[0], buffers=parts[1:])


def _portable(error: Exception) -> bytes:
    """Returns a short error as a pickle that fits into a block. Types that are not kept become TypeError."""
    kind = type(error) if type(error) in (TypeError, ValueError, AttributeError) else TypeError
    kind = pickle.PicklingError if isinstance(error, pickle.PicklingError) else kind
    try:
        text = str(error)
    except Exception:
        text = type(error).__name__
    return pickle.dumps(kind(f"an object cannot be pickled: {text}"[: BLOCK // 4]))
