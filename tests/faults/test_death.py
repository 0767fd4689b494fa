"""A rank dies: every other rank gets an error that names it, and soon.

Target: 0.25 s; `make faults` measures it. The groups' timeout is far longer.
"""

import os
import random
import re
import time

import pytest
import torch
import torch.distributed as dist
from backend import reduce_scatter_single
from fault_list import plays
from fault_rank import Fault, Rank, catch
from in_call import tell_in_call
from in_time import in_time
from over_hosts import apart, over_hosts
from suite_rules import bound

NOTICED = 0.25
ENDED = 1.0
"""Seconds for destroy_process_group after a fault."""

LARGE = 8 << 20  # elements: 32 MiB of float
VICTIM = 1


def assert_names(fault: Fault, since: float, victim: int, pid: int, collective: str) -> None:
    assert fault is not None, "no error: success was reported"
    in_time(fault.at - since, NOTICED, fault.text)
    assert fault.kind == "DistBackendError", fault
    assert "RuntimeError" in fault.bases
    assert collective in fault.text and re.search(r", seq [1-9]\d*\]: ", fault.text), fault.text
    assert re.search(rf"rank {victim} \(pid {pid}\b", fault.text), fault.text
    assert re.search("connection closed by peer|process died", fault.text, re.I), fault.text


def assert_recovered(after: dict, fault: Fault) -> None:
    """Sticky, with the same cause, and maybe the call in which it was met; nothing left; a new group works."""
    assert after["again"] is not None and after["again"].seconds < bound(0.5), after
    assert cause(after["again"].text).startswith(cause(fault.text))
    assert after["state"] == "COMM_ERROR"
    assert after["destroy"] < bound(ENDED)
    assert after["left"] == []


def cause(text: str) -> str:
    return text.partition("]: ")[2]


def others(rank: Rank, victims=(VICTIM,)) -> list[int]:
    return [r for r in range(rank.size) if r not in (rank.rank, *victims)]


# --- in the middle of a collective ---------------------------------------------------------------


def repeat(rank: Rank, call) -> None:
    """Run a collective until it fails, and check each result."""
    while True:
        call(rank)


def all_reduce(rank, count=LARGE):
    tensor = torch.ones(count)
    dist.all_reduce(tensor)
    assert torch.all(tensor == rank.size), "a wrong result was returned as success"


def all_reduce_small(rank):
    all_reduce(rank, 7)


def all_reduce_async(rank):
    tensors = [torch.full((100_000,), 2.0) for _ in range(4)]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    assert all(torch.all(tensor == 2.0 * rank.size) for tensor in tensors)


def broadcast(rank):
    tensor = torch.full((LARGE,), float(rank.rank))
    dist.broadcast(tensor, 2)
    assert torch.all(tensor == 2.0)


def all_gather(rank):
    tensors = [torch.empty(LARGE // 4) for _ in range(rank.size)]
    dist.all_gather(tensors, torch.full((LARGE // 4,), float(rank.rank)))
    assert all(torch.all(tensor == r) for r, tensor in enumerate(tensors))


def reduce_scatter(rank):
    tensor = torch.empty(LARGE // 4)
    reduce_scatter_single(tensor, torch.ones(rank.size * LARGE // 4))
    assert torch.all(tensor == rank.size)


def all_to_all(rank):
    tensor = torch.empty(3 * LARGE // 4)
    dist.all_to_all_single(tensor, torch.full((3 * LARGE // 4,), float(rank.rank)))
    assert torch.equal(tensor[:: LARGE // 4], torch.arange(3.0))


def barrier(rank):
    dist.barrier()


def dies_in(rank: Rank, call):
    rank.used()
    tell_in_call(rank, 3)
    fault = catch(repeat, rank, call)
    return fault, rank.recover(others(rank))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(all_reduce, marks=plays(1)),
        *[
            pytest.param(call, marks=pytest.mark.full)
            for call in (all_reduce_small, broadcast, all_gather, reduce_scatter, barrier)
        ],
        all_reduce_async,
        all_to_all,
    ],
)
def test_killed_in_the_middle(jobs, call):
    job = jobs(3, dies_in, call)
    job.hear_all()
    killed = job.kill(VICTIM)
    answers = job.hear_all(but=[VICTIM])
    for fault, after in answers.values():
        name = call.__name__.removesuffix("_small").removesuffix("_async")
        assert_names(fault, killed, VICTIM, job.pids[VICTIM], name)
        assert_recovered(after, fault)
    assert len({cause(fault.text) for fault, _ in answers.values()}) == 1, "one cause for all"
    job.ended_well(but=[VICTIM])


# --- before it arrives ---------------------------------------------------------------------------


def dies_before(rank: Rank, use_before: bool, nonblocking: bool):
    (rank.used if use_before else rank.init)()
    if rank.rank == VICTIM or not use_before:
        rank.tell("ready")
        rank.hear()
    else:
        tell_in_call(rank)
    if nonblocking:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        fault = catch(work.wait)
        assert work.is_completed() and not work.is_success()
    else:
        fault = catch(dist.all_reduce, torch.ones(5))
    return fault, rank.recover(others(rank))


@plays(2)
@apart
@pytest.mark.parametrize("nonblocking", [False, True], ids=["sync", "async"])
def test_killed_before_it_arrives(jobs, nonblocking, pretended_hosts):
    # Over the network a death may be noticed before the call is looked at.
    call = "all_reduce(seq 2, float32[5], SUM)" if pretended_hosts == 1 else "all_reduce"
    job = jobs(3, dies_before, True, nonblocking)
    job.hear_all()
    killed = job.kill(VICTIM)
    for fault, after in job.hear_all(but=[VICTIM]).values():
        assert_names(fault, killed, VICTIM, job.pids[VICTIM], call)
        assert_recovered(after, fault)
    job.ended_well(but=[VICTIM])


@plays(2)
@apart
def test_killed_before_the_first_collective(jobs):
    """Nobody is connected yet."""
    job = jobs(3, dies_before, False, False)
    job.hear_all()
    killed = job.kill(VICTIM)
    job.end(VICTIM)
    for rank in (0, 2):
        job.tell(rank)
    for fault, after in job.hear_all(but=[VICTIM]).values():
        assert fault.kind == "DistBackendError" and f"rank {VICTIM}" in fault.text, fault
        in_time(fault.at - killed, NOTICED, fault.text)
        assert after["destroy"] < bound(ENDED) and after["left"] == []
    job.ended_well(but=[VICTIM])


def sends_then_dies(rank: Rank):
    rank.used()
    tensor = torch.full((4,), 7.0)
    if rank.rank == VICTIM:
        dist.send(tensor, 0)
        dist.send(tensor, 2)
        os.kill(os.getpid(), 9)
    rank.tell("ready")
    rank.hear()
    dist.recv(tensor, VICTIM)
    return tensor.tolist()


def test_message_of_the_dead_is_delivered(jobs):
    """What a rank sent before it died counts."""
    job = jobs(3, sends_then_dies)
    job.hear_all(but=[VICTIM])
    assert job.end(VICTIM) == -9
    for rank in (0, 2):
        job.tell(rank)
        assert job.hear(rank) == [7.0] * 4
    job.ended_well(but=[VICTIM])


# --- point-to-point ------------------------------------------------------------------------------


def send_forever(rank):
    while True:
        dist.send(torch.ones(1 << 20), VICTIM)


def receive(rank):
    dist.recv(torch.ones(5), VICTIM)


def receive_from_any(rank):
    dist.recv(torch.ones(5))


def message_to_the_dead(rank: Rank, call):
    rank.used()
    if rank.rank == VICTIM:
        rank.tell("ready")
        rank.hear()
    tell_in_call(rank)
    fault = catch(call, rank)
    return fault, rank.recover(others(rank))


@pytest.mark.parametrize(
    ("call", "name"),
    [(send_forever, "send"), (receive, "recv"), (receive_from_any, "recv")],
    ids=["send", "recv", "recv from any"],
)
@apart
def test_killed_partner_of_a_message(jobs, call, name):
    job = jobs(3, message_to_the_dead, call)
    job.hear_all()
    killed = job.kill(VICTIM)
    for fault, after in job.hear_all(but=[VICTIM]).values():
        assert_names(fault, killed, VICTIM, job.pids[VICTIM], name)
        assert_recovered(after, fault)
    job.ended_well(but=[VICTIM])


# --- at any moment -------------------------------------------------------------------------------


def anything(rank: Rank, victim: int):
    rank.used()
    rank.tell("ready")
    calls = [all_reduce_small, all_reduce, broadcast, all_reduce_async, all_gather, barrier]

    def forever():
        while True:
            for call in calls:
                call(rank)

    fault = catch(forever)
    return fault, rank.recover(others(rank, (victim,)))


KILLS = range(int(os.environ.get("FASTCOLL_TEST_KILLS", "20")))


@plays(4)
@over_hosts
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.full] if seed > 2 else []) for seed in KILLS]
)
def test_killed_at_some_moment(jobs, seed):
    """Of mixed collectives. The seed is fixed; the moment is not, for the machine's timing adds to it."""
    chance = random.Random(seed)
    victim = chance.randrange(3)
    job = jobs(3, anything, victim)
    job.hear_all()
    time.sleep(chance.uniform(0.0, 0.5))
    killed = job.kill(victim)
    for fault, after in job.hear_all(but=[victim]).values():
        assert_names(fault, killed, victim, job.pids[victim], "")
        assert_recovered(after, fault)
    job.ended_well(but=[victim])
