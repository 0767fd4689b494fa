"""fastcoll's own communication hook: fewer bits on the wire, shared and complex buckets."""

import gc

import pytest
import torch
import torch.distributed as dist
from backend import backend_of, beyond_gloo
from on_ranks import on_ranks
from oracle import assert_alike, bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Given, assert_gradients, assert_replicated, loss_of, network, train
from ways import hooked

from fastcoll.ddp import WIRE_DTYPES, FusedAllreduceState


@pytest.mark.parametrize("wire", WIRE_DTYPES)
@on_ranks(2, 8)
def test_a_sum_of_16_bits_is_rounded_once(wire):
    """The error is that of one rounding of the sum, whatever the number of ranks."""
    size, model = dist.get_world_size(), Given(3000)
    given = torch.randn(size, 3000, generator=torch.Generator().manual_seed(7))
    ddp, _ = hooked(model, wire_dtype=wire)
    ddp(given[dist.get_rank()]).backward()
    found, exact = model.gradient(), given.to(wire).double().mean(0)
    assert_alike(bits(found))
    # Beside it that of the float32 sum, of numbers up to 5.
    allowed = torch.finfo(wire).eps / 2 * exact.abs() + 5 * size * 2.0**-24
    assert ((found.double() - exact).abs() <= allowed).all()


@on_ranks(2)
def test_training_with_any_wire_learns_as_without():
    steps, last = 40, slice(-10, None)
    expected = train(DistributedDataParallel(network(torch.float)), steps)
    for wire in WIRE_DTYPES:
        ddp, _ = hooked(network(torch.float), wire_dtype=wire, bucket_cap_mb=0.001)
        losses = train(ddp, steps)
        assert_replicated(ddp.module)
        apart = abs(sum(losses[last]) - sum(expected[last])) / 10
        assert apart < 0.1 * (expected[0] - expected[-1]), wire


def test_another_wire_is_refused():
    with pytest.raises(
        ValueError, match=r"expected a wire_dtype of torch\.bfloat16.*got torch\.float8_e4m3fn"
    ):
        FusedAllreduceState(wire_dtype=torch.float8_e4m3fn)


@beyond_gloo("has no shared memory")
@on_ranks(2)
def test_buckets_in_shared_memory():
    """DDP puts its buckets where the ranks share memory; the peers read them there."""
    model, stock = network(torch.float, width=800), network(torch.float, width=800)
    ours, state = hooked(model, gradient_norm=True, gradient_as_bucket_view=True)
    stock = DistributedDataParallel(stock)
    for step in range(3):
        for model in (ours, stock):
            model.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
        expected = torch.nn.utils.get_total_norm([p.grad.double() for p in stock.parameters()])
        torch.testing.assert_close(state.grad_norm(), expected)
        assert_gradients(ours, stock, rtol=0, atol=0)
    assert backend_of().is_shared(next(ours.parameters()).grad)


class TwoDtypes(nn.Module):
    """Its gradients are its input."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Given(40), Given(41, dtype=torch.double)])

    def forward(self, value):
        return sum(part(value).double() for part in self.parts)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@on_ranks(2)
def test_buckets_of_two_dtypes_in_a_static_graph(wire, overlap):
    """In the first pass torch calls both the first one, and neither the last one."""
    options = {"wire_dtype": wire, "gradient_norm": True, "overlap": overlap}
    ddp, state = hooked(TwoDtypes(), static_graph=True, **options)
    for step in range(3):
        ddp.zero_grad()
        ddp(2.0 ** (dist.get_rank() + step)).backward()
        mean = 1.5 * 2.0**step
        for part in ddp.module.parts:
            torch.testing.assert_close(part.gradient(), torch.full_like(part.gradient(), mean))
        torch.testing.assert_close(float(state.grad_norm()), mean * 81**0.5)


@pytest.mark.parametrize("name", ["fastcoll", "gloo"])
@on_ranks(2)
def test_complex_gradients(name):
    group = dist.new_group(backend=name)
    model = nn.Linear(3, 2, dtype=torch.complex64)
    ddp, state = hooked(model, group, gradient_norm=True, average=False)
    ddp(torch.ones(4, 3, dtype=torch.complex64)).abs().sum().backward()
    parts = [torch.view_as_real(p.grad).double().square().sum() for p in model.parameters()]
    torch.testing.assert_close(state.grad_norm(), torch.stack(parts).sum().sqrt())
    # DDP's part in C++ would end the group under Python's lock, for which gloo's threads may wait.
    del ddp
    gc.collect()
    dist.destroy_process_group(group)
