"""How a rank waits: it spins only if each rank has a core, and sleeps when the wait is long."""

import contextlib
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from backend import BACKEND, beyond_gloo
from collective_cases import MOVING, REDUCING, Case, run
from fault_list import plays
from suite_rules import full, until
from world import here

import fastcoll
import fastcoll.info

pytestmark = beyond_gloo("fastcoll's own waiting")

SPIN_US = 50
"""By default, where each rank has a core."""

many_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two cores: ranks of one core each"
)


def spin(cores_of_ranks, spin_us=-1):
    """Makes a group while this rank is bound to its cores, and returns what the group says of its waits."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores_of_ranks[here().rank])
    known = {group["name"] for group in fastcoll.info.groups()}
    try:
        group = dist.new_group(backend=BACKEND, pg_options=fastcoll.Options(spin_us=spin_us))
    finally:
        os.sched_setaffinity(0, before)
    assert "spin_us" not in told(known), "it is decided with the transport"
    dist.all_reduce(torch.ones(3), group=group)
    return told(known)["spin_us"]


def told(known):
    """Returns what fastcoll.info tells of the one group that is not known."""
    (new,) = [group for group in fastcoll.info.groups() if group["name"] not in known]
    return new


# Cores of each rank, of those that this process may use; what the ranks then spin.
A, B, BOTH = {0}, {1}, {0, 1}


@pytest.mark.parametrize(
    "cores, expected",
    [
        pytest.param([A, B], [SPIN_US] * 2, id="a core each", marks=many_cores),
        pytest.param([BOTH, BOTH], [SPIN_US] * 2, id="two cores for both", marks=many_cores),
        pytest.param([A, A], [0, 0], id="one core for both"),
        pytest.param([A, B, A], [0, SPIN_US, 0], id="two meet on a core", marks=many_cores),
        pytest.param([A, BOTH, B], [0] * 3, id="one joins two others", marks=many_cores),
    ],
)
def test_ranks_spin_where_each_has_a_core(world, cores, expected):
    known = sorted(os.sched_getaffinity(0))
    sets = [{known[core] for core in own} for own in cores]
    assert world(len(cores)).run(spin, sets) == expected


def test_the_option_decides(world):
    (core,) = sorted(os.sched_getaffinity(0))[:1]
    assert world(2).run(spin, [{core}, {core}], 7) == [7, 7]


# --- a rank that waits for a long time sleeps: it leaves its core to others ----------------------

WINDOW = 0.2
"""Seconds over which a rank is observed."""

RUNNING, RUNNABLE = 0.05, 0.5
"""Most shares of a window in which a waiting rank runs, and in which it runs or waits for a core; a rank that spins
has 1 in the second, on a busy machine too."""


def all_reduce():
    dist.all_reduce(torch.ones(3))


def large_all_reduce():
    dist.all_reduce(torch.ones(1 << 20))


def asynchronous():
    dist.all_reduce(torch.ones(3), async_op=True).wait()


def barrier():
    dist.barrier()


def receive():
    if here().rank == 0:
        for peer in range(1, here().size):
            dist.send(torch.ones(3), peer)
    else:
        dist.recv(torch.ones(3), 0)


def scheduled(pid):
    """Returns for how many seconds the threads of a process have run, and have waited for a core."""
    ran = waited = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended
            times = thread.read_text().split()
            ran, waited = ran + int(times[0]), waited + int(times[1])
    return ran / 1e9, waited / 1e9


def sleep(pids):
    """Returns whether the processes slept in the next window, but for a look now and then."""
    before, began = [scheduled(pid) for pid in pids], time.monotonic()
    time.sleep(WINDOW)
    seconds = time.monotonic() - began
    for pid, old in zip(pids, before, strict=True):
        ran, waited = (now - then for now, then in zip(scheduled(pid), old, strict=True))
        if ran > RUNNING * seconds or ran + waited > RUNNABLE * seconds:
            return False
    return True


def waits(call):
    """Rank 0 calls when it has seen the others wait for it, asleep."""
    pids = [None] * here().size
    dist.all_gather_object(pids, os.getpid())
    call()  # connected
    dist.barrier()
    if here().rank == 0:
        until(lambda: sleep(pids[1:]))
    call()


class Checked(Case):
    """A collective for which rank 1 waits for rank 0."""

    def __call__(self):
        run(self)


CASES = [
    *[
        pytest.param(call, size, marks=plays(42) if (call, size) == (all_reduce, 2) else ())
        for call in (all_reduce, large_all_reduce, asynchronous, barrier, receive)
        for size in (2, 4)
    ],
    *[
        full(Checked(name, root=int(name in ("reduce", "gather"))), 2, id=name)
        for name in [*REDUCING, *MOVING]
    ],
]


@pytest.mark.parametrize(("call", "size"), CASES)
def test_waiting_takes_no_core(world, call, size):
    world(size).run(waits, call)
