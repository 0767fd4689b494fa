"""What others write into the meeting place: garbage where a rank's record should be, and records of other versions."""

import os
import random
import re

import pytest
import torch.distributed as dist
from backend import IS_GLOO, beyond_gloo
from fault_list import plays
from fault_rank import Rank, catch
from in_time import assert_raised, in_time
from over_hosts import over_hosts
from rank_calls import all_reduce


def begins_alone(rank: Rank):
    """Rank 1 has its record when rank 0 begins to wait for it; gloo waits within init."""
    fault = catch(rank.init, timeout=3.0)
    if not IS_GLOO:
        rank.pause()
    rank.tell(fault or catch(all_reduce, rank))
    if dist.is_initialized():
        dist.destroy_process_group()
    return rank.left()


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


@plays(58)
@over_hosts
@pytest.mark.parametrize("case", range(8))
def test_garbage_where_a_record_should_be(jobs, case):
    job = jobs(2, begins_alone, ranks=[0])
    # The first record of rank 0; its neighbour's has the same name with another number.
    key = jobs.key(job, r"/0(/\d+)?$" if IS_GLOO else r"/r/0$")
    record = b"\0" * 100 if IS_GLOO else jobs.store.get(key)
    jobs.store.set(re.sub(r"0((/\d+)?)$", r"1\1", key), garbled(record, random.Random(58))[case])
    if not IS_GLOO:
        job.go()
    fault = job.hear(0)
    assert fault is not None, "no error: success was reported"
    assert IS_GLOO or fault.kind in ("DistStoreError", "DistBackendError"), fault
    assert re.search("store|record|layout", fault.text), fault.text
    in_time(fault.seconds, 5.0, fault.text)
    assert job.hear(0) == []


def of_some_version(rank: Rank):
    rank.init()
    rank.pause()
    rank.tell(catch(all_reduce, rank))
    dist.destroy_process_group()


def with_other_settings(rank: Rank):
    os.environ["FASTCOLL_RING_BYTES"] = str(65536 << rank.rank)
    of_some_version(rank)


def assert_told(job, *words: str):
    job.tell_all()
    for fault in job.hear_all().values():
        assert_raised(fault, *words, within=2.0)


@plays(60)
@over_hosts
@beyond_gloo("its ranks do not compare versions")
def test_another_version(jobs):
    job = jobs.ready(2, of_some_version)
    for rank in (0, 1):
        key = jobs.key(job, rf"/r/{rank}$")
        record = bytearray(jobs.store.get(key))
        record[-32:] = b"0.0.1-other".ljust(32, b"\0")
        jobs.store.set(key, bytes(record))
    assert_told(job, "0.0.1-other", "same version")


@plays(60)
@over_hosts
@beyond_gloo("has no such settings")
def test_other_settings(jobs):
    job = jobs.ready(2, with_other_settings)
    assert_told(job, "FASTCOLL_RING_BYTES", "65536", "131072")
