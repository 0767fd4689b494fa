"""The program ends, interrupts or leaves a group while it is at work."""

import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from backend import IS_GLOO, beyond_gloo
from fault_list import plays
from fault_rank import Rank, catch
from in_call import once_in_call, tell_in_call
from in_time import in_time
from on_ranks import on_ranks
from over_hosts import APART, apart
from rank_calls import WRONG, all_reduce, all_reduce_with_plan
from suite_rules import bound, full, until

import fastcoll
import fastcoll.trace

communicator = beyond_gloo("fastcoll's communicator")

# --- destroy with work pending -------------------------------------------------------------------


def destroys_with_pending(rank: Rank, kind, several_hosts):
    """Target: destroy within 1 s, though the timeout is 30 s; the work's wait raises."""
    rank.used()
    rank.pause()
    if rank.rank == 1:
        tensor = torch.ones(10)
        fault = catch(dist.all_reduce, tensor)
        if several_hosts and fault is None:
            # Rank 0 may have sent its operand of its first call, and its fault be still on its way here.
            assert kind == "all_reduce" and torch.all(tensor == 2.0), WRONG
            fault = catch(dist.all_reduce, tensor)
        return fault, rank.leave()
    tensor = torch.ones(10)
    works = [pending(kind, tensor) for _ in range(3)]
    futures = [work.get_future() for work in works] if kind == "all_reduce" else []
    start = time.monotonic()
    dist.destroy_process_group()
    seconds = time.monotonic() - start
    faults = [catch(work.wait) for work in works]
    faults += [catch(future.wait) for future in futures]
    done = all(work.is_completed() for work in works)
    del works, futures
    rank.tell("destroyed")
    return seconds, faults, done, rank.left()


def pending(kind, tensor):
    return dist.all_reduce(tensor, async_op=True) if kind == "all_reduce" else dist.irecv(tensor, 1)


@pytest.mark.parametrize("kind", [pytest.param("all_reduce", marks=plays(13)), "irecv"])
@apart
def test_destroy_with_pending_work(jobs, kind, pretended_hosts):
    job = jobs.ready(2, destroys_with_pending, kind, pretended_hosts > 1)
    job.tell(0)
    assert job.hear(0) == "destroyed"
    job.tell(1)
    seconds, faults, done, left = job.hear(0)
    in_time(seconds, 1.0, faults[0].text if faults[0] else "")
    assert done and left == []
    for fault in faults:
        assert fault is not None and "RuntimeError" in fault.bases, fault
        assert "destroyed on rank 0 with work pending" in fault.text, fault.text
        assert fault.seconds < bound(0.5)
    fault, left = job.hear(1)
    assert fault is not None and fault.seconds < bound(1.0), fault
    assert "destroyed on rank 0" in fault.text or "left the group" in fault.text, fault.text
    assert left == []


# --- abort from another thread -------------------------------------------------------------------


def call_wait(rank):
    dist.all_reduce(torch.ones(7), async_op=True).wait()


def call_recv(rank):
    dist.recv(torch.ones(10), 1)


def aborted(rank: Rank, call):
    """Target: 0.1 s. Rank 0 waits and is aborted by its own thread; rank 2 waits, too; rank 1 is away."""
    rank.used()
    if rank.rank == 1:
        rank.pause()
        return catch(all_reduce, rank), rank.recover()
    times = []

    def abort():
        rank.hear()
        times.append(time.monotonic())
        dist.group.WORLD.abort()

    thread = threading.Thread(target=abort)
    if rank.rank == 0:
        thread.start()
    tell_in_call(rank)
    fault = catch(call, rank) if rank.rank == 0 else catch(all_reduce, rank)
    if rank.rank == 0:
        thread.join()
    del thread
    rank.tell(times)
    return fault, rank.recover()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(all_reduce, marks=plays(14)),
        pytest.param(all_reduce_with_plan, marks=communicator),
        call_wait,
        call_recv,
    ],
)
def test_abort_from_another_thread(jobs, call):
    job = jobs(3, aborted, call)
    assert job.hear_all() == {0: "in call", 1: "ready", 2: "in call"}
    job.tell(0)
    noticed = job.hear_all(but=[1])
    (aborted_at,) = noticed[0]
    job.tell(1)
    answers = job.hear_all()
    job.after_fault(answers, "rank 0 aborted the group")
    for fault in (answers[0][0], answers[2][0]):
        assert fault.at >= aborted_at
        in_time(fault.at - aborted_at, 0.1, fault.text)


# --- Ctrl-C --------------------------------------------------------------------------------------


def call_send(rank):
    dist.send(torch.ones(1 << 22), 1)


def call_wait_large(rank):
    dist.all_reduce(torch.ones(1 << 22), async_op=True).wait()


def call_wait_second(rank):
    """The waiting thread may run the first work, which is queued before the second."""
    first = dist.all_reduce(torch.ones(1 << 22), async_op=True)
    dist.all_reduce(torch.ones(10), async_op=True).wait()
    first.wait()


def call_first(rank):
    """The first collective of a new group, whose ranks are not connected yet."""
    dist.all_reduce(torch.ones(3), group=rank.group)


def interrupted(rank: Rank, call):
    rank.used()
    rank.group = dist.new_group([0, 1])
    if rank.rank == 1:
        rank.pause()
        return None
    tell_in_call(rank)
    return catch(call, rank)


@pytest.mark.parametrize(
    "pretended_hosts, call",
    [
        *[pytest.param(hosts, all_reduce, marks=plays(15)) for hosts in (1, APART)],
        *[(1, call_wait), (1, call_wait_second), (1, call_recv)],
        pytest.param(1, all_reduce_with_plan, marks=communicator),
        pytest.param(APART, all_reduce_with_plan, marks=[communicator, pytest.mark.full]),
        *[
            full(hosts, call)
            for hosts in (1, APART)
            for call in (call_wait_large, call_send, call_first)
        ],
        *[full(APART, call) for call in (call_wait, call_recv)],
    ],
)
def test_ctrl_c(jobs, call):
    """Target: 0.1 s to KeyboardInterrupt, then 2 s to the end of the program."""
    job = jobs.ready(2, interrupted, call, real_exits=[0])
    when = job.signal(0, signal.SIGINT)
    fault = job.hear(0)
    assert fault is not None and fault.kind == "KeyboardInterrupt", fault
    in_time(fault.at - when, 0.1)
    heard = time.monotonic()
    assert job.end(0) == 0
    assert time.monotonic() - heard < bound(2.0)
    job.tell(1)


def interrupted_and_peer(rank: Rank):
    rank.used()
    if rank.rank == 2:
        rank.pause()
        return None
    tell_in_call(rank)
    fault = catch(dist.all_reduce, torch.ones(10))
    if rank.rank == 0:
        return fault, catch(dist.all_reduce, torch.ones(10))
    return fault, None


def test_ctrl_c_is_told_to_the_others(jobs):
    job = jobs.ready(3, interrupted_and_peer)
    when = job.signal(0, signal.SIGINT)
    fault, later = job.hear(0)
    assert fault.kind == "KeyboardInterrupt"
    assert later is not None and "was interrupted in all_reduce(seq 2" in later.text, later
    fault, _ = job.hear(1)
    assert fault.kind == "DistBackendError" and "was interrupted" in fault.text, fault
    assert re.search(r"\brank 0\b", fault.text.partition("]: ")[2]), fault.text
    assert fault.at - when < bound(0.5)
    job.tell(2)


@plays(21)
@on_ranks(2, world="jobs")
def test_signals_do_not_disturb(rank):
    """A handler that does not raise runs, and the wait goes on."""
    rank.used()
    seen = []
    signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    tensor = torch.ones(1 << 20)
    words = rank.store("words")

    def tell_when_disturbed() -> None:
        before = len(seen)
        until(lambda: IS_GLOO or len(seen) > before + 3)  # gloo's wait runs no handler
        words.set("disturbed", "")

    if rank.rank == 0:
        once_in_call(tell_when_disturbed)
    else:
        words.wait(["disturbed"])
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    dist.send(tensor, 1) if rank.rank == 0 else dist.recv(tensor, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert torch.all(tensor == 4), WRONG


# --- exit with work pending ----------------------------------------------------------------------


def taken_up() -> int:
    """Return how many collectives fastcoll's threads, or this one, have begun to serve."""
    states = [entry["state"] for entry in fastcoll.trace.dump()["entries"]]
    return len(states) - states.count("scheduled")


def exits_with_pending(rank: Rank, kind):
    rank.used()
    rank.tell("ready")
    if rank.rank == 0:
        tensor = torch.ones(1000)
        before = taken_up()
        rank.work = [pending(kind, tensor) for _ in range(3)]  # alive until the process ends
        until(lambda: IS_GLOO or kind == "irecv" or taken_up() > before)
        return time.monotonic()
    rank.hear()
    return catch(dist.all_reduce, torch.ones(1000))


@pytest.mark.parametrize("kind", [pytest.param("all_reduce", marks=plays(18)), "irecv"])
@apart
def test_exit_with_pending_work(jobs, kind):
    """Target: 2 s from the end of the program to that of the process; torch takes half of one."""
    job = jobs.ready(2, exits_with_pending, kind, real_exits=[0])
    returned = job.hear(0)
    assert job.end(0) == 0
    in_time(time.monotonic() - returned, 2.0)
    job.tell(1)
    fault = job.hear(1)
    assert fault is not None, "no error: success was reported"
    assert fault.kind == ("RuntimeError" if IS_GLOO else "DistBackendError"), fault
    assert fault.seconds < bound(1.0), fault


def exits_idle(rank: Rank):
    rank.used()
    dist.all_reduce(torch.ones(10), async_op=True).wait()
    dist.barrier()
    return time.monotonic()


@apart
def test_exit_without_destroy(jobs):
    job = jobs(2, exits_idle, real_exits=[0, 1])
    returned = max(job.hear_all().values())
    job.ended_well()
    assert time.monotonic() - returned < bound(2.0)
    assert "Traceback" not in job.logs() and "terminate called" not in job.logs()


def exit_race(rank: Rank):
    """The first to finish leaves while the others still read what it gave; groups of one name follow each other."""
    for again in range(3):
        rank.used("same")
        tensor = torch.full((1 << 20,), 1.0)
        for _ in range(5):
            dist.all_reduce(tensor)
        if again == 0:  # rank 2 leaves behind the others
            leaving = rank.store("leaving")
            if rank.rank == 2:
                leaving.wait([str(other) for other in range(rank.size) if other != 2])
            else:
                leaving.set(str(rank.rank), "")
        assert torch.all(tensor == float(rank.size) ** 5), WRONG
        dist.destroy_process_group()
    assert rank.left() == []


@plays(47)
@pytest.mark.parametrize("hosts", ["000", "0011"])
def test_exit_race(jobs, hosts):
    jobs(len(hosts), exit_race, hosts=hosts).hear_all()


# --- use after destroy ---------------------------------------------------------------------------


@plays(19)
@on_ranks(2, world="jobs")
def test_use_after_destroy(rank):
    """Try everything that a destroyed group could do."""
    rank.used()
    tensor, other = torch.ones(3), 1 - rank.rank
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=group)
    whole = dist.group.WORLD
    backend = whole._get_backend(torch.device("cpu"))
    dist.barrier()
    dist.destroy_process_group()
    faults = {
        "default group": catch(dist.all_reduce, tensor),
        "group": catch(dist.all_reduce, tensor, group=group),
        "destroyed again": catch(dist.destroy_process_group),
        "object": catch(lambda: whole.allreduce([tensor]).wait()),
        "backend": catch(lambda: backend.allreduce([tensor]).wait()),
        "message": catch(lambda: backend.send([tensor], other, 0).wait()),
        "barrier": catch(lambda: backend.barrier().wait()),
    }
    whole = backend = group = None  # they keep the group
    for name, fault in faults.items():
        assert fault is not None, f"{name} still works"
        in_time(fault.seconds, 0.5, f"{name}: {fault.text}")
    for name in ("object", "backend", "message", "barrier"):
        assert "destroyed" in faults[name].text, (name, faults[name])
    assert tensor.tolist() == [1.0] * 3
    assert rank.left() == []
