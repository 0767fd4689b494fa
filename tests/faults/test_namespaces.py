"""Other users, and namespaces between the ranks of one host."""

import contextlib
import ctypes
import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
from fault_list import plays
from fault_rank import Rank
from in_call import soon, tell_in_call
from in_time import in_time
from machine import (
    CLONE_NEWIPC,
    CLONE_NEWNS,
    NOBODY,
    enter_network,
    next_process_id,
    own_namespaces,
    own_process_ids,
    two_networks,
)
from on_ranks import on_ranks
from over_hosts import over_hosts
from rank_calls import all_reduce, repeated, transport, works

TIMEOUT = 2.0

# --- another user --------------------------------------------------------------------------------


def is_attacked(rank: Rank):
    rank.used()
    dist.all_reduce(torch.ones(1 << 20))
    rank.pause()
    works(rank)
    rank.finish()


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


@plays(37)
@over_hosts
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: changing the user")
def test_another_user_gets_nothing(jobs):
    job = jobs.ready(2, is_attacked)
    assert as_nobody(attack, job.pids[0]) == [], "another user could"
    job.tell_all()
    job.hear_all()


# --- namespaces ----------------------------------------------------------------------------------


@plays(39)
@on_ranks(2, world="jobs")
def test_other_mount_and_ipc_namespaces(rank):
    if rank.rank == 1:
        own_namespaces(CLONE_NEWNS | CLONE_NEWIPC)
    rank.used()
    works(rank)
    assert transport() in ("shm", "")
    rank.finish()


def with_other_pids(rank: Rank):
    """The rank is process 2 of a namespace of its own, on both sides."""
    own_process_ids(2)
    rank.used()
    works(rank)
    rank.tell((os.getpid(), transport()))
    if rank.rank == 1:
        rank.hear()
        rank.tell(time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    rank.tell(repeated(all_reduce, rank))


@plays(40)
def test_other_pid_namespaces_and_a_death_in_one(jobs):
    job = jobs(2, with_other_pids)
    said = job.hear_all().values()
    assert len({pid for pid, _ in said}) == 1, "the pids differ: the fault was not injected"
    assert {used for _, used in said} in ({"shm"}, {""})
    job.tell(1)
    when = job.hear(1)
    fault = job.hear(0)
    assert fault is not None and "rank 1" in fault.text and "died" in fault.text, fault
    in_time(fault.at - when, 0.25, fault.text)


def late_with_other_pids(rank: Rank):
    """To each rank process 2 is itself, so it must not ask /proc for the state of the other."""
    own_process_ids(2)
    rank.used()
    works(rank)
    soon(TIMEOUT)
    if rank.rank == 0:
        rank.tell(repeated(all_reduce, rank))
    rank.pause()


def test_no_state_is_told_of_a_process_of_another_namespace(jobs):
    job = jobs(2, late_with_other_pids)
    fault = job.hear(0)
    assert fault is not None and "last completed seq" in fault.text, fault
    assert "state ?" in fault.text, fault.text
    job.tell_all()
    jobs.ended_well()


@on_ranks(2, world="jobs")
def test_the_end_of_a_keeper_changes_no_memory(rank):
    """The kernel marks words that hold the number of a thread that ends; glibc's heap holds 656 as a length."""
    own_process_ids(2)
    for i in range(20):
        rank.init(f"round {i}")
        next_process_id(656)
        dist.all_reduce(torch.ones(3))
        rank.finish()


# --- a link --------------------------------------------------------------------------------------


def over_the_link(rank: Rank, networks):
    enter_network(networks[rank.rank])
    rank.used()
    soon(TIMEOUT)
    tell_in_call(rank, 3)
    rank.tell(repeated(all_reduce, rank, 10_000))


@plays(10)
@pytest.mark.full
def test_a_link_between_two_hosts_is_cut(jobs):
    with two_networks() as (cluster, networks):
        job = jobs.ready(2, over_the_link, networks)
        since = time.monotonic()
        cluster.cut(1)
        for fault in job.hear_all().values():
            assert fault is not None and "timed out" in fault.text.lower(), fault
            in_time(fault.at - since, TIMEOUT + 0.5, fault.text)
        jobs.ended_well()
