"""A rank dies, or goes without a word: every other rank gets an error that names it, and soon.

Target: 0.25 s, whatever the dead rank's memory; `make faults` measures it. The groups' timeout is 30 s.
"""

import contextlib
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from backend import reduce_scatter_single
from fault_rank import Fault, Rank, catch
from in_call import tell_in_call
from suite_rules import bound

NOTICED = 1.0
ENDED = 1.0
"""Seconds for destroy_process_group after a fault."""

LARGE = 8 << 20  # elements: 32 MiB of float
VICTIM = 1


def assert_names(fault: Fault, since: float, victim: int, pid: int, collective: str) -> None:
    assert fault is not None, "no error"
    assert fault.kind == "DistBackendError", fault
    assert "RuntimeError" in fault.bases
    assert collective in fault.text and re.search(r", seq [1-9]\d*\]: ", fault.text), fault.text
    assert re.search(rf"rank {victim} \(pid {pid}\b", fault.text), fault.text
    assert re.search("connection closed by peer|process died", fault.text, re.I), fault.text
    assert fault.at - since < bound(NOTICED), (
        f"noticed after {fault.at - since:.3f} s: {fault.text}"
    )


def assert_recovered(after: dict, fault: Fault) -> None:
    """Sticky, with the same cause; then nothing left, and a new group works."""
    assert after["again"] is not None and after["again"].seconds < bound(0.5), after
    assert cause(after["again"].text) == cause(fault.text)
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
        all_reduce,
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


@pytest.mark.parametrize("nonblocking", [False, True], ids=["sync", "async"])
def test_killed_before_it_arrives(jobs, nonblocking):
    job = jobs(3, dies_before, True, nonblocking)
    job.hear_all()
    killed = job.kill(VICTIM)
    for fault, after in job.hear_all(but=[VICTIM]).values():
        assert_names(fault, killed, VICTIM, job.pids[VICTIM], "all_reduce(seq 2, float32[5], SUM)")
        assert_recovered(after, fault)
    job.ended_well(but=[VICTIM])


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
        assert fault.at - killed < bound(NOTICED)
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


# --- how it dies ---------------------------------------------------------------------------------


def large_process(rank: Rank):
    rank.used()
    ballast = torch.ones(1 << 28) if rank.rank == VICTIM else None  # 1 GiB, touched
    tell_in_call(rank, 3)
    fault = catch(repeat, rank, all_reduce_small)
    assert ballast is None
    return fault, rank.recover(others(rank))


@pytest.mark.full
def test_killed_with_a_large_memory(jobs):
    """The kernel takes its time to free the memory, and closes files only after it."""
    job = jobs(3, large_process)
    job.hear_all()
    killed = job.kill(VICTIM)
    for fault, after in job.hear_all(but=[VICTIM]).values():
        assert_names(fault, killed, VICTIM, job.pids[VICTIM], "all_reduce")
        assert_recovered(after, fault)
    job.ended_well(but=[VICTIM])
    assert job.end(VICTIM) == -9  # only now is it gone


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
    call = receive if how == "in recv" else all_reduce_small
    fault = catch(call, rank)
    return fault, rank.recover(others(rank))


@pytest.mark.parametrize(
    "how", [pytest.param("returns", marks=pytest.mark.full), "raises", "destroys", "in recv"]
)
def test_leaves_without_a_word(jobs, how):
    """A clean exit, an exception, or a group destroyed by one rank alone: target 1 s."""
    job = jobs(3, leaves, how, real_exit=True)
    if how == "raises":
        assert job.end(VICTIM) == 1
        gone = time.monotonic()
    else:
        gone = job.hear(VICTIM)
    for rank, (fault, after) in job.hear_all(but=[VICTIM]).items():
        assert fault is not None and fault.kind == "DistBackendError", (rank, fault)
        assert re.search(rf"rank {VICTIM} \(pid {job.pids[VICTIM]}\b", fault.text), fault.text
        assert "left the group (goodbye sent)" in fault.text, fault.text
        assert "process died" not in fault.text, "a goodbye is no death"
        assert ("recv" if how == "in recv" else "all_reduce(seq 3") in fault.text
        assert fault.at - gone < bound(NOTICED), fault
        assert_recovered(after, fault)
    if how == "destroys":
        job.tell(VICTIM)
    job.ended_well(but=[VICTIM] if how == "raises" else [])


def first_dies_with_its_store(rank: Rank, port_file):
    if rank.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        new = rank.folder / "port.new"
        new.write_text(str(store.port))
        new.rename(rank.folder / port_file)
    else:
        while not (rank.folder / port_file).exists():
            time.sleep(0.01)
        port = int((rank.folder / port_file).read_text())
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    rank.used(store=store)
    rank.before.files["socket"] += 1
    tell_in_call(rank, 3)
    fault = catch(repeat, rank, all_reduce)
    return fault, rank.recover(others(rank, (0,)))


def test_rank_0_dies_with_the_store(jobs):
    job = jobs(3, first_dies_with_its_store, "port")
    job.hear_all()
    killed = job.kill(0)
    for fault, after in job.hear_all(but=[0]).values():
        assert_names(fault, killed, 0, job.pids[0], "all_reduce")
        assert_recovered(after, fault)
    job.ended_well(but=[0])


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
def test_killed_partner_of_a_message(jobs, call, name):
    job = jobs(3, message_to_the_dead, call)
    job.hear_all()
    killed = job.kill(VICTIM)
    for fault, after in job.hear_all(but=[VICTIM]).values():
        assert_names(fault, killed, VICTIM, job.pids[VICTIM], name)
        assert_recovered(after, fault)
    job.ended_well(but=[VICTIM])


# --- at any moment -------------------------------------------------------------------------------


def anything(rank: Rank):
    rank.used()
    rank.tell("ready")
    calls = [all_reduce_small, all_reduce, broadcast, all_reduce_async, all_gather, barrier]

    def forever():
        while True:
            for call in calls:
                call(rank)

    fault = catch(forever)
    return fault, rank.recover(others(rank))


ROUNDS = [*range(3), *(pytest.param(round_, marks=pytest.mark.full) for round_ in range(3, 40))]


@pytest.mark.parametrize("round_", ROUNDS)
def test_killed_at_some_moment(jobs, round_):
    """Of mixed collectives: which moment it is, the time decides."""
    job = jobs(3, anything)
    job.hear_all()
    time.sleep(0.03 + 0.037 * (round_ % 13))
    killed = job.kill(VICTIM)
    for fault, after in job.hear_all(but=[VICTIM]).values():
        assert_names(fault, killed, VICTIM, job.pids[VICTIM], "")
        assert_recovered(after, fault)
    job.ended_well(but=[VICTIM])


# --- under DETAIL --------------------------------------------------------------------------------


DETAIL_TIMEOUT = 10.0
"""Seconds after which torch's own Gloo, whose check comes before each call, gives up a message to a dead rank."""


def detail(rank: Rank):
    dist.set_debug_level_from_env()  # torch itself reads it when it is loaded
    rank.used(timeout=DETAIL_TIMEOUT)
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    tell_in_call(rank, 3)
    fault = catch(repeat, rank, all_reduce_small)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    return fault


def test_killed_under_detail(jobs):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a check over Gloo before each collective."""
    job = jobs(3, detail, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    job.hear_all()
    killed = job.kill(VICTIM)
    for fault in job.hear_all(but=[VICTIM]).values():
        assert fault is not None and "RuntimeError" in fault.bases, fault
        in_torchs_check = "gloo/transport" in fault.text and "waiting" in fault.text
        assert fault.at - killed < bound(NOTICED) + in_torchs_check * DETAIL_TIMEOUT
    job.ended_well(but=[VICTIM])
