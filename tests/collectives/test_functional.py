"""Functional collectives, eager, under autograd and under torch.compile."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from on_ranks import on_ranks
from oracle import assert_reduced, assert_same, sample


def of_all(shape=(6, 4), seed=0):
    return [sample(r, shape, torch.float, seed) for r in range(dist.get_world_size())]


@on_ranks(3)
def test_broadcast_and_all_to_all():
    mine, size = dist.get_rank(), dist.get_world_size()
    inputs = of_all()
    assert_same(funcol.broadcast(inputs[mine], 1, dist.group.WORLD) + 0, inputs[1])
    # Rank r sends r + t + 1 rows to rank t.
    sends = [
        [sample(10 * r + t, (r + t + 1, 2), torch.float) for t in range(size)] for r in range(size)
    ]
    splits = [mine + t + 1 for t in range(size)]
    got = funcol.all_to_all_single(torch.cat(sends[mine]), splits, splits, dist.group.WORLD)
    assert_same(got + 0, torch.cat([sends[r][mine] for r in range(size)]))


@on_ranks(3)
def test_coalesced():
    mine, size = dist.get_rank(), dist.get_world_size()
    rows = [of_all((3, 2), seed=1), of_all((5,), seed=2)]
    given = [row[mine] for row in rows]
    for got, row in zip(
        funcol.all_reduce_coalesced(given, "sum", dist.group.WORLD), rows, strict=True
    ):
        assert_reduced(got + 0, row, "SUM")
    outputs = funcol.all_gather_into_tensor_coalesced(given, dist.group.WORLD)
    for got, row in zip(outputs, rows, strict=True):
        assert_same(got + 0, torch.cat(row))
    wide = [torch.cat([t] * size) for t in given]
    outputs = funcol.reduce_scatter_tensor_coalesced(wide, "sum", [0, 0], dist.group.WORLD)
    for got, row in zip(outputs, rows, strict=True):
        flat = [torch.cat([t] * size).chunk(size)[mine] for t in row]
        assert_reduced(got + 0, flat, "SUM")


@on_ranks(3)
def test_backward():
    """The gradient of a gather is a reduce-scatter, and the other way round."""
    mine, size = dist.get_rank(), dist.get_world_size()
    weights = of_all((size * 3, 2), seed=5)
    given = of_all((3, 2))[mine].requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(given, 0, dist.group.WORLD)
    (gathered * weights[mine]).sum().backward()
    assert_reduced(given.grad, [w.chunk(size)[mine] for w in weights], "SUM")

    wide = of_all((size * 3, 2))[mine].requires_grad_()
    part = funcol.reduce_scatter_tensor_autograd(wide, "sum", 0, dist.group.WORLD)
    factors = of_all((3, 2), seed=6)
    (part * factors[mine]).sum().backward()
    assert_same(wide.grad, torch.cat(factors))


@on_ranks(3)
def test_many_in_flight():
    """Results may be awaited in any order, or never."""
    inputs = [of_all((100,), seed) for seed in range(20)]
    results = [funcol.all_reduce(row[dist.get_rank()], "sum", dist.group.WORLD) for row in inputs]
    del results[7]
    for row, result in reversed(list(zip(inputs[:7] + inputs[8:], results, strict=True))):
        assert_reduced(result + 0, row, "SUM")


def step(x):
    y = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
    z = funcol.all_gather_tensor(y + 1, 0, dist.group.WORLD)
    return funcol.reduce_scatter_tensor(z, "avg", 0, dist.group.WORLD).relu()


def step_in_place(x):
    y = x * 3
    dist.all_reduce(y)
    return y * 1


def compiled(backend, *functions):
    given = sample(dist.get_rank(), (6, 4), torch.float)
    for function in functions:
        torch.compiler.reset()
        fast = torch.compile(function, backend=backend, fullgraph=True)
        for scale in (1.0, 2.0):
            torch.testing.assert_close(fast(given * scale), function(given * scale))


@pytest.mark.parametrize("op", ["sum", "avg", "max", "product"])
@on_ranks(1, 3)
def test_all_reduce(op):
    inputs = of_all()
    given = inputs[dist.get_rank()].clone()
    result = funcol.all_reduce(given, op, dist.group.WORLD)
    assert_reduced(result + 0, inputs, op.upper())
    assert_same(given, inputs[dist.get_rank()])


@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(1, 3)
def test_gather_and_scatter(dim):
    mine, size = dist.get_rank(), dist.get_world_size()
    inputs = of_all()
    gathered = funcol.all_gather_tensor(inputs[mine], dim, dist.group.WORLD)
    assert_same(gathered + 0, torch.cat(inputs, dim))
    wide = [torch.cat([t] * size, dim) * (r + 1) for r, t in enumerate(inputs)]
    part = funcol.reduce_scatter_tensor(wide[mine], "sum", dim, dist.group.WORLD)
    assert_reduced(part + 0, [t.chunk(size, dim)[mine] for t in wide], "SUM")


def test_compiled(world):
    world(2).run(compiled, "aot_eager", step, step_in_place)


@on_ranks(2)
def test_compiled_with_gradients():
    torch.compiler.reset()
    weight = torch.ones(4, 3, requires_grad=True)
    given = sample(dist.get_rank(), (6, 4), torch.float)

    def loss(weight):
        hidden = funcol.all_gather_tensor_autograd(given @ weight, 0, dist.group.WORLD)
        return hidden.square().sum()

    torch.compile(loss, backend="aot_eager", fullgraph=True)(weight).backward()
    compiled_gradient, weight.grad = weight.grad, None
    loss(weight).backward()
    torch.testing.assert_close(compiled_gradient, weight.grad)
    assert weight.grad.abs().sum() > 0


@pytest.mark.full
def test_compiled_by_inductor(world):
    world(2).run(compiled, "inductor", step)
