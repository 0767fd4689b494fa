"""How the ranks of a group meet for NCCL's init, through the group's store.

Every rank's record in the roster (csrc/group/roster.hpp) contains its version of NCCL, and the communicators of which
the new one could be a part. When all ranks have arrived (the round "ready"), rank 0 posts in the round "id" how they
begin: with the first of its communicators that all ranks have, else with NCCL's unique id. So stale records, in a store
that outlives its workers, can delay the ranks but never take part. NCCL's init has no timeout, so it begins only when
all ranks have arrived.

Only the id is secret, because it admits a process to the communicator: it is deleted after the init.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fastcoll._load_cuda import CUDA
from fastcoll.cuda.errors import NEVER_MADE, Member, names_of
from fastcoll.cuda.nccl_library import version_text
from fastcoll.cuda.nccl_life import is_ending

__all__ = ["KEY_BYTES", "WHAT", "Rendezvous", "Start"]

WHAT = "nccl_init"
"""Name of the failed call in errors."""

KEY_BYTES = 8
"""Length of a communicator's key in a record."""

_KEYS = 8  # at most, in a record
_RECORD = struct.Struct(f"<8s16sI{_KEYS * KEY_BYTES}s")  # magic, nonce, version of NCCL, keys
_MAGIC = b"fcnccl03"
_ID_BYTES = 128
_TOKEN_BYTES = 16
_ID, _NO_ID, _SPLIT = b"+", b"-", b"="
_LONGEST_TEXT = 2000  # bytes of another rank's error


class Start(NamedTuple):
    """How all ranks make the communicator.

    Attributes:
        token: NCCL's unique id, or other bytes that are equal on all ranks and new.
        parent: Key of the communicator to split; b"": none, so NCCL's init makes it.
    """

    token: bytes
    parent: bytes = b""


@dataclass(eq=False, repr=False)
class Rendezvous:
    """One rank's part in making one communicator.

    Attributes:
        store: The group's store.
        member: Group and rank.
        generation: How many communicators the group's ranks have made before this one.
        version: Version of NCCL on this rank.
        deadline: When to stop waiting, on the clock of ``time.monotonic``.
        timeout: The whole wait in seconds, for the error.
        abort_cause: Why the communicator is no longer wanted, which ends the wait; "" while it is.
        parents: Keys of the communicators that this rank could split.
    """

    store: Store
    member: Member
    generation: int
    version: int
    deadline: float
    timeout: float
    abort_cause: Callable[[], str]
    parents: Sequence[bytes] = ()

    def __post_init__(self) -> None:
        keys = b"".join(self.parents[:_KEYS])
        self._record = _RECORD.pack(_MAGIC, secrets.token_bytes(16), self.version, keys)
        folder = f"fastcoll/nccl/{self.member.group}/{self.generation}"
        ours = self.member.rank, self.member.size, self._record
        self._roster = CUDA.Roster(self.store, folder, *ours, len(_MAGIC))

    def exchange(self, make_id: Callable[[], bytes]) -> Start:
        """Returns how to begin, the same on all ranks, when all ranks have arrived.

        Args:
            make_id: Makes the unique id; called on rank 0 only.

        Raises:
            DistBackendError: A rank did not arrive in time, the versions of NCCL differ, or rank 0 has no id.
            DistStoreError: The store holds an entry that is not fastcoll's.
        """
        try:
            return self._exchange(make_id)
        except dist.DistStoreError as error:
            raise dist.DistStoreError(self.member.message(WHAT, str(error))) from None

    def enter(self) -> None:
        """Posts that this rank begins NCCL's init."""
        self._roster.post("in", b"")

    def fail(self, text: str) -> None:
        """Posts that this rank's init failed; the first report counts."""
        with contextlib.suppress(RuntimeError):  # the store may be what failed
            self._roster.tell(f"rank {self.member.rank}: {text}")

    def fault(self) -> str | None:
        """Returns the error of another rank whose init failed, or None."""
        text = self._roster.told()
        return None if text is None or text.startswith(f"rank {self.member.rank}: ") else text

    def not_entered(self) -> list[int]:
        """Returns the ranks that have not begun NCCL's init."""
        return self._roster.missing("in")

    def clean_up(self) -> None:
        """Deletes this rank's keys; call it after NCCL's init succeeded, which is then so on all ranks."""
        self._roster.erase()

    def timed_out(self, text: str) -> dist.DistBackendError:
        """Returns the error for a deadline that has passed."""
        if self._roster.read(self.member.rank) not in (None, self._record):
            text += f". Another process has joined as rank {self.member.rank} too"
        return self.member.fault(
            WHAT,
            f"timed out after {self.timeout * 1000:.0f} ms: {text}. Check that every rank of the group is alive "
            "and uses its CUDA tensors in the same order, or raise the group's timeout.",
        )

    def _exchange(self, make_id: Callable[[], bytes]) -> Start:
        self._roster.publish()
        while True:
            records = self._roster.gather(lambda: self._look(None))
            if self._roster.exchange("ready", b"", lambda: self._look("ready"), True) is None:
                continue
            # Not before all are ready: one may have been an old one.
            self._compare_versions(records)
            text, failure = b"", None
            if self.member.rank == 0:
                try:
                    parent = _common_key(records)
                    text = (
                        _SPLIT + parent + secrets.token_bytes(_TOKEN_BYTES)
                        if parent
                        else _ID + make_id()
                    )
                except Exception as error:
                    text, failure = _NO_ID + str(error).encode(), error
            try:
                said = self._roster.exchange("id", text, lambda: self._look("id"), True)
            except Exception:
                if failure is not None:
                    raise failure from None
                raise
            if failure is not None:
                raise failure
            if said is not None:
                return self._start(said[0])

    def _look(self, round: str | None) -> None:
        """Called between two reads of the store: ends the wait for records (`round` is None) or for a round."""
        if is_ending():
            raise self.member.fault(WHAT, "the interpreter ends")
        if cause := self.abort_cause():
            raise self.member.fault(WHAT, NEVER_MADE + cause)
        if time.monotonic() < self.deadline:
            return
        if round is None:
            ranks = range(self.member.size)
            absent = [rank for rank in ranks if self._roster.read(rank) is None]
        else:
            absent = self._roster.missing(round)
        absent = absent or [0]  # rank 0 has not made the roster
        have = "have" if len(absent) > 1 else "has"
        raise self.timed_out(
            f"{names_of(absent)} {have} not arrived to create the NCCL communicator"
        )

    def _compare_versions(self, records: list[bytes]) -> None:
        for rank, record in enumerate(records):
            version = _RECORD.unpack(record)[2]
            if version != self.version:
                raise self.member.fault(
                    WHAT,
                    f"expected the same NCCL on all ranks, got {version_text(self.version)} here and "
                    f"{version_text(version)} on rank {rank}. Install the same version everywhere.",
                )

    def _start(self, text: bytes) -> Start:
        if text[:1] == _ID and len(text) == 1 + _ID_BYTES:
            return Start(text[1:])
        if text[:1] == _SPLIT and len(text) == 1 + KEY_BYTES + _TOKEN_BYTES:
            return Start(text[1 + KEY_BYTES :], text[1 : 1 + KEY_BYTES])
        if text[:1] == _NO_ID:
            why = text[1:_LONGEST_TEXT].decode(errors="replace")
            raise self.member.fault(WHAT, f"rank 0 made no unique id: {why}")
        raise dist.DistStoreError(
            "the store holds an invalid entry of fastcoll: NCCL's unique id. Give each job its own store prefix, and "
            "install the same version of fastcoll for all ranks."
        )


def _common_key(records: Sequence[bytes]) -> bytes:
    """Returns the first key of rank 0's record that is in all records; b"" if there is none."""
    first, *others = (
        [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        for *_, keys in map(_RECORD.unpack, records)
    )
    return next((key for key in first if any(key) and all(key in other for other in others)), b"")
