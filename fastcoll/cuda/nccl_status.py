"""NCCL's statuses, as CuPy reports them, and the errors for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist

from fastcoll.cuda.errors import Member
from fastcoll.cuda.nccl_library import IN_PROGRESS, NcclLibrary, StatusError

__all__ = ["async_status", "finish", "settle", "status_of", "translated"]

_SHORTEST, _LONGEST = 0.0001, 0.02  # seconds between two polls of a call in progress


def status_of(cupy: ModuleType, error: BaseException) -> int | None:
    """Returns the status behind CuPy's exception; None if it is about something else.

    CuPy has no names for the statuses 7 (in progress) and 8 (timed out) and raises KeyError with the number.
    """
    if isinstance(error, (cupy.NcclError, StatusError)):
        return int(error.status)
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], int):
        return error.args[0]
    return None


def async_status(cupy: ModuleType, raw: Any) -> int:
    """Returns the status of a communicator's work in the background."""
    try:
        raw.check_async_error()
    except Exception as error:
        status = status_of(cupy, error)
        if status is None:
            raise
        return status
    return 0


def translated(library: NcclLibrary, member: Member, what: str, error: Exception) -> Exception:
    """Returns the exception to raise in place of CuPy's; the same one if it is not about a status."""
    status = status_of(library.cupy, error)
    return error if status is None else member.fault(what, library.functions.describe(status))


def finish(
    library: NcclLibrary,
    member: Member,
    what: str,
    raw: Any,
    result: Callable[[], object],
    end: float,
    late: Callable[[str], dist.DistBackendError],
) -> None:
    """Waits for a call that NCCL may continue after it has returned.

    Args:
        library: NCCL.
        member: The rank that made the call.
        what: Name of the call in errors.
        raw: CuPy's communicator.
        result: Raises what the call raised.
        end: When to stop waiting, on the clock of ``time.monotonic``.
        late: Makes the error for a wait that timed out.

    Raises:
        DistBackendError: The call failed, or was still in progress at the end.
    """
    try:
        result()
    except Exception as error:
        if status_of(library.cupy, error) != IN_PROGRESS:
            raise translated(library, member, what, error) from None
    else:
        return
    settle(library, member, what, raw, end, late)


def settle(
    library: NcclLibrary,
    member: Member,
    what: str,
    raw: Any,
    end: float,
    late: Callable[[str], dist.DistBackendError],
) -> None:
    """Waits until a communicator is no longer in progress; arguments and errors as in ``finish``."""
    pause = _SHORTEST
    while (status := async_status(library.cupy, raw)) == IN_PROGRESS:
        if time.monotonic() >= end:
            raise late("NCCL is still running; set NCCL_DEBUG=INFO to see what it waits for")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    if status:
        raise member.fault(what, library.functions.describe(status))
