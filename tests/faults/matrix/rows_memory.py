"""Rows 32 to 36 and 42 to 47: shared memory, limits, and many of everything."""

import contextlib
import os
import re
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from backend import BACKEND
from fault_rank import Rank, catch
from matrix_machine import memory_limit, refuse_calls, remount_shared_memory
from matrix_ranks import aftermath, finish, works
from matrix_row import NotPlayed, Outcome, Stage, Verdict, limit, row, worst
from test_control import exit_race
from test_many import many_groups, many_works
from test_restart import busy
from test_restart import works as works_again

__all__: list[str] = []


@row(32, "/dev/shm of 64 KB, full, or read-only", "works: nothing lies there")
def tiny_shared_memory(stage: Stage) -> Outcome:
    ways = (("64k", False, False), ("1m", True, False), ("1m", False, True))
    found = [stage.checks(job) for job in [stage.jobs(2, with_shared_memory, *way) for way in ways]]
    return worst(found)


def with_shared_memory(rank: Rank, size: str, fill: bool, read_only: bool):
    remount_shared_memory(size, fill, read_only)
    rank.used()
    works(rank)
    return finish(rank)


@row(
    33,
    "memory cannot be reserved: at once, and later",
    "all ranks use Gloo; later an error on all ranks; a kill is row 1",
    "test_no_memory.py::test_first_call_is_point_to_point",
    quick=True,
)
def no_memory(stage: Stage) -> Outcome:
    if not stage.native:
        raise NotPlayed("gloo reserves none")
    job = stage.jobs(3, refused_at_once)
    found = [stage.checks(job)]
    warnings = job.logs().count("hosts, with Gloo between them")
    if warnings != 1:
        found.append(Outcome(Verdict.FAILS, detail=f"{warnings} warnings instead of one"))
    job = stage.started(3, refused_later)
    start = time.monotonic()
    job.tell_all()
    said = ("rank 1", "cannot reserve", "free memory")
    found.append(stage.errors(job, start, 1.0, *said, aftermath=False))
    try:
        with memory_limit(256) as cgroup:
            job = stage.started(2, beyond_the_limit, str(cgroup))
            job.tell(1)
            code = job.end(1)
            if code != -9:
                found.append(Outcome(Verdict.FAILS, detail=f"rank 1 ended with {code}"))
            said = (r"rank 1 \(pid \d+", "died")
            found.append(stage.errors(job, time.monotonic(), 0.5, *said, but=[1]))
    except NotPlayed as reason:  # what was found before counts
        found.append(Outcome(Verdict.NOT_PLAYED, detail=f"the kill: {reason}"))
    return worst(found)


def refused_at_once(rank: Rank):
    if rank.rank == 1:
        refuse_calls("fallocate")
    rank.used()
    works(rank)
    used = dist.group.WORLD._get_backend(torch.device("cpu")).transport()
    return finish(rank, **{"uses Gloo": used == "gloo"})


def refused_later(rank: Rank):
    rank.used()
    if rank.rank == 1:
        refuse_calls("fallocate")
    rank.tell("ready")
    rank.hear()
    rank.tell(catch(dist.all_reduce, torch.ones(1 << 20)))
    dist.destroy_process_group()


def beyond_the_limit(rank: Rank, cgroup: str):
    """A container's memory limit: there the kernel does not refuse memory, but kills for it."""
    rank.used()
    rank.tell("ready")
    if rank.rank == 1:
        rank.hear()
        with open(f"{cgroup}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        held = backend.allocate_tensor(400 << 20, dtype=torch.uint8, device=torch.device("cpu"))
        held.fill_(1)
        return None
    rank.tell(catch(dist.all_reduce, torch.ones(3)))
    return aftermath(rank)


@row(
    34,
    "SIGKILL of all ranks, then the same job again",
    "nothing left, and no stale state",
    "test_restart.py::test_all_killed_and_run_again_under_the_same_name",
)
def all_killed(stage: Stage) -> Outcome:
    name = f"again {time.monotonic()}/"
    job = stage.started(3, busy, prefix=name)
    memory = {inode for pid in job.pids.values() for inode in shared_memory(pid)}
    if stage.native and len(memory) != 3:
        return Outcome(Verdict.FAILS, detail=f"expected a memory of each rank, got {memory}")
    for rank in job.pids:
        job.kill(rank)
    for rank in job.pids:
        job.end(rank)
    processes = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    if holders := [pid for pid in processes if memory & shared_memory(pid)]:
        return Outcome(
            Verdict.LEFTOVERS, detail=f"processes {holders} have shared memory of the dead"
        )
    job = stage.jobs(3, works_again, prefix=name)
    answers = job.hear_all()
    slowest = max(seconds for seconds, _ in answers.values())
    beyond = [text for _, left in answers.values() for text in left]
    return Outcome(Verdict.LEFTOVERS if beyond else Verdict.AS_WANTED, slowest, ", ".join(beyond))


def shared_memory(pid: int) -> set[str]:
    """Return the inodes of fastcoll's memory that a process has mapped; none if it has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "/memfd:fastcoll" in line}
    return set()


@row(
    35,
    "squatted names and links in /dev/shm",
    "no names are used: works, and touches none",
)
def squatted_names(stage: Stage) -> Outcome:
    return stage.checks(stage.jobs(2, among_garbage))


def among_garbage(rank: Rank):
    remount_shared_memory("64m")
    target = rank.folder / f"target{rank.rank}"
    target.write_text("mine")
    names = ["fastcoll", "fastcoll-0", "default_pg", "0", "torch_1_0", "psm_0", "FSTCOLL1"]
    for name in names:
        os.symlink(target, f"/dev/shm/{name}")
    with open("/dev/shm/sem.fastcoll", "wb") as file:
        file.write(os.urandom(4096))
    listed = sorted(os.listdir("/dev/shm"))
    rank.used()
    works(rank, 1 << 20)
    during = sorted(os.listdir("/dev/shm"))
    return finish(
        rank,
        **{"no new name": during == listed, "no link was followed": target.read_text() == "mine"},
    )


@row(36, "two jobs with the same group name at once", "both right")
def two_jobs(stage: Stage) -> Outcome:
    both = [
        stage.jobs(2, in_its_own_world, float(i), prefix=f"{time.monotonic()} {i}/") for i in (1, 2)
    ]
    return worst([stage.checks(job) for job in both])


def in_its_own_world(rank: Rank, value: float):
    rank.used("same", group_name="same")
    for _ in range(200):
        tensor = torch.full((5000,), value)
        dist.all_reduce(tensor)
        assert torch.all(tensor == 2 * value), "a wrong result was returned as success"
    return finish(rank)


@row(
    42,
    "8 ranks on one core; the processor time of a wait",
    "right results; below 5 % of a core while waiting",
    "test_shared_memory.py::test_many_ranks",
    "test_idle.py::test_waiting_takes_no_core",
)
def one_core(stage: Stage) -> Outcome:
    core = min(os.sched_getaffinity(0))
    return stage.checks(stage.jobs(8, on_one_core, core), timeout=60.0)


def on_one_core(rank: Rank, core: int):
    os.sched_setaffinity(0, {core})
    rank.used()
    rounds, start = 50, time.monotonic()
    for _ in range(rounds):
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        assert torch.all(tensor == 8.0), "a wrong result was returned as success"
    each = (time.monotonic() - start) / rounds
    dist.barrier()
    used, start = time.process_time(), time.monotonic()
    if rank.rank == 0:
        time.sleep(1.0)
    dist.all_reduce(torch.ones(3))
    share = (time.process_time() - used) / (time.monotonic() - start)
    return finish(
        rank, seconds=each, detail=f"an operation; waiting {share:.1%}", sleeps=share < 0.05
    )


@row(
    43,
    "300 groups, each used",
    "no thread each, no descriptor but two between hosts; all is given back",
    "test_many.py::test_300_groups_in_use",
    "test_many.py::test_1000_groups_unused",
)
def groups(stage: Stage) -> Outcome:
    if not stage.native:
        return stage.checks(stage.jobs(2, groups_of_any_backend), timeout=60.0)
    job = stage.jobs(2, many_groups, 300, True)
    found = []
    for answer in job.hear_all(timeout=60.0).values():
        held = answer["more"] + answer["after"] + answer["left"]
        if stage.hosts == 2 and "file socket x600" in held:
            held.remove("file socket x600")
        verdict = Verdict.LEFTOVERS if held else Verdict.AS_WANTED
        found.append(Outcome(verdict, answer["made"], ", ".join(held)))
    return worst(found)


def groups_of_any_backend(rank: Rank):
    from fault_rank import footprint

    rank.used()
    before = footprint()
    start = time.monotonic()
    made = [dist.new_group([0, 1]) for _ in range(300)]
    seconds = time.monotonic() - start
    for group in made:
        dist.all_reduce(torch.ones(5), group=group)
    beyond = footprint().beyond(before)
    return {"seconds": seconds, "left": beyond}


@row(
    44,
    "5000 outstanding works",
    "right results, bounded memory",
    "test_many.py::test_2000_outstanding_works",
)
def outstanding(stage: Stage) -> Outcome:
    job = stage.jobs(2, many_works, 5000)
    start = time.monotonic()
    answers = job.hear_all(timeout=40.0).values()
    took = time.monotonic() - start
    right = all(ok for ok, _ in answers)
    left = [text for _, texts in answers for text in texts]
    verdict = (
        Verdict.WRONG_RESULT if not right else Verdict.LEFTOVERS if left else Verdict.AS_WANTED
    )
    return Outcome(verdict, took, ", ".join(left))


NO_DESCRIPTORS = (
    r"rank 1 \(pid \d+, host ",
    "Too many open files",
    "Raise the limit on open files",
)


@row(
    46,
    "descriptors run out",
    "all ranks name the rank and the limit, at once; no crash; works once there are some",
)
def no_descriptors(stage: Stage) -> Outcome:
    found = []
    for room in (0, 1, 2, 3, 4) if stage.deep else (1,):
        job = stage.jobs(2, few_descriptors, room)
        found.append(stage.checks(job))
    return worst(found)


def few_descriptors(rank: Rank, room: int):
    """Rank 1 may open ``room`` more; each rank either succeeds, or has an error that tells it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.listdir("/proc/self/fd")
    if rank.rank == 1:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + room, hard))
    rank.meet()
    fault = catch(rank.used, timeout=2 * limit(2.0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if dist.is_initialized():
        dist.destroy_process_group()
    # Both failed or both worked: else one waits for ever. fastcoll names rank 1 and why on both.
    said = fault is None or all(
        re.search(pattern, fault.text)
        for pattern in (NO_DESCRIPTORS if BACKEND == "fastcoll" else ("open files|Too many",))
    )
    rank.used("again")
    works(rank)
    seconds = fault.seconds if fault else None
    return finish(rank, detail=fault.text if fault else "", named=said, seconds=seconds, within=2.0)


@row(
    47,
    "the first to finish leaves while others read",
    "right results",
    "test_control.py::test_exit_race",
)
def race_to_exit(stage: Stage) -> Outcome:
    job = stage.jobs(3, exit_race, real_exit=True)
    right = all(job.hear_all().values())
    found = stage.ended(job)
    return found if right else Outcome(Verdict.WRONG_RESULT)
