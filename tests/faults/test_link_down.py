"""A link between two hosts that goes down, with real namespaces: noticed within FASTCOLL_LINK_SECONDS, or mended."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from fault_rank import Rank, catch
from in_time import assert_raised
from machine import enter_network, two_networks
from rank_calls import swap
from suite_rules import bound

pytestmark = [pytest.mark.full, beyond_gloo("the bound on a silent host")]

BOUND = 3
"""Seconds of silence."""


def late() -> float:
    """Return after how many seconds a silence is noticed too late.

    The kernel's own retries are up to half the bound apart.
    """
    return bound(2 * BOUND + 2)


def repeats(rank: Rank, networks: list[str], address: str, call: str):
    """Repeat the call until it fails or the test tells rank 0 that it is enough; return the error and the rounds."""
    enter_network(networks[rank.rank // 2])
    rank.init(store=rank.store_of(0, address))
    # Four ranks on two hosts: the last of one host talks with the first of the other.
    ends = (1, 2)
    peer = ends[1 - ends.index(rank.rank)] if rank.rank in ends else None
    large, small = torch.ones(3_000_000), torch.ones(3)
    enough = threading.Event()
    if rank.rank == 0:
        threading.Thread(target=lambda: (rank.hear(), enough.set()), daemon=True).start()

    def once() -> bool:
        """Return whether rank 0 has enough: then all leave after the same round."""
        if call == "all_reduce":
            large.fill_(1.0)
            large[0] = float(enough.is_set())
            dist.all_reduce(large)
            return large[0].item() > 0
        if call == "idle" and rank.rank == ends[0]:
            dist.recv(small, peer)  # no rank sends
        elif call == "send" and peer is not None:
            work = dist.isend(large, peer)
            dist.recv(torch.empty_like(large), peer)
            work.wait()
        else:
            time.sleep(0.05)
        return False

    rounds = 0

    def forever():
        nonlocal rounds
        over = False
        while not over:
            over = once()
            rounds += 1

    dist.barrier()
    if peer is not None:
        swap(small, peer, rank.rank == ends[0])
    rank.tell("ready")
    fault = catch(forever)
    if fault is None:
        dist.destroy_process_group()
    return fault, rounds


def start(jobs, cluster, networks, call: str, seconds: int = BOUND):
    environment = {"FASTCOLL_LINK_SECONDS": str(seconds)}
    job = jobs.ready(4, repeats, networks, cluster.address(0), call, environment=environment)
    return job


@pytest.mark.parametrize(
    "call, waiting", [("all_reduce", [0, 1, 2, 3]), ("send", [1, 2]), ("idle", [1])]
)
def test_a_link_that_stays_down_is_noticed(jobs, call, waiting):
    with two_networks() as (cluster, networks):
        job = start(jobs, cluster, networks, call)
        cut = time.monotonic()
        cluster.cut(1)
        found = {rank: job.hear(rank, 2 * late()) for rank in waiting}
        for rank in job.pids.keys() - set(waiting):
            job.kill(rank)
    for rank, (fault, _) in found.items():
        assert_raised(fault, "connection closed by peer")
        other = [2, 3] if rank < 2 else [0, 1]
        assert any(job.name(r) in fault.text for r in other), (rank, fault)
        assert BOUND - 1 < fault.at - cut < late(), fault


def test_a_link_that_comes_back_costs_nothing_but_time(jobs):
    with two_networks() as (cluster, networks):
        # On a busy machine, the commands that cut and mend take seconds.
        job = start(jobs, cluster, networks, "all_reduce", 5 * BOUND)
        cluster.cut(1)
        time.sleep(BOUND / 3)
        cluster.mend(1)
        time.sleep(BOUND)
        job.tell(0)
        found = list(job.hear_all(bound(10)).values())
    # Rank 0 was told after the link had come back, so the round that ended the loop went over the mended link.
    assert [fault for fault, _ in found] == [None] * 4
    assert len({rounds for _, rounds in found}) == 1, found
