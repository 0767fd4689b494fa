"""torch.ops.fastcoll: fake tensors, refusals. test_collectives.py compares all results.

Compiled graphs are in test_compile.py; faults of the calls in tests/faults, beside those of torch's.
"""

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from on_ranks import on_ranks
from oracle import sample
from torch._subclasses.fake_tensor import FakeTensorMode

import fastcoll

pytestmark = [beyond_gloo("torch.ops.fastcoll"), *on_ranks(2)]

operators = torch.ops.fastcoll


def name() -> str:
    return dist.group.WORLD.group_name


def rows(rank: int, count: int) -> torch.Tensor:
    """Numbers of 64 bits, which sums keep exact."""
    return sample(rank, (count, 2), torch.float64).round(decimals=0)


def test_a_tensor_that_requires_a_gradient_is_refused():
    weight = torch.ones(4, 2, requires_grad=True)
    calls = [
        lambda x: operators.all_reduce(x, "sum", name()),
        lambda x: operators.all_gather(x, 2, name()),
        lambda x: operators.reduce_scatter(x, "AVG", 2, name()),
        lambda x: operators.all_to_all(x, [], [], name()),
        lambda x: operators.all_gather_out(torch.ones(2, 2), name(), out=x),
        lambda x: operators.reduce_scatter_out(x, "sum", name(), out=torch.empty(2, 2)),
        lambda x: operators.all_to_all_out(x, [], [], name(), out=torch.empty(4, 2)),
        lambda x: operators.all_reduce_(x, "sum", name()),
    ]
    text = r"requires no gradient, got one that does\. To train, give fastcoll\.compile"
    for call in calls:
        with pytest.raises(ValueError, match=text):
            call(weight)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(torch.ones(4, 2), torch.ones(4, 2))
            with pytest.raises(ValueError, match=text):
                call(dual)
    with torch.no_grad():
        for call in calls:
            call(weight)
    assert weight[0, 0] == 2


def test_a_scalar_is_gathered_to_a_row():
    assert operators.all_gather(torch.tensor(dist.get_rank()), 2, name()).tolist() == [0, 1]


@pytest.mark.full
def test_torch_finds_no_fault_in_the_operators():
    """opcheck compares schemas and fake tensors with what the kernels do."""
    x = rows(dist.get_rank(), 4)
    uneven = [1, 3] if dist.get_rank() == 0 else [3, 1]
    reduced, whole, part = (
        x.clone(),
        torch.empty(8, 2, dtype=x.dtype),
        torch.empty(2, 2, dtype=x.dtype),
    )
    for call, arguments, options in [
        (operators.all_reduce, (x, "sum", name()), {}),
        (operators.all_reduce, (x.t(), "max", name()), {}),
        (operators.all_gather, (x, 2, name()), {}),
        (operators.reduce_scatter, (x, "avg", 2, name()), {}),
        (operators.all_to_all, (x, [], [], name()), {}),
        (operators.all_to_all, (x, uneven, uneven, name()), {}),
        (operators.all_reduce_, (reduced, "sum", name()), {}),
        (operators.all_gather_out, (x, name()), {"out": whole}),
        (operators.reduce_scatter_out, (x, "sum", name()), {"out": part}),
        (operators.all_to_all_out, (x, [], [], name()), {"out": x.clone()}),
    ]:
        torch.library.opcheck(call.default, arguments, options)


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


def test_autograd_learns_of_tensors_that_are_written():
    weight = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
    x = rows(dist.get_rank(), 4)
    y = weight * x
    operators.all_reduce_(x, "sum", name())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
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
def test_refusal(call):
    function, text = REFUSED[call]
    with pytest.raises(ValueError, match=text):
        function(rows(dist.get_rank(), 4))
    assert operators.all_reduce(torch.ones(1), "sum", name()).item() == 2  # still in step


def test_coalescing_is_refused():
    """The call would return before its result exists."""
    with (
        dist._coalescing_manager(device=torch.device("cpu")),
        pytest.raises(ValueError, match="expected a call outside of a coalescing manager"),
    ):
        operators.all_reduce(torch.ones(2), "sum", name())
    assert operators.all_reduce(torch.ones(1), "sum", name()).item() == 2


def test_group_of_another_backend_is_refused():
    group = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="whose tensors on cpu fastcoll serves, got group"):
        operators.all_reduce(torch.ones(1), "sum", group.group_name)
