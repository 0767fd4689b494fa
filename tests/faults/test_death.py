"""A rank dies: every other rank gets an error that names it, and soon.

Target: 0.25 s; `.ci/run faults` measures it. The groups' timeout is far longer.
"""

import os
import random
import re
import time

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from fault_list import plays
from fault_rank import Rank, catch
from in_call import tell_in_call
from in_time import cause
from over_hosts import over_hosts
from rank_calls import (
    all_gather,
    all_reduce,
    all_reduce_async,
    all_reduce_with_communicator,
    all_reduce_with_operator,
    all_reduce_with_plan,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    repeated,
    scatter,
    swap,
)
from suite_rules import full

NOTICED = 0.25
ELSEWHERE = NOTICED + 0.5
"""Over the network: a rank gives those of the other host so long to say why a connection broke."""

communicator = beyond_gloo("fastcoll's communicator")

LARGE = 2 << 20  # elements: 8 MiB of float
VICTIM = 1


def after_death(
    job, answers: dict, since: float | None, collective: str, victim: int = VICTIM
) -> None:
    within = NOTICED if job.on_one_host else ELSEWHERE
    job.after_fault(answers, collective, names=[victim], since=since, within=within)
    for fault, _ in answers.values():
        assert re.search(r", seq [1-9]\d*\]: ", fault.text), fault.text
        assert re.search("connection closed by peer|process died", fault.text, re.I), fault.text


# --- in the middle of a collective ---------------------------------------------------------------


BALLAST: list[torch.Tensor] = []


def all_reduce_with_much_memory(rank: Rank):
    """The kernel takes its time to free the memory of the victim, and closes files only after it."""
    if rank.rank == VICTIM and not BALLAST:
        BALLAST.append(torch.ones(1 << 28))  # 1 GiB, touched
    all_reduce(rank)


def dies_in(rank: Rank, call, victim: int, *arguments: int):
    rank.used()
    tell_in_call(rank, 3)
    fault = repeated(call, rank, *arguments)
    return fault, rank.recover(victim)


@pytest.mark.parametrize(
    "hosts, victim, call, arguments",
    [
        pytest.param("000", 1, all_reduce, [LARGE], marks=plays(1)),
        full("000", 1, all_reduce, []),
        pytest.param(
            *("000", 1, all_reduce_with_much_memory, []), marks=[pytest.mark.full, plays(3)]
        ),
        full("000", 1, broadcast, [LARGE, 2]),
        full("000", 1, reduce, [LARGE, 2]),
        full("000", 1, gather, [LARGE // 4, 2]),
        full("000", 1, scatter, [LARGE // 4, 2]),
        full("000", 1, all_gather, [LARGE // 4]),
        full("000", 1, reduce_scatter, [LARGE // 4]),
        full("000", 1, barrier, []),
        pytest.param("000", 1, all_reduce_with_communicator, [], marks=communicator),
        pytest.param("000", 1, all_reduce_with_plan, [100_000], marks=communicator),
        pytest.param(
            *("000", 1, all_reduce_with_operator, [100_000]), marks=[communicator, pytest.mark.full]
        ),
        pytest.param(
            *("0011", 1, all_reduce_with_plan, [100_000]), marks=[communicator, pytest.mark.full]
        ),
        ("000", 1, all_reduce_async, [100_000]),
        ("000", 1, all_to_all, [LARGE // 4]),
        # The leader of either host, and the other rank.
        full("0011", 0, all_reduce, [100_000]),
        full("0011", 1, all_reduce, [100_000]),
        ("0011", 2, all_reduce, [100_000]),
        ("0011", 3, all_reduce, [100_000]),
        # Within a long message, and among those that pass by the leaders.
        ("01", 1, all_reduce, [4_000_000]),
        ("0011", 1, all_to_all, [300_000]),
        ("0011", 3, all_to_all, [300_000]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_killed_in_the_middle(jobs, hosts, victim, call, arguments):
    job = jobs.ready(len(hosts), dies_in, call, victim, *arguments, hosts=hosts)
    killed = job.kill(victim)
    answers = job.hear_all(but=[victim])
    collective = call.__name__.partition("_async")[0].partition("_with")[0]
    after_death(job, answers, killed, collective, victim)
    if len(set(hosts)) == 1:
        assert len({cause(fault) for fault, _ in answers.values()}) == 1, "one cause for all"
    assert job.end(victim) == -9


# --- before it arrives ---------------------------------------------------------------------------


def dies_before(rank: Rank, victim: int, away: list[int], used: bool, nonblocking: bool):
    (rank.used if used else rank.init)()
    if rank.rank in (victim, *away):
        rank.pause()
    else:
        tell_in_call(rank)
    if nonblocking:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        fault = catch(work.wait)
        assert work.is_completed() and not work.is_success()
    else:
        fault = catch(dist.all_reduce, torch.ones(5))
    rank.tell(fault)
    return rank.recover(victim)


@plays(2)
@pytest.mark.parametrize(
    "hosts, victim, away, used, nonblocking",
    [
        *[(hosts, VICTIM, [], True, late) for hosts in ("000", "012") for late in (False, True)],
        ("0011", 3, [2], True, False),  # a host that calls nothing
        # Before the first collective: no ranks are connected, or rank 0, which gathers their records, is missing.
        *[(hosts, VICTIM, [0, 2], False, False) for hosts in ("000", "012")],
        *[(hosts, 2, [0], False, False) for hosts in ("000", "012")],
    ],
)
def test_killed_before_it_arrives(jobs, hosts, victim, away, used, nonblocking):
    # Over the network a death may be noticed before the call is looked at.
    call = "all_reduce(seq 2, float32[5], SUM)" if hosts == "000" and used else "all_reduce"
    job = jobs.ready(len(hosts), dies_before, victim, away, used, nonblocking, hosts=hosts)
    killed = job.kill(victim)
    faults = job.hear_all(but=[victim, *away])
    job.end(victim)
    job.tell(*away)
    late = {rank: job.hear(rank) for rank in away}
    after = job.hear_all(but=[victim])
    for found, since in (faults, killed), (late, None):
        answers = {rank: (fault, after[rank]) for rank, fault in found.items()}
        if used:
            after_death(job, answers, since, call, victim)
        else:
            job.after_fault(answers, "process died", names=[victim], since=since, within=NOTICED)


def sends_then_dies(rank: Rank):
    rank.used()
    tensor = torch.full((4,), 7.0)
    if rank.rank == VICTIM:
        dist.send(tensor, 0)
        dist.send(tensor, 2)
        os.kill(os.getpid(), 9)
    rank.pause()
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


# --- point-to-point ------------------------------------------------------------------------------


def send(rank, count):
    dist.send(torch.ones(count), VICTIM)


def receive(rank, count):
    dist.recv(torch.ones(count), VICTIM)


def receive_from_any(rank, count):
    dist.recv(torch.ones(count))


def message_to_the_dead(rank: Rank, call, count: int, used: bool):
    (rank.used if used else rank.init)()
    if not used:  # the two have met all the same
        swap(torch.ones(10), VICTIM - rank.rank, rank.rank == 0)
    if rank.rank == VICTIM:
        rank.pause()
    tell_in_call(rank)
    fault = repeated(call, rank, count)
    return fault, rank.recover(VICTIM)


@pytest.mark.parametrize(
    "hosts, call, count, used",
    [
        *[
            (hosts, call, count, True)
            for hosts in ("000", "012")
            for call, count in ((send, 1 << 20), (receive, 5), (receive_from_any, 5))
        ],
        # A group without collectives, short and long messages.
        *[("01", *call, False) for call in ((receive, 8), (receive, 3_000_000), (send, 3_000_000))],
        ("01", receive_from_any, 8, False),
    ],
)
def test_killed_partner_of_a_message(jobs, hosts, call, count, used):
    job = jobs.ready(len(hosts), message_to_the_dead, call, count, used, hosts=hosts)
    killed = job.kill(VICTIM)
    after_death(job, job.hear_all(but=[VICTIM]), killed, "send" if call is send else "recv")


# --- at any moment -------------------------------------------------------------------------------


def anything(rank: Rank, victim: int):
    rank.used()
    rank.tell("ready")

    def calls():
        all_reduce(rank)
        all_reduce(rank, LARGE)
        broadcast(rank, LARGE, 2)
        all_reduce_async(rank, 100_000)
        all_gather(rank, LARGE // 4)
        barrier(rank)

    fault = repeated(calls)
    return fault, rank.recover(victim)


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
    job = jobs.ready(3, anything, victim)
    time.sleep(chance.uniform(0.0, 0.5))
    killed = job.kill(victim)
    after_death(job, job.hear_all(but=[victim]), killed, "", victim)
