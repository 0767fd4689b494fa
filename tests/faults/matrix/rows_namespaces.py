"""Rows 37 to 41: other users, and namespaces between the ranks of one host."""

import contextlib
import ctypes
import os
import signal
import socket
import time

import torch
import torch.distributed as dist
from fault_rank import Rank
from matrix_machine import (
    CLONE_NEWIPC,
    CLONE_NEWNS,
    CLONE_NEWPID,
    NOBODY,
    own_namespaces,
    two_networks,
)
from matrix_ranks import all_reduce, enter_host, finish, repeated, works
from matrix_row import NotPlayed, Outcome, Stage, Verdict, row, worst

__all__: list[str] = []


def transport() -> str:
    """Return what moves the bytes of the default group: "shm" or "gloo"."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return backend.transport() if hasattr(backend, "transport") else ""


def needs_root() -> None:
    if os.geteuid() != 0:
        raise NotPlayed("needs root: changing the user")


@row(
    37,
    "another user opens the segment, takes the descriptor, connects",
    "refused; the group goes on",
)
def other_user_tries(stage: Stage) -> Outcome:
    needs_root()
    job = stage.started(2, is_attacked)
    outcome = Outcome(Verdict.AS_WANTED)
    got = as_nobody(attack, job.pids[0])
    if got:
        outcome = Outcome(Verdict.WRONG_RESULT, detail="another user could: " + ", ".join(got))
    job.tell_all()
    return worst([outcome, stage.checks(job)])


def is_attacked(rank: Rank):
    rank.used()
    dist.all_reduce(torch.ones(1 << 20))
    rank.tell("ready")
    rank.hear()
    works(rank)
    return finish(rank)


def as_nobody(function, *arguments) -> list[str]:
    """Run a function in a child of another user; return what it returns."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            text = "\n".join(function(*arguments))
        except BaseException as error:  # told to the parent, whatever it is
            text = f"the attacker failed: {error!r}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text.split("\n") if text else []


def attack(pid: int) -> list[str]:
    """Try all ways to another process's memory; return those that worked."""
    worked = []
    for folder in ("fd", "map_files"):
        with contextlib.suppress(PermissionError):
            worked += [f"list {folder}/{name}" for name in os.listdir(f"/proc/{pid}/{folder}")]
    for number in range(64):
        with contextlib.suppress(OSError):
            os.close(os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY))
            worked.append(f"open descriptor {number}")
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd_open, pidfd_getfd = 434, 438
    process = libc.syscall(pidfd_open, pid, 0)
    if process >= 0:
        taken = [n for n in range(64) if libc.syscall(pidfd_getfd, process, n, 0) >= 0]
        worked += [f"take descriptor {number}" for number in taken]
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "rb"):
        worked.append("open its memory")
    for name in abstract_names():
        # Anybody may connect; nobody else may be answered.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(2.0)
            with contextlib.suppress(OSError):
                connection.connect(b"\0" + name)
                connection.send(b"\0" * 56)
                _, descriptors, _, _ = socket.recv_fds(connection, 256, 8)
                if descriptors:
                    worked.append(f"receive memory from {name!r}")
    return worked


def abstract_names() -> list[bytes]:
    """Return the names of all abstract sockets of ours that listen."""
    with open("/proc/net/unix") as file:
        names = {line.split()[-1] for line in file if "@fastcoll-" in line}
    return [name[1:].encode() for name in sorted(names)]


@row(
    38,
    "ranks under two users",
    "Gloo, or an error; right results",
    "test_choice.py::test_ranks_of_two_users_take_gloo_and_warn_once",
)
def two_users(stage: Stage) -> Outcome:
    needs_root()
    return stage.checks(stage.jobs(2, as_another_user))


def as_another_user(rank: Rank):
    with contextlib.suppress(ImportError):
        import fastcoll._backend
        import fastcoll.info  # noqa: F401  now: the other user may not be allowed to read the files
    if rank.rank == 1:
        os.seteuid(NOBODY)
    try:
        rank.used()
        works(rank)
        used = transport()
        dist.destroy_process_group()
    finally:
        os.seteuid(0)
    return {"left": rank.left(), "no shared memory": used != "shm"}


@row(39, "other mount and IPC namespaces", "works, over shared memory still")
def other_mounts(stage: Stage) -> Outcome:
    stage.require_one_host()
    return stage.checks(stage.jobs(2, with_other_mounts))


def with_other_mounts(rank: Rank):
    if rank.rank == 1:
        own_namespaces(CLONE_NEWNS | CLONE_NEWIPC)
    rank.used()
    works(rank)
    return finish(rank, **{"shared memory": transport() in ("shm", "")})


@row(
    40,
    "other PID namespaces, equal pids, and a death in one",
    "works; the death is noticed in 0.25 s",
)
def other_pids(stage: Stage) -> Outcome:
    stage.require_one_host()
    job = stage.jobs(2, with_other_pids)
    said = {job.hear(rank) for rank in job.pids}
    pids, transports = ({each[i] for each in said} for i in (0, 1))
    found = [Outcome(Verdict.AS_WANTED)]
    if len(pids) > 1:
        found.append(Outcome(Verdict.FAILS, detail=f"the fault was not injected: pids {pids}"))
    if transports not in ({"shm"}, {""}):
        found.append(Outcome(Verdict.WRONG_RESULT, detail=f"the ranks use {transports}"))
    job.tell(1)
    when = job.hear(1)
    found.append(stage.judged(job.hear(0), when, 0.25, [r"rank 1\b", "died"]))
    return worst(found)


def with_other_pids(rank: Rank):
    """The rank is process 2 of a namespace of its own, on both sides."""
    own_namespaces(CLONE_NEWPID)
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        os._exit(0)
    second = os.fork()
    if second:
        os.waitpid(second, 0)
        os._exit(0)
    rank.used()
    works(rank)
    rank.tell((os.getpid(), transport()))
    if rank.rank == 1:
        rank.hear()
        rank.tell(time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    rank.tell(repeated(all_reduce, rank))


@row(
    41,
    "other network namespaces: two hosts",
    "Gloo; right results",
    "test_choice.py::test_two_hosts",
)
def two_hosts(stage: Stage) -> Outcome:
    with two_networks() as network:
        return stage.checks(stage.jobs(2, on_two_hosts, network.names, network.ends))


def on_two_hosts(rank: Rank, names, ends):
    enter_host(rank, names, ends)
    rank.used()
    works(rank, 50_000)
    return finish(rank, **{"no shared memory": transport() != "shm"})
