"""The sender of a first message dies, whose process the receiver's host cannot see: ranks of its own host tell."""

import os

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from fault_rank import Rank, catch
from in_call import tell_in_call
from machine import CLONE_NEWPID, own_namespaces
from suite_rules import bound

pytestmark = [
    beyond_gloo("how fastcoll's hosts tell each other"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces"),
]


def first_message(rank: Rank, hosts: str, used: bool, idle: bool):
    """Rank 0 dies, whose first message others await; rank 1 is of its host, and calls nothing if ``idle``."""
    if hosts[rank.rank] != hosts[0]:
        own_namespaces(CLONE_NEWPID)  # of its children
        if child := os.fork():
            os.waitpid(child, 0)
            os._exit(0)
    os.environ["FASTCOLL_HOST_ID"] = hosts[rank.rank]
    rank.init()
    if used:
        dist.all_reduce(torch.ones(3))
    if rank.rank == 0:
        rank.tell("ready")
        rank.hear()
    if rank.rank == 1 and idle:
        rank.tell("ready")
        rank.hear()
        return
    tell_in_call(rank)
    rank.tell(catch(dist.recv, torch.ones(3), 0))


@pytest.mark.parametrize(
    "hosts, used, idle",
    [("0012", False, False), ("0012", True, False), ("0012", True, True), ("1101", True, True)],
)
def test_a_sender_that_dies_before_its_first_message_is_named(jobs, hosts, used, idle):
    job = jobs(len(hosts), first_message, hosts, used, idle)
    job.hear_all()
    killed = job.kill(0)
    for rank in (2, 3) if idle else (1, 2, 3):
        fault = job.hear(rank)
        assert fault is not None and fault.kind == "DistBackendError", fault
        assert f"rank 0 (pid {job.pids[0]}, host" in fault.text and "died" in fault.text, fault.text
        assert fault.at - killed < bound(0.25), fault
    if idle:
        job.tell(1)
    for rank in (1, 2, 3):
        job.end(rank)
