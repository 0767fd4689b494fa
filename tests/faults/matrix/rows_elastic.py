"""Rows 56 to 60: restarts, ranks that come back, and what others write into the meeting place."""

import contextlib
import os
import random
import re
import socket
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from fault_job import DEADLINE, JobFailed
from fault_rank import Rank, catch
from in_call import tell_in_call
from matrix_ranks import VICTIM, all_reduce, finish, repeated, works
from matrix_row import ANY_ERROR, NotPlayed, Outcome, Stage, Verdict, limit, row, worst
from torchrun import torchrun

__all__: list[str] = []


@row(
    56,
    "torchrun --max-restarts after a SIGKILL",
    "generation 1 works the first time",
    "test_torchrun.py::test_restart_after_a_killed_worker",
)
def restarted(stage: Stage) -> Outcome:
    start = time.monotonic()
    environment = {"FASTCOLL_TEST_BACKEND": stage.backend}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        try:
            printed = torchrun(
                "die_once.py",
                Path(folder) / "checkpoint",
                max_restarts=1,
                environment=environment,
                deadline=60.0,
            )
        except AssertionError as error:
            last = [line for line in str(error).splitlines() if re.search(r"Error: ", line)]
            return Outcome(Verdict.FAILS, detail=last[0] if last else str(error)[:200])
    ends = printed.count("in life 1, having started at step 3")
    verdict = Verdict.AS_WANTED if ends == 2 else Verdict.WRONG_RESULT
    return Outcome(verdict, time.monotonic() - start, "of the whole job")


@row(
    57,
    "a group rebuilt without the dead rank, which then joins again",
    "0.1 s after the error; right results",
)
def shrinks_and_grows(stage: Stage) -> Outcome:
    name = f"elastic {time.monotonic()}/"
    job = stage.started(3, loses_one, prefix=name)
    job.kill(VICTIM)
    rebuilt = [job.hear(rank) for rank in (0, 2)]
    late = stage.jobs(3, joins_again, ranks=[VICTIM], prefix=name)
    found = [stage.checks(late), stage.checks(job, but=[VICTIM])]
    seconds = max(rebuilt)
    if seconds > limit(0.1):
        found.append(Outcome(Verdict.TOO_SLOW, seconds, "until the smaller group worked"))
    return worst(found, seconds)


def loses_one(rank: Rank):
    rank.used()
    tell_in_call(rank, 3)
    fault = repeated(all_reduce, rank, 100_000)
    start = time.monotonic()
    dist.destroy_process_group()
    rank.init("smaller", rank=rank.rank // 2, world_size=2)
    tensor = torch.ones(100)
    dist.all_reduce(tensor)
    rank.tell(time.monotonic() - start)
    assert fault is not None and tensor[0] == 2.0, "a wrong result was returned as success"
    dist.destroy_process_group()
    return joins_again(rank)


def joins_again(rank: Rank):
    rank.used("larger")
    works(rank)
    return finish(rank)


# --- what is in the store ------------------------------------------------------------------------


def begins_alone(rank: Rank):
    rank.tell(catch(rank.used, timeout=3.0))
    if dist.is_initialized():
        dist.destroy_process_group()
    assert rank.left() == [], rank.left()


def published(store: dist.TCPStore, prefix: str, pattern: str, native: bool = True) -> str:
    """Wait for a key under the prefix; return the whole key.

    Raises:
        JobFailed: if fastcoll writes no such key.
        NotPlayed: if another backend writes none, as it may.
    """
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        for key in store.list_keys():
            if prefix in key and re.search(pattern, key):
                return key
        time.sleep(0.01)
    if native:
        text = f"expected a key that matches {pattern} in the store, got none in {DEADLINE:g} s"
        raise JobFailed(text, "silent")
    raise NotPlayed("no record is to be seen in the store")


def garbled(record: bytes, chance: random.Random) -> list[bytes]:
    """Return what somebody might write where a record is expected."""
    flipped = bytearray(record)
    flipped[chance.randrange(16)] ^= 0x40
    return [
        b"",
        b"x",
        record[:-1],
        record + b"\0",
        bytes(flipped),
        chance.randbytes(len(record)),
        b"\xff" * len(record),
        chance.randbytes(1 << 20),
    ]


@row(
    58,
    "garbage in the store where a rank's record or vote should be",
    "DistStoreError within 5 s, no crash",
    "test_votes.py::test_what_is_no_vote",
    "test_votes.py::test_what_is_no_list_of_votes",
    quick=True,
)
def garbage_in_the_store(stage: Stage) -> Outcome:
    store = dist.TCPStore("127.0.0.1", stage.jobs.port, is_master=False)
    chance = random.Random(58)
    found = []
    for case in range(len(garbled(b"\0" * 64, chance))):
        prefix = f"garbled {time.monotonic()}/"
        job = stage.jobs(2, begins_alone, ranks=[0], prefix=prefix)
        # The first record of rank 0; its neighbour's has the same name with another number.
        pattern = r"/r/0$" if stage.native else r"/0(/\d+)?$"
        key = published(store, prefix, pattern, stage.native)
        record = store.get(key) if stage.native else b"\0" * 100
        theirs = re.sub(r"0((/\d+)?)$", r"1\1", key)
        store.set(theirs, garbled(record, chance)[case])
        kinds = ["DistStoreError", "DistBackendError"] if stage.native else ANY_ERROR
        found.append(
            stage.errors(job, None, 5.0, "store|record|layout", kinds=kinds, aftermath=False)
        )
        found.append(stage.ended(job, within=6.0))
    return worst(found)


# --- what comes to the sockets -------------------------------------------------------------------


@row(
    59,
    "garbage to every socket that listens",
    "ignored: right results, no descriptor lost",
)
def garbage_to_sockets(stage: Stage) -> Outcome:
    job = stage.started(2, is_pelted)
    chance = random.Random(59)
    hit = 0
    for pid in job.pids.values():
        for family, kind, address in listening(pid):
            hit += 1
            pelt(family, kind, address, chance)
    if not hit:
        raise NotPlayed("no socket listens")
    job.tell_all()
    found = stage.checks(job)
    return Outcome(found.verdict, found.seconds, found.detail or f"{hit} sockets")


def is_pelted(rank: Rank):
    rank.used()
    works(rank)
    before = len(os.listdir("/proc/self/fd"))
    rank.tell("ready")
    rank.hear()
    works(rank)
    group = dist.new_group([0, 1])
    all_reduce(rank, 5000, group)
    dist.destroy_process_group(group)
    del group
    kept = len(os.listdir("/proc/self/fd")) <= before
    return finish(rank, descriptors=kept)


def listening(pid: int) -> list[tuple[int, int, object]]:
    """Return family, type and address of all sockets on which the process listens."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{name}")
            if link.startswith("socket:["):
                inodes.add(link[8:-1])
    found: list[tuple[int, int, object]] = []
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                port = int(fields[1].rpartition(":")[2], 16)
                host = "127.0.0.1" if family == socket.AF_INET else "::1"
                found.append((family, socket.SOCK_STREAM, (host, port)))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & 0x10000 and fields[6] in inodes and len(fields) > 7:
            name = fields[7].encode()
            address = b"\0" + name[1:] if name.startswith(b"@") else name
            found.append((socket.AF_UNIX, int(fields[4]), address))
    return found


def pelt(family: int, kind: int, address: object, chance: random.Random) -> None:
    """Send what does not belong there, with and without descriptors, and leave."""
    magic = (0x314C4C4F43545346).to_bytes(8, "little")  # of a hello
    for attempt in range(60):
        with socket.socket(family, kind) as connection, contextlib.suppress(OSError):
            connection.settimeout(1.0)
            connection.connect(address)
            size = chance.choice([0, 1, 8, 55, 56, 57, 64, 1000, 65536])
            data = chance.randbytes(size)
            if attempt % 3 == 0:
                data = (magic + (3).to_bytes(4, "little") + (56).to_bytes(4, "little") + data)[:56]
            if family == socket.AF_UNIX and attempt % 2:
                socket.send_fds(connection, [data or b"x"], [0] * chance.choice([1, 2, 8, 30]))
            else:
                connection.send(data)


# --- other versions ------------------------------------------------------------------------------


@row(
    60,
    "another version, or other settings, on one rank",
    "error at init that names both",
)
def versions(stage: Stage) -> Outcome:
    if not stage.native:
        raise NotPlayed("gloo's ranks tell no version")
    store = dist.TCPStore("127.0.0.1", stage.jobs.port, is_master=False)
    prefix = f"versions {time.monotonic()}/"
    job = stage.started(2, of_some_version, prefix=prefix)
    for rank in (0, 1):
        key = published(store, prefix, rf"/r/{rank}$", stage.native)
        record = bytearray(store.get(key))
        record[-32:] = b"0.0.1-other".ljust(32, b"\0")
        store.set(key, bytes(record))
    start = time.monotonic()
    job.tell_all()
    found = [stage.errors(job, start, 2.0, r"0\.0\.1-other", "same version", aftermath=False)]
    job = stage.started(2, with_other_settings)
    start = time.monotonic()
    job.tell_all()
    said = ("FASTCOLL_RING_BYTES", "65536", "131072")
    found.append(stage.errors(job, start, 2.0, *said, aftermath=False))
    return worst(found)


def of_some_version(rank: Rank):
    rank.init(timeout=4.0)
    rank.tell("ready")
    rank.hear()
    rank.tell(catch(all_reduce, rank))
    dist.destroy_process_group()


def with_other_settings(rank: Rank):
    os.environ["FASTCOLL_RING_BYTES"] = str(65536 << rank.rank)
    of_some_version(rank)
