"""A rank is stopped, or never calls: after the timeout the error says what is missing, and who.

Target: the timeout of the group plus 0.5 s at most. Groups begin with a long timeout. Where ranks wait together, one
of them alone has the short one, and calls when the others are in the call: a rank that is only slow is never missing.
"""

import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from backend import IS_GLOO
from fault_list import plays
from fault_rank import Fault, Rank, catch
from in_call import others_first, soon, tell_in_call
from in_time import in_time
from over_hosts import apart
from suite_rules import bound

TIMEOUT = 0.5
LATE = 0.5
ABSENT = 1


def assert_timed_out(fault: Fault, collective: str, timeout: float = TIMEOUT) -> None:
    assert fault is not None, "no error"
    assert fault.kind == "DistBackendError" and "RuntimeError" in fault.bases, fault
    assert "timed out" in fault.text.lower(), fault.text
    assert f"{timeout * 1000:.0f} ms" in fault.text, fault.text
    assert collective in fault.text, fault.text


def assert_in_time(fault: Fault, timeout: float = TIMEOUT) -> None:
    assert timeout - 0.1 < fault.seconds, fault
    in_time(fault.seconds, timeout + LATE, fault.text)


# --- a rank that never calls ---------------------------------------------------------------------


def all_reduce(rank):
    dist.all_reduce(torch.ones(10))


def all_reduce_large(rank):
    dist.all_reduce(torch.ones(1 << 20))


def all_reduce_async(rank):
    dist.all_reduce(torch.ones(10), async_op=True).wait()


def broadcast_to(rank):
    dist.broadcast(torch.ones(10), 0)


def broadcast_from(rank):
    dist.broadcast(torch.ones(10), ABSENT)


def all_to_all(rank):
    dist.all_to_all_single(torch.ones(3), torch.ones(3))


def barrier(rank):
    dist.barrier()


def misses(rank: Rank, call, absent: list[int]):
    rank.used()
    dist.all_reduce(torch.ones(3))
    if rank.rank in absent:
        rank.tell("away")
        rank.hear()  # until the others have their error
        return catch(call, rank), None
    others_first(rank, 0, TIMEOUT)
    fault = catch(call, rank)
    return fault, rank.recover([r for r in range(rank.size) if r not in (rank.rank, *absent)])


def misses_the_first(rank: Rank, absent: list[int]):
    rank.used()
    first = min(set(range(rank.size)) - set(absent))
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT if rank.rank == first else 30.0))
    if rank.rank in absent or rank.rank == first:
        rank.tell("ready")
        rank.hear()
    else:
        tell_in_call(rank)
    fault = catch(dist.all_reduce, torch.ones(10), group=group)
    dist.destroy_process_group()
    return fault


@pytest.mark.parametrize("absent", [[1], [0], [1, 3]], ids=str)
def test_a_rank_does_not_come_to_the_first_collective(jobs, absent):
    job = jobs(4, misses_the_first, absent)
    job.hear_all()
    job.tell(min(set(job.pids) - set(absent)))
    for fault in job.hear_all(but=absent).values():
        assert_timed_out(fault, "fastcoll.init")
        for rank in absent:
            assert f"rank {rank} (pid {job.pids[rank]}" in fault.text, fault.text
            assert "has not arrived at the group's first collective" in fault.text
        assert re.search(r"state [SRD]\b", fault.text), fault.text
    for rank in absent:
        job.tell(rank)
    for rank in absent:
        late = job.hear(rank)
        assert late is not None and late.kind == "DistBackendError", late
        assert "this rank came to the group's first collective" in late.text, late.text
        _, idle, before = map(float, re.findall(r"(\d+\.\d) s", late.text)[:3])
        assert idle >= TIMEOUT and before >= 0, late.text
        assert "after the others had given up" in late.text
    job.ended_well()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        pytest.param(all_reduce, "all_reduce(seq 3, float32[10], SUM)", marks=plays(6)),
        (all_reduce_large, "all_reduce(seq 3, float32[1048576], SUM)"),
        (all_reduce_async, "all_reduce(seq 3, float32[10], SUM)"),
        (broadcast_to, "broadcast(seq 3, float32[10], root 0)"),
        (broadcast_from, "broadcast(seq 3, float32[10], root 1)"),
        (all_to_all, "all_to_all(seq 3, float32[3])"),
        (barrier, "barrier(seq 3)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_rank_never_calls(jobs, call, text):
    job = jobs(3, misses, call, [ABSENT])
    job.hear_all()
    job.tell(0)
    answers = job.hear_all(but=[ABSENT])
    for fault, after in answers.values():
        assert_timed_out(fault, text)
        assert f"not arrived: rank {ABSENT} (pid {job.pids[ABSENT]}" in fault.text, fault.text
        assert "last completed seq 2" in fault.text, fault.text
        assert re.search(r"state [SRD]\b", fault.text), fault.text
        assert after["again"].seconds < bound(0.5) and "Timed out" in after["again"].text
        assert after["state"] == "TIMEOUT"
        assert after["destroy"] < bound(1.0) and after["left"] == []
    first, told = answers[0][0], answers[2][0]
    assert_in_time(first)
    assert told.at - first.at < bound(LATE), (first, told)
    # The late rank must not mistake what the others left for an answer.
    job.tell(ABSENT)
    late, _ = job.hear(ABSENT)
    assert late is not None and late.kind == "DistBackendError", late
    assert late.seconds < bound(1.0), late
    job.ended_well()


def test_two_ranks_never_call(jobs):
    job = jobs(3, misses, all_reduce, [1, 2])
    job.hear_all()
    job.tell(0)
    fault, _ = job.hear(0)
    assert_timed_out(fault, "all_reduce(seq 3")
    assert_in_time(fault)
    for rank in (1, 2):
        assert f"rank {rank} (pid {job.pids[rank]}" in fault.text, fault.text
        job.tell(rank)
        assert job.hear(rank)[0] is not None
    job.ended_well()


# --- a rank that is stopped ----------------------------------------------------------------------


def stopped(rank: Rank, call):
    rank.used()
    if rank.rank == ABSENT:
        rank.tell("ready")
        rank.hear()
    else:
        others_first(rank, 0, TIMEOUT)
    fault = catch(call, rank)
    return fault, rank.error_kind()


@pytest.mark.parametrize("call", [pytest.param(all_reduce, marks=plays(5)), barrier])
def test_a_rank_is_stopped(jobs, call):
    job = jobs(3, stopped, call)
    job.hear_all()
    job.signal(ABSENT, signal.SIGSTOP)
    job.tell(0)
    answers = job.hear_all(but=[ABSENT])
    for fault, state in answers.values():
        assert_timed_out(fault, f"{call.__name__}(seq 2")
        assert re.search(
            rf"rank {ABSENT} \(pid {job.pids[ABSENT]}.*state T \(stopped\)", fault.text
        )
        assert state == "TIMEOUT"
    assert_in_time(answers[0][0])
    job.signal(ABSENT, signal.SIGCONT)
    job.tell(ABSENT)
    fault, _ = job.hear(ABSENT)
    assert fault is not None and fault.seconds < bound(1.0), fault
    job.ended_well()


LONG = 4.0
"""Seconds of a timeout that covers calls of all ranks, which may be slow."""


def stopped_in_the_middle(rank: Rank):
    rank.used()
    soon(LONG)
    tell_in_call(rank, 3)

    def repeat():
        while True:
            tensor = torch.ones(4 << 20)
            dist.all_reduce(tensor)
            assert torch.all(tensor == rank.size), "a wrong result was returned as success"

    return catch(repeat)


@plays(5)
@pytest.mark.full
def test_a_rank_is_stopped_in_the_middle(jobs):
    job = jobs(3, stopped_in_the_middle)
    job.hear_all()
    when = job.signal(ABSENT, signal.SIGSTOP)
    for fault in job.hear_all(but=[ABSENT]).values():
        assert_timed_out(fault, "all_reduce(seq ", LONG)
        assert "state T (stopped)" in fault.text, fault.text
        in_time(fault.at - when, LONG + LATE, fault.text)
    job.signal(ABSENT, signal.SIGCONT)
    assert job.hear(ABSENT).kind == "DistBackendError"
    job.ended_well()


# --- point-to-point ------------------------------------------------------------------------------


def no_message(rank: Rank, source: int | None):
    rank.used()
    fault = None
    if rank.rank == 0:
        soon(TIMEOUT)
        fault = catch(dist.recv, torch.ones(10), source, tag=5)
    rank.tell(fault)
    rank.hear()


@pytest.mark.parametrize("source", [ABSENT, None], ids=["from one", "from any"])
def test_no_message_comes(jobs, source):
    job = jobs(2, no_message, source)
    fault = job.hear_all()[0]
    assert_timed_out(fault, "recv(seq 1, float32[10], from ")
    assert "tag 5" in fault.text
    assert_in_time(fault)
    if source is not None:
        assert f"rank {ABSENT} (pid {job.pids[ABSENT]}" in fault.text, fault.text
        assert re.search(r"state [SRD]\b", fault.text), fault.text
    job.tell_all()
    job.hear_all()
    job.ended_well()


# --- monitored barrier, which names without ending the group -------------------------------------


def monitored(rank: Rank):
    rank.used()
    if rank.rank == 2:
        tell_in_call(rank)
    else:
        rank.tell("ready")
        rank.hear()
    if rank.rank != ABSENT:
        # torch.distributed.monitored_barrier itself refuses every name but "gloo".
        group = dist.group.WORLD
        fault = catch(group.monitored_barrier, timedelta(seconds=TIMEOUT), wait_all_ranks=True)
        rank.tell(fault)
        rank.hear()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return tensor.tolist()


def test_monitored_barrier_names_the_rank_and_spares_the_group(jobs):
    job = jobs(3, monitored)
    job.hear_all()
    job.tell(0)
    faults = job.hear_all(but=[ABSENT])
    assert f"Rank {ABSENT} failed to pass monitoredBarrier" in faults[0].text
    assert faults[2] is not None and faults[2].seconds < TIMEOUT + bound(LATE)
    job.tell_all()
    assert job.hear_all() == {rank: [3.0, 3.0] for rank in range(3)}
    job.ended_well()


# --- a wait of one's own choice ------------------------------------------------------------------


def waits_a_little(rank: Rank, kind):
    rank.used()
    rank.tell("ready")
    tensor = torch.full((10,), rank.rank + 1.0)
    if rank.rank == 0:
        work = dist.irecv(tensor, 1) if kind == "recv" else dist.all_reduce(tensor, async_op=True)
        fault = catch(work.wait, timedelta(seconds=0.5))
        rank.tell(fault)
        work.wait()
    else:
        rank.hear()
        if kind == "recv":
            dist.send(tensor, 0)
        else:
            dist.all_reduce(tensor)
    first = tensor.tolist()
    dist.all_reduce(tensor)
    return first, tensor.tolist(), rank.error_kind()


@pytest.mark.parametrize("kind", [pytest.param("all_reduce", marks=plays(16)), "recv"])
@apart
def test_wait_with_a_timeout_raises_and_the_work_goes_on(jobs, kind):
    job = jobs(2, waits_a_little, kind)
    job.hear_all()
    fault = job.hear(0)
    assert fault is not None and "RuntimeError" in fault.bases
    assert ("timed out" if IS_GLOO else "timed out after 500 ms") in fault.text.lower(), fault.text
    assert_in_time(fault, 0.5)
    job.tell(1)
    first = [2.0] * 10 if kind == "recv" else [3.0] * 10
    for result in job.hear_all().values():
        assert result == (first, [2 * x for x in first], "" if IS_GLOO else "SUCCESS")
    job.ended_well()


# --- a rank that has come, and stands still ------------------------------------------------------


def comes_last(rank: Rank):
    rank.used()
    others_first(rank, 2, TIMEOUT)
    return catch(dist.all_reduce, torch.ones(4 << 20))  # more than a rank can publish at once


def sleeps(pid: int) -> bool:
    """Return whether the process's main thread sleeps, and goes on doing so."""
    for _ in range(5):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state != "S":
            return False
        time.sleep(0.002)
    return True


def test_a_rank_is_stopped_within_a_call_to_which_all_have_come(jobs):
    job = jobs(3, comes_last, environment={"FASTCOLL_SPIN_US": "0"})
    job.hear_all()
    while not sleeps(job.pids[ABSENT]):  # it has published what there is room for, and waits
        pass
    job.signal(ABSENT, signal.SIGSTOP)
    job.tell(2)
    for fault in job.hear_all(but=[ABSENT]).values():
        assert_timed_out(fault, "all_reduce(seq ")
        assert "all ranks arrived, still waiting for" in fault.text, fault.text
        assert f"rank {ABSENT} (pid {job.pids[ABSENT]}" in fault.text, fault.text
        assert "state T (stopped)" in fault.text, fault.text
    job.signal(ABSENT, signal.SIGCONT)
    assert job.hear(ABSENT).kind == "DistBackendError"
    job.ended_well()
