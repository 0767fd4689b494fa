"""fastcoll.compile: which collectives of a graph become one call, which stay, and that they stay in order.

All tests but the first run Inductor, which calls a C++ compiler.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from backend import beyond_gloo
from on_ranks import on_ranks
from oracle import sample
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

import fastcoll
from fastcoll._compile import OneCallPass

pytestmark = [beyond_gloo("fastcoll.compile"), *on_ranks(2)]


def given(seed=0):
    return sample(dist.get_rank(), (6, 4), torch.float, seed)


def code_of(function, *arguments, fullgraph=True, **options):
    """Compiles a function, compares its result with the function's, and returns the code that Inductor wrote."""
    torch.compiler.reset()
    compiled = fastcoll.compile(function, fullgraph=fullgraph, **options)
    result, codes = run_and_get_code(compiled, *arguments)
    torch.testing.assert_close(result, function(*arguments))
    return "\n".join(codes)


def calls(code):
    """Returns the collectives of the code, in its order."""
    names = ("fastcoll", "_c10d_functional")
    lines = [line for line in code.splitlines() if "torch.ops." in line and "(" in line]
    return [
        part.removeprefix("torch.ops.").split("(")[0].removesuffix(".default")
        for line in lines
        for part in line.split()
        if part.startswith(tuple(f"torch.ops.{name}." for name in names)) and "(" in part
    ]


def every_call(x):
    y = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
    z = funcol.all_gather_tensor(y + 1, 0, dist.group.WORLD)
    w = funcol.reduce_scatter_tensor(z * 2, "avg", 0, dist.group.WORLD)
    n = dist.get_world_size()
    return (
        funcol.all_to_all_single(w + 1, [len(x) // n] * n, [len(x) // n] * n, dist.group.WORLD) + 1
    )


NAMES = [
    f"fastcoll.{name}" for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
]


def test_the_pass_replaces_each_collective_and_its_wait():
    graph = make_fx(every_call, tracing_mode="fake")(given()).graph
    (x,) = (node.meta["val"] for node in graph.nodes if node.op == "placeholder")
    with V.set_fake_mode(x.fake_mode):
        OneCallPass()(graph)
    graph.lint()
    targets = [str(node.target).removesuffix(".default") for node in graph.nodes]
    assert [target for target in targets if "aten" not in target] == ["x_1", *NAMES, "output"]
    rows = [len(node.meta["val"]) for node in graph.nodes if "fastcoll" in str(node.target)]
    assert rows == [6, 12, 6, 6]


def by_operators(x):
    name = dist.group.WORLD.group_name
    y = torch.ops.fastcoll.all_reduce(x * 2, "sum", name)
    z = y + 1
    torch.ops.fastcoll.all_reduce_(z, "max", name)
    return torch.ops.fastcoll.all_gather(z, 2, name).relu()


def by_operators_that_write(x):
    name, operators = dist.group.WORLD.group_name, torch.ops.fastcoll
    whole, part, moved = x.new_empty(12, 4), x.new_empty(3, 4), torch.empty_like(x)
    operators.all_gather_out(x * 2, name, out=whole)
    operators.reduce_scatter_out(whole[:6], "sum", name, out=part)
    operators.all_to_all_out(x + 1, [], [], name, out=moved)
    return whole.relu(), part + 1, moved * 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("function", "names"),
    [
        (every_call, NAMES),
        (
            by_operators,
            [f"fastcoll.{name}" for name in ("all_reduce", "all_reduce_", "all_gather")],
        ),
        (by_operators_that_write, [f"{name}_out" for name in NAMES[1:]]),
    ],
    ids=["functional", "operators", "operators that write"],
)
def test_each_call_is_one_in_the_code(function, names):
    assert calls(code_of(function, given())) == names


@pytest.mark.full
def test_in_training_forward_and_backward():
    def loss(x):
        whole = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        return (
            funcol.reduce_scatter_tensor_autograd(whole * whole, "sum", 0, dist.group.WORLD)
        ).sum()

    torch.compiler.reset()
    x, y = given().requires_grad_(), given().requires_grad_()
    loss(y).backward()
    compiled = fastcoll.compile(loss, fullgraph=True)
    _, codes = run_and_get_code(lambda: compiled(x).backward())
    assert calls("\n".join(codes)) == ["fastcoll.all_gather", "fastcoll.reduce_scatter"] * 2
    torch.testing.assert_close(x.grad, y.grad)


def apart(x):
    """One collective that the graph computes beside, and one that it awaits at once."""
    functional = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name
    first = functional.all_reduce(x * 2, "sum", name)
    beside = torch.mm(x, x.t())
    first = functional.wait_tensor(first)
    second = functional.wait_tensor(functional.all_reduce(first + 1, "max", name))
    return second @ beside


@pytest.mark.full
def test_a_collective_beside_a_computation_stays():
    given = torch.rand(6, 6)
    assert sorted(calls(code_of(apart, given))) == [
        "_c10d_functional.all_reduce_",
        "_c10d_functional.wait_tensor",
        "fastcoll.all_reduce",
    ]
    # This pass of Inductor moves collectives to their waits.
    options = {"reorder-for-locality": True}
    assert calls(code_of(apart, given, options=options)) == ["fastcoll.all_reduce"] * 2


def independent(x):
    first = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
    return (first + 1) @ torch.mm(x, x)


@pytest.mark.full
def test_what_inductor_overlaps_stays():
    x = torch.rand(6, 6)
    assert calls(code_of(independent, x)) == ["fastcoll.all_reduce"]
    with config.patch(reorder_for_compute_comm_overlap=True):
        assert "_c10d_functional.wait_tensor" in calls(code_of(independent, x))
        assert calls(code_of(every_call, given())) == NAMES


@pytest.mark.full
def test_groups_of_other_backends_stay():
    group = dist.new_group(backend="gloo")

    def function(x):
        return funcol.all_reduce(x * 2, "sum", group) + funcol.all_reduce(
            x, "sum", dist.group.WORLD
        )

    found = calls(code_of(function, given()))
    assert "fastcoll.all_reduce" in found
    assert "_c10d_functional.all_reduce_" in found


def in_turn(x, y):
    """Two collectives that do not need each other's results, and matrices that need memory."""
    name = dist.group.WORLD.group_name
    first = torch.ops.fastcoll.all_reduce(y.sum(0)[:4].contiguous(), "sum", name).sum()
    a = y * first
    second = torch.ops.fastcoll.all_reduce(x.sum(0)[:4].contiguous(), "sum", name).sum()
    b = x * second
    c, d = (torch.mm(matrix, matrix.t()).sum(1, keepdim=True) for matrix in (y, b))
    return first + a.sum() + second + b.sum() + c.sum() + d.sum()


@pytest.mark.full
def test_collectives_stay_in_order_on_ranks_with_other_sizes():
    """Inductor orders nodes by the memory that they need, which differs here from rank to rank."""
    rank = dist.get_rank()
    x = torch.rand(4 if rank else 700, 8, dtype=torch.float64)
    y = torch.rand(700 if rank else 4, 8, dtype=torch.float64)
    for compiled in (torch.compile, fastcoll.compile):
        torch.compiler.reset()
        torch.testing.assert_close(compiled(in_turn)(x, y), in_turn(x, y))


@pytest.mark.full
def test_options_of_the_user_are_kept():
    seen = []
    options = {"post_grad_custom_post_pass": lambda graph: seen.append(graph)}
    assert calls(code_of(every_call, given(), options=options, mode="reduce-overhead"))
    assert seen
    with pytest.raises(ValueError, match="expected backend \"inductor\", got 'eager'"):
        fastcoll.compile(every_call, backend="eager")

    @fastcoll.compile(fullgraph=True)
    def decorated(x):
        return every_call(x)

    torch.testing.assert_close(decorated(given()), every_call(given()))


@pytest.mark.full
def test_shapes_that_vary():
    compiled = fastcoll.compile(every_call, fullgraph=True, dynamic=True)
    torch.compiler.reset()
    for length in (6, 8, 10):
        x = sample(dist.get_rank(), (length, 4), torch.float)
        result, codes = run_and_get_code(compiled, x)
        torch.testing.assert_close(result, every_call(x))
        assert not codes or calls(codes[0]) == NAMES


@pytest.mark.full
def test_a_call_stays_on_a_rank_that_does_not_use_its_result():
    name, rank = dist.group.WORLD.group_name, dist.get_rank()

    def function(x):
        total = torch.ops.fastcoll.all_reduce(x, "sum", name)
        scratch = x + 1
        torch.ops.fastcoll.all_reduce_(scratch, "sum", name)
        last = torch.ops.fastcoll.all_reduce(x * 3, "sum", name)
        return last + (total + scratch if rank == 0 else x)

    for compiler in (partial(torch.compile, backend="aot_eager"), fastcoll.compile):
        torch.compiler.reset()
        torch.testing.assert_close(compiler(function)(given()), function(given()))
    operator = torch.ops.fastcoll.all_reduce(torch.ones(1), "sum", name)
    assert operator.item() == 2  # still in step


@pytest.mark.full
def test_a_rank_that_is_not_compiled_calls_in_the_same_order():
    name = dist.group.WORLD.group_name

    def function(x, y):
        a = torch.ops.fastcoll.all_reduce(x, "sum", name)
        b = torch.ops.fastcoll.all_reduce(y, "sum", name)
        c = b * 2
        return c + a * 3

    x, y = given(1), given(2)
    torch.compiler.reset()
    compiled = fastcoll.compile(function, fullgraph=True)
    with torch.no_grad():
        results = [(function if dist.get_rank() else compiled)(x, y), function(x, y)]
    torch.testing.assert_close(*results)


@pytest.mark.full
def test_layers_compiled_one_by_one_share_their_code():
    layers = [torch.nn.Linear(4, 4) for _ in range(12)]
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()

    def step(layer, x):
        return funcol.all_reduce(layer(x), "sum", dist.group.WORLD)

    compiled = [fastcoll.compile(step, fullgraph=True, dynamic=False) for _ in layers]
    x = given()
    with torch.no_grad():
        for layer, call in zip(layers, compiled, strict=True):
            torch.testing.assert_close(call(layer, x), step(layer, x) + 0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.full
def test_a_graph_has_no_gradient_of_an_operator():
    def loss(x):
        return torch.ops.fastcoll.all_reduce(x.sin(), "sum", dist.group.WORLD.group_name).sum()

    for compiler in (partial(torch.compile, backend="aot_eager"), fastcoll.compile):
        torch.compiler.reset()
        with pytest.raises(Exception, match="requires no gradient, got one that does"):
            compiler(loss, fullgraph=True)(given().requires_grad_())
