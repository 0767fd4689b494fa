"""How the ranks of a group come together for NCCL's init, through the group's store.

Every rank publishes a record with a number drawn now (a nonce). Rank 0 collects the records and publishes them
as the roster; a rank that finds its own record in the roster confirms it, under keys named by the roster's
hash. When all have confirmed, rank 0 publishes NCCL's unique id there. So what an earlier generation left in
a store that outlives its workers can delay the ranks, and never enters: no rank confirms a record that is not
its own of now, and a roster without it is not read any further. NCCL's init, which cannot be told to wait for
a rank only so long, begins when all ranks are there.

Nothing of this is secret but the id, which admits to the communicator: rank 0 deletes it after the init.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import struct
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fastcoll.cuda.errors import Member, names_of
from fastcoll.cuda.nccl_library import version_text

__all__ = ["WHAT", "Cancelled", "Rendezvous"]

WHAT = "nccl_init"
"""What errors say has failed."""

_RECORD = struct.Struct("<8s16sI")  # magic, nonce, version of NCCL
_MAGIC = b"fcnccl01"
_ID_BYTES = 128
_ID, _NO_ID = b"+", b"-"
_LONGEST_TEXT = 2000  # bytes of what another rank says
_SHORTEST, _LONGEST = 0.001, 0.1  # seconds between two looks into the store


class Cancelled(Protocol):
    """Whether the communicator is not wanted any more; a ``threading.Event`` is one."""

    def is_set(self) -> bool:
        """Returns whether it is so."""

    def wait(self, timeout: float) -> bool:
        """Returns whether it is so, waiting for that so many seconds."""


class Rendezvous:
    """One rank's part in the making of one communicator.

    Args:
        store: The group's.
        member: Group and rank.
        generation: How many communicators the group's ranks have made before this one.
        version: Of NCCL here.
        deadline: When to give up, on the clock of ``time.monotonic``.
        timeout: The seconds that this was, for the message.
        cancelled: Makes the waiting end.
    """

    def __init__(
        self,
        store: Store,
        member: Member,
        generation: int,
        version: int,
        deadline: float,
        timeout: float,
        cancelled: Cancelled,
    ) -> None:
        self._store = PrefixStore(f"fastcoll/nccl/{member.group}/{generation}", store)
        self._member = member
        self._deadline = deadline
        self._timeout = timeout
        self._cancelled = cancelled
        self._record = _RECORD.pack(_MAGIC, secrets.token_bytes(16), version)
        self._version = version
        self._roster = b""
        self._digest = ""

    def exchange(self, make_id: Callable[[], bytes]) -> bytes:
        """Returns NCCL's unique id, the same on all ranks, when all ranks have come.

        Args:
            make_id: Called on rank 0 alone.

        Raises:
            DistBackendError: Not all came in time, the versions of NCCL differ, or rank 0 has no id.
            DistStoreError: What the store holds is none of ours.
        """
        self._put(f"rank/{self._member.rank}", self._record)
        return self._lead(make_id) if self._member.rank == 0 else self._follow()

    def enter(self) -> None:
        """Tells the others that this rank begins NCCL's init."""
        self._put(f"{self._digest}/in/{self._member.rank}")

    def fail(self, text: str) -> None:
        """Tells the others that this rank's init failed; the first to say so is heard."""
        with contextlib.suppress(RuntimeError):  # the store may be what failed
            self._store.compare_set(f"{self._digest}/fault", "", f"{self._member.rank} {text}")

    def fault(self) -> str | None:
        """Returns what another rank said when its init failed."""
        key = f"{self._digest}/fault"
        if not self._store.check([key]):
            return None
        rank, _, text = self._store.get(key)[:_LONGEST_TEXT].decode(errors="replace").partition(" ")
        return None if rank == str(self._member.rank) else f"rank {rank}: {text}"

    def not_entered(self) -> list[int]:
        """Returns the ranks that have not begun NCCL's init."""
        return self._missing(f"{self._digest}/in")

    def clean_up(self) -> None:
        """Deletes this rank's keys; to be called when NCCL's init has ended well, which is so on all ranks."""
        rank = self._member.rank
        keys = [f"rank/{rank}", f"{self._digest}/ack/{rank}", f"{self._digest}/in/{rank}"]
        for key in [*keys, f"{self._digest}/id", "roster"] if rank == 0 else keys:
            with contextlib.suppress(RuntimeError):  # stores need not be able to delete
                self._store.delete_key(key)

    def timed_out(self, text: str) -> dist.DistBackendError:
        """Returns the error of a deadline that has passed."""
        own = f"rank/{self._member.rank}"
        if self._store.check([own]) and self._get(own) != self._record:
            text += f". Another process, too, says that it is rank {self._member.rank}"
        return self._member.fault(
            WHAT,
            f"timed out after {self._timeout * 1000:.0f} ms: {text}. Check that every rank of the group is alive "
            "and uses its CUDA tensors in the same order, or give the group a longer timeout.",
        )

    def _lead(self, make_id: Callable[[], bytes]) -> bytes:
        self._until(lambda: self._complete("rank"), "rank")
        self._publish(self._records())
        while not self._complete(f"{self._digest}/ack"):
            self._until(
                lambda: self._complete(f"{self._digest}/ack") or self._records() != self._roster,
                f"{self._digest}/ack",
            )
            if (records := self._records()) != self._roster:  # one was of an earlier generation
                self._publish(records)
        try:
            self._compare_versions()
            unique_id = make_id()
        except Exception as error:
            self._put(f"{self._digest}/id", _NO_ID + str(error).encode())
            raise
        self._put(f"{self._digest}/id", _ID + unique_id)
        return unique_id

    def _follow(self) -> bytes:
        while True:
            self._until(self._in_new_roster, "rank")
            self._put(f"{self._digest}/ack/{self._member.rank}")
            self._until(
                lambda: self._store.check([f"{self._digest}/id"]) or self._in_new_roster(look=True),
                f"{self._digest}/ack",
            )
            key = f"{self._digest}/id"
            if not self._store.check([key]):
                continue
            self._compare_versions()  # not before all have confirmed: a record may be an old one
            answer = self._get(key)
            if answer[:1] == _ID and len(answer) == 1 + _ID_BYTES:
                return answer[1:]
            if answer[:1] == _NO_ID:
                text = answer[1:_LONGEST_TEXT].decode(errors="replace")
                raise self._member.fault(WHAT, f"rank 0 made no unique id: {text}")
            raise self._foreign("the unique id")

    def _in_new_roster(self, look: bool = False) -> bool:
        """Whether there is a roster with this rank's record that was not read before; takes it, or just looks."""
        if not self._store.check(["roster"]):
            return False
        roster = self._get("roster")
        rank, width = self._member.rank, _RECORD.size
        mine = roster[rank * width : (rank + 1) * width] == self._record
        if not mine or len(roster) != self._member.size * width or roster == self._roster:
            return False
        if not look:
            self._take(roster)
        return True

    def _publish(self, roster: bytes) -> None:
        self._take(roster)
        self._put("roster", roster)
        self._put(f"{self._digest}/ack/0")

    def _take(self, roster: bytes) -> None:
        self._roster = roster
        self._digest = hashlib.sha256(roster).hexdigest()[:32]

    def _records(self) -> bytes:
        keys = self._keys("rank")
        store: Any = self._store  # torch's stubs lack the question
        values = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
        records = [_decoded(value) for value in values]
        for rank, record in enumerate(records):
            if len(record) != _RECORD.size or record[: len(_MAGIC)] != _MAGIC:
                raise self._foreign(f"the record of rank {rank}")
        return b"".join(records)

    def _compare_versions(self) -> None:
        versions = [version for _, _, version in _RECORD.iter_unpack(self._roster)]
        for rank, version in enumerate(versions):
            if version != self._version:
                raise self._member.fault(
                    WHAT,
                    f"expected the same NCCL on all ranks, got {version_text(self._version)} here and "
                    f"{version_text(version)} on rank {rank}. Install the same version everywhere.",
                )

    def _put(self, key: str, value: bytes = b"") -> None:
        self._store.set(key, value.hex())

    def _get(self, key: str) -> bytes:
        return _decoded(self._store.get(key))

    def _keys(self, folder: str) -> list[str]:
        return [f"{folder}/{rank}" for rank in range(self._member.size)]

    def _complete(self, folder: str) -> bool:
        return self._store.check(self._keys(folder))

    def _missing(self, folder: str) -> list[int]:
        keys = enumerate(self._keys(folder))
        return [rank for rank, key in keys if not self._store.check([key])]

    def _until(self, true: Callable[[], bool], folder: str) -> None:
        """Waits; if it has waited too long, names the ranks that have no key in the folder."""
        pause = _SHORTEST
        while not true():
            if time.monotonic() >= self._deadline:
                absent = self._missing(folder) or [0]
                have = "have" if len(absent) > 1 else "has"
                raise self.timed_out(
                    f"{names_of(absent)} {have} not come to create the NCCL communicator"
                )
            if self._cancelled.wait(pause):
                raise self._member.fault(WHAT, "the communicator was aborted before it was made")
            pause = min(2 * pause, _LONGEST)

    def _foreign(self, what: str) -> dist.DistStoreError:
        return dist.DistStoreError(
            self._member.says(
                WHAT,
                f"{what} in the store is not fastcoll's, or of another version of it. Use the same version on all "
                "ranks, and a store that other programs do not write to.",
            )
        )


def _decoded(value: bytes) -> bytes:
    """Returns what was put; nothing where the store holds something else."""
    try:
        return bytes.fromhex(value.decode("ascii"))
    except ValueError:
        return b""
