"""Votes and decisions that somebody else writes into the store, met by ranks in a real rendezvous.

Whoever reaches the store sees the ranks' records, and can compute the names of the keys. What is there must be
a vote, or an error of the store on all ranks; and no vote makes a rank use memory that it has not.
"""

import re
import struct
import time

import pytest
import torch
import torch.distributed as dist
from fault_rank import Rank, catch
from matrix_machine import refuse_calls
from rows_elastic import published

NOTICED = 3.0
OVER_GLOO = {"FASTCOLL_TRANSPORT": "gloo"}
GARBAGE = [b"", b"gloo", b"\xff" * 64, b"s" * (1 << 20)]


def begins(rank: Rank, has_memory: bool = True):
    rank.init(timeout=4.0)
    if not has_memory and rank.rank == 1:
        refuse_calls("fallocate")
    rank.tell("ready")
    rank.hear()
    tensor = torch.full((1000,), rank.rank + 1.0)
    fault = catch(dist.all_reduce, tensor)
    if fault is None:
        assert torch.all(tensor == 3.0), "a wrong result was returned as success"
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    used = backend.transport()
    del backend
    rank.tell((fault, used))
    dist.destroy_process_group()
    return rank.left()


def encoded(*texts: bytes) -> bytes:
    """What rank 0 publishes of all ranks; see csrc/group/roster.hpp."""
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


class Forger:
    """Somebody who reaches the store of two ranks."""

    def __init__(self, jobs, job, prefix: str) -> None:
        self.store = dist.TCPStore("127.0.0.1", jobs.port, is_master=False)
        job.hear_all()
        keys = [published(self.store, prefix, rf"/r/{rank}$") for rank in (0, 1)]
        self.folder = keys[0].removesuffix("r/0")
        records = [self.store.get(key) for key in keys]
        found = 0xCBF29CE484222325
        for byte in encoded(*records):
            found = (found ^ byte) * 0x100000001B3 % (1 << 64)
        self.hash = f"{found:016x}"

    def write(self, key: str, value: bytes) -> None:
        self.store.set(f"{self.folder}{key.replace('H', self.hash)}", value)


@pytest.fixture
def forged(jobs):
    """Start two ranks, forge, let rank 0 go first; return what came of both."""

    def play(key: str, value: bytes, environment=None, has_memory=True, both=False):
        prefix = f"votes {time.monotonic()}/"
        job = jobs(2, begins, has_memory, prefix=prefix, environment=environment)
        Forger(jobs, job, prefix).write(key, value)
        job.tell(0)
        time.sleep(0.0 if both else 0.3)
        job.tell(1)
        answers = job.hear_all()
        assert set(map(tuple, job.hear_all().values())) == {()}
        job.ended_well()
        return answers[0], answers[1]

    return play


@pytest.mark.parametrize("environment", [{}, OVER_GLOO], ids=["shm", "gloo"])
@pytest.mark.parametrize("value", GARBAGE, ids=[repr(value[:8]) for value in GARBAGE])
def test_what_is_no_vote(forged, value, environment):
    for fault, _ in forged("H/v/1", value, environment):
        assert fault is not None and fault.kind == "DistStoreError", fault
        assert "what the store holds as a vote is none of fastcoll's" in fault.text
        assert fault.seconds < NOTICED, fault


@pytest.mark.parametrize("value", [b"", b"shmx", encoded(b"shm"), encoded(b"shm", b"shmx")])
def test_what_is_no_list_of_votes(forged, value):
    """Rank 0 publishes what all have voted; who reads something else before must not guess."""
    (first, used), (second, _) = forged("H/v", value, both=True)
    if second is None:  # it read rank 0's, which came in time
        assert first is None and used == "shm"
        return
    assert second.kind == "DistStoreError" and second.seconds < NOTICED, second


def test_a_vote_for_gloo_in_a_rank_s_name(forged):
    """The worst that a well-formed vote does: all use Gloo, and are right."""
    for fault, used in forged("H/v/1", b"gloo: \x1b[2J" + b"because " * 1000):
        assert fault is None, fault
        assert used == "gloo"


def test_a_vote_for_memory_that_is_not_there(forged):
    (first, used), (second, there) = forged("H/v/1", b"shm", has_memory=False, both=True)
    assert first is None and second is None, (first, second)
    assert used == there == "gloo"


def test_a_list_for_memory_that_is_not_there(forged):
    (_, _), (second, _) = forged("H/v", encoded(b"shm", b"shm"), has_memory=False, both=True)
    assert second is not None and second.seconds < NOTICED
    assert re.search("the store says that all ranks share memory, but ", second.text), second.text
    assert second.kind == "DistStoreError", second


@pytest.mark.parametrize("value", [b"B", b"Xtext"])
def test_what_is_no_fault(forged, value):
    for fault, used in forged("f/H", value):
        assert fault is None and used == "shm"


def test_a_fault_in_a_rank_s_name(forged):
    """It stops the job, as any false record does, and is shown without what a terminal would obey."""
    faults = [
        fault for fault, _ in forged("f/H", b"B1700000000000 rank 1 \x1b[2J " + b"died " * 1000)
    ]
    for fault in faults:
        assert fault is not None and fault.kind == "DistBackendError", fault
        assert "rank 1  [2J died" in fault.text and len(fault.text) < 2000
