"""``fastcoll.communicator``: a group's calls for microseconds, straight from Python.

A call of ``dist.*`` passes torch's Python front and dispatcher before it reaches a backend. A call of a communicator
is one C call: blocking, in place, with no work. It has the same engine, order, errors, timeouts and trace as
``dist.*`` on that group, and the two may be mixed freely. A plan goes further: its arguments are checked once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.dlpack import from_dlpack

from fastcoll._group_backend import needed_cpu_backend
from fastcoll._load import C

if TYPE_CHECKING:
    from fastcoll._C import Communicator

__all__ = ["as_tensor", "communicator"]


def communicator(group: ProcessGroup | None = None) -> Communicator:
    """Returns the calls of a group for tensors, numpy arrays, and CPU arrays with ``__dlpack__``.

    Args:
        group: A group that fastcoll serves, of which this rank is a member. None: the default group.

    Returns:
        A ``fastcoll._C.Communicator``. It does not keep the group alive: calls after ``destroy_process_group`` raise.

    Raises:
        ValueError: There is no such group, or another backend serves its CPU tensors.
    """
    backend = needed_cpu_backend(
        group, "communicator", "call dist.* for a group of another backend"
    )
    return C.Communicator(backend)


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
