"""The groups of a process leave multiprocessors of a device to NCCL, however many of them wait there."""

import types

import peer_memory
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from peer_memory import DEVICE

from fastcoll.cuda.channels import BUDGET, ChannelShare


def test_groups_share_a_budget_until_nothing_is_left_to_share():
    device = torch.device("cuda", 77)
    shares = [ChannelShare(device, 32) for _ in range(8)]
    assert [share.programs for share in shares] == [32, 16, 8, 4, 2, 1, 0, 0]
    assert sum(share.programs for share in shares) < BUDGET
    assert ChannelShare(torch.device("cuda", 78), 32).programs == 32, "each device has a budget"
    shares[0].close()
    shares[0].close()
    assert ChannelShare(device, 32).programs == 16


@pytest.mark.parametrize(
    ("multiprocessors", "programs"), [(132, 32), (128, 32), (78, 19), (16, 4), (2, 0)]
)
def test_half_of_a_small_device_is_left_to_nccl(monkeypatch, multiprocessors, programs):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: types.SimpleNamespace(multi_processor_count=multiprocessors),
    )
    device = torch.device("cuda", 80)
    shares = [ChannelShare(device, 32) for _ in range(8)]
    assert shares[0].programs == programs
    assert sum(share.programs for share in shares) <= multiprocessors // 2
    for share in shares:
        share.close()


def test_what_another_rank_does_not_have_goes_back():
    device = torch.device("cuda", 79)
    first = ChannelShare(device, 32)
    first.agree(6)
    assert first.programs == 6
    assert ChannelShare(device, 64).programs == (BUDGET - 6) // 2


@on_ranks(2, world="peer_world", fresh=True)
def test_ranks_agree_on_the_smaller_share_and_the_last_groups_go_by_nccl():
    """A rank whose process has other groups besides; a group here has a use for 3 programs."""
    dist.all_reduce(torch.ones(10, device=DEVICE))
    mine = torch.device(DEVICE)
    others = [ChannelShare(mine, 1000) for _ in range(3)] if dist.get_rank() == 1 else []
    groups, channels = [], []
    for _ in range(5):
        groups.append(dist.new_group())
        x = torch.ones(700, device=DEVICE)
        dist.all_reduce(x, group=groups[-1])
        assert x.cpu().eq(2).all()
        region = peer_memory.reduces_of(groups[-1]).region
        channels.append(region.peers.buffers.layout.channels if region.peers else 0)
    reason = peer_memory.reduces_of(groups[-1]).region.topology.reason
    for group in groups:
        dist.destroy_process_group(group)
    for share in others:
        share.close()
    group = dist.new_group()
    dist.all_reduce(x, group=group)
    channels.append(peer_memory.reduces_of(group).region.peers.buffers.layout.channels)
    assert channels == [3, 2, 1, 1, 0, 3]  # and 3 again when the others are gone
    assert reason.startswith("rank 1: other groups of the process use all thread blocks")
