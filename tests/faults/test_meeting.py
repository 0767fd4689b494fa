"""Ranks that meet, or wait, while another is stopped, late, computes, or ends with the store."""

import ctypes
import re
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from fault_rank import PATIENT, Rank, catch, footprint
from in_call import soon, tell_in_call
from in_time import assert_raised
from odd_stores import Between, Slow
from on_ranks import on_ranks
from rank_calls import swap
from suite_rules import bound, until

import fastcoll

pytestmark = beyond_gloo("how fastcoll's ranks meet")


# --- messages -------------------------------------------------------------------------------------


class Ending(Between):
    """A store that tells the test when a first read of it has failed."""

    def __init__(self, store: dist.Store, rank: Rank) -> None:
        super().__init__(store)
        self.rank, self.ended = rank, False

    def check(self, keys):
        try:
            return super().check(keys)
        except Exception:
            if not self.ended:
                self.rank.tell("noticed")
            self.ended = True
            raise


def store_ends(rank: Rank):
    """Rank 2 holds the store and has not made the group; ranks 0 and 1 have met for messages."""
    store = rank.store_of(2)
    if rank.rank == 2:
        return rank.hear()
    if rank.rank == 1:
        store = Ending(store, rank)
    rank.init(store=store)
    x = torch.full((3,), rank.rank + 1.0)
    if rank.rank == 0:
        dist.send(x, 1)
        dist.recv(torch.ones(3), 1)  # each has met the other
        rank.tell("met")
        rank.hear()
        dist.send(x, 1)
        rank.hear()
        return None
    dist.recv(x, 0)
    dist.send(x, 0)
    tell_in_call(rank)
    dist.recv(x, 0)
    return x.tolist()


def test_a_wait_for_a_message_outlives_the_store(jobs):
    job = jobs(3, store_ends)
    assert [job.hear(0), job.hear(1)] == ["met", "in call"]
    job.kill(2)
    job.end(2)
    assert job.hear(1) == "noticed"  # by the thread that reads the store five times a second
    job.tell(0)
    assert job.hear(1) == [1.0] * 3
    job.tell(0)


def one_is_stopped(rank: Rank):
    """Rank 1 listens, for it awaits a message, and is stopped; rank 0 has never met it."""
    rank.init()
    rank.meet("made")
    x = torch.ones(2)
    if rank.rank == 1:
        work = dist.irecv(x, 2)
        until(lambda: fastcoll.info.groups()[0]["shared_bytes"])
        rank.tell("listens")
        work.wait()
        dist.send(x, 0)
        rank.meet()
        return x.tolist()
    rank.hear()
    late = torch.zeros(2)
    work = dist.irecv(late, 1) if rank.rank == 0 else None
    peer = 2 - rank.rank
    for _ in range(300):
        swap(x, peer, rank.rank == 0)
    rank.tell("done")
    rank.hear()
    if rank.rank == 2:
        dist.send(x, 1)
    if work is not None:
        work.wait()
    rank.meet()  # what it has sent lies in its memory
    return late.tolist()


def test_a_stopped_rank_holds_up_no_messages_of_others(jobs):
    job = jobs(3, one_is_stopped)
    assert job.hear(1) == "listens"
    job.signal(1, signal.SIGSTOP)
    job.tell(0, 2)
    assert [job.hear(0, bound(5.0)), job.hear(2, bound(5.0))] == ["done", "done"]
    job.signal(1, signal.SIGCONT)
    job.tell(0, 2)
    assert job.hear(1) == [1.0, 1.0]
    assert [job.hear(0), job.hear(2)] == [[1.0, 1.0], [0.0, 0.0]]


def one_is_late(rank: Rank):
    """Rank 0, whose store is slow, awaits a message of rank 1, which makes the group when it is told to."""
    store = Slow(rank.store("first"))
    if rank.rank == 1:
        rank.hear()
    rank.init(store=store)
    if rank.rank == 1:
        dist.send(torch.full((2,), 7.0), 0)
        rank.meet()
        return None
    x, late = torch.ones(2), torch.zeros(2)
    if rank.rank == 0:
        dist.recv(x, 2)
        store.seconds = 0.3
        work = dist.irecv(late, 1)
        for _ in range(100):
            swap(x, 2, True)
        rank.tell("done")
        work.wait()
    else:
        dist.send(x, 0)
        for _ in range(100):
            swap(x, 0, False)
    rank.meet()
    return late.tolist()


def test_a_slow_store_holds_up_no_messages_of_those_who_have_met(jobs):
    job = jobs(3, one_is_late)
    assert job.hear(0, bound(3.0)) == "done"
    job.tell(1)
    assert job.hear_all() == {0: [7.0, 7.0], 1: None, 2: [0.0, 0.0]}


def awaits_a_rank_that_fails(rank: Rank):
    """Rank 1 has found rank 0, which fails with rank 2, and never makes a call that needs rank 1."""
    rank.init()
    if rank.rank == 2:
        return rank.hear()
    if rank.rank == 0:
        tell_in_call(rank)
        rank.tell(catch(dist.recv, torch.ones(2), 2))
        return rank.hear()  # still in the group
    work = dist.irecv(torch.ones(2), 0)
    until(lambda: footprint().shared_memory >= rank.before.shared_memory + 2)  # and rank 0's
    rank.tell("found")
    return catch(work.wait)


def test_a_rank_reports_the_fault_of_one_that_has_not_found_it(jobs):
    job = jobs(3, awaits_a_rank_that_fails)
    assert [job.hear(0), job.hear(1)] == ["in call", "found"]
    job.kill(2)
    for rank in (0, 1):
        assert_raised(job.hear(rank), job.name(2), "died")
    job.tell(0)


class ReadsFaults(Between):
    """Sets ``read`` when this rank has looked for a fault of another."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store)
        self.read = threading.Event()

    def check(self, keys):
        found = super().check(keys)
        if any("fastcoll/f/" in key for key in keys):
            self.read.set()
        return found


def makes_it_again(rank: Rank):
    """The group fails and is made again under its name, by rank 1 before rank 0."""
    rank.init()
    rank.pause()
    if rank.rank == 0:
        soon(0.2)
    fault = catch(dist.recv, torch.ones(2), 1 - rank.rank)
    dist.destroy_process_group()
    rank.hear()
    store = ReadsFaults(rank.store("first"))
    rank.init(store=store)
    if rank.rank == 0:
        dist.send(torch.full((2,), 7.0), 1)
        rank.meet()
        return fault
    x = torch.zeros(2)
    work = dist.irecv(x, 0)
    rank.tell(store.read.wait(20))
    work.wait()
    rank.meet()
    return x.tolist()


@pytest.mark.parametrize("hosts", ["00", "01"])
def test_a_fault_of_an_earlier_group_of_the_name_is_ignored(jobs, hosts):
    job = jobs(2, makes_it_again, hosts=hosts)
    job.go()
    record = jobs.store.get(jobs.key(job, "/r/0$"))
    nonce = int.from_bytes(record[16:24], "little")
    jobs.key(job, f"/f/{nonce}$")  # rank 0 has reported
    job.tell(1)
    assert job.hear(1) is True
    job.tell(0)
    assert job.hear(1) == [7.0, 7.0]
    assert_raised(job.hear(0), "Timed out after 200 ms in recv(")


# --- collectives ----------------------------------------------------------------------------------


def queued(rank: Rank):
    rank.used()
    if rank.rank == 1:
        rank.hear()
        return None
    work = dist.all_reduce(torch.ones(3), async_op=True)
    tell_in_call(rank)
    fault = catch(dist.reduce_scatter_tensor, torch.ones(1), torch.ones(2))
    return fault, catch(work.wait)


@pytest.mark.parametrize("hosts", ["00", "01"])
def test_an_error_of_a_call_that_waits_behind_another_names_the_call(jobs, hosts):
    job = jobs(2, queued, hosts=hosts)
    assert job.hear(0) == "in call"
    job.kill(1)
    for fault, call in zip(job.hear(0), ("reduce_scatter", "all_reduce"), strict=True):
        assert fault is not None
        assert re.match(rf"fastcoll\.{call}\w* \[group '0', rank 0/2, seq [1-9]", fault.text), fault


# --- hosts ----------------------------------------------------------------------------------------


@pytest.mark.full
@on_ranks(2, world="jobs", hosts="01")
def test_a_leader_that_computes_is_waited_for(rank):
    """Rank 0 lets no other thread run Python for longer than leaders once gave each other."""
    rank.init(timeout=PATIENT)
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    if rank.rank == 0:
        ctypes.PyDLL(None).sleep(12)
    work.wait(timedelta(seconds=PATIENT))
    assert x.tolist() == [2.0] * 3
