"""What cannot be launched raises before anything is; what can is in the table that the compile gate sees."""

import importlib
import itertools

import peer_ranks
import pytest
import torch
from kernel_table import KERNEL_MODULES
from on_ranks import on_ranks

from fastcoll.kernels.peers import MAX_CHANNELS, PeerBuffers, PeerLayout

LAYOUT = PeerLayout(channels=2, stage_bytes=1024, slots=4, slot_bytes=512)


@pytest.mark.parametrize(
    "changes",
    [
        {"channels": 0},
        {"channels": MAX_CHANNELS + 1},
        {"slots": 1},
        {"stage_bytes": 0},
        {"stage_bytes": 100},
        {"slot_bytes": 64},
    ],
)
def test_a_layout_that_cannot_be_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        PeerLayout(**{**vars(LAYOUT), **changes})


def test_the_parts_of_a_region_follow_each_other_in_lines():
    parts = [LAYOUT.flags_at, LAYOUT.staging_at, LAYOUT.slots_at, LAYOUT.bytes]
    assert parts == sorted(set(parts))
    assert all(part % 128 == 0 for part in parts)
    assert LAYOUT.bytes - LAYOUT.slots_at == 2 * 4 * 512
    assert LAYOUT.slots_at - LAYOUT.staging_at == 2 * 2 * 1024


def test_buffers_that_cannot_be_are_refused():
    memory = peer_ranks.buffers_on("cpu", 1, LAYOUT)[0].memory
    address = memory.data_ptr()
    for addresses, what in [
        ([address + 128], r"addresses\[rank\]"),
        ([address, address + 64], "address of rank 1"),
        ([address, 0], "address of rank 1"),
    ]:
        with pytest.raises(ValueError, match=what):
            PeerBuffers(0, memory, addresses, LAYOUT)
    PeerBuffers(0, memory, [address + 128 * rank for rank in range(32)], LAYOUT)


def test_no_kernel_fuses_a_product_and_a_sum():
    """It would be rounded once where the oracle, and the CPU, round twice."""
    modules = [importlib.import_module(f"fastcoll.kernels.{name}") for name in KERNEL_MODULES]
    all_of = [each for module in modules for each in module.configurations()]
    reducing = [each for each in all_of if "gather" not in each.name]
    assert len(reducing) > 30
    assert all(each.options["enable_fp_fusion"] is False for each in reducing)


@on_ranks(1, world="interpreted", init=False)
def test_every_launch_is_of_a_listed_configuration():
    peers = peer_ranks.open_buffers()
    from fastcoll.kernels import _launch, ring, staged

    _launch._kernels.clear()  # of other tests on this rank
    listed = [*staged.configurations(), *ring.configurations()]
    half = [torch.float16, torch.bfloat16]
    for dtype, wire in itertools.product([torch.float32, *half], [None, *half]):
        x, y = torch.ones(64, dtype=dtype), torch.ones(64, dtype=dtype)
        if wire is not None and dtype != torch.float32:
            continue
        for algorithm in ("one_shot", "two_shot", "ring"):
            peer_ranks.prepare(algorithm, "all_reduce", x, y, peers, wire_dtype=wire)()
    for dtype in (torch.int32, torch.uint8):
        x, y = torch.ones(64, dtype=dtype)[:61], torch.ones(61, dtype=dtype)
        peer_ranks.prepare("ring", "all_gather", x, y, peers)()
    peers.check()
    used = [configuration for configuration, _ in _launch._kernels.values()]
    assert all(any(each is other for other in listed) for each in used)
    # None is listed that nothing launches.
    assert {each.name for each in used} == {each.name for each in listed}
