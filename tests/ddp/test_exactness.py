"""The mean of bfloat16 gradients: one rounding with any number of ranks, where a stock ring adds one for each hop."""

import functools
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from backend import backend_of, beyond_gloo
from on_ranks import on_ranks
from oracle import assert_alike, bits
from training import Given
from ways import hooked, stock
from world import init_group

pytestmark = beyond_gloo("sums with one rounding")

ELEMENTS = 40_000
ONE_ROUNDING = torch.finfo(torch.bfloat16).eps / 2  # of a number, relative to it
# An element whose float32 sum lies within that sum's own error of a tie may go the other way.
FLOAT32_SUM = 1 + 64 * torch.finfo(torch.float32).eps / torch.finfo(torch.bfloat16).eps


class Deviation(NamedTuple):
    """How far a mean in bfloat16 is from the float64 mean."""

    relative: float  # norm of the difference over the norm of the exact mean
    # The largest error of an element, divided by the error bound of one rounding.
    roundings: float
    not_nearest: float  # share of the elements that are not the nearest bfloat16 number


def gradients(ranks):
    """A mean gradient that all share and as much noise of each rank's own, over five orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    size = 10.0 ** (5 * torch.rand(ELEMENTS, generator=generator, dtype=torch.float64) - 6)
    shared = torch.randn(ELEMENTS, generator=generator, dtype=torch.float64)
    own = torch.randn(ranks, ELEMENTS, generator=generator, dtype=torch.float64)
    return (size * (shared + own)).to(torch.bfloat16)


def error_of(found, given):
    exact = given.double().mean(0)
    difference = (found.double() - exact).abs()
    allowed = exact.abs() * ONE_ROUNDING
    return Deviation(
        (difference.norm() / exact.norm()).item(),
        (difference / allowed)[allowed > 0].max().item(),
        (found != exact.to(torch.bfloat16)).double().mean().item(),
    )


def nearest(given):
    """No mean in bfloat16 can be nearer."""
    return error_of(given.double().mean(0).to(torch.bfloat16), given)


def rounded_once(given):
    """The mean that is summed in float32, in rank order."""
    return (functools.reduce(torch.add, given.float()) / len(given)).to(torch.bfloat16)


def mean_by_ddp(given, wrap=hooked, group=None, **options):
    """Return what DDP makes of each rank's row."""
    model = Given(1, 999, 20_000, ELEMENTS - 21_000, dtype=torch.bfloat16)
    ddp = wrap(model, group, **options)[0]
    ddp(given[dist.get_rank()]).backward()
    return model.gradient()


def errors_of_ours_and_gloos():
    given = gradients(dist.get_world_size())
    ours = mean_by_ddp(given)
    found = error_of(ours, given)
    assert found.roundings <= FLOAT32_SUM
    assert found.relative <= nearest(given).relative * (1 + 1e-6)
    assert torch.equal(ours, rounded_once(given))
    gloo = dist.new_group(backend="gloo")
    theirs = error_of(mean_by_ddp(given, stock, gloo), given)
    dist.destroy_process_group(gloo)
    assert_alike(bits(ours))
    return found, theirs


def test_error_is_that_of_one_rounding_where_gloos_grows(world):
    ours, theirs = {}, {}
    for size in (2, 4, 8):
        ours[size], theirs[size] = world(size).run(errors_of_ours_and_gloos)[0]
        assert ours[size].relative <= ONE_ROUNDING
    assert ours[8].not_nearest < 1e-3
    assert theirs[4].relative > 1.15 * theirs[2].relative
    assert theirs[8].relative > 1.15 * theirs[4].relative
    assert theirs[8].relative > 1.5 * ours[8].relative
    assert theirs[8].not_nearest > 0.2


def layouts():
    """Buckets, views and runs: none changes a bit."""
    given = gradients(dist.get_world_size())
    options = [{}, {}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}]
    found = {bits(mean_by_ddp(given, **one)) for one in options}
    again = dist.new_group()
    found.add(bits(mean_by_ddp(given, group=again)))
    dist.destroy_process_group(again)
    in_pieces = given[dist.get_rank()].clone()
    for piece in in_pieces.split(777):
        dist.all_reduce(piece, dist.ReduceOp.AVG)
    found.add(bits(in_pieces))
    return found


@on_ranks(3, init=False)
def test_the_same_bits_on_all_ranks_in_all_runs_and_layouts():
    found = set()
    for shared_memory, transport in (("require", "shm"), ("off", "gloo")):
        os.environ["FASTCOLL_SHARED_MEMORY"] = shared_memory
        init_group(transport)
        found |= layouts()
        assert backend_of().transport() == transport
        assert_alike(found)
        dist.destroy_process_group()
    assert len(found) == 1
