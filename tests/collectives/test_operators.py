"""torch.ops.fastcoll: gradients, fake tensors, refusals. test_collectives.py compares all results.

Compiled graphs are in test_compile.py; faults of the calls in tests/faults, beside those of torch's.
"""

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from on_ranks import on_ranks
from oracle import assert_same, sample
from torch._subclasses.fake_tensor import FakeTensorMode

import fastcoll

pytestmark = beyond_gloo("torch.ops.fastcoll")

operators = torch.ops.fastcoll


def name() -> str:
    return dist.group.WORLD.group_name


def rows(rank: int, count: int, seed: int = 0) -> torch.Tensor:
    """Numbers of 64 bits, which sums keep exact."""
    return sample(rank, (count, 2), torch.float64, seed).round(decimals=0)


# Calls on `x`, which has 2 n rows on n ranks, and what each rank's gradient is when the gradients of the results of
# all ranks are `gs`, by `rank` and `n`.
GRADIENTS = {
    "all_reduce sum": (
        lambda x: operators.all_reduce(x, "sum", name()),
        lambda gs, rank, n: sum(gs),
    ),
    "all_reduce avg": (
        lambda x: operators.all_reduce(x, "AVG", name()),
        lambda gs, rank, n: sum(gs) / n,
    ),
    "all_gather": (
        lambda x: operators.all_gather(x, dist.get_world_size(), name()),
        lambda gs, rank, n: sum(gs).chunk(n)[rank],
    ),
    "reduce_scatter sum": (
        lambda x: operators.reduce_scatter(x, "sum", dist.get_world_size(), name()),
        lambda gs, rank, n: torch.cat(gs),
    ),
    "reduce_scatter avg": (
        lambda x: operators.reduce_scatter(x, "avg", dist.get_world_size(), name()),
        lambda gs, rank, n: torch.cat(gs) / n,
    ),
    "all_to_all": (
        lambda x: operators.all_to_all(x, [], [], name()),
        lambda gs, rank, n: torch.cat([g.chunk(n)[rank] for g in gs]),
    ),
    # Rank 0 sends all of its rows to rank 0, the others send all of theirs to rank 1.
    "all_to_all with splits": (
        lambda x: operators.all_to_all(x, *splits(x), name()),
        lambda gs, rank, n: gs[0] if rank == 0 else gs[1].chunk(n - 1)[rank - 1],
    ),
}


def splits(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    received = {0: [len(x)] + [0] * (n - 1), 1: [0] + [len(x)] * (n - 1)}
    sent = [0] * n
    sent[min(rank, 1)] = len(x)
    return received.get(rank, [0] * n), sent


@pytest.mark.parametrize("call", GRADIENTS)
@on_ranks(2, 4)
def test_gradient(call):
    function, expected = GRADIENTS[call]
    rank, n = dist.get_rank(), dist.get_world_size()
    lengths = [None] * n
    given = rows(rank, 2 * n).requires_grad_()
    result = function(given)
    with torch.no_grad():
        assert_same(result.detach(), function(given))
    dist.all_gather_object(lengths, len(result))
    gradients = [rows(r, lengths[r], seed=7) for r in range(n)]
    result.backward(gradients[rank])
    torch.testing.assert_close(given.grad, expected(gradients, rank, n), rtol=0, atol=0)


@on_ranks(2)
def test_gradient_of_a_gradient():
    rank = dist.get_rank()
    x = rows(rank, 4).requires_grad_()
    y = operators.all_reduce(x * x, "sum", name())
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)  # 2 ranks * 2 x
    assert_same(first.detach(), 4 * x.detach())
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_same(second, torch.full_like(x, 4.0))


@on_ranks(2)
def test_gradient_of_a_scalar():
    x = torch.tensor(3.0 + dist.get_rank(), requires_grad=True)
    gathered = operators.all_gather(x, dist.get_world_size(), name())
    assert gathered.tolist() == [3.0, 4.0]
    gathered.backward(torch.tensor([1.0, 10.0]))
    assert x.grad.item() == [2.0, 20.0][dist.get_rank()]
    assert x.grad.shape == ()


@pytest.mark.full
@on_ranks(2)
def test_torch_finds_no_fault_in_the_operators():
    """opcheck compares schemas, fake tensors and autograd with what the kernels do."""
    x = rows(dist.get_rank(), 4)
    uneven = [1, 3] if dist.get_rank() == 0 else [3, 1]
    reduced, whole, part = (
        x.clone(),
        torch.empty(8, 2, dtype=x.dtype),
        torch.empty(2, 2, dtype=x.dtype),
    )
    for call, arguments, options in [
        (operators.all_reduce, (x, "sum", name()), {}),
        (operators.all_reduce, (x.clone().requires_grad_(), "sum", name()), {}),
        (operators.all_reduce, (x.t(), "max", name()), {}),
        (operators.all_gather, (x, 2, name()), {}),
        (operators.all_gather, (x.clone().requires_grad_(), 2, name()), {}),
        (operators.reduce_scatter, (x.clone().requires_grad_(), "avg", 2, name()), {}),
        (operators.all_to_all, (x.clone().requires_grad_(), [], [], name()), {}),
        (operators.all_to_all, (x, uneven, uneven, name()), {}),
        (operators.all_reduce_, (reduced, "sum", name()), {}),
        (operators.all_gather_out, (x, name()), {"out": whole}),
        (operators.reduce_scatter_out, (x, "sum", name()), {"out": part}),
        (operators.all_to_all_out, (x, [], [], name()), {"out": x.clone()}),
    ]:
        torch.library.opcheck(call.default, arguments, options)


@on_ranks(2)
def test_ranks_may_call_in_different_ways():
    comm = fastcoll.communicator()
    for turn in range(6):
        x = torch.full((3,), 1.0 + dist.get_rank())
        way = (turn + dist.get_rank()) % 3
        if way == 0:
            x = operators.all_reduce(x, "sum", name())
        elif way == 1:
            dist.all_reduce(x)
        else:
            comm.all_reduce(x)
        assert x.tolist() == [3.0] * 3


@on_ranks(2)
def test_shapes_of_fake_tensors():
    with FakeTensorMode():
        x = torch.empty(6, 5, dtype=torch.bfloat16).t()
        for result, shape in [
            (operators.all_reduce(x, "sum", name()), (5, 6)),
            (operators.all_gather(x, dist.get_world_size(), name()), (10, 6)),
            (operators.reduce_scatter(x.t(), "sum", dist.get_world_size(), name()), (3, 5)),
            (operators.all_to_all(x, [4, 0], [2, 3], name()), (4, 6)),
            (operators.all_to_all(x.t(), [], [], name()), (6, 5)),
        ]:
            assert (tuple(result.shape), result.dtype) == (shape, torch.bfloat16)
            assert result.is_contiguous()
        with pytest.raises(ValueError, match="first dimension is a multiple of 2"):
            operators.reduce_scatter(x, "sum", dist.get_world_size(), name())


@on_ranks(2)
def test_autograd_learns_of_tensors_that_are_written():
    weight = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
    x = rows(dist.get_rank(), 4)
    y = weight * x
    operators.all_reduce_(x, "sum", name())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    for call in [
        lambda: operators.all_reduce_(weight, "sum", name()),
        lambda: operators.all_gather_out(weight, name(), out=torch.empty(8, 2)),
    ]:
        with pytest.raises(ValueError, match=r"requires no gradient.*returns a new tensor"):
            call()
    with torch.no_grad():
        operators.all_reduce_(weight, "sum", name())
    assert weight[0, 0] == 2
    with torch.inference_mode():
        operators.all_reduce_(inference := torch.ones(3), "sum", name())
        before = x._version
        operators.all_reduce_(x, "sum", name())
    assert inference.tolist() == [2.0] * 3
    assert x._version == before + 1


REFUSED = {
    "group": (lambda x: operators.all_reduce(x, "sum", "x"), "name of a process group .*got 'x'"),
    "operation": (
        lambda x: operators.all_reduce(x, "median", name()),
        "reduce_op of sum, .*got 'median'",
    ),
    "gradient": (
        lambda x: operators.all_reduce(x.requires_grad_(), "max", name()),
        r"sum or avg for a tensor that requires a gradient, got 'max'. Call it under torch.no_grad",
    ),
    "rows": (
        lambda x: operators.reduce_scatter(x[:3], "sum", dist.get_world_size(), name()),
        r"multiple of 2, got \[3, 2",
    ),
    "rows to send": (lambda x: operators.all_to_all(x[:3], [], [], name()), "multiple of 2"),
    "splits": (lambda x: operators.all_to_all(x, [4, 0], [4, 1], name()), "add up to 4 rows"),
    "negative": (lambda x: operators.all_to_all(x, [4, -4], [4, 0], name()), "add up to 0 rows"),
    "scalar": (lambda x: operators.all_to_all(x.sum(), [], [], name()), "at least one dimension"),
    "length": (
        lambda x: operators.all_gather_out(x, name(), out=torch.empty(3, dtype=x.dtype)),
        "2 x 8 elements",
    ),
}


@pytest.mark.parametrize("call", REFUSED)
@on_ranks(2)
def test_refusal(call):
    function, text = REFUSED[call]
    with pytest.raises(ValueError, match=text):
        function(rows(dist.get_rank(), 4))
    assert operators.all_reduce(torch.ones(1), "sum", name()).item() == 2  # still in step


@on_ranks(2)
def test_forward_mode_is_refused():
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            operators.all_reduce(x, "sum", name())


@on_ranks(2)
def test_coalescing_is_refused():
    """The call would return before its result exists."""
    with (
        dist._coalescing_manager(device=torch.device("cpu")),
        pytest.raises(ValueError, match="expected a call outside of a coalescing manager"),
    ):
        operators.all_reduce(torch.ones(2), "sum", name())
    assert operators.all_reduce(torch.ones(1), "sum", name()).item() == 2


@on_ranks(2)
def test_group_of_another_backend_is_refused():
    group = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="whose tensors on cpu fastcoll serves, got group"):
        operators.all_reduce(torch.ones(1), "sum", group.group_name)
