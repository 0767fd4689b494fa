"""Rows 13 to 22: the program ends, aborts, interrupts, forks, or its clock jumps."""

import ctypes
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from fault_job import Jobs, Launcher
from fault_rank import Rank, catch
from in_call import soon, tell_in_call
from matrix_ranks import VICTIM, all_reduce, works
from matrix_row import ANY_ERROR, NotPlayed, Outcome, Stage, Verdict, limit, row, worst
from test_control import (
    call_all_reduce,
    destroys_with_pending,
    exits_with_pending,
    interrupted,
    signals_in_between,
    used_after,
)
from test_fork import forks, loads_data
from test_silence import waits_a_little

__all__: list[str] = []


@row(
    13,
    "destroy with work pending",
    "1 s; the work's wait says that the group was destroyed",
    "test_control.py::test_destroy_with_pending_work",
)
def destroyed_with_pending(stage: Stage) -> Outcome:
    job = stage.started(2, destroys_with_pending, "all_reduce")
    job.tell(0)
    job.hear(0, 12.0)
    job.tell(1)
    seconds, faults, _, left = job.hear(0)
    found = [stage.judged(fault, None, 1.0, ["destroyed"]) for fault in faults[:3]]
    if seconds > limit(1.0):
        found.append(Outcome(Verdict.TOO_SLOW, seconds, "destroy_process_group"))
    if left:
        found.append(Outcome(Verdict.LEFTOVERS, detail=", ".join(left)))
    return worst(found, seconds)


@row(
    14,
    "abort from another thread",
    "0.1 s on all ranks, the peers are told",
    "test_control.py::test_abort_from_another_thread",
)
def aborted(stage: Stage) -> Outcome:
    job = stage.started(3, is_aborted)
    job.tell(0)
    since = job.hear(0)
    found = stage.errors(job, since, 0.1, "rank 0.*aborted", but=[VICTIM], aftermath=False)
    job.tell(VICTIM)
    return found


def is_aborted(rank: Rank):
    rank.used()
    soon(4.0)
    if rank.rank == VICTIM:
        rank.tell("ready")
        rank.hear()
        return

    def abort():
        rank.hear()
        rank.tell(time.monotonic())
        dist.group.WORLD.abort()

    thread = threading.Thread(target=abort)
    if rank.rank == 0:
        thread.start()
    tell_in_call(rank)
    fault = catch(all_reduce, rank)
    if rank.rank == 0:
        thread.join()
    rank.tell(fault)


@row(
    15,
    "Ctrl-C in a wait",
    "KeyboardInterrupt within 0.1 s",
    "test_control.py::test_ctrl_c",
)
def ctrl_c(stage: Stage) -> Outcome:
    job = stage.started(2, interrupted, call_all_reduce)
    since = job.signal(0, signal.SIGINT)
    found = stage.judged(job.hear(0, 12.0), since, 0.1, kinds=["KeyboardInterrupt"])
    job.tell(1)
    return found


@row(
    16,
    "wait(timeout) shorter than the group's",
    "raises at its own time; the work goes on, the group is usable",
    "test_silence.py::test_wait_with_a_timeout_raises_and_the_work_goes_on",
)
def own_timeout(stage: Stage) -> Outcome:
    job = stage.started(2, waits_a_little, "all_reduce")
    found = [stage.judged(job.hear(0), None, 1.0, ["timed out"], ANY_ERROR, 0.4)]
    job.tell(1)
    for rank in job.pids:
        first, second, _ = job.hear(rank)
        if (first, second) != ([3.0] * 10, [6.0] * 10):
            found.append(Outcome(Verdict.WRONG_RESULT, detail=str((first, second))))
    return worst(found)


@row(
    17,
    "after a timeout: a second call, and the late rank's",
    "the same error at once, never stale data",
)
def after_a_timeout(stage: Stage) -> Outcome:
    job = stage.started(2, too_late)
    first, second = job.hear(0), job.hear(0)
    found = [
        stage.judged(first, None, 1.5, ["timed out"], ANY_ERROR, 0.8),
        stage.judged(second, None, 0.2, (), ANY_ERROR),
    ]
    job.tell(1)
    found.append(stage.judged(job.hear(1), None, 1.5, (), ANY_ERROR))
    job.tell(0)
    return worst(found, second and second.seconds)


def too_late(rank: Rank):
    rank.used()
    soon(1.0)
    rank.tell("ready")
    tensor = torch.full((1000,), 5.0)
    if rank.rank == 0:
        rank.tell(catch(dist.all_reduce, tensor))
        rank.tell(catch(dist.all_reduce, torch.full((1000,), 6.0)))
        rank.hear()
    else:
        rank.hear()
        rank.tell(catch(dist.all_reduce, tensor))
    dist.destroy_process_group()


@row(
    18,
    "exit with work pending",
    "the process ends within 2 s",
    "test_control.py::test_exit_with_pending_work",
)
def exit_with_pending(stage: Stage) -> Outcome:
    job = stage.started(2, exits_with_pending, "all_reduce", real_exit=True)
    returned = job.hear(0)
    found = [stage.ended(job, but=[1], within=12.0)]
    seconds = time.monotonic() - returned
    job.tell(1)
    found.append(stage.judged(job.hear(1), None, 1.0, (), ANY_ERROR))
    if seconds > limit(2.0) and found[0].verdict < Verdict.TOO_SLOW:
        found.append(Outcome(Verdict.TOO_SLOW, seconds, "the interpreter's end"))
    return worst(found, seconds)


@row(
    19,
    "use after destroy, double destroy",
    "everything raises",
    "test_control.py::test_use_after_destroy",
)
def use_after_destroy(stage: Stage) -> Outcome:
    job = stage.jobs(2, used_after)
    found = []
    for faults, unchanged, left in job.hear_all(12.0).values():
        for name, fault in faults.items():
            if fault is None:
                found.append(Outcome(Verdict.WRONG_RESULT, detail=f"{name} still works"))
            else:
                kinds = ["RuntimeError", "ValueError", "AssertionError", "TypeError"]
                found.append(stage.judged(fault, None, 1.0, kinds=kinds))
        if not unchanged or left:
            found.append(Outcome(Verdict.LEFTOVERS, detail=f"{left}, unchanged: {unchanged}"))
    return worst(found)


@row(
    20,
    "fork after init: the child uses the group, or only ends; DataLoader workers",
    "error in the child, the parent goes on",
    "test_fork.py::test_child_that_uses_the_group",
    "test_fork.py::test_child_that_only_exits",
    "test_fork.py::test_data_loader_with_forked_workers",
)
def forked(stage: Stage) -> Outcome:
    found = []
    for how, said in (("exits", "nothing: None"), ("uses", "fork")):
        job = stage.jobs(2, forks, how, real_exit=True)
        for text, code, left in job.hear_all(timeout=25.0).values():
            if code is None:
                found.append(Outcome(Verdict.HANG, detail=f"the child that {how}"))
            elif code != 0:
                found.append(Outcome(Verdict.CRASH, detail=f"the child that {how}: {code}"))
            elif any(said not in line for line in text.split("\n")):
                found.append(Outcome(Verdict.UNNAMED, detail=text))
            elif left:
                found.append(Outcome(Verdict.LEFTOVERS, detail=", ".join(left)))
        found.append(stage.ended(job))
    job = stage.jobs(2, loads_data, real_exit=True)
    job.hear_all(timeout=40.0)
    found.append(stage.ended(job))
    return worst(found)


@row(
    21,
    "SIGALRM every millisecond (EINTR)",
    "right results",
    "test_control.py::test_signals_do_not_disturb",
)
def signal_storm(stage: Stage) -> Outcome:
    job = stage.jobs(2, signals_in_between)
    counts = job.hear_all()
    few = [count for count in counts.values() if count < 4]
    if few:
        raise NotPlayed("the timer of this machine is too slow")
    return stage.ended(job)


@row(
    22, "the wall clock steps by an hour, both ways, during a wait", "deadline exact, right results"
)
def clock_steps(stage: Stage) -> Outcome:
    """Through a library that is loaded before all others: the machine's own clock is left alone."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        library = Path(folder) / "clock_step.so"
        source = Path(__file__).with_name("clock_step.c")
        command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        except FileNotFoundError:
            raise NotPlayed("there is no gcc") from None
        environment = {"LD_PRELOAD": str(library), "FASTCOLL_TEST_BACKEND": stage.backend}
        launcher = Launcher(environment)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        jobs = Jobs(launcher, store, Path(folder))
        try:
            job = jobs(2, waits_while_clock_steps)
            job.hear(0)
            job.tell(1)
            found = [stage.checks(job)]
            job = jobs(2, times_out_while_clock_steps)
            fault = job.hear(0)
            found.append(stage.judged(fault, None, 1.5, ["timed out"], ANY_ERROR, 0.8))
            job.tell(1)
            job.hear_all()
            return worst(found)
        finally:
            jobs.settle(3.0)
            jobs.close()
            launcher.close()


def step(hours: int) -> None:
    """Step the wall clock as this process sees it, all clocks of libc included."""
    before = time.time()
    ctypes.CDLL(None).clock_step(ctypes.c_long(3600 * hours))
    assert abs(time.time() - before - 3600 * hours) < 10, "the clock has not moved"


def waits_while_clock_steps(rank: Rank):
    """Rank 0's clock steps while it waits for rank 1, whose clock has stepped before."""
    rank.used(timeout=20.0)

    def steps() -> None:
        step(1)
        time.sleep(0.2)  # the wait goes on in another hour
        step(-2)
        rank.tell("stepped")

    if rank.rank == 1:
        step(1)
        rank.hear()
    else:
        threading.Timer(0.2, steps).start()
    start = time.monotonic()
    works(rank)
    seconds = time.monotonic() - start
    dist.destroy_process_group()
    return {"seconds": seconds, "within": 5.0, "left": rank.left()}


def times_out_while_clock_steps(rank: Rank):
    rank.used()
    soon(1.0)
    if rank.rank == 1:
        rank.tell(None)
        rank.hear()
        return
    threading.Timer(0.3, step, (-1,)).start()
    rank.tell(catch(dist.all_reduce, torch.ones(3)))
