"""``fastcoll.communicator``: a group's calls for microseconds, straight from Python.

A call of ``dist.*`` passes torch's Python front and dispatcher before it reaches a backend. A call of a communicator
is one C call: blocking, in place, with no work. It has the same engine, order, errors, timeouts and trace as
``dist.*`` on that group, and the two may be mixed freely. A plan goes further: its arguments are checked once.

An object travels as its pickle (protocol 5) and the buffers out of band. Each rank's part begins with one block of
``BLOCK`` bytes, which has the sizes. A small object is in this block. Else a message with the pickle and the short
buffers follows, and then each long buffer, from the sender's memory into new memory of the receiver.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.dlpack import from_dlpack

from fastcoll._group_backend import needed_cpu_backend
from fastcoll._load import C

__all__ = ["Communicator", "as_tensor", "communicator"]

BLOCK = 4096
LONG = 64 * 1024
"""Least bytes of a buffer that travels by itself."""

_COUNTS = struct.Struct(
    "<qq"
)  # parts, or the negative length of an error; bytes of the sizes and the short parts


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
            ValueError: There is no such rank.
            TypeError, pickle.PicklingError: Rank ``src`` cannot pickle the object; all ranks raise.
        """
        sends = self.rank == src
        parts = _parts_of(value) if sends else []
        block = self._block()
        if sends:
            _write(block.memory, parts)
        self.broadcast(block.tensor, src)
        found = self._receive(memoryview(block.memory), parts, src)
        self._blocks.append(block)
        return value if sends else found

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the objects of all ranks in the order of the ranks; at this rank's place is ``value`` itself.

        Raises:
            TypeError, pickle.PicklingError: A rank cannot pickle its object; all ranks raise.
        """
        parts = _parts_of(value)
        block, blocks = self._block(), _Block(self.size * BLOCK)
        _write(block.memory, parts)
        self.all_gather(blocks.tensor, block.tensor)
        self._blocks.append(block)
        content = memoryview(blocks.memory)
        found, failed = [], None
        for rank in range(self.size):
            try:
                found.append(self._receive(content[rank * BLOCK :][:BLOCK], parts, rank))
            except Exception as error:
                if isinstance(error, dist.DistError):
                    raise
                failed = failed or error  # all ranks take part in what follows
        if failed is not None:
            raise failed
        found[self.rank] = value
        return found

    def _block(self) -> _Block:
        """Lends a block, of which each thread has another one."""
        try:
            return self._blocks.pop()
        except IndexError:
            return _Block(BLOCK)

    def _receive(self, content: memoryview, parts: list[Any], src: int) -> Any:
        """Completes the exchange of a rank's object, and returns it; on that rank None."""
        sends = self.rank == src
        count, length = _COUNTS.unpack_from(content)
        if count < 0:
            raise pickle.loads(content[_COUNTS.size : _COUNTS.size - count])
        if _COUNTS.size + length <= BLOCK:
            stream = content[_COUNTS.size : _COUNTS.size + length]
        else:
            memory = _stream_of(parts) if sends else bytearray(length)
            self.broadcast(torch.frombuffer(memory, dtype=torch.uint8), src)
            stream = memoryview(memory)
        sizes = struct.unpack_from(f"<{count}q", stream)
        place, found = 8 * count, []
        for index, size in enumerate(sizes):
            if size >= LONG:
                long = parts[index] if sends else bytearray(size)
                self.broadcast(_bytes_of(long), src)
                found.append(long)
            else:
                found.append(bytearray(stream[place : place + size]))
                place += size
        return None if sends else pickle.loads(found[0], buffers=found[1:])


def communicator(group: ProcessGroup | None = None) -> Communicator:
    """Returns the calls of a group for tensors, numpy arrays, and CPU arrays with ``__dlpack__``.

    Args:
        group: A group that fastcoll serves, of which this rank is a member. None: the default group.

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
    """Pickles with long tensors out of band. Plain pickles of tensors do not keep their shared memory either."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is Tensor and value.is_cpu and value.layout == torch.strided
        if not plain or value.nbytes < LONG or not value.is_contiguous() or value.requires_grad:
            return NotImplemented
        if value.is_quantized or value.is_conj() or value.is_neg() or value.__dict__:
            return NotImplemented
        memory = value.view(-1).view(torch.uint8).numpy()
        return _tensor_of, (pickle.PickleBuffer(memory), value.dtype, value.shape)


def _tensor_of(memory: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _parts_of(value: Any) -> list[Any]:
    """Returns the pickle and the buffers of an object, or the error of its pickling."""
    buffers: list[pickle.PickleBuffer] = []
    content = io.BytesIO()
    try:
        _Pickler(content, 5, buffer_callback=buffers.append).dump(value)
        return [content.getbuffer(), *(buffer.raw() for buffer in buffers)]
    except Exception as error:
        return [error]


def _bytes_of(memory: Any) -> Tensor:
    """Returns the bytes of a part as a tensor, which is only read if the part is read-only."""
    view = memoryview(memory)
    if view.readonly:
        return torch.frombuffer(bytearray(view), dtype=torch.uint8)
    return torch.frombuffer(view, dtype=torch.uint8)


def _stream_of(parts: list[Any]) -> bytearray:
    """Returns the sizes of the parts, and the short parts."""
    sizes = [len(part) for part in parts]
    stream = bytearray(struct.pack(f"<{len(parts)}q", *sizes))
    for part, size in zip(parts, sizes, strict=True):
        if size < LONG:
            stream += part
    return stream


def _write(content: bytearray, parts: list[Any]) -> None:
    """Writes what a rank has for the others into its block: the sizes, and as much as fits."""
    if isinstance(parts[0], Exception):
        error = _portable(parts[0])
        _COUNTS.pack_into(content, 0, -len(error), 0)
        content[_COUNTS.size : _COUNTS.size + len(error)] = error
        return
    length = 8 * len(parts) + sum(len(part) for part in parts if len(part) < LONG)
    _COUNTS.pack_into(content, 0, len(parts), length)
    if _COUNTS.size + length <= BLOCK:
        content[_COUNTS.size : _COUNTS.size + length] = _stream_of(parts)


def _portable(error: Exception) -> bytes:
    """Returns the pickle of an error of the same kind that fits into a block; another kind becomes a TypeError."""
    kind = type(error) if type(error) in (TypeError, ValueError, AttributeError) else TypeError
    kind = pickle.PicklingError if isinstance(error, pickle.PicklingError) else kind
    return pickle.dumps(kind(f"an object cannot be pickled: {error}"[: BLOCK // 4]))
