"""Votes and decisions that somebody else writes into the store, met by ranks in a real rendezvous.

Whoever reaches the store sees the ranks' records, and can compute the names of the keys. What is there must be
a vote, or an error of the store on all ranks; and no vote makes a rank use memory that it has not.
"""

import struct
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from fault_list import plays
from fault_rank import Rank, catch
from in_time import assert_raised
from machine import refuse_calls
from odd_stores import HidesLinks
from rank_calls import transport
from suite_rules import bound, full

pytestmark = beyond_gloo("how fastcoll's ranks agree")

NOTICED = 1.0
OVER_GLOO = {"FASTCOLL_SHARED_MEMORY": "off"}
GARBAGE = [b"", b"gloo", b"\xff" * 64, b"s" * (1 << 20)]


class Unpublished(HidesLinks):
    """The store of a rank 0 whose list of votes comes too late: another one is there before."""

    def set(self, key, value):
        if not key.endswith("/v"):
            self.store.set(key, value)

    def check(self, keys):
        return self.store.check(keys)


def begins(rank: Rank, has_memory: bool, publishes: bool):
    store = rank.store("first")
    if rank.rank == 0 and not publishes:
        store = Unpublished(store)
    rank.init(store=store)
    if not has_memory and rank.rank == 1:
        refuse_calls("fallocate")
    rank.pause()
    tensor = torch.full((1000,), rank.rank + 1.0)
    fault = catch(dist.all_reduce, tensor)
    if fault is None:
        assert torch.all(tensor == 3.0), "a wrong result was returned as success"
    rank.tell((fault, transport()))
    rank.finish()


def encoded(*texts: bytes) -> bytes:
    """What rank 0 publishes of all ranks; see csrc/group/roster.hpp."""
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


@pytest.fixture
def forged(jobs):
    """Start two ranks and set a key of their group, in which H is the hash of both records; return what came of both.

    Rank ``first`` calls before the other, until it has failed, or the key ``until`` is there; None: both at once.
    """

    def play(
        key, value, *, first=None, until="", publishes=True, environment=None, has_memory=True
    ):
        job = jobs.ready(2, begins, has_memory, publishes, environment=environment)
        records = [jobs.key(job, rf"/r/{rank}$") for rank in (0, 1)]
        found = 0xCBF29CE484222325
        for byte in encoded(*map(jobs.store.get, records)):
            found = (found ^ byte) * 0x100000001B3 % (1 << 64)
        path = records[0].removesuffix("r/0")
        jobs.store.set(path + key.replace("H", f"{found:016x}"), value)
        answers = {}
        for rank in [0, 1] if first is None else [first, 1 - first]:
            job.tell(rank)
            if rank == first and until:
                awaited = path + until.replace("H", f"{found:016x}")
                jobs.store.wait([awaited], timedelta(seconds=bound(2.0)))
            elif rank == first:
                answers[rank] = job.hear(rank)
        answers |= job.hear_all(but=answers)
        job.hear_all()
        return answers[0], answers[1]

    return play


@plays(58)
@pytest.mark.parametrize("environment", [pytest.param({}, id="shm"), full(OVER_GLOO, id="gloo")])
@pytest.mark.parametrize("value", GARBAGE, ids=[repr(value[:8]) for value in GARBAGE])
def test_what_is_no_vote(forged, value, environment):
    for fault, _ in forged("H/v/1", value, first=0, environment=environment):
        said = "the store holds an invalid entry of fastcoll"
        assert_raised(fault, said, kind="DistStoreError", within=NOTICED)


@plays(58)
@pytest.mark.parametrize("value", [b"", b"shmx", encoded(b"shm"), encoded(b"shm", b"shmx")])
def test_what_is_no_list_of_votes(forged, value):
    """Rank 0 publishes what all have voted; a rank that reads something else before must not guess."""
    (first, _), (second, _) = forged("H/v", value, publishes=False)
    assert_raised(second, kind="DistStoreError", within=NOTICED)
    assert first is not None, first


def test_a_vote_against_shared_memory_in_a_rank_s_name(forged):
    """The worst that a well-formed vote does: all use Gloo, and are right."""
    for fault, used in forged(
        "H/v/1", b"apart: \x1b[2J" + b"because " * 1000, first=0, until="H/v"
    ):
        assert fault is None, fault
        assert used == "gloo"


def test_a_vote_for_memory_that_is_not_there(forged):
    (first, used), (second, there) = forged("H/v/1", b"shm", has_memory=False)
    assert first is None and second is None, (first, second)
    assert used == there == "gloo"


@pytest.mark.full  # rank 0 may connect by Gloo for ten seconds before it reads why rank 1 has failed
def test_a_list_for_memory_that_is_not_there(forged):
    (_, _), (second, _) = forged("H/v", encoded(b"shm", b"shm"), publishes=False, has_memory=False)
    said = "the store has the entry that all ranks share memory, but "
    assert_raised(second, said, kind="DistStoreError", within=NOTICED)


@pytest.mark.parametrize("value", [b"B", b"Xtext"])
def test_what_is_no_fault(forged, value):
    for fault, used in forged("f/H", value):
        assert fault is None and used == "shm"


def test_a_fault_in_a_rank_s_name(forged):
    """It stops the job, as any false record does, and is shown without what a terminal would obey."""
    value = b"B1700000000000 rank 1 \x1b[2J " + b"died " * 1000
    for fault, _ in forged("f/H", value, first=0):
        assert_raised(fault, "rank 1  [2J died")
        assert len(fault.text) < 2000
