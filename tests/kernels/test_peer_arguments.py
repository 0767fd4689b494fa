"""What cannot be launched raises before anything is; what can is in the table that the compile gate sees."""

import importlib
import itertools
from typing import Any

import peer_ranks
import pytest
import torch
from kernel_table import KERNEL_MODULES
from world import Worlds

from fastcoll.kernels.peers import MAX_CHANNELS, PeerBuffers, PeerLayout

LAYOUT = PeerLayout(channels=2, stage_bytes=1024, slots=4, slot_bytes=512)


def memory_of(layout: PeerLayout) -> torch.Tensor:
    """Zeroed memory of the layout's size at a multiple of 128."""
    space = torch.zeros(layout.bytes + 128, dtype=torch.uint8)
    start = -space.data_ptr() % 128
    return space[start : start + layout.bytes]


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
def test_a_layout_that_cannot_be_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        PeerLayout(**{**vars(LAYOUT), **changes})


def test_the_parts_of_a_region_follow_each_other_in_lines() -> None:
    parts = [LAYOUT.flags_at, LAYOUT.staging_at, LAYOUT.slots_at, LAYOUT.bytes]
    assert parts == sorted(set(parts))
    assert all(part % 128 == 0 for part in parts)
    assert LAYOUT.bytes - LAYOUT.slots_at == 2 * 4 * 512
    assert LAYOUT.slots_at - LAYOUT.staging_at == 2 * 2 * 1024


def test_buffers_that_cannot_be_are_refused() -> None:
    memory = memory_of(LAYOUT)
    address = memory.data_ptr()
    for rank, region, addresses, what in [
        (1, memory, [address], "rank"),
        (0, memory, [], "world size"),
        (0, memory, [address] + [address + 128] * 32, "world size"),
        (0, memory, [address + 128], r"addresses\[rank\]"),
        (0, memory, [address, address + 64], "address of rank 1"),
        (0, memory, [address, 0], "address of rank 1"),
        (0, memory[:-128], [address], "memory"),
        (0, memory.view(torch.int32), [address], "memory's dtype"),
    ]:
        with pytest.raises(ValueError, match=what):
            PeerBuffers(rank, region, addresses, LAYOUT)
    PeerBuffers(0, memory, [address + 128 * rank for rank in range(32)], LAYOUT)
    with pytest.raises(ValueError, match="spins"):
        PeerBuffers(0, memory, [address], LAYOUT, spins=0)


def test_calls_that_cannot_be_are_refused_before_a_launch(interpreted: Worlds) -> None:
    interpreted(1).run(refused_calls, init=False)


def refused_calls() -> None:
    modules = peer_ranks.interpret()
    peers = peer_ranks.open_buffers(LAYOUT)
    one, two, ring = modules.one_shot, modules.two_shot, modules.ring
    x, y = torch.ones(64), torch.zeros(64)
    at = modules.Registered.at
    here, elsewhere = at([x.data_ptr()], "cpu"), at([y.data_ptr()], "cpu")
    two_of = at([x.data_ptr(), y.data_ptr()], "cpu")
    space = torch.ones(100)
    half = torch.bfloat16
    for error, what, call in [
        (TypeError, "source", lambda: one.all_reduce([1.0], y, peers)),
        (ValueError, "out's dtype", lambda: one.all_reduce(x, y.double(), peers)),
        (ValueError, "source's dtype", lambda: one.all_reduce(x.int(), y.int(), peers)),
        (ValueError, "contiguous", lambda: one.all_reduce(x[::2], y[:32], peers)),
        (ValueError, "elements of out", lambda: two.all_reduce(x, y[:32], peers)),
        (ValueError, "wire_dtype", lambda: two.all_reduce(x, y, peers, wire_dtype=torch.float64)),
        (ValueError, "op", lambda: two.all_reduce(x, y, peers, op="mean")),
        (ValueError, "overlap", lambda: one.all_reduce(space[:64], space[8:72], peers)),
        (ValueError, "channels", lambda: one.all_reduce(x, y, peers, channels=3)),
        (ValueError, "channels", lambda: ring.all_reduce(x, y, peers, channels=0)),
        (ValueError, "partial_dtype", lambda: ring.all_reduce(x, y, peers, partial_dtype=half)),
        (ValueError, "device", lambda: ring.all_reduce(x.to("meta"), y, peers)),
        (ValueError, "memory of its own", lambda: one.all_reduce(x, x, peers, registered=here)),
        (ValueError, "`source`", lambda: two.all_reduce(x, y, peers, registered=here)),
        (ValueError, "message at", lambda: one.all_reduce(x, y, peers, registered=elsewhere)),
        (ValueError, "multiple of 16", lambda: at([x.data_ptr() + 4], "cpu")),
        (
            ValueError,
            "expected 1 addresses",
            lambda: one.all_reduce(x, y, peers, registered=two_of),
        ),
        (ValueError, "elements of out", lambda: ring.all_gather(x, y[:32], peers)),
        (ValueError, "overlap", lambda: ring.all_gather(space[:64], space[8:72], peers)),
        (ValueError, "out's dtype", lambda: ring.all_gather(x, y.int(), peers)),
        (ValueError, "elements of out", lambda: ring.reduce_scatter(x, y[:32], peers)),
        (ValueError, "overlap", lambda: ring.reduce_scatter(space[:64], space[8:72], peers)),
        (
            ValueError,
            "wire dtype",
            lambda: two.all_reduce(x, x, peers, registered=here, wire_dtype=half),
        ),
        (
            ValueError,
            "alignment",
            lambda: one.all_reduce(x, space[1:65], peers, registered=here),
        ),
    ]:
        with pytest.raises(error, match=what):
            call()
    assert not peers.state.any(), "something was launched"
    assert torch.all(y == 0)


def test_no_kernel_fuses_a_product_and_a_sum() -> None:
    """It would be rounded once where the oracle, and the CPU, round twice."""
    modules = [importlib.import_module(f"fastcoll.kernels.{name}") for name in KERNEL_MODULES]
    all_of = [each for module in modules for each in module.configurations()]
    reducing = [each for each in all_of if "gather" not in each.name]
    assert len(reducing) > 50
    assert all(each.options["enable_fp_fusion"] is False for each in reducing)


def test_every_launch_is_of_a_listed_configuration(interpreted: Worlds) -> None:
    launched, listed = interpreted(1).run(launches, init=False)[0]
    assert launched <= listed
    assert listed - launched == set()  # none is listed that nothing launches


def launches() -> tuple[set[str], set[str]]:
    modules = peer_ranks.interpret()
    from fastcoll.kernels import _launch, every_rank

    peers = peer_ranks.open_buffers(LAYOUT)
    names = ("one_shot", "two_shot", "ring")
    homes = [getattr(modules, name) for name in names]
    listed = [each for home in homes for each in home.configurations()]
    half = [torch.float16, torch.bfloat16]
    for dtype, wire in itertools.product([torch.float32, *half, torch.float64], [None, *half]):
        x, y = torch.ones(64, dtype=dtype), torch.ones(64, dtype=dtype)
        here = modules.Registered.at([x.data_ptr()], "cpu")
        if wire is not None and dtype != torch.float32:
            continue
        for partial in {None, torch.float64 if dtype == torch.float64 else torch.float32}:
            options: dict[str, Any] = {"wire_dtype": wire, "partial_dtype": partial}
            modules.ring.all_reduce(x, y, peers, **options)
        for registered in [None, here] if wire is None else [None]:
            options = {"wire_dtype": wire, "registered": registered}
            modules.one_shot.all_reduce(x, y, peers, **options)
            modules.two_shot.all_reduce(x, x, peers, **options)
    for dtype in (torch.int32, torch.uint8):
        x, y = torch.ones(64, dtype=dtype)[:61], torch.ones(61, dtype=dtype)
        modules.ring.all_gather(x, y, peers)
    for dtype, algorithm in itertools.product(
        [torch.float32, torch.bfloat16], ["one_shot", "two_shot", "ring"]
    ):
        x, y = torch.ones(64, dtype=dtype), torch.ones(64, dtype=dtype)
        every_rank.launch_every_rank(algorithm, "all_reduce", [x], [y], [peers])
        if algorithm != "ring":
            out = x if algorithm == "two_shot" else y
            here = modules.Registered.at([x.data_ptr()], "cpu")
            every_rank.launch_every_rank(
                algorithm, "all_reduce", [x], [out], [peers], registered=here
            )
        assert torch.all(y == 1)
    peers.check()
    used = [each.configuration for each in _launch._launchers.values()]
    assert all(any(each is other for other in listed) for each in used)
    return {each.name for each in used}, {each.name for each in listed}
