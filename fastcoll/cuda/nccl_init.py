"""Makes one communicator: the ranks meet, then NCCL's init runs on a thread that can be left behind.

If all ranks have a communicator of the same ranks that shares its resources (``split_share``), they split it instead.
Rank 0 decides that from all ranks' records. So ranks that differ, because one has aborted its communicator, use init.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from fastcoll._load_cuda import CUDA
from fastcoll.cuda import deadline, nccl_library
from fastcoll.cuda.errors import NEVER_MADE, Member, names_of
from fastcoll.cuda.nccl import NcclCommunicator, current
from fastcoll.cuda.nccl_config import LibraryCommunicator, NcclConfig, check_config, is_set
from fastcoll.cuda.nccl_library import NcclLibrary, finish, settle, translated
from fastcoll.cuda.nccl_life import (
    ABORT_SECONDS,
    decref,
    incref,
    is_ending,
    left_behind,
    making,
)
from fastcoll.cuda.nccl_rendezvous import KEY_BYTES, WHAT, Rendezvous

__all__ = ["create_communicator"]

_GLANCE = 0.1  # seconds between two checks of what else may end NCCL's init

_log = logging.getLogger("fastcoll.cuda")


@making()
def create_communicator(
    store: Store,
    member: Member,
    device: torch.device,
    seconds: float,
    generation: int,
    abort_cause: Callable[[], str],
    config: NcclConfig | None = None,
    parents: Sequence[NcclCommunicator] = (),
    join: Callable[[CUDA.Communicators], None] = lambda family: None,
) -> NcclCommunicator:
    """Makes a communicator, together with all other ranks of the group.

    Args:
        store: The group's store, common to all ranks.
        member: Group and rank.
        device: The CUDA device of this rank.
        seconds: How long to wait for the other ranks.
        generation: How many communicators the ranks of this group have made before.
        abort_cause: Why the communicator is no longer wanted, which ends the wait with an error; "" while it is.
        config: NCCL config, equal on all ranks; if no field is set, CuPy's constructor makes the communicator.
        parents: Communicators that it may be split from, of the same rank, size and device; the best first. The ranks
            split one that all of them name.
        join: Called before the split with the communicators of the group that is split.

    Raises:
        ImportError: CuPy or NCCL is missing; there are two copies of NCCL.
        DistBackendError: A rank did not arrive in time, or NCCL failed here or on another rank; the error names ranks
            and cause.
        DistStoreError: The store holds an entry that is not fastcoll's.
        ValueError: This NCCL does not support the config.
    """
    library = nccl_library.load()
    check_config(library, config)
    end = time.monotonic() + seconds
    known = {hashlib.sha256(one.instance.encode()).digest()[:KEY_BYTES]: one for one in parents}
    meeting = Rendezvous(
        store, member, generation, library.version, end, seconds, abort_cause, [*known]
    )
    start = meeting.exchange(lambda: _unique_id(library, member))
    parent = known.get(start.parent)
    if parent is not None and parent.family is not None:
        join(parent.family)
    cupys = library.cupy.NcclCommunicator
    own = parent is not None or is_set(config)
    raw: Any = LibraryCommunicator(library) if own else cupys.__new__(cupys)

    def init() -> None:
        with current(device):
            if parent is not None:
                _split(parent, raw, member.rank, config)
            elif is_set(config):
                raw.make(member.size, start.token, member.rank, config)
            else:
                raw.__init__(member.size, start.token, member.rank)

    meeting.enter()
    call = deadline.start(init)
    try:
        while not call.wait(min(_GLANCE, end - time.monotonic())):
            if fault := meeting.fault():
                raise member.fault(WHAT, f"another rank failed: {fault}")
            if is_ending():
                raise member.fault(WHAT, "the interpreter ends")
            if cause := abort_cause():
                raise member.fault(WHAT, NEVER_MADE + cause)
            if time.monotonic() >= end:
                absent = meeting.not_entered()
                who = f"{names_of(absent)} did not begin" if absent else "all ranks began"
                raise meeting.timed_out(
                    f"{who} NCCL's init, which has not ended here (set NCCL_DEBUG=INFO to see what it waits for)"
                )
        finish(library, member, WHAT, call.result)
        if parent is not None:
            parent.await_part(WHAT, raw, end, meeting.timed_out)
        settle(library, member, WHAT, raw.comm, end, meeting.timed_out)
    except BaseException as error:
        meeting.fail(str(error))
        if parent is not None and parent.family is not None:  # its abort flag is that of the part
            parent.family.end_family(
                f"group '{member.group}' could not split a communicator of this group's family: {error}"
            )
        _give_up(member, raw, call)
        raise
    meeting.clean_up()
    instance = hashlib.sha256(start.token).hexdigest()[:16]
    return NcclCommunicator(raw, member, device, seconds, library, instance)


def _split(
    parent: NcclCommunicator, part: LibraryCommunicator, rank: int, config: NcclConfig | None
) -> None:
    """Splits a communicator of the same ranks, while no other thread makes calls of its family."""
    assert parent.family is not None
    given = NcclConfig() if config is None else copy.copy(config)
    given.split_share = 1  # so that the config is this group's, not the parent's
    parent.family.begin_calls()
    try:
        parent.make_part(part, 0, rank, given)
    finally:
        parent.family.end_calls()


def _unique_id(library: NcclLibrary, member: Member) -> bytes:
    try:
        return bytes(library.cupy.get_unique_id())
    except Exception as error:
        raise translated(library, member, WHAT, error) from None


def _give_up(member: Member, raw: Any, init: deadline.Call[None]) -> None:
    """Aborts the communicator of an init that has ended.

    An init that blocks is left behind with its thread. NCCL has already returned the communicator's handle then. But an
    abort does not wait for the init, and may free memory that the init still uses.
    """
    incref(raw)
    if not init.wait(_GLANCE):
        _log.warning(left_behind(member, "init", _GLANCE))
        return
    if raw.comm:
        abort = deadline.start(raw.abort)
        if not abort.wait(ABORT_SECONDS):
            _log.warning(left_behind(member, "abort", ABORT_SECONDS))
            return
    decref(raw)
