"""The same faults where the ranks are connected by Gloo, whose sockets set the pace."""

import signal
import time

import pytest
import torch
import torch.distributed as dist
from fault_rank import Rank, catch
from in_call import soon, tell_in_call
from suite_rules import bound

import fastcoll.trace

OVER_GLOO = {"FASTCOLL_TRANSPORT": "gloo"}


def repeats(rank: Rank):
    rank.used()
    tell_in_call(rank, 3)

    def forever():
        while True:
            tensor = torch.ones(100_000)
            dist.all_reduce(tensor)
            assert torch.all(tensor == rank.size)

    fault = catch(forever)
    again = catch(dist.all_reduce, torch.ones(2))
    start = time.monotonic()
    dist.destroy_process_group()
    return fault, again, time.monotonic() - start, rank.left()


def test_killed_over_gloo(jobs):
    job = jobs(3, repeats, environment=OVER_GLOO)
    job.hear_all()
    killed = job.kill(1)
    for fault, again, seconds, left in job.hear_all(but=[1]).values():
        assert fault is not None and fault.kind == "DistBackendError", fault
        assert "all_reduce" in fault.text and "Gloo" in fault.text, fault.text
        assert f"rank 1 (pid {job.pids[1]}, " in fault.text, fault.text
        assert fault.at - killed < bound(1.0)
        assert again is not None and again.seconds < bound(0.5), again
        assert seconds < bound(1.0) and left == []
    job.ended_well(but=[1])


def never_calls(rank: Rank, call):
    rank.used()
    rank.tell("ready")
    rank.hear()
    soon(1.0)
    return catch(call, rank)


def all_reduce(rank):
    dist.all_reduce(torch.ones(10))


def wait(rank):
    dist.all_reduce(torch.ones(10), async_op=True).wait()


def recv(rank):
    dist.recv(torch.ones(10), 1)


@pytest.mark.parametrize(
    "call", [all_reduce, *(pytest.param(call, marks=pytest.mark.full) for call in (wait, recv))]
)
def test_a_rank_never_calls_over_gloo(jobs, call):
    job = jobs(2, never_calls, call, environment=OVER_GLOO)
    job.hear_all()
    job.tell(0)
    fault = job.hear(0)
    assert fault is not None and fault.kind == "DistBackendError", fault
    assert "timed out" in fault.text.lower() and "seq" in fault.text, fault.text
    assert ("recv" if call is recv else "all_reduce") in fault.text
    assert 0.9 < fault.seconds < 1.0 + bound(0.5), fault
    time.sleep(0.3)  # for Gloo's thread of the other rank to see that the connection is closed
    job.tell(1)
    assert job.hear(1) is not None
    job.ended_well()


@pytest.mark.parametrize(
    "call", [wait, *(pytest.param(call, marks=pytest.mark.full) for call in (all_reduce, recv))]
)
def test_ctrl_c_over_gloo(jobs, call):
    job = jobs(2, interrupted, call, environment=OVER_GLOO)
    job.hear_all()
    when = job.signal(0, signal.SIGINT)
    fault = job.hear(0)
    assert fault is not None and fault.kind == "KeyboardInterrupt", fault
    assert fault.at - when < bound(0.5), fault
    job.tell(1)
    job.hear(1)
    job.ended_well()


def interrupted(rank: Rank, call):
    rank.used()
    if rank.rank == 0:
        tell_in_call(rank)
        return catch(call, rank)
    rank.tell("ready")
    return rank.hear()


def destroys_pending(rank: Rank):
    rank.used()
    rank.tell("ready")
    if rank.rank == 1:
        rank.hear()
        return None
    work = dist.all_reduce(torch.ones(10), async_op=True)
    while fastcoll.trace.records()[-1]["state"] != "started":
        time.sleep(0.01)
    start = time.monotonic()
    dist.destroy_process_group()
    seconds = time.monotonic() - start
    return seconds, catch(work.wait)


def test_destroy_with_pending_work_over_gloo(jobs):
    job = jobs(2, destroys_pending, environment=OVER_GLOO)
    job.hear_all()
    seconds, fault = job.hear(0)
    assert seconds < bound(1.0)
    assert fault is not None and fault.seconds < bound(0.5), fault
    job.tell(1)
    job.hear(1)
    job.ended_well()


def exits(rank: Rank):
    rank.used()
    rank.tell("ready")
    if rank.rank == 1:
        rank.hear()
        return None
    rank.work = dist.all_reduce(torch.ones(10), async_op=True)
    return time.monotonic()


def test_exit_with_pending_work_over_gloo(jobs):
    job = jobs(2, exits, environment=OVER_GLOO, real_exit=True)
    job.hear_all()
    returned = job.hear(0)
    assert job.end(0) == 0
    assert time.monotonic() - returned < bound(2.0)
    job.tell(1)
    job.hear(1)
    job.ended_well()
