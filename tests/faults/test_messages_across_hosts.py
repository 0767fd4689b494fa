"""Point-to-point messages between pretended hosts: which ranks take part, and what a fault's error says."""

import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, wait_all
from fault_rank import Rank, catch
from in_call import soon, tell_in_call
from in_time import assert_raised
from machine import own_process_ids
from odd_stores import HidesLinks
from on_ranks import on_ranks
from suite_rules import full, until

SMALL, LARGE = 8, 3_000_000
"""Elements: in one record, and with a body that goes by itself."""


def two_talk(rank: Rank):
    if rank.rank == 2:
        rank.hear()
    rank.init()
    if rank.rank < 2:
        other = 1 - rank.rank
        for count in (SMALL, LARGE):
            tensor = torch.full((count,), float(rank.rank))
            into = torch.empty_like(tensor)
            pair = [dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, into, other)]
            wait_all(dist.batch_isend_irecv(pair))
            assert torch.all(into == other)
        del pair  # it keeps the group
        rank.tell("talked")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 3
    rank.finish()


@pytest.mark.parametrize("hosts", [*(full(h) for h in ("000", "011")), "001", "012"])
def test_two_ranks_talk_though_the_third_has_not_come(jobs, hosts):
    job = jobs(3, two_talk, hosts=hosts)
    assert [job.hear(0), job.hear(1)] == ["talked"] * 2
    job.tell(2)
    job.hear_all()


def leaves_while_it_connects(rank: Rank):
    store = HidesLinks(rank.store("first"))
    rank.init(store=store)
    work = dist.irecv(torch.ones(3), 1 - rank.rank)
    assert store.hidden.wait(20)
    rank.pause()
    del work
    rank.finish()


def test_a_group_that_is_destroyed_waits_for_no_connection(jobs):
    job = jobs(2, leaves_while_it_connects, hosts="01")
    job.go()
    job.hear_all()


def killed_within(rank: Rank):
    """A long message is on its way when its sender dies: the receiver's memory is its own again after the error.

    The receiver stops itself, so that no more of the message arrives than its socket has room for.
    """
    rank.init()
    tensor = torch.ones(8_000_000)  # far more than sockets hold
    if rank.rank == 0:
        work = dist.isend(tensor, 1)
        rank.tell("ready")
        work.wait()
        return rank.hear()
    into = torch.zeros_like(tensor)
    work = dist.irecv(into, 0)
    until(lambda: into[200_000] != 0)
    rank.tell("under way")
    os.kill(os.getpid(), signal.SIGSTOP)
    fault = catch(work.wait)
    into.fill_(7)
    time.sleep(0.2)  # for what would come late
    return fault, bool(torch.all(into == 7))


def test_a_sender_that_dies_within_a_message(jobs):
    job = jobs(2, killed_within, hosts="01")
    job.hear(0)
    job.hear(1)
    until(lambda: psutil.Process(job.pids[1]).status() == psutil.STATUS_STOPPED)
    job.kill(0)
    assert job.end(0) == -9
    job.signal(1, signal.SIGCONT)
    fault, untouched = job.hear(1)
    assert_raised(fault, job.name(0))
    assert untouched


@on_ranks(2, world="jobs", hosts="01")
def test_long_messages_that_nobody_waits_for_end(rank):
    """A long message each way is seen to by the backend's own threads."""
    rank.init()
    other = 1 - rank.rank
    into = torch.empty(LARGE)
    works = [dist.isend(torch.full((LARGE,), float(rank.rank)), other), dist.irecv(into, other)]
    until(lambda works=works: all(work.is_completed() for work in works))
    wait_all(works)
    del works  # they keep the group
    dist.destroy_process_group()
    assert torch.all(into == other)


@on_ranks(3, world="jobs", hosts="011")
def test_long_messages_from_any_rank(rank):
    rank.init()
    if rank.rank == 0:
        into = torch.empty(LARGE)
        came = sorted((dist.recv(into), int(into[-1])) for _ in range(4))
        assert came == [(1, 1), (1, 1), (2, 2), (2, 2)]
    else:
        for _ in range(2):
            dist.send(torch.full((LARGE,), float(rank.rank)), 0)
    dist.destroy_process_group()


def leaves_much_unread(rank: Rank, count):
    """More long messages than the receiver has room for the heads of; it takes none of them."""
    rank.init()
    if rank.rank == 1:
        dist.recv(torch.ones(3), 0)
        dist.destroy_process_group()
        return rank.tell("left")
    dist.send(torch.ones(3), 1)
    tensor = torch.ones(LARGE)
    works = [dist.isend(tensor, 1, tag=tag + 1) for tag in range(count)]
    return catch(works[-1].wait)


@pytest.mark.parametrize("count", [1, 20])
def test_a_receiver_that_leaves_long_messages_unread_is_named(jobs, count):
    job = jobs(2, leaves_much_unread, count, hosts="01")
    assert job.hear(1) == "left"
    fault = job.hear(0)
    assert_raised(fault, job.name(1), "left the group", within=1.0)


def sends_and_leaves(rank: Rank):
    rank.init()
    if rank.rank == 0:
        for tag in range(6):
            dist.send(torch.full((1000,), float(tag)), 1, tag=tag)
        dist.send(torch.full((LARGE,), 6.0), 1, tag=6)
        dist.destroy_process_group()
        rank.tell("left")
        return rank.left()
    found = torch.empty(LARGE)
    dist.recv(found, 0, tag=6)
    rank.hear()
    for tag in (5, 0, 1, 4, 2, 3):
        tensor = torch.empty(1000)
        dist.recv(tensor, 0, tag=tag)
        assert torch.all(tensor == tag)
    assert torch.all(found == 6)
    return catch(dist.recv, tensor, 0)


def test_what_was_sent_is_received_after_the_sender_has_left(jobs):
    job = jobs(2, sends_and_leaves, hosts="01")
    assert job.hear(0) == "left"
    job.tell(1)
    assert job.hear(0) == []
    assert_raised(job.hear(1), job.name(0), "left the group (close notice sent)")


def chain(rank: Rank):
    """Rank 0 gives up; rank 1 waits for it, and rank 2 for rank 1."""
    rank.init()
    for low in (0, 1):
        if rank.rank in (low, low + 1):
            turn = dist.send if rank.rank == low else dist.recv
            turn(torch.ones(3), 2 * low + 1 - rank.rank)
    rank.pause()
    if rank.rank == 0:
        soon(1.0)
    fault = catch(dist.recv, torch.ones(3), 1 if rank.rank == 0 else rank.rank - 1)
    dist.destroy_process_group()
    return fault


def test_who_hears_of_a_fault_tells_it_on(jobs):
    job = jobs(3, chain, hosts="012")
    job.go()
    faults = job.hear_all()
    for fault in faults.values():
        said = "Timed out after 1000 ms in recv(", job.name(1)
        assert_raised(fault, *said, since=faults[0].at, within=1.0)


def leaves_while_another_fails(rank: Rank):
    rank.init()
    tensor = torch.ones(3)
    for other in (1, 2):
        if rank.rank == 0:
            dist.send(tensor, other)
        elif rank.rank == other:
            dist.recv(tensor, 0)
    rank.pause()
    if rank.rank == 1:
        work = dist.irecv(tensor, 0)
        time.sleep(0.05)
        dist.destroy_process_group()
        return catch(work.wait) is not None
    if rank.rank == 0:
        dist.destroy_process_group()
    return rank.left() if rank.rank == 0 else []


def test_a_rank_that_leaves_is_not_hurt_by_a_fault_meanwhile(jobs):
    job = jobs.ready(3, leaves_while_another_fails, hosts="001")
    job.tell(1)
    job.tell(0)  # waits for rank 2's goodbye, which does not come
    assert job.hear(0) == []
    assert job.hear(1) is True
    job.tell(2)
    assert job.hear(2) == []


def dies_with_a_message_announced(rank: Rank):
    rank.init()
    if rank.rank == 1:
        work = dist.isend(torch.ones(LARGE), 0, tag=5)
        dist.send(torch.ones(3), 0)
        rank.pause()
        return work
    dist.recv(torch.ones(3), 1)  # behind the head of the long one
    rank.pause()
    return catch(dist.recv, torch.ones(LARGE), 1, tag=5)


def test_the_sender_of_a_message_that_was_announced_is_named(jobs):
    job = jobs.ready(2, dies_with_a_message_announced, hosts="01")
    job.kill(1)
    assert job.end(1) == -9
    job.tell(0)
    assert_raised(job.hear(0), job.name(1), "died", within=1.0)


def first_message(rank: Rank, hosts: str, used: bool, idle: bool):
    """Rank 0 dies, whose first message others await; rank 1 is of its host, and calls nothing if ``idle``."""
    if hosts[rank.rank] != hosts[0]:
        own_process_ids(1)
    rank.init()
    if used:
        dist.all_reduce(torch.ones(3))
    if rank.rank == 0:
        rank.pause()
    if rank.rank == 1 and idle:
        rank.pause()
        return
    tell_in_call(rank)
    rank.tell(catch(dist.recv, torch.ones(3), 0))


@beyond_gloo("how fastcoll's hosts tell each other")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces")
@pytest.mark.parametrize(
    "hosts, used, idle",
    [("0012", False, False), ("0012", True, False), ("0012", True, True), ("1101", True, True)],
)
def test_a_sender_that_dies_before_its_first_message_is_named(jobs, hosts, used, idle):
    """The receiver's host cannot see its process: ranks of the sender's own host tell."""
    job = jobs.ready(len(hosts), first_message, hosts, used, idle, hosts=hosts)
    killed = job.kill(0)
    for rank in (2, 3) if idle else (1, 2, 3):
        fault = job.hear(rank)
        assert_raised(fault, job.name(0), "died", since=killed, within=0.75)
    if idle:
        job.tell(1)


@beyond_gloo("how fastcoll's hosts tell each other")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces")
def test_a_sender_that_dies_is_named_by_ranks_that_began_after_its_group(jobs):
    """Its record is older than their processes, as one of an earlier run would be; but they saw its process run."""
    hosts = "0012"
    sender = jobs(4, first_message, hosts, False, False, ranks=[0], hosts=hosts)
    sender.hear(0)
    time.sleep(2 / os.sysconf("SC_CLK_TCK"))  # the kernel rounds the time at which a process began
    others = jobs(
        4, first_message, hosts, False, False, ranks=[1, 2, 3], hosts=hosts, prefix=sender.prefix
    )
    others.hear_all()
    sender.kill(0)
    for fault in others.hear_all().values():
        assert_raised(fault, sender.name(0), "died")


def dies_while_they_connect(rank: Rank):
    """Ranks 0 and 2, of two hosts, connect, but find no address; rank 1 is of rank 0's host."""
    store = rank.store("first") if rank.rank == 1 else HidesLinks(rank.store("first"))
    rank.init(store=store)
    if rank.rank == 1:
        tell_in_call(rank)
        return catch(dist.recv, torch.ones(3), 0)
    work = dist.irecv(torch.ones(3), 2 - rank.rank)
    rank.tell("connects" if store.hidden.wait(20) else "does not connect")
    if rank.rank == 0:
        rank.hear()
    return catch(work.wait)


@beyond_gloo("how fastcoll's hosts tell each other")
def test_a_sender_that_dies_while_it_connects_is_named(jobs):
    job = jobs(3, dies_while_they_connect, hosts="001")
    assert job.hear_all() == {0: "connects", 1: "in call", 2: "connects"}
    killed = job.kill(0)
    for fault in job.hear_all(but=[0]).values():
        # A connection alone would time out, and report the same, after 60 s.
        assert_raised(fault, job.name(0), "died", since=killed, within=8.0)
