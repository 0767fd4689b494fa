"""How a rank can end: by an exception, with a core dump, with its store, in a thread of its own."""

import contextlib
import ctypes
import os
import resource
import signal
import time

import pytest
import torch
import torch.distributed as dist
from fault_list import plays
from fault_rank import Rank, catch
from in_call import tell_in_call
from over_hosts import over_hosts
from rank_calls import all_reduce, repeated
from suite_rules import bound
from test_death import VICTIM, after_death, receive

LEFT = 1.0
"""Seconds in which the others notice that a rank has left."""


def leaves(rank: Rank, how):
    rank.used()
    dist.all_reduce(torch.ones(3))
    if rank.rank == VICTIM:
        if how == "raises":
            raise KeyError("lost")
        if how == "destroys":
            dist.destroy_process_group()
            rank.tell(time.monotonic())
            rank.hear()
        return time.monotonic()
    fault = catch(*((receive, rank, 5) if how == "in recv" else (all_reduce, rank)))
    return fault, rank.recover(VICTIM)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("returns", marks=[pytest.mark.full, plays(7)]),
        pytest.param("raises", marks=plays(7)),
        "destroys",
        "in recv",
    ],
)
def test_leaves_without_a_word(jobs, how):
    """A clean exit, an exception, or a group destroyed by one rank alone: target 1 s."""
    job = jobs(3, leaves, how, real_exits=[VICTIM])
    if how == "raises":
        assert job.end(VICTIM) == 1
        gone = time.monotonic()
    else:
        gone = job.hear(VICTIM)
    call = "recv" if how == "in recv" else "all_reduce(seq 3"
    answers = job.hear_all(but=[VICTIM])
    said = "left the group (close notice sent)", call
    job.after_fault(answers, *said, names=[VICTIM], since=gone, within=LEFT)
    assert not any("process died" in f.text for f, _ in answers.values()), "a goodbye is no death"
    if how == "destroys":
        job.tell(VICTIM)


def first_dies_with_its_store(rank: Rank):
    rank.used(store=rank.store_of(0))
    rank.before.files["socket"] += 1
    tell_in_call(rank, 3)
    fault = repeated(all_reduce, rank, 1 << 20)
    return fault, rank.recover(0)


@plays(8)
def test_rank_0_dies_with_the_store(jobs):
    job = jobs.ready(3, first_dies_with_its_store)
    killed = job.kill(0)
    after_death(job, job.hear_all(but=[0]), killed, "all_reduce", 0)


# --- a core dump ---------------------------------------------------------------------------------


def dumps_core(rank: Rank):
    rank.used()
    if rank.rank == VICTIM:
        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)
        (rank.scratch / "core").mkdir()
        os.chdir(rank.scratch / "core")
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        held = torch.ones(128 << 20)
        rank.pause()
        ctypes.string_at(0)
        del held
    tell_in_call(rank)
    fault = repeated(all_reduce, rank)
    with contextlib.suppress(FileNotFoundError):
        for core in (rank.scratch / "core").iterdir():
            core.unlink()
    return fault, rank.recover(VICTIM)


@plays(11)
@over_hosts
@pytest.mark.full
def test_a_rank_that_dumps_its_memory_is_named_before_the_timeout(jobs):
    """The kernel marks no word and closes no file before the dump is written."""
    job = jobs.ready(3, dumps_core)
    since = time.monotonic()
    job.tell(VICTIM)
    answers = job.hear_all(but=[VICTIM])
    job.after_fault(answers, "died", names=[VICTIM], since=since, within=5.0)
    job.end(VICTIM)  # when its memory is written


# --- under DETAIL --------------------------------------------------------------------------------


DETAIL_TIMEOUT = 10.0
"""Seconds after which torch's own Gloo, whose check comes before each call, gives up a message to a dead rank."""


def detail(rank: Rank):
    dist.set_debug_level_from_env()  # torch itself reads it when it is loaded
    rank.used(timeout=DETAIL_TIMEOUT)
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    tell_in_call(rank, 3)
    fault = repeated(all_reduce, rank)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    return fault


def test_killed_under_detail(jobs):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a check over Gloo before each collective."""
    job = jobs.ready(3, detail, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    killed = job.kill(VICTIM)
    for fault in job.hear_all(but=[VICTIM]).values():
        assert fault is not None and "RuntimeError" in fault.bases, fault
        in_torchs_check = "gloo/transport" in fault.text and "waiting" in fault.text
        assert fault.at - killed < bound(LEFT) + in_torchs_check * DETAIL_TIMEOUT
