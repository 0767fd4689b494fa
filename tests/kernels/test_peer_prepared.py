"""Launches between ranks that are prepared once: repeated, after a fault, and where they are refused."""

import peer_ranks
import pytest
import torch
from on_ranks import on_ranks
from peer_ranks import here
from test_peer_exchange import KINDS

from fastcoll.kernels.peers import PeerBuffers, PeerLayout
from fastcoll.kernels.staged import one_shot

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
@on_ranks(3, world="interpreted", init=False)
def test_a_prepared_launch_is_repeated_among_others(collective, algorithm):
    """It counts on where the last launch on the buffers ended, of whichever kind that was."""
    buffers = peer_ranks.open_buffers()
    source, out = sides(collective)
    arguments = {} if collective == "all_gather" else {"op": "avg", "scale": 1 / 3}
    launch = peer_ranks.prepare(algorithm, collective, source, out, buffers, **arguments)
    plain = []
    for seed in range(ROUNDS):
        fill(source, out, seed)
        launch()
        prepared = out.clone()
        out.fill_(-1)
        peer_ranks.prepare(algorithm, collective, source, out, buffers, **arguments)()
        plain.append(out.sum().item())
        assert torch.equal(prepared, out)
        other = "ring" if algorithm == "one_shot" else "one_shot"
        between = torch.ones(50 + seed)
        peer_ranks.prepare(other, "all_reduce", between, between, buffers)()
    buffers.check()
    assert len(set(plain)) == ROUNDS


def own_buffers() -> PeerBuffers:
    return peer_ranks.buffers_on("cpu", 1, PeerLayout(1, 1024, 2, 512))[0]


def test_closed_buffers_are_refused():
    buffers = own_buffers()
    source, out = torch.ones(20), torch.zeros(20)
    buffers.close()
    with pytest.raises(RuntimeError, match=r"rank 0/1\]: expected open buffers, got closed"):
        one_shot.prepare_all_reduce(source, out, buffers)
    assert not out.any() and not buffers.state.any()


def test_nothing_is_launched_for_an_empty_message():
    buffers = own_buffers()
    one_shot.prepare_all_reduce(torch.ones(0), torch.ones(0), buffers)()
    assert not buffers.state.any()
