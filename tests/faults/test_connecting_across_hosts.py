"""A group that fails while two of its hosts connect: neither waits for the other one in Gloo."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
from fault_rank import Rank, catch
from odd_stores import HidesLinks


def aborts(rank: Rank):
    rank.hear()
    dist.group.WORLD._get_backend(torch.device("cpu")).abort()


def connects(rank: Rank, gives_up: int):
    """Rank ``gives_up`` has told the other one where to connect, and does not find it, when rank 2 aborts the group."""
    os.environ["FASTCOLL_HOST_ID"] = str(rank.rank)
    store = rank.store("first")
    if rank.rank == gives_up:
        store = HidesLinks(store)
        threading.Thread(target=lambda: rank.tell(store.found.wait(20)), daemon=True).start()
    rank.init(store=store)
    if rank.rank == 2:
        threading.Thread(target=aborts, args=(rank,), daemon=True).start()
    fault = catch(dist.all_reduce, torch.ones(3))
    dist.destroy_process_group()
    return fault, rank.left(), rank.rank != gives_up or store.given_up.is_set()


@pytest.mark.parametrize("gives_up", [0, 1])
def test_a_rank_that_gives_up_connects_first_if_the_other_one_has_begun(jobs, gives_up):
    job = jobs(3, connects, gives_up)
    assert job.hear(gives_up) is True
    job.tell(2)
    for fault, left, gave_up in job.hear_all().values():
        assert fault is not None and "rank 2 aborted the group" in fault.text, fault
        assert left == [] and gave_up
    job.ended_well()
