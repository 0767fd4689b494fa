"""NCCL's statuses, as CuPy and the library report them, and the errors for them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from fastcoll.cuda.errors import Member
from fastcoll.cuda.nccl_library import IN_PROGRESS, NcclLibrary, StatusError

__all__ = ["finish", "settle", "translated"]

_SHORTEST, _LONGEST = 0.0001, 0.02  # seconds between two polls of a call in progress


def _status_of(library: NcclLibrary, error: BaseException) -> int | None:
    """Returns the status behind an exception; None if it is about something else.

    CuPy has no names for the statuses 7 (in progress) and 8 (timed out) and raises KeyError with the number.
    """
    if isinstance(error, (library.cupy.NcclError, StatusError)):
        return int(error.status)
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], int):
        return error.args[0]
    return None


def translated(library: NcclLibrary, member: Member, what: str, error: Exception) -> Exception:
    """Returns the exception to raise in place of CuPy's; the same one if it is not about a status."""
    status = _status_of(library, error)
    return error if status is None else member.fault(what, library.functions.describe(status))


def finish(library: NcclLibrary, member: Member, what: str, result: Callable[[], object]) -> None:
    """Takes the result of a call that NCCL may continue after it has returned; `result` raises what the call raised.

    Raises:
        DistBackendError: The call failed.
    """
    try:
        result()
    except Exception as error:
        if _status_of(library, error) != IN_PROGRESS:
            raise translated(library, member, what, error) from None


def settle(
    library: NcclLibrary,
    member: Member,
    what: str,
    communicator: int,
    end: float,
    late: Callable[[str], dist.DistBackendError],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Waits until a communicator is no longer in progress, or until `end` on the clock of ``time.monotonic``.

    `late` makes the error for a wait that timed out. `check` is called before each poll; it raises if the communicator
    was aborted, because its memory is then freed.

    Raises:
        DistBackendError: The call failed, or was still in progress at the end.
    """
    pause = _SHORTEST
    while True:
        check()
        try:
            status = library.number("ncclCommGetAsyncError", communicator)
        except StatusError as error:
            raise translated(library, member, what, error) from None
        if status != IN_PROGRESS:
            break
        if time.monotonic() >= end:
            raise late("NCCL is still running; set NCCL_DEBUG=INFO to see what it waits for")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    if status:
        raise member.fault(what, library.functions.describe(status))
