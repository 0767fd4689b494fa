"""Point-to-point between hosts, pretended by FASTCOLL_HOST_ID: who takes part, and what a fault is called."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from fault_rank import Rank, catch
from in_call import soon, tell_in_call
from odd_stores import HidesLinks, Slow
from suite_rules import bound

SMALL, LARGE = 8, 3_000_000
"""Elements: in one record, and with a body that goes by itself."""


def start(rank: Rank, hosts: str, **other):
    os.environ["FASTCOLL_HOST_ID"] = hosts[rank.rank]
    rank.init(**other)


def two_talk(rank: Rank, hosts):
    if rank.rank == 2:
        rank.hear()
    start(rank, hosts)
    if rank.rank < 2:
        other = 1 - rank.rank
        for count in (SMALL, LARGE):
            tensor = torch.full((count,), float(rank.rank))
            into = torch.empty_like(tensor)
            pair = [dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, into, other)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
            assert torch.all(into == other)
        del pair  # it keeps the group
        rank.tell("talked")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist(), rank.left()


@pytest.mark.parametrize(
    "hosts", [*(pytest.param(h, marks=pytest.mark.full) for h in ("000", "011")), "001", "012"]
)
def test_two_ranks_talk_though_the_third_has_not_come(jobs, hosts):
    job = jobs(3, two_talk, hosts)
    assert [job.hear(0), job.hear(1)] == ["talked"] * 2
    job.tell(2)
    for found in job.hear_all().values():
        assert found == ([3.0] * 3, [])
    job.ended_well()


def leaves_while_it_connects(rank: Rank):
    os.environ["FASTCOLL_HOST_ID"] = str(rank.rank)
    store = HidesLinks(rank.store("first"))
    rank.init(store=store)
    work = dist.irecv(torch.ones(3), 1 - rank.rank)
    waited = store.hidden.wait(20)
    rank.tell("connects")
    rank.hear()
    del work
    dist.destroy_process_group()
    return waited, rank.left()


def test_a_group_that_is_destroyed_waits_for_no_connection(jobs):
    job = jobs(2, leaves_while_it_connects)
    assert set(job.hear_all().values()) == {"connects"}
    job.tell_all()
    assert list(job.hear_all().values()) == [(True, [])] * 2
    job.ended_well()


def one_expects(rank: Rank, call, count):
    start(rank, "01")
    other = 1 - rank.rank
    tensor = torch.ones(10)
    for turn in [dist.send, dist.recv] if rank.rank == 0 else [dist.recv, dist.send]:
        turn(tensor, other)
    if rank.rank == 1:
        rank.tell("ready")
        return rank.hear()
    tensor = torch.ones(count)
    tell_in_call(rank)
    fault = catch(lambda: getattr(dist, call)(tensor, 1).wait())
    again = catch(dist.send, tensor, 1)
    dist.destroy_process_group()
    return fault, again, rank.left()


@pytest.mark.parametrize("call, count", [("irecv", SMALL), ("irecv", LARGE), ("isend", LARGE)])
def test_a_dead_peer_is_named(jobs, call, count):
    job = jobs(2, one_expects, call, count)
    job.hear_all()
    killed = job.kill(1)
    fault, again, left = job.hear(0)
    assert fault.kind == "DistBackendError" and f"fastcoll.{call[1:]}" in fault.text, fault
    assert f"rank 1 (pid {job.pids[1]}, host" in fault.text and "died" in fault.text, fault.text
    assert fault.at - killed < bound(1.0)
    assert again is not None and "died" in again.text
    assert left == []
    job.ended_well(but=[1])


def killed_within(rank: Rank):
    """A long message is on its way when its sender dies: the receiver's memory is its own again after the error.

    The receiver stops itself, so that no more of the message arrives than its socket has room for.
    """
    start(rank, "01")
    tensor = torch.ones(20_000_000)
    if rank.rank == 0:
        work = dist.isend(tensor, 1)
        rank.tell("ready")
        work.wait()
        return rank.hear()
    into = torch.zeros_like(tensor)
    work = dist.irecv(into, 0)
    while into[200_000] == 0:
        time.sleep(0.0005)
    rank.tell("under way")
    os.kill(os.getpid(), signal.SIGSTOP)
    fault = catch(work.wait)
    into.fill_(7)
    time.sleep(0.2)  # for what would come late
    return fault, bool(torch.all(into == 7))


def test_a_sender_that_dies_within_a_message(jobs):
    job = jobs(2, killed_within)
    job.hear(0)
    job.hear(1)
    job.kill(0)
    assert job.end(0) == -9
    job.signal(1, signal.SIGCONT)
    fault, untouched = job.hear(1)
    assert fault is not None and f"rank 0 (pid {job.pids[0]}, host" in fault.text, fault
    assert untouched
    job.ended_well(but=[0])


def talk_unwatched(rank: Rank):
    """Nobody waits: a long message each way is seen to by the backend's own threads."""
    start(rank, "01")
    other = 1 - rank.rank
    into = torch.empty(LARGE)
    works = [dist.isend(torch.full((LARGE,), float(rank.rank)), other), dist.irecv(into, other)]
    end = time.monotonic() + bound(2.5)
    while not all(work.is_completed() for work in works) and time.monotonic() < end:
        time.sleep(0.01)
    completed = [work.is_completed() for work in works]
    for work in works:
        work.wait()
    del work, works  # they keep the group
    dist.destroy_process_group()
    return completed, bool(torch.all(into == other))


def from_anybody(rank: Rank):
    start(rank, "011")
    if rank.rank == 0:
        into = torch.empty(LARGE)
        came = sorted((dist.recv(into), int(into[-1])) for _ in range(4))
        dist.destroy_process_group()
        return came
    for _ in range(2):
        dist.send(torch.full((LARGE,), float(rank.rank)), 0)
    dist.destroy_process_group()
    return None


def test_long_messages_that_nobody_waits_for_end(jobs):
    job = jobs(2, talk_unwatched)
    assert job.hear_all() == dict.fromkeys(range(2), ([True, True], True))
    job.ended_well()


def test_long_messages_from_any_rank(jobs):
    job = jobs(3, from_anybody)
    assert job.hear_all()[0] == [(1, 1), (1, 1), (2, 2), (2, 2)]
    job.ended_well()


def leaves_much_unread(rank: Rank, count):
    """More long messages than the receiver has room for the heads of; it takes none of them."""
    start(rank, "01")
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
    job = jobs(2, leaves_much_unread, count)
    assert job.hear(1) == "left"
    fault = job.hear(0)
    assert fault is not None and f"rank 1 (pid {job.pids[1]}, host" in fault.text, fault
    assert "left the group" in fault.text and fault.seconds < bound(1.0), fault
    job.ended_well()


def nobody_sends(rank: Rank, peer):
    start(rank, "01")
    rank.meet()
    if rank.rank == 1:
        return rank.hear()
    soon(1.0)
    fault = catch(dist.recv, torch.ones(3), peer)
    dist.destroy_process_group()
    return fault


@pytest.mark.parametrize("peer", [1, None])
def test_a_timeout_says_what_was_awaited(jobs, peer):
    job = jobs(2, nobody_sends, peer)
    fault = job.hear(0)
    assert "Timed out after 1000 ms in recv(" in fault.text, fault.text
    assert ("any rank" if peer is None else f"rank 1 (pid {job.pids[1]}, host") in fault.text, (
        fault.text
    )
    assert 0.9 < fault.seconds < 1.0 + bound(0.5)
    job.tell(1)
    job.hear(1)
    job.ended_well()


def sizes_differ(rank: Rank, sent, expected, slow):
    store = Slow(rank.store("first"))
    start(rank, "01", store=store)
    store.seconds = slow if rank.rank == 0 else 0.0
    tensor = torch.ones(sent if rank.rank == 0 else expected)
    if rank.rank == 0:
        work = dist.isend(tensor, 1)
        return catch(dist.recv, torch.ones(1), 1), catch(work.wait)
    return catch(dist.recv, tensor, 0)


@pytest.mark.parametrize(
    "sent, expected, slow",
    [(SMALL, 9, 0.0), (SMALL, 9, 0.07), (LARGE, SMALL, 0.0), (SMALL, LARGE, 0.0)],
)
def test_sizes_that_differ(jobs, sent, expected, slow):
    """Also where rank 1 has told of it and ended before rank 0, whose store is slow, has an answer."""
    job = jobs(2, sizes_differ, sent, expected, slow)
    fault = job.hear(1)
    assert "Detected mismatch" in fault.text and f"float32[{expected}]" in fault.text, fault.text
    assert f"sends float32[{sent}]" in fault.text, fault.text
    waits, _ = job.hear(0)
    assert "Detected mismatch" in waits.text, waits.text
    assert waits.seconds < bound(1.0)
    job.ended_well()


def sends_and_leaves(rank: Rank):
    start(rank, "01")
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
    tags = []
    for tag in (5, 0, 1, 4, 2, 3):
        tensor = torch.empty(1000)
        dist.recv(tensor, 0, tag=tag)
        assert torch.all(tensor == tag)
        tags.append(tag)
    fault = catch(dist.recv, tensor, 0)
    return tags, bool(torch.all(found == 6)), fault


def test_what_was_sent_is_received_after_the_sender_has_left(jobs):
    job = jobs(2, sends_and_leaves)
    assert job.hear(0) == "left"
    job.tell(1)
    assert job.hear(0) == []
    tags, whole, fault = job.hear(1)
    assert tags == [5, 0, 1, 4, 2, 3] and whole
    assert "rank 0 (pid" in fault.text and "left the group (goodbye sent)" in fault.text, fault.text
    job.ended_well()


def chain(rank: Rank):
    """Rank 0 gives up; rank 1 waits for it, and rank 2 for rank 1."""
    start(rank, "012")
    for low in (0, 1):
        if rank.rank in (low, low + 1):
            turn = dist.send if rank.rank == low else dist.recv
            turn(torch.ones(3), 2 * low + 1 - rank.rank)
    rank.tell("ready")
    rank.hear()
    if rank.rank == 0:
        soon(1.0)
    fault = catch(dist.recv, torch.ones(3), 1 if rank.rank == 0 else rank.rank - 1)
    dist.destroy_process_group()
    return fault


def test_who_hears_of_a_fault_tells_it_on(jobs):
    job = jobs(3, chain)
    job.hear_all()
    job.tell_all()
    faults = job.hear_all()
    for fault in faults.values():
        assert fault is not None and "Timed out after 1000 ms in recv(" in fault.text, fault
        assert f"rank 1 (pid {job.pids[1]}, host" in fault.text, fault.text
        assert fault.at - faults[0].at < bound(1.0)
    job.ended_well()


def leaves_while_another_fails(rank: Rank):
    start(rank, "001")
    tensor = torch.ones(3)
    for other in (1, 2):
        if rank.rank == 0:
            dist.send(tensor, other)
        elif rank.rank == other:
            dist.recv(tensor, 0)
    rank.tell("ready")
    rank.hear()
    if rank.rank == 1:
        work = dist.irecv(tensor, 0)
        time.sleep(0.05)
        dist.destroy_process_group()
        return catch(work.wait) is not None
    if rank.rank == 0:
        dist.destroy_process_group()
    return rank.left() if rank.rank == 0 else []


def test_a_rank_that_leaves_is_not_hurt_by_a_fault_meanwhile(jobs):
    job = jobs(3, leaves_while_another_fails)
    job.hear_all()
    job.tell(1)
    job.tell(0)  # waits for rank 2's goodbye, which does not come
    assert job.hear(0) == []
    assert job.hear(1) is True
    job.tell(2)
    assert job.hear(2) == []
    job.ended_well()


def dies_with_a_message_announced(rank: Rank):
    start(rank, "01")
    if rank.rank == 1:
        work = dist.isend(torch.ones(LARGE), 0, tag=5)
        dist.send(torch.ones(3), 0)
        rank.tell("ready")
        rank.hear()
        return work
    dist.recv(torch.ones(3), 1)  # behind the head of the long one
    rank.tell("ready")
    rank.hear()
    return catch(dist.recv, torch.ones(LARGE), 1, tag=5)


def test_the_sender_of_a_message_that_was_announced_is_named(jobs):
    job = jobs(2, dies_with_a_message_announced)
    job.hear_all()
    job.kill(1)
    assert job.end(1) == -9
    job.tell(0)
    fault = job.hear(0)
    assert f"rank 1 (pid {job.pids[1]}, host" in fault.text and "died" in fault.text, fault.text
    assert fault.seconds < bound(1.0)
    job.ended_well(but=[1])
