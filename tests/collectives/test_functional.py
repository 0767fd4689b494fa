"""Functional collectives, eager and under torch.compile."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from on_ranks import on_ranks
from oracle import assert_reduced, assert_same, sample
from suite_rules import full


def of_all(shape=(6, 4), seed=0):
    return [sample(r, shape, torch.float, seed) for r in range(dist.get_world_size())]


@on_ranks(1, 3)
def test_each_call():
    mine, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    inputs = of_all()
    given = inputs[mine].clone()
    for op in ("sum", "avg", "max", "product"):
        assert_reduced(funcol.all_reduce(given, op, group) + 0, inputs, op.upper())
        assert_same(given, inputs[mine])
    assert_same(funcol.broadcast(given, size - 1, group) + 0, inputs[-1])
    for dim in (0, 1):
        gathered = funcol.all_gather_tensor(given, dim, group)
        assert_same(gathered + 0, torch.cat(inputs, dim))
        wide = [torch.cat([t] * size, dim) * (r + 1) for r, t in enumerate(inputs)]
        part = funcol.reduce_scatter_tensor(wide[mine], "sum", dim, group)
        assert_reduced(part + 0, [t.chunk(size, dim)[mine] for t in wide], "SUM")
    # Rank r sends r + t + 1 rows to rank t.
    sends = [
        [sample(10 * r + t, (r + t + 1, 2), torch.float) for t in range(size)] for r in range(size)
    ]
    splits = [mine + t + 1 for t in range(size)]
    got = funcol.all_to_all_single(torch.cat(sends[mine]), splits, splits, group)
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


@pytest.mark.parametrize("backend", ["aot_eager", full("inductor")])
@on_ranks(2)
def test_compiled(backend):
    given = sample(dist.get_rank(), (6, 4), torch.float)
    for function in (step, step_in_place)[: 1 if backend == "inductor" else 2]:
        torch.compiler.reset()
        fast = torch.compile(function, backend=backend, fullgraph=True)
        for scale in (1.0, 2.0):
            torch.testing.assert_close(fast(given * scale), function(given * scale))
