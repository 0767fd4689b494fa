"""Rows 1 to 12: ranks that die, stop, never come, or fail inside."""

import contextlib
import ctypes
import os
import random
import resource
import signal
import time
from collections import Counter

import torch
import torch.distributed as dist
from fault_rank import Rank, catch
from in_call import soon, tell_in_call
from matrix_machine import refuse_calls, two_networks
from matrix_ranks import (
    VICTIM,
    aftermath,
    all_reduce,
    all_reduce_large,
    arrives,
    enter_host,
    repeated,
    same_store,
    until_error,
)
from matrix_row import ANY_ERROR, NotPlayed, Outcome, Stage, Verdict, row, worst
from test_death import anything, leaves
from test_restart import loses_its_store

__all__: list[str] = []

DEATH = (rf"rank {VICTIM} \(pid \d+", "died")
NOTICED = 0.25


@row(
    1,
    "SIGKILL in the middle of an all_reduce",
    "error that names the rank, 0.25 s",
    "test_death.py::test_killed_in_the_middle",
)
def killed_in_the_middle(stage: Stage) -> Outcome:
    job = stage.started(3, until_error, all_reduce_large)
    return stage.errors(job, job.kill(VICTIM), NOTICED, *DEATH, but=[VICTIM])


@row(
    2,
    "SIGKILL of a rank that has not arrived",
    "error that names the rank, 0.25 s",
    "test_death.py::test_killed_before_it_arrives",
    "test_death.py::test_killed_before_the_first_collective",
)
def killed_before_it_arrives(stage: Stage) -> Outcome:
    job = stage.started(3, arrives, all_reduce)
    return stage.errors(job, job.kill(VICTIM), NOTICED, *DEATH, but=[VICTIM])


@row(
    3,
    "SIGKILL of a rank that holds 3 GB",
    "0.25 s, whatever the memory",
    "test_death.py::test_killed_with_a_large_memory",
)
def killed_with_a_large_memory(stage: Stage) -> Outcome:
    job = stage.started(3, until_error, all_reduce, 3 << 30)
    return stage.errors(job, job.kill(VICTIM), NOTICED, *DEATH, but=[VICTIM])


@row(
    4,
    "SIGKILL at a random moment of mixed collectives",
    "every round within 1 s, no leak",
    "test_death.py::test_killed_at_some_moment",
    quick=True,
)
def killed_at_random(stage: Stage) -> Outcome:
    """The seed is fixed; the moments are not, for the machine's timing adds to them."""
    moments = random.Random(4)
    outcomes = []
    for _ in range(stage.rounds):
        job = stage.started(3, mixed)
        time.sleep(moments.uniform(0.0, 0.25))
        victim = moments.randrange(3)
        killed = job.kill(victim)
        patterns = (rf"rank {victim} \(pid \d+", "died")
        outcomes.append(stage.errors(job, killed, 1.0, *patterns, but=[victim], aftermath=False))
        if outcomes[-1].verdict < Verdict.HANG:
            outcomes[-1] = worst([outcomes[-1], stage.ended(job, but=[victim])])
        job.close()
    counts = Counter(str(o.verdict) for o in outcomes)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    found = worst(outcomes)
    detail = f"{stage.rounds} rounds: {said}; {found.detail}"
    return Outcome(found.verdict, max(o.seconds or 0.0 for o in outcomes), detail)


def mixed(rank: Rank):
    """The scenario of test_death without its aftermath: other ranks are victims too."""
    rank.recover = lambda _: None
    fault, _ = anything(rank)
    rank.tell(fault)
    dist.destroy_process_group()
    left = rank.left()
    assert left == [], left


TIMEOUT = 2.0


@row(
    5,
    "SIGSTOP",
    "timeout + 0.5 s; the text says state T",
    "test_silence.py::test_a_rank_is_stopped",
    "test_silence.py::test_a_rank_is_stopped_in_the_middle",
)
def stopped(stage: Stage) -> Outcome:
    job = stage.started(3, arrives, all_reduce, TIMEOUT)
    job.signal(VICTIM, signal.SIGSTOP)
    job.tell(0)
    job.tell(2)
    patterns = (rf"rank {VICTIM} \(pid \d+.*state T", "timed out")
    # The first to begin its wait gives up for all.
    found = stage.errors(
        job, None, TIMEOUT + 0.5, *patterns, but=[VICTIM], not_before=TIMEOUT - 0.2
    )
    job.kill(VICTIM)
    return found


@row(
    6,
    "a rank never calls",
    "timeout + 0.5 s; names the missing rank and its last call",
    "test_silence.py::test_a_rank_never_calls",
)
def never_calls(stage: Stage) -> Outcome:
    job = stage.started(3, arrives, all_reduce, TIMEOUT)
    job.tell_all()
    patterns = (rf"rank {VICTIM} \(pid \d+", "last completed seq 1", "timed out")
    found = stage.errors(
        job, None, TIMEOUT + 0.5, *patterns, but=[VICTIM], not_before=TIMEOUT - 0.2
    )
    job.kill(VICTIM)
    return found


@row(
    7,
    "exit without destroy; a Python exception",
    '"left the group (goodbye sent)", 1 s',
    "test_death.py::test_leaves_without_a_word",
)
def leaves_without_a_word(stage: Stage) -> Outcome:
    outcomes = []
    for how in ("returns", "raises"):
        job = stage.jobs(3, leaves, how, real_exit=True)
        if how == "returns":
            gone = job.hear(VICTIM)
        else:
            job.end(VICTIM)
            gone = time.monotonic()
        for rank, (fault, _) in job.hear_all(but=[VICTIM]).items():
            del rank
            patterns = (rf"rank {VICTIM} \(pid \d+", "goodbye sent")
            outcomes.append(stage.judged(fault, gone, 1.0, patterns))
    return worst(outcomes)


@row(
    8,
    "rank 0 and its store die together",
    "like row 1: nothing depends on the store at run time",
    "test_death.py::test_rank_0_dies_with_the_store",
)
def first_dies_with_its_store(stage: Stage) -> Outcome:
    job = stage.started(3, until_error_with_own_store)
    patterns = (r"rank 0 \(pid \d+", "died")
    return stage.errors(job, job.kill(0), NOTICED, *patterns, but=[0])


def until_error_with_own_store(rank: Rank):
    with same_store(rank) as store:
        rank.store = lambda name, first=rank.store: store if name == "first" else first(name)
        return until_error(rank, all_reduce_large, away=(0,))


@row(
    9,
    "the store dies",
    "groups go on; a new group is a DistNetworkError within 5 s",
    "test_restart.py::test_the_store_dies",
)
def the_store_dies(stage: Stage) -> Outcome:
    job = stage.started(3, loses_its_store, False)
    job.kill(2)
    job.end(2)
    outcomes = []
    job.tell(0)
    job.tell(1)
    for tensor, faults, _ in job.hear_all(but=[2]).values():
        if tensor != [8.0 if faults[0] is not None else 16.0] * 3:
            outcomes.append(Outcome(Verdict.WRONG_RESULT, detail=str(tensor)))
        # A group that connects when it is made has none that is not connected.
        tried = faults if faults[0] is not None else faults[1:]
        outcomes += [stage.judged(f, None, 5.0, (), ["DistNetworkError"]) for f in tried]
    return worst(outcomes)


@row(10, "the link between two hosts is cut", "timeout + 0.5 s, as DistBackendError")
def link_cut(stage: Stage) -> Outcome:
    with two_networks() as network:
        job = stage.started(2, over_the_link, network.names, network.ends)
        since = network.cut()
        patterns = ("timed out",)
        return stage.errors(job, since, TIMEOUT + 0.5, *patterns, kinds=ANY_ERROR, aftermath=False)


def over_the_link(rank: Rank, names, ends):
    enter_host(rank, names, ends)
    rank.used()
    soon(TIMEOUT)
    tell_in_call(rank, 3)
    rank.tell(repeated(all_reduce, rank, 10_000))


@row(
    11,
    "segmentation fault that dumps 512 MB of core",
    "error that names the rank, before the timeout",
)
def core_dump(stage: Stage) -> Outcome:
    job = stage.started(3, dumps_core)
    since = time.monotonic()
    job.tell(VICTIM)
    # The kernel marks no word and closes no file before the dump is written.
    return stage.errors(job, since, 5.0, *DEATH, but=[VICTIM])


def dumps_core(rank: Rank):
    rank.used()
    held = None
    if rank.rank == VICTIM:
        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)
        (rank.folder / "core").mkdir()
        os.chdir(rank.folder / "core")
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        held = torch.ones(128 << 20)
    if rank.rank == VICTIM:
        rank.tell("ready")
        rank.hear()
        ctypes.string_at(0)
    del held
    tell_in_call(rank)
    rank.tell(repeated(all_reduce, rank))
    with contextlib.suppress(FileNotFoundError):
        for core in (rank.folder / "core").iterdir():
            core.unlink()
    return aftermath(rank)


@row(12, "an exception in the communication thread", "the error on all ranks, no abort")
def exception_in_the_thread(stage: Stage) -> Outcome:
    """The kernel refuses memory to an operation that runs on a thread of the library."""
    if not stage.native:
        raise NotPlayed("gloo reserves no memory there; its thread is in rows 23, 24, 28, 29, 46")
    job = stage.started(3, fails_in_the_thread)
    start = time.monotonic()
    job.tell_all()
    patterns = (rf"rank {VICTIM}.*No space left",)
    return stage.errors(job, start, 1.0, *patterns, aftermath=False)


def fails_in_the_thread(rank: Rank):
    rank.used()
    if rank.rank == VICTIM:
        refuse_calls("fallocate")
    rank.tell("ready")
    rank.hear()

    def reduces():
        work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
        while not work.is_completed():  # it is not to be run by a rank that waits for it
            time.sleep(0.01)
        work.wait()

    rank.tell(catch(reduces))
    assert catch(dist.all_reduce, torch.ones(2)), "a later call was reported as done"
    dist.destroy_process_group()
    left = rank.left()
    assert left == [], left
