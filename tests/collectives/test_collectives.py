"""Each collective: every type and operation, every root, every split, long messages, groups, in place, and refusals."""

from dataclasses import replace
from random import Random

import pytest
import torch
import torch.distributed as dist
from backend import IS_GLOO, all_gather_single, beyond_gloo, name_of, reduce_scatter_single, since
from collective_cases import (
    MOVED,
    MOVING,
    REDUCED,
    REDUCING,
    STACKING,
    Case,
    collectives,
    operations,
    run_all,
)
from collective_doors import OPERATORS, ROOTED
from on_ranks import on_ranks
from oracle import GLOO_MOVES, GLOO_REDUCES, assert_reduced, assert_same, sample

import fastcoll

SHAPES = [(1,), (7,), (3, 5), (0,), (4097,), (65537,), ()]
SHORT = [shape for shape in SHAPES if shape != (65537,)]
ALL = [*REDUCING, *MOVING]
UNEVEN = ((0, 1, 5), (3, 0, 2), (4, 4, 0))
ONE_SIDED = ((0, 0, 7), (0, 0, 0), (0, 0, 0))
LARGE = ((1, 70001, 3), (100003, 2, 5), (7, 11, 50021))


def each_shape(collective, op="SUM", dtype=torch.float, shapes=SHAPES, **options):
    """Cases for each shape that the collective takes: by torch, in turns asynchronous, and by fastcoll's own calls."""
    shapes = [s for s in shapes if s or options.get("stacked") or not collective.endswith("single")]
    for seed, shape in enumerate(shapes):
        later = seed % 2 == 1
        case = Case(collective, op, dtype, shape, async_op=later, seed=seed, **options)
        yield case
        if not IS_GLOO:
            yield replace(case, door="plan" if later else "direct", async_op=False)
        if not IS_GLOO and collective in OPERATORS and op != "PREMUL_SUM":
            yield replace(case, door="operator", async_op=False)


@pytest.mark.parametrize(
    ("collective", "dtype"), collectives([*MOVING, "gather_single"], MOVED, GLOO_MOVES), ids=name_of
)
def test_type(world, collective, dtype):
    splits = UNEVEN if collective == "all_to_all_single" else ()
    world(3).run(run_all, list(each_shape(collective, dtype=dtype, root=2, splits=splits)))


@pytest.mark.parametrize(
    ("collective", "dtype"), collectives(REDUCING[1:], REDUCED, GLOO_REDUCES), ids=name_of
)
def test_operation_and_type(world, collective, dtype):
    """Of each type one operation takes the long messages, which need most of the time."""
    for number, op in enumerate(operations(collective, dtype)):
        shapes = SHORT if number else SHAPES
        world(3).run(run_all, list(each_shape(collective, op, dtype, shapes, root=2)))


# torch refuses messages to oneself
@pytest.mark.parametrize(
    ("collective", "size"), [(c, n) for c in ALL for n in (1, 2, 4, 5) if (c, n) != ("ring", 1)]
)
def test_size_and_root(world, collective, size):
    for root in range(size) if collective in ROOTED else [0]:
        world(size).run(run_all, list(each_shape(collective, root=root)))


@pytest.mark.parametrize("collective", ALL)
def test_large(world, collective):
    """Longer than `TuningTable.streamingBytes`."""
    dtype = torch.float if collective == "all_reduce" else torch.int64
    count = 2**24 // dtype.itemsize + 1
    case = Case(collective, dtype=dtype, shape=(count,), root=1, async_op=True)
    world(2).run(run_all, [case])


@pytest.mark.parametrize("collective", ALL)
def test_group_whose_ranks_have_other_numbers(world, collective):
    world(4).run(run_all, list(each_shape(collective, root=1, members=(1, 2, 3))))


@beyond_gloo("refuses the stacked form")
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("collective", STACKING)
def test_stacked(world, collective, size):
    world(size).run(run_all, list(each_shape(collective, stacked=True)))


@pytest.mark.parametrize("splits", [UNEVEN, ONE_SIDED, LARGE], ids=lambda s: str(s[0]))
@pytest.mark.parametrize(
    "collective",
    ["all_to_all_single", pytest.param("all_to_all", marks=beyond_gloo("refuses unequal sizes"))],
)
def test_splits(world, collective, splits):
    shape = (3,) if collective == "all_to_all" else (1, 3)
    case = Case(collective, shape=shape, splits=splits)
    cases = [case, replace(case, async_op=True)]
    if not IS_GLOO:
        doors = ("direct", "plan", *["operator"] * (collective in OPERATORS))
        cases += [replace(case, door=door) for door in doors]
    world(3).run(run_all, cases)


@beyond_gloo("has no tensors in shared memory")
@pytest.mark.parametrize("seed", range(3))
@on_ranks(2, 3, 5)
def test_longest_messages_alike_and_unlike(seed):
    """A rank writes its first segment before it knows whether the others cut their messages as it does."""
    mine, size = dist.get_rank(), dist.get_world_size()
    random = Random(seed)
    for turn in range(30):
        most = random.choice([0, 100, 3000, 40_000, 300_000])
        splits = [
            [random.choice([most, most, most // 2, 0]) for _ in range(size)] for _ in range(size)
        ]
        if turn % 3 == 0:  # all ranks have the same longest message
            splits = [[most] * size for _ in range(size)]
        parts = [torch.arange(n) + 1000 * mine + to + turn for to, n in enumerate(splits[mine])]
        given = torch.cat(parts)
        if random.random() < 0.3 and mine != random.randrange(size):
            shared = fastcoll.empty_shared(given.numel(), dtype=given.dtype)
            given = shared.copy_(given)
        incoming = [row[mine] for row in splits]
        output = given.new_full((sum(incoming),), -1)
        dist.all_to_all_single(output, given, incoming, splits[mine])
        for source, part in enumerate(output.split(incoming)):
            assert torch.equal(part, torch.arange(part.numel()) + 1000 * source + mine + turn)


@beyond_gloo("refuses unequal sizes")
@pytest.mark.parametrize("sizes", [[(3,), (5,), (1,)], [(2, 2), (0,), (70001,)]], ids=str)
@on_ranks(3)
def test_reduce_scatter_of_unequal_sizes(sizes):
    mine, ranks = dist.get_rank(), range(dist.get_world_size())
    inputs = [
        [sample(10 * r + d, shape, torch.float) for d, shape in enumerate(sizes)] for r in ranks
    ]
    output = torch.empty(sizes[mine])
    dist.reduce_scatter(output, inputs[mine])
    assert_reduced(output, [row[mine] for row in inputs], "SUM")


@beyond_gloo("refuses other shapes")
@on_ranks(3)
def test_all_gather_into_another_shape():
    """Any shape with the right number of elements is an output."""
    inputs = [sample(r, (2, 6), torch.float) for r in range(dist.get_world_size())]
    output = torch.empty(dist.get_world_size() * 12)
    all_gather_single(output, inputs[dist.get_rank()])
    assert_same(output, torch.cat(inputs).reshape(-1))


@pytest.mark.parametrize(
    "step", [0, *(pytest.param(step, marks=beyond_gloo("overwrites inputs")) for step in (1, 2))]
)
@pytest.mark.parametrize("length", [5, 300_000])
@on_ranks(3)
def test_in_place(length, step):
    """What a rank gives is a part of what it gets, or the other way round; in lists, also another part than its own."""
    mine, ranks = dist.get_rank(), range(dist.get_world_size())
    inputs = [[sample(10 * r + d, (length,), torch.float) for d in ranks] for r in ranks]
    place = (mine + step) % len(ranks)

    parts = list(torch.stack(inputs[mine]).unbind())
    dist.reduce_scatter(parts[place], parts)
    assert_reduced(parts[place], [row[mine] for row in inputs], "SUM")

    parts = list(torch.zeros(len(ranks), length).unbind())
    dist.all_gather(parts, parts[place].copy_(inputs[mine][0]))
    for part, row in zip(parts, inputs, strict=True):
        assert_same(part, row[0])

    given = torch.cat(inputs[mine])
    reduce_scatter_single(given[length * mine :][:length], given)
    assert_reduced(given[length * mine :][:length], [row[mine] for row in inputs], "SUM")

    output = torch.zeros(len(ranks), length)
    output[mine] = inputs[mine][0]
    all_gather_single(output.view(-1), output[mine])
    assert_same(output, torch.stack([row[0] for row in inputs]))


REFUSED = {
    "all_gather_single": lambda: all_gather_single(torch.empty(9), torch.ones(4)),
    "dtype of all_gather_single": lambda: all_gather_single(
        torch.empty(8, dtype=torch.double), torch.ones(4)
    ),
    "all_gather": lambda: dist.all_gather([torch.empty(4)] * 3, torch.ones(4)),
    "uneven all_gather": lambda: dist.all_gather(
        [torch.empty(4 if rank == dist.get_rank() else 3) for rank in range(2)], torch.ones(4)
    ),
    "reduce_scatter_single": lambda: reduce_scatter_single(torch.empty(3), torch.ones(7)),
    "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(3), [torch.ones(3)] * 3),
    "all_to_all_single": lambda: dist.all_to_all_single(
        torch.empty(4), torch.ones(4), [2, 2], [2, 3]
    ),
    "all_to_all_single without splits": lambda: dist.all_to_all_single(
        torch.empty(5), torch.ones(5)
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[beyond_gloo("reads past the end")] if "all_to_all" in n else [])
        for n in REFUSED
    ],
)
@on_ranks(2)
def test_wrong_sizes_are_refused_before_anything_is_sent(name):
    remedy = "Pad the tensors" if name == "uneven all_gather" and not IS_GLOO else ""
    with pytest.raises((ValueError, TypeError, RuntimeError), match=remedy):
        REFUSED[name]()
    dist.barrier()


@since(14, "gather_single")
@beyond_gloo("it has no gather_single")
@on_ranks(3)
def test_gather_single_of_wrong_size():
    output = torch.empty(7) if dist.get_rank() == 0 else None
    if dist.get_rank() == 0:
        expected = "expected an output of 3 x 2 elements on the root, got 7"
        with pytest.raises(ValueError, match=expected):
            dist.gather_single(torch.ones(2), output)
        output = torch.empty(6)
    dist.gather_single(torch.full((2,), float(dist.get_rank())), output)
    if output is not None:
        assert_same(output, torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0]))
