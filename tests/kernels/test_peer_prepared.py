"""Launches between ranks that are prepared once: repeated, after a fault, and where they are refused."""

from typing import Any

import peer_ranks
import pytest
import torch
from peer_ranks import barrier, here
from test_peer_exchange import KINDS
from world import Worlds

from fastcoll.kernels import one_shot
from fastcoll.kernels.peers import PeerBuffers, PeerLayout

ROUNDS = 3
OTHER_RINGS = [("reduce_scatter", "ring"), ("all_gather", "ring")]


def sides(collective: str, count: int = 700) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = here().size
    source = torch.zeros(count * (ranks if collective == "reduce_scatter" else 1))
    out = torch.zeros(count * (ranks if collective == "all_gather" else 1))
    return source, out


def fill(source: torch.Tensor, out: torch.Tensor, seed: int) -> None:
    source.normal_(generator=torch.Generator().manual_seed(100 * seed + here().rank))
    out.fill_(-1)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [pytest.param(*kind, marks=pytest.mark.full if kind in OTHER_RINGS else ()) for kind in KINDS],
)
def test_a_prepared_launch_is_repeated_among_others(
    collective: str, algorithm: str, interpreted: Worlds
) -> None:
    """It counts on where the last launch on the buffers ended, of whichever kind that was."""
    for prepared, plain in interpreted(3).run(repeated, collective, algorithm, init=False):
        assert len(prepared) == ROUNDS
        assert all(torch.equal(one, other) for one, other in zip(prepared, plain, strict=True))
        assert len({each.sum().item() for each in plain}) == ROUNDS


def repeated(collective: str, algorithm: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    modules = peer_ranks.interpret()
    buffers = peer_ranks.open_buffers(modules.peers.PeerLayout(2, 1024, 4, 512))
    module = getattr(modules, algorithm)
    source, out = sides(collective)
    arguments = {} if collective == "all_gather" else {"op": "avg", "scale": 1 / 3}
    launch = getattr(module, f"prepare_{collective}")(source, out, buffers, **arguments)
    prepared, plain = [], []
    for seed in range(ROUNDS):
        fill(source, out, seed)
        launch()
        prepared.append(out.clone())
        out.fill_(-1)
        getattr(module, f"prepare_{collective}")(source, out, buffers, **arguments)()
        plain.append(out.clone())
        other = modules.ring if algorithm == "one_shot" else modules.one_shot
        between = torch.ones(50 + seed)
        other.prepare_all_reduce(between, between, buffers)()
    buffers.check()
    return prepared, plain


@pytest.mark.parametrize("algorithm", ["two_shot", "ring"])
def test_after_a_fault_it_touches_nothing(algorithm: str, interpreted: Worlds) -> None:
    results = interpreted(2).run(beside_a_late_rank, algorithm, init=False)
    assert results[0] == (True, True)


def beside_a_late_rank(algorithm: str) -> tuple[bool, bool]:
    modules = peer_ranks.interpret()
    buffers = peer_ranks.open_buffers(modules.peers.PeerLayout(2, 1024, 4, 512), spins=300)
    source, out = sides("all_reduce")
    launch = getattr(modules, algorithm).prepare_all_reduce(source, out, buffers)
    source.fill_(1.0)
    faulty = untouched = False
    if here().rank == 0:
        launch()
        faulty = fails(modules, buffers)
        out.fill_(-1)
        before = [region.clone() for region in buffers.regions]
        launch()
        same = all(map(torch.equal, before, buffers.regions))
        untouched = same and bool((out == -1).all()) and fails(modules, buffers)
    barrier("over")
    return faulty, untouched


def fails(modules: Any, buffers: Any) -> bool:
    try:
        buffers.check()
    except modules.peers.PeerFault:
        return True
    return False


def own_buffers() -> PeerBuffers:
    layout = PeerLayout(1, 1024, 2, 512)
    space = torch.zeros(layout.bytes + 128, dtype=torch.uint8)
    memory = space[-space.data_ptr() % 128 :][: layout.bytes]
    return PeerBuffers(0, memory, [memory.data_ptr()], layout)


def test_it_is_refused_once_the_buffers_are_closed() -> None:
    buffers = own_buffers()
    source, out = torch.ones(20), torch.zeros(20)
    launch = one_shot.prepare_all_reduce(source, out, buffers)
    buffers.close()
    for call in (launch, lambda: one_shot.prepare_all_reduce(source, out, buffers)):
        with pytest.raises(RuntimeError, match=r"rank 0/1\]: expected open buffers, got closed"):
            call()
    assert not out.any() and not buffers.state.any()


def test_it_is_refused_with_another_limit_of_polls() -> None:
    buffers = own_buffers()
    source, out = torch.ones(20), torch.zeros(20)
    launch = one_shot.prepare_all_reduce(source, out, buffers)
    buffers.spins = 7
    with pytest.raises(RuntimeError, match=r"expected the limit of 30000000 polls.*, got 7"):
        launch()
    assert not buffers.state.any()
    one_shot.prepare_all_reduce(source, out, buffers)()
    assert out.sum() == 20


def test_nothing_is_launched_for_an_empty_message() -> None:
    buffers = own_buffers()
    one_shot.prepare_all_reduce(torch.ones(0), torch.ones(0), buffers)()
    assert not buffers.state.any()
