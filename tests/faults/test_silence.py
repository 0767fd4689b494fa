"""A rank is stopped, or never calls: after the timeout the error says what is missing, and who.

Target: the timeout of the group plus 0.5 s at most. Groups begin with a long timeout. Where ranks wait together, one
of them alone has the short one, and calls when the others are in the call: a rank that is only slow is never missing.
"""

import ctypes
import re
import signal
import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from backend import IS_GLOO, beyond_gloo
from fault_list import plays
from fault_rank import Fault, Rank, catch
from in_call import others_first, soon, tell_in_call
from in_time import assert_raised, in_time
from over_hosts import apart
from rank_calls import (
    all_reduce,
    all_reduce_async,
    all_reduce_with_communicator,
    all_reduce_with_plan,
    all_to_all,
    barrier,
    broadcast,
    repeated,
)
from suite_rules import bound, full, until

TIMEOUT = 0.5
LATE = 0.5
ABSENT = 1


def assert_timed_out(fault: Fault, collective: str, *said: str, timeout: float = TIMEOUT) -> None:
    assert_raised(fault, f"imed out after {timeout * 1000:.0f} ms", collective, *said)
    assert "RuntimeError" in fault.bases, fault


def assert_in_time(fault: Fault, timeout: float = TIMEOUT) -> None:
    assert timeout - 0.1 < fault.seconds, fault
    in_time(fault.seconds, timeout + LATE, fault.text)


# --- a rank that never calls ---------------------------------------------------------------------


def misses(rank: Rank, absent: list[int], short: list[int], call, *arguments: int):
    """Ranks ``short`` have the short timeout."""
    rank.used()
    dist.all_reduce(torch.ones(3))
    if rank.rank in absent:
        rank.pause()  # until the others have their error
        # Between hosts the first call may have the others' data already, and their fault be still on its way here.
        return catch(call, rank, *arguments) or catch(call, rank, *arguments), None
    others_first(rank, rank.rank if rank.rank in short else short[0], TIMEOUT)
    fault = catch(call, rank, *arguments)
    return fault, rank.recover(*absent)


def misses_the_first(rank: Rank, absent: list[int]):
    rank.used()
    first = min(set(range(rank.size)) - set(absent))
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT if rank.rank == first else 30.0))
    if rank.rank in absent or rank.rank == first:
        rank.pause()
    else:
        tell_in_call(rank)
    fault = catch(dist.all_reduce, torch.ones(10), group=group)
    dist.destroy_process_group()
    return fault


@pytest.mark.parametrize("absent", [[1], [0], [1, 3]], ids=str)
def test_a_rank_does_not_come_to_the_first_collective(jobs, absent):
    job = jobs.ready(4, misses_the_first, absent)
    job.tell(min(set(job.pids) - set(absent)))
    for fault in job.hear_all(but=absent).values():
        missing = "has not arrived at the group's first collective"
        assert_timed_out(fault, "fastcoll.init", missing, *map(job.name, absent))
        assert re.search(r"state [SRD]\b", fault.text), fault.text
    job.tell(*absent)
    for rank in absent:
        late = job.hear(rank)
        came = "this rank reached the group's first collective"
        assert_raised(late, came, "after the other ranks had timed out")
        _, before, idle = map(float, re.findall(r"(\d+\.\d) s", late.text)[:3])
        assert idle >= TIMEOUT and before >= 0, late.text


@pytest.mark.parametrize(
    "hosts, absent, text, call, arguments",
    [
        pytest.param(
            *("000", [1], "all_reduce(seq 3, float32[10], SUM)", all_reduce, [10]), marks=plays(6)
        ),
        pytest.param(
            *("000", [1], "all_reduce(seq 3, float32[1048576], SUM)", all_reduce, [1 << 20]),
            marks=plays(17),
        ),
        ("000", [1], "all_reduce(seq 3, float32[10], SUM)", all_reduce_async, [10]),
        *[
            pytest.param(
                *("000", [1], "all_reduce(seq 3, float32[10], SUM)", call, [10]),
                marks=beyond_gloo("fastcoll's communicator"),
            )
            for call in (all_reduce_with_communicator, all_reduce_with_plan)
        ],
        ("000", [1], "broadcast(seq 3, float32[10], root 0)", broadcast, [10, 0]),
        ("000", [1], "broadcast(seq 3, float32[10], root 1)", broadcast, [10, 1]),
        ("000", [1], "all_to_all(seq 3, float32[3])", all_to_all, [1]),
        ("000", [1], "barrier(seq 3)", barrier, []),
        ("000", [1, 2], "all_reduce(seq 3", all_reduce, [10]),
        ("01", [1], "all_reduce(seq 3", all_reduce, [10]),
        full("01", [1], "all_reduce(seq 3", all_reduce_async, [10]),
        ("0011", [1], "all_reduce(seq 3", all_reduce, [10]),
        full("0011", [2], "all_reduce(seq 3", all_reduce, [10]),
        ("0011", [3], "all_reduce(seq 3", all_reduce, [10]),
        ("0011", [2, 3], "all_reduce(seq 3", all_reduce, [10]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_rank_never_calls(jobs, hosts, absent, text, call, arguments):
    waiting = [rank for rank in range(len(hosts)) if rank not in absent]
    # Between hosts all that wait have it: one that waits for a rank of its own host does not look at other hosts.
    short = waiting[:1] if hosts == "000" else waiting
    job = jobs.ready(len(hosts), misses, absent, short, call, *arguments, hosts=hosts)
    job.tell(*short)
    answers = job.hear_all(but=absent)
    job.after_fault(answers, "imed out after 500 ms", text, state="TIMEOUT")
    for rank, (fault, after) in answers.items():
        in_time(after.again.seconds, 0.2, after.again.text)
        assert f"[group '0', rank {rank}/{len(hosts)}, seq 3]: " in fault.text or IS_GLOO, (
            fault.text
        )
        missing = fault.text[fault.text.index("not arrived") :]
        assert all(job.name(rank) in missing for rank in absent), fault.text
        if hosts == "000":
            assert missing.startswith("not arrived: ") and "last completed seq 2" in missing
            assert re.search(r"state [SRD]\b", missing), fault.text
    first = answers[waiting[0]][0]
    assert_in_time(first)
    for told, _ in answers.values():
        assert told.at - first.at < bound(LATE), (first, told)
    # The late rank must not mistake what the others left for an answer.
    job.tell(*absent)
    for rank in absent:
        late, _ = job.hear(rank)
        assert_raised(late, within=1.0)


def ahead(rank: Rank):
    rank.used()
    dist.all_reduce(torch.ones(3))
    soon(TIMEOUT)
    if rank.rank == 2:
        rank.pause()

    def calls() -> None:
        dist.broadcast(torch.ones(1 << 18), 0)
        dist.all_reduce(torch.ones(3))

    return catch(calls)


def test_a_rank_that_is_a_call_ahead_leaves_it_to_the_others_to_say_who_is_missing(jobs):
    """Rank 1 waits in all_reduce for rank 0 of its host, which waits in broadcast for rank 2 of another."""
    job = jobs(3, ahead, hosts="001")
    job.hear(2)
    for fault in job.hear_all(but=[2]).values():
        assert_timed_out(fault, "broadcast(seq 3", job.name(2))
    job.tell(2)
    assert_raised(job.hear(2))


# --- a rank that is stopped ----------------------------------------------------------------------


def stopped(rank: Rank, call):
    rank.used()
    if rank.rank == ABSENT:
        rank.pause()
    else:
        others_first(rank, 0, TIMEOUT)
    fault = catch(call, rank)
    return fault, rank.error_kind()


@pytest.mark.parametrize("call", [pytest.param(all_reduce, marks=plays(5)), barrier])
def test_a_rank_is_stopped(jobs, call):
    job = jobs.ready(3, stopped, call)
    job.signal(ABSENT, signal.SIGSTOP)
    job.tell(0)
    answers = job.hear_all(but=[ABSENT])
    for fault, state in answers.values():
        assert_timed_out(fault, f"{call.__name__}(seq 2")
        assert re.search(re.escape(job.name(ABSENT)) + r".*state T \(stopped\)", fault.text)
        assert state == "TIMEOUT"
    assert_in_time(answers[0][0])
    job.signal(ABSENT, signal.SIGCONT)
    job.tell(ABSENT)
    fault, _ = job.hear(ABSENT)
    assert fault is not None and fault.seconds < bound(1.0), fault


LONG = 4.0
"""Seconds of a timeout that covers calls of all ranks, which may be slow."""


def stopped_in_the_middle(rank: Rank, stops: int, call, count: int):
    rank.used()
    soon(LONG)
    tell_in_call(rank, 3)
    fault = repeated(call, rank, count)
    if rank.rank == stops:
        return fault, None
    return fault, rank.recover(stops)


@plays(5)
@pytest.mark.full
@pytest.mark.parametrize(
    "hosts, stops, call, count", [("000", 1, all_reduce, 4 << 20), ("0011", 3, all_to_all, 300_000)]
)
def test_a_rank_is_stopped_in_the_middle(jobs, hosts, stops, call, count):
    job = jobs.ready(len(hosts), stopped_in_the_middle, stops, call, count, hosts=hosts)
    when = job.signal(stops, signal.SIGSTOP)
    answers = job.hear_all(but=[stops])
    said = "imed out after 4000 ms", f"{call.__name__}(seq "
    job.after_fault(answers, *said, names=[stops], state="TIMEOUT")
    for fault, _ in answers.values():
        assert hosts != "000" or "state T (stopped)" in fault.text, fault.text
        in_time(fault.at - when, LONG + LATE, fault.text)
    job.signal(stops, signal.SIGCONT)
    assert_raised(job.hear(stops)[0])


# --- point-to-point ------------------------------------------------------------------------------


def no_message(rank: Rank, source: int | None, used: bool):
    (rank.used if used else rank.init)()
    rank.meet()
    fault = None
    if rank.rank == 0:
        soon(TIMEOUT)
        fault = catch(dist.recv, torch.ones(10), source, tag=5)
    rank.tell(fault)
    rank.hear()


@pytest.mark.parametrize("source", [ABSENT, None], ids=["from one", "from any"])
@pytest.mark.parametrize("hosts, used", [("00", True), ("01", True), ("01", False)])
def test_no_message_comes(jobs, source, hosts, used):
    job = jobs(2, no_message, source, used, hosts=hosts)
    fault = job.hear_all()[0]
    assert_timed_out(fault, "recv(seq 1, float32[10], from ", "tag 5")
    assert_in_time(fault)
    if source is None:
        assert "any rank" in fault.text, fault.text
    else:
        assert job.name(ABSENT) in fault.text, fault.text
        assert hosts == "01" or re.search(r"state [SRD]\b", fault.text), fault.text
    job.tell_all()


# --- a wait of one's own choice ------------------------------------------------------------------


def waits_a_little(rank: Rank, kind):
    rank.used()
    rank.tell("ready")
    tensor = torch.full((10,), rank.rank + 1.0)
    if rank.rank == 0:
        work = dist.irecv(tensor, 1) if kind == "recv" else dist.all_reduce(tensor, async_op=True)
        fault = catch(work.wait, timedelta(seconds=0.5))
        rank.tell((fault, work.is_completed()))
        assert work.wait()
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
    job = jobs.ready(2, waits_a_little, kind)
    fault, is_completed = job.hear(0)
    assert fault is not None and "RuntimeError" in fault.bases and not is_completed
    assert ("timed out" if IS_GLOO else "timed out after 500 ms") in fault.text.lower(), fault.text
    assert_in_time(fault, 0.5)
    job.tell(1)
    first = [2.0] * 10 if kind == "recv" else [3.0] * 10
    for result in job.hear_all().values():
        assert result == (first, [2 * x for x in first], "" if IS_GLOO else "SUCCESS")


# --- a rank that has come, and stands still ------------------------------------------------------


def comes_last(rank: Rank):
    rank.used()
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    for number, handler in ((HANGS, libc.pause), (GOES_ON, libc.abs)):
        libc.signal(number, ctypes.cast(handler, ctypes.c_void_p))
    others_first(rank, 2, TIMEOUT)
    return catch(dist.all_reduce, torch.ones(4 << 20))  # more than a rank can publish at once


HANGS, GOES_ON = signal.SIGUSR1, signal.SIGUSR2


def sleeps(pid: int) -> bool:
    """Return whether the process's main thread sleeps, and goes on doing so."""
    for _ in range(5):
        if psutil.Process(pid).status() != psutil.STATUS_SLEEPING:
            return False
        time.sleep(0.002)
    return True


@pytest.mark.parametrize(
    "hosts, stop, go_on, state",
    [
        ("000", signal.SIGSTOP, signal.SIGCONT, r"state T \(stopped\)"),
        # All ranks wait, so the error may name another one, which may be awake on a busy machine.
        ("0001", HANGS, GOES_ON, "state [SR]"),
    ],
    ids=["stopped", "hangs, and another host waits"],
)
def test_a_rank_stands_still_within_a_call_to_which_all_have_come(jobs, hosts, stop, go_on, state):
    job = jobs.ready(len(hosts), comes_last, hosts=hosts, environment={"FASTCOLL_SPIN_US": "0"})
    until(lambda: sleeps(job.pids[ABSENT]))  # it has published what there is room for, and waits
    job.signal(ABSENT, stop)
    job.tell(2)
    for fault in job.hear_all(but=[ABSENT]).values():
        assert_timed_out(fault, "all_reduce(seq ", "all ranks arrived, still waiting for")
        assert re.search(state, fault.text), fault
        assert stop == HANGS or job.name(ABSENT) in fault.text, fault
    job.signal(ABSENT, go_on)
    assert_raised(job.hear(ABSENT))
