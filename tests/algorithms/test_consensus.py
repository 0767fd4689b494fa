"""Consensus: how the ranks of a group read each other's answers through the store."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from odd_stores import Between

from fastcoll.cuda import symmetric
from fastcoll.cuda.consensus import Consensus
from fastcoll.cuda.errors import Member
from fastcoll.cuda.mapping_decision import REGION_SIZES, MappingRequest
from fastcoll.cuda.thresholds import Thresholds


def rounds(size, late=()):
    """What the ranks of a consensus hear, each on a thread."""
    store = dist.HashStore()

    def vote(rank):
        consensus = Consensus(store, Member("g", rank, size), 0.5, str)
        heard = [consensus.gather("first", f"{rank} is here")]
        if rank in late:
            return heard
        return [*heard, consensus.gather("second", "")]

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(vote, rank) for rank in range(size)]
    rounds = ("first", "first/0", "first/1", "second", "second/0", "second/1", "second/2")
    left = [key for key in rounds if store.check([f"consensus/{key}"])]
    return futures, left


def test_every_rank_hears_all_and_leaves_the_last_round_only():
    futures, left = rounds(3)
    texts = ["0 is here", "1 is here", "2 is here"]
    assert [future.result() for future in futures] == [[texts, ["", "", ""]]] * 3
    assert left == ["second", "second/0", "second/1", "second/2"]


def test_a_rank_that_does_not_vote_is_named():
    futures, _ = rounds(3, late={1, 2})
    with pytest.raises(
        dist.DistBackendError,
        match=r"rank 0/3\]: timed out after 500 ms: ranks 1, 2 have not arrived to map the peers' memory \(second\)",
    ):
        futures[0].result()


def test_a_consensus_ends_with_the_group():
    store = dist.HashStore()
    consensus = Consensus(store, Member("g", 0, 2), 30, lambda: "rank 1 died")
    with pytest.raises(dist.DistBackendError, match="the group was aborted: rank 1 died"):
        consensus.gather("first", "")


class Counting(Between):
    """Counts the bytes of the values that are read."""

    read = 0

    def get(self, key):
        value = super().get(key)
        self.read += len(value)
        return value


def test_ranks_read_no_more_in_a_larger_group():
    """Where NCCL serves alone: rank 0 reads all records, and the others what it decides."""
    request = MappingRequest("auto", Thresholds(), REGION_SIZES)
    nowhere = torch.device("meta")

    def most_read(size):
        store = dist.HashStore()
        stores = [Counting(store) for _ in range(size)]

        def opened(rank):
            member = Member("g", rank, size)
            return symmetric.open_region(stores[rank], member, nowhere, 30, request, str)

        with ThreadPoolExecutor(size) as pool:
            regions = list(pool.map(opened, range(size)))
        (reason,) = {region.topology.reason for region in regions}
        assert reason.startswith("no limit of a kernel was measured on these devices")
        return max(each.read for each in stores[1:])

    assert most_read(12) == most_read(3)
