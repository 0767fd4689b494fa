"""Collectives on tensors that are not contiguous, not aligned, empty, scalar or under autograd."""

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, reduce_scatter_single
from collective_cases import MOVING, REDUCING, Case, run_all
from fault_list import plays
from layouts import DENSE, FLAT, LAYOUTS
from on_ranks import on_ranks
from oracle import assert_same, sample

ONE_TENSOR = ["reduce_scatter_single", "all_gather_single", "all_to_all_single", "ring"]


def layouts(collectives, known):
    """Parameters for all layouts, of which gloo handles the known ones."""
    beyond = beyond_gloo("an error, or wrong numbers without one")
    return [
        pytest.param(collective, layout, marks=[] if layout in known else beyond)
        for collective in collectives
        for layout in LAYOUTS
    ]


@plays(52)
@pytest.mark.parametrize(
    ("collective", "layout"),
    [
        *layouts([c for c in [*REDUCING, *MOVING] if c not in ONE_TENSOR], known=DENSE),
        *layouts(ONE_TENSOR, known=FLAT),
    ],
)
def test_every_collective(world, collective, layout):
    cases = [
        Case(collective, dtype=dtype, shape=shape, given_layout=layout, output_layout=layout)
        for dtype in (torch.float, torch.bfloat16, torch.int8)
        for shape in [(5, 7), (64, 129), (1, 1), (3, 4, 5)]
    ]
    world(3).run(run_all, cases)


@beyond_gloo("reads past the end")
@on_ranks(3)
def test_expanded_inputs():
    mine, size = dist.get_rank(), dist.get_world_size()
    given = torch.tensor([float(mine + 1)]).expand(6)
    outputs = [torch.empty(6) for _ in range(size)]
    dist.all_gather(outputs, given)
    for source, output in enumerate(outputs):
        assert_same(output, torch.full((6,), source + 1.0))
    output = torch.empty(6)
    reduce_scatter_single(output, torch.tensor([mine + 1.0]).expand(size * 6))
    assert_same(output, torch.full((6,), size * (size + 1) / 2))


@beyond_gloo("crashes, or overwrites silently")
@on_ranks(2)
def test_overlapping_output_is_refused():
    """Refused where they would be written; nothing has been sent by then."""
    mine, size = dist.get_rank(), dist.get_world_size()
    overlapping = [torch.ones(1).expand(6), torch.ones(8).as_strided((4, 3), (1, 1))]
    for tensor in overlapping:
        for call in (
            lambda t=tensor: dist.all_reduce(t),
            lambda t=tensor: dist.broadcast(t, 1 - mine),
            lambda t=tensor: dist.reduce(t, mine),
            lambda t=tensor: dist.recv(t, 1 - mine),
            lambda t=tensor: dist.all_gather([t] * size, torch.ones(t.shape)),
            lambda t=tensor: dist.reduce_scatter(t, [torch.ones(t.shape)] * size),
        ):
            with pytest.raises(ValueError, match="overlap"):
                call()
    dist.barrier()


@plays(54)
@on_ranks(2)
def test_requires_grad():
    parameter = torch.nn.Parameter(torch.full((4,), dist.get_rank() + 1.0))
    dist.all_reduce(parameter)
    assert parameter.requires_grad and parameter.is_leaf and parameter.grad is None
    assert_same(parameter, torch.full((4,), 3.0))
    dist.broadcast(parameter, 0)
    outputs = [torch.empty(4), torch.empty(4)]
    dist.all_gather(outputs, parameter)
    assert_same(outputs[1], torch.full((4,), 3.0))


@plays(55)
@beyond_gloo("ignores conjugate and negative bits")
@on_ranks(2)
def test_conjugate_and_negative_bits():
    """As inputs only: torch hands the backend a resolved copy, so an output could not be written."""
    size, rank = dist.get_world_size(), dist.get_rank()
    inputs = [sample(r, (6,), torch.complex64).conj() for r in range(size)]
    mine = inputs[rank]
    assert mine.is_conj()
    gathered = [torch.empty(6, dtype=torch.complex64) for _ in inputs] if rank == 0 else None
    dist.gather(mine, gathered, 0)
    for output, expected in zip(gathered or (), inputs, strict=rank == 0):
        assert_same(output, expected.resolve_conj())
    negative = mine.imag
    assert negative.is_neg()
    outputs = [torch.empty(6) for _ in inputs]
    dist.all_gather(outputs, negative)
    for output, expected in zip(outputs, inputs, strict=True):
        assert_same(output, expected.imag.resolve_neg().contiguous())
