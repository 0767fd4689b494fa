"""Ranks that end, stop, or call something else in a group of device tensors, on NCCL's stand-in.

NCCL itself tells nothing of it: without fastcoll the others wait until the timeout. Target: two seconds. Tensors are
the recording device's (tests/recording_device); the rules are those of csrc/torch/host_peers.hpp.
"""

import os
import re
import signal
import threading
import time

import captures
import device_ranks
import peer_memory
import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from fault_list import plays
from fault_rank import Rank, catch
from in_time import assert_raised
from suite_rules import bound, full, until

pytestmark = [
    beyond_gloo("it has no device tensors"),
    pytest.mark.usefixtures("without_nccl", "device_libraries"),
]

NAMED = 2.0
"""Seconds in which all others name the rank."""

VICTIM = 1

MOMENTS = ["idle", "in a call", "init"]


def ones(count: int = 4, **options) -> torch.Tensor:
    return torch.ones(count, device=device_ranks.DEVICE, **options)


def begin(rank: Rank) -> None:
    device_ranks.prepare()
    rank.init()


def used(rank: Rank) -> None:
    """Make one call, and wait until no rank is in it."""
    begin(rank)
    x = ones()
    dist.all_reduce(x)
    assert x.tolist() == [rank.size] * 4
    rank.meet("used")


def fault_of_group() -> None:
    """Wait until the group has failed, without a call, and raise its fault by one."""
    until(lambda: device_ranks.has_failed(dist.group.WORLD))
    dist.all_reduce(ones())


# --- a rank that ends ----------------------------------------------------------------------------


def loses(rank: Rank, moment: str, way: str):
    begin(rank) if moment == "init" else used(rank)
    if rank.rank == VICTIM and moment == "init":
        device_ranks.inject("hang initRank 0 0 1")
    if rank.rank != VICTIM:
        rank.pause()
        return catch(fault_of_group) if moment == "idle" else catch(lambda: dist.all_reduce(ones()))
    rank.tell("ready")
    if moment == "init":
        dist.all_reduce(ones())  # does not return
    rank.hear()
    if way == "destroy":
        dist.destroy_process_group()
        rank.tell(time.monotonic())
        rank.hear()  # the process lives on
    if way == "os._exit":
        os._exit(3)
    return None


@pytest.mark.parametrize(
    ("size", "pretended_hosts", "moment"),
    [(size, hosts, moment) for size, hosts in ((2, 1), (4, 2)) for moment in MOMENTS]
    + [full(size, hosts, moment) for size, hosts in ((8, 1), (6, 3)) for moment in MOMENTS],
)
@plays(66)
def test_a_killed_rank(jobs, size, moment):
    """Its host's other ranks see it, and tell those of other hosts."""
    job = jobs.ready(size, loses, moment, "kill")
    others = [rank for rank in range(size) if rank != VICTIM]
    job.tell(*others)
    time.sleep(0.3)  # they wait in the call, or for no call at all
    killed = job.kill(VICTIM)
    faults = job.hear_all(but=[VICTIM])
    for fault in faults.values():
        assert_raised(fault, job.name(VICTIM), "process died", since=killed, within=NAMED)


def receives(rank: Rank):
    """The ranks meet in pairs alone, as in a pipeline: no call has all of them."""
    begin(rank)
    x = ones()
    if rank.rank == VICTIM:
        dist.send(x, 0)
        rank.pause()
    elif rank.rank == 0:
        dist.recv(x, VICTIM)
        rank.pause()
        return catch(lambda: dist.recv(x, VICTIM))
    return None


def test_a_killed_rank_of_a_pair(jobs):
    job = jobs.ready(3, receives)
    job.tell(0)
    time.sleep(0.3)
    killed = job.kill(VICTIM)
    assert_raised(job.hear(0), job.name(VICTIM), "process died", since=killed, within=NAMED)


def maps(rank: Rank, moment: str):
    """These ranks map each other's memory, and their kernels wait for each other."""
    peer_memory.prepare()
    import quick_interpreter

    rank.init(device_id=torch.device(peer_memory.DEVICE) if moment == "split" else None)

    def stays(*_):
        rank.tell("maps")
        time.sleep(600)

    if moment != "init":
        dist.all_reduce(ones())
        assert peer_memory.reduces_of().chosen == "one_shot"
    if rank.rank == VICTIM:
        peer_memory.SharedFiles.map = stays
    rank.meet("ready")
    if rank.rank == VICTIM and moment == "in a kernel":
        rank.pause()
    if moment == "split":
        return catch(dist.split_group, split_ranks=[list(range(rank.size))])
    if moment == "init":
        return catch(dist.all_reduce, ones())
    before = quick_interpreter.polls[0]
    call = threading.Thread(target=catch, args=(dist.all_reduce, ones()))
    call.start()
    until(lambda: quick_interpreter.polls[0] > before + 10)
    rank.tell("waits")
    call.join()  # the kernel's wait ends
    return catch(fault_of_group)


@pytest.mark.parametrize("moment", ["init", "split", "in a kernel"])
def test_a_killed_rank_whose_memory_the_others_map(jobs, moment):
    """The rank is killed while all map, or while the others' kernels wait for it."""
    job = jobs(3, maps, moment)
    job.hear(VICTIM)
    if moment == "in a kernel":
        job.hear_all(but=[VICTIM])
    killed = job.kill(VICTIM)
    for fault in job.hear_all(but=[VICTIM]).values():
        assert_raised(fault, job.name(VICTIM), "process died", since=killed, within=NAMED)


@pytest.mark.parametrize("way", ["destroy", full("return"), "os._exit"])
def test_a_rank_that_leaves_before_a_call(jobs, way):
    job = jobs.ready(3, loses, "in a call", way, real_exits=[VICTIM])
    job.tell_all()
    since = job.hear(VICTIM) if way == "destroy" else time.monotonic()
    if way == "return":
        job.hear(VICTIM)
    if way == "os._exit":
        assert job.end(VICTIM) == 3
    faults = job.hear_all(but=[VICTIM])
    said = "process died" if way == "os._exit" else "left the group"
    for fault in faults.values():
        assert_raised(fault, job.name(VICTIM), said, since=since, within=NAMED)
    if way == "destroy":
        job.tell(VICTIM)
        job.hear(VICTIM)


# --- a rank that is killed while a graph has calls of the group ----------------------------------

NEXT = {"call": lambda: dist.all_reduce(ones()), "destroy": dist.destroy_process_group}


def replays(rank: Rank, graph: str, then: str):
    """A replay's calls are not seen: nothing of the group is under way."""
    used(rank)
    x, y = ones(1) * rank.rank, ones(rank.size)
    if graph != "none":
        with captures.captured(captures.driver()):
            dist.all_gather_into_tensor(y, x)
        assert y.tolist() == [1.0] * rank.size
    if graph == "replayed":
        assert captures.replay()
        assert y.tolist() == [*range(rank.size)]
    rank.tell("ready")
    while graph == "replayed" and captures.replay():
        continue
    until(lambda: device_ranks.has_failed(dist.group.WORLD))
    return catch(NEXT[then])


@pytest.mark.parametrize(
    ("size", "pretended_hosts", "graph", "then"),
    [(2, 1, graph, then) for graph in ("captured", "replayed") for then in NEXT]
    + [full(*of, "replayed", then) for of in ((4, 2), (8, 1)) for then in NEXT],
)
@plays(66)
def test_a_killed_rank_of_a_graph(jobs, size, graph, then):
    """A replay may be under way and compute wrong values. A rank that makes no further call gets the error too."""
    job = jobs.ready(size, replays, graph, then)
    time.sleep(0.3)  # they replay, or wait for no call at all
    killed = job.kill(VICTIM)
    said = "failed before" if then == "call" else "failed before it was destroyed"
    for fault in job.hear_all(but=[VICTIM]).values():
        assert_raised(fault, said, job.name(VICTIM), "process died", since=killed, within=NAMED)


@pytest.mark.parametrize(("size", "pretended_hosts"), [(2, 1), (4, 2), full(8, 1), full(6, 3)])
def test_a_killed_rank_of_an_idle_group_without_graphs(jobs, size):
    """It has spoiled no result, so the end of the group says nothing."""
    job = jobs.ready(size, replays, "none", "destroy")
    job.kill(VICTIM)
    assert set(job.hear_all(but=[VICTIM]).values()) == {None}


# --- ranks that leave in order -------------------------------------------------------------------


def last_calls(rank: Rank, rounds: int) -> int:
    """Groups of which each rank leaves right behind its last call, after a pause of its own."""
    begin(rank)
    for round_ in range(rounds):
        group = dist.new_group()
        for _ in range(round_ % 3 + 1):
            x = ones()
            dist.all_reduce(x, group=group)
        y = ones() * rank.rank
        dist.broadcast(y, round_ % rank.size, group=group)
        time.sleep(0.001 * ((rank.rank + round_) % 4))
        dist.destroy_process_group(group)
        assert x.tolist() == [rank.size] * 4 and y.tolist() == [round_ % rank.size] * 4
    dist.all_reduce(ones())
    return rounds


@pytest.mark.parametrize("rounds", [25, full(500)])
def test_no_alarm_when_ranks_leave_in_order(jobs, rounds):
    job = jobs(3, last_calls, rounds)
    assert set(job.hear_all(timeout=bound(20 + rounds)).values()) == {rounds}
    for rank in range(3):
        assert "is aborted" not in job.log(rank)


# --- a rank that is stopped ----------------------------------------------------------------------


def reduces(rank: Rank) -> list[float]:
    used(rank)
    rank.pause()
    x = ones()
    dist.all_reduce(x)
    return x.tolist()


@plays(5)
def test_a_stopped_rank_is_named_while_the_others_wait(jobs):
    """It is no fault: a debugger may hold it."""
    job = jobs.ready(3, reduces)
    job.signal(VICTIM, signal.SIGSTOP)
    since = time.monotonic()
    job.tell_all()
    warned = re.escape(job.name(VICTIM)) + r"host .*\) is stopped"
    others = [rank for rank in range(3) if rank != VICTIM]
    until(lambda: all(re.search(warned, job.log(rank)) for rank in others))
    assert time.monotonic() - since < bound(NAMED)
    job.signal(VICTIM, signal.SIGCONT)
    assert list(job.hear_all().values()) == [[3.0] * 4] * 3


# --- calls that differ ---------------------------------------------------------------------------


def parts(count: int) -> list[torch.Tensor]:
    return [ones(count) for _ in range(dist.get_world_size())]


CALLS = {
    "all_reduce": lambda: dist.all_reduce(ones(10)),
    "longer all_reduce": lambda: dist.all_reduce(ones(11)),
    "all_reduce of int32": lambda: dist.all_reduce(ones(10, dtype=torch.int32)),
    "all_reduce by MAX": lambda: dist.all_reduce(ones(10), op=dist.ReduceOp.MAX),
    "a factor of each rank": lambda: dist.all_reduce(
        ones(10), op=dist._make_nccl_premul_sum(1.0 + dist.get_rank())
    ),
    "broadcast from 0": lambda: dist.broadcast(ones(10), 0),
    "broadcast from 2": lambda: dist.broadcast(ones(10), 2),
    "reduce to 0": lambda: dist.reduce(ones(10), 0),
    "all_gather": lambda: dist.all_gather(parts(10), ones(10)),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ones(30), ones(10)),
    "longer all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ones(33), ones(11)),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ones(10), ones(30)),
    "all_to_all_single": lambda: dist.all_to_all_single(ones(30), ones(30)),
    "gather": lambda: dist.gather(ones(10), parts(10) if dist.get_rank() == 0 else None, 0),
    "scatter": lambda: dist.scatter(ones(10), parts(10) if dist.get_rank() == 0 else None, 0),
}

PAIRS = {
    # what the others call, what the odd rank calls, and the two as the text must show them
    "counts": ("all_reduce", "longer all_reduce", r"float32[10], SUM", r"float32[11], SUM"),
    "dtypes": ("all_reduce", "all_reduce of int32", "float32[10]", "int32[10]"),
    "operations": ("all_reduce", "all_reduce by MAX", "SUM", "MAX"),
    "roots": ("broadcast from 0", "broadcast from 2", "root 0", "root 2"),
    "all_reduce and broadcast": ("all_reduce", "broadcast from 0", "all_reduce(", "broadcast("),
    "reduce and all_reduce": ("reduce to 0", "all_reduce", "reduce(", "all_reduce("),
    "all_gather and reduce_scatter": (
        *("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather", "reduce_scatter"),
    ),
    "sizes of all_gather": (
        *("all_gather_into_tensor", "longer all_gather_into_tensor", "[10]", "[11]"),
    ),
    "all_to_all and all_reduce": ("all_to_all_single", "all_reduce", "all_to_all", "all_reduce"),
    "gather and scatter": ("gather", "scatter", "gather(", "scatter("),
}


def all_calls(rank: Rank) -> None:
    used(rank)
    for call in CALLS.values():
        call()
    rank.meet("all")


def differs(rank: Rank, theirs: str, odd: str):
    """NCCL would hang, or move what it gets; the stand-in says at once what it dislikes, so it is told to hang."""
    used(rank)
    device_ranks.inject("hang * 0 0 99")
    rank.pause()
    call = CALLS[odd if rank.rank == VICTIM else theirs]
    return catch(call)


@plays(27)
@pytest.mark.parametrize(
    "pair", [name if name in ("counts", "roots") else full(name) for name in PAIRS]
)
def test_calls_that_differ(jobs, pair):
    theirs, odd, shown, odd_shown = PAIRS[pair]
    job = jobs.ready(3, differs, theirs, odd)
    since = time.monotonic()
    job.tell_all()
    for fault in job.hear_all().values():
        said = "Detected mismatch between collectives on ranks", shown, odd_shown
        assert_raised(fault, *said, since=since, within=NAMED)


def test_equal_calls_raise_no_alarm(jobs):
    job = jobs.ready(3, all_calls)
    for rank in range(3):
        assert "mismatch" not in job.log(rank)
