"""Groups on several hosts, pretended by FASTCOLL_HOST_ID: the same calls give the same bits as on one."""

import itertools
import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from backend import backend_of, beyond_gloo, reduce_scatter_single
from collective_cases import MOVED, MOVING, REDUCED, REDUCING, Case, Runner, operations, run_all
from on_ranks import on_ranks
from oracle import assert_same, reduced, sample
from suite_rules import until
from world import here, init_group

import fastcoll
import fastcoll.info
from fastcoll._load import C

pytestmark = beyond_gloo("fastcoll's own hosts")

# The host of each rank: all on one, one aside, in halves, in turns, of different sizes.
PLACEMENTS = ["000", "001", "0011", "0101", "00112", "011000", "012012", "001122", "00001111"]
IN_SHORT = {"000", "001", "0101", "012012", "gloo"}
COUNT = itertools.count()
"""Of the groups that this process has started."""


def assert_reduced_lists(tensors, given, op="SUM"):
    """Assert the bits of a list of tensors that were reduced with those of all ranks, by rank."""
    for i, tensor in enumerate(tensors):
        assert_same(tensor, reduced([of_rank[i] for of_rank in given], op))


def reductions():
    """Every dtype with every op it has, small and past one frame."""
    mine, size = here().rank, here().size
    run_all(
        Case("all_reduce", op, dtype, (count,), exact=True)
        for dtype in REDUCED
        for op in operations("all_reduce", dtype)
        for count in ((0, 5, 4001) if op == "SUM" else (5, 4001))
    )
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for wire in (None, torch.bfloat16, torch.float16):
        for counts in ((5,), (4001, 0, 100_003)):
            given = [[sample(r, (count,), torch.float) for count in counts] for r in range(size)]
            tensors = [tensor.clone() for tensor in given[mine]]
            squares = torch.zeros(1, dtype=torch.float64)
            backend.all_reduce_fused(tensors, dist.ReduceOp.AVG, wire, squares)
            if wire is None:  # a wire rounds the sum of each host: see `wires`
                assert_reduced_lists(tensors, given, "AVG")
            # The share of a rank is its transport's affair; their sum is not, but for the order of its additions.
            dist.all_reduce(squares)
            total = sum(tensor.double().square().sum() for tensor in tensors)
            torch.testing.assert_close(squares, total.reshape(1), rtol=1e-12, atol=0)


def movements():
    """Every collective."""
    mine, size = here().rank, here().size
    # Row r of the table says what rank r sends to each.
    rows = tuple(tuple((i * j + i + 3) % 7 for j in range(size)) for i in range(size))
    run_all(
        Case(collective, dtype=dtype, shape=(count,), root=2, splits=rows if count == 3 else ())
        for collective in MOVING
        for dtype in MOVED
        for count in (3, 3001)
    )
    for dtype in [torch.float32, torch.bfloat16, torch.int16]:
        run_all(
            Case(collective, dtype=dtype, shape=(1001,), root=1, exact=True)
            for collective in REDUCING
        )
        given = [[sample(r + i, (10 + i,), dtype) for i in range(4)] for r in range(size)]
        tensors = [tensor.clone() for tensor in given[mine]]
        dist.all_reduce_coalesced(tensors)
        assert_reduced_lists(tensors, given)
    dense = torch.zeros(size, size)
    for r in range(size):
        dense[r, : r + 1] = r + 1.0  # more on each rank; exact in any order
    sparse = dense[mine].to_sparse()
    dist.all_reduce(sparse)
    assert_same(sparse.to_dense(), dense.sum(0))
    odd = Case("all_reduce", shape=(20, 15), output_layout="transposed", exact=True)
    run_all([odd, Case("all_reduce", shape=(9,), members=(0, 2), exact=True)])
    given = [[sample(r, (50,), torch.float32)] * 9 for r in range(size)]
    tensors = [tensor.clone() for tensor in given[mine]]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    assert_reduced_lists(tensors, given)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": mine, "text": "x" * mine})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]
    dist.barrier()


def messages():
    mine = here().rank
    run_all(Case("ring", dtype=dtype, shape=(70_001,)) for dtype in MOVED)
    if mine == 0:
        sources = set()
        for _ in range(2):
            into = torch.empty(6, dtype=torch.int16)
            source = dist.recv(into, tag=7)
            assert into.tolist() == [source] * 6
            sources.add(source)
        assert sources == {1, 2}
    else:
        dist.send(torch.full((6,), mine, dtype=torch.int16), 0, tag=7)
    dist.barrier()


def on_hosts(placement, function):
    if placement == "gloo":
        os.environ["FASTCOLL_SHARED_MEMORY"], expected = "off", "gloo"
    else:
        os.environ["FASTCOLL_HOST_ID"] = f"host {placement[here().rank]}"
        expected = "shm+gloo" if len(set(placement)) > 1 else "shm"
    init_group(f"group{next(COUNT)}", 20.0)
    function()
    assert backend_of().transport() == expected
    dist.destroy_process_group()


CASES = [
    *[(function, placement) for function in (reductions, movements) for placement in PLACEMENTS],
    *[(messages, "001"), (messages, "010")],
    *[(function, "gloo") for function in (reductions, movements, messages)],
]


@pytest.mark.parametrize(
    "function, placement",
    [pytest.param(*case, marks=[] if case[1] in IN_SHORT else pytest.mark.full) for case in CASES],
)
def test_same_bits_as_on_one_host(world, placement, function):
    """On one host and on several they are those of the oracle."""
    size = 3 if placement == "gloo" else len(placement)
    world(size).run(on_hosts, placement, function, init=False)


def chunks(placement, group):
    """Messages of many segments, over two steps where there are more than two hosts."""
    size = here().size
    for dtype, op in [(torch.float, "SUM"), (torch.bfloat16, "AVG"), (torch.half, "PREMUL_SUM")]:
        for name, count in [
            *(("all_reduce", 33_000), ("all_reduce", 33_000), ("reduce", 33_000)),
            *(("all_reduce", 150_001), ("all_reduce", 150_001), ("reduce", 150_001)),
            ("reduce_scatter_single", 30_001),
        ]:
            Runner(Case(name, op, dtype, (count,), root=-1, exact=True), group).check()
    rooted = [*(("broadcast", root) for root in range(size)), ("scatter", 1), ("gather", 0)]
    for name, root in [*rooted, ("all_gather", 0), ("all_to_all", 0)]:
        Runner(Case(name, dtype=torch.int32, shape=(150_001,), root=root), group).check()


def large(placement, group):
    """Messages of many chunks, where a host's operand is its partial result, and those that lie in pieces."""
    rank, size = here().rank, here().size
    count = 3 * size * 200_001
    for name in ("all_reduce", "reduce"):
        for layout in ("contiguous", "step"):
            case = Case(name, shape=(count,), root=1, output_layout=layout, exact=True)
            Runner(case, group).check()
    given = [sample(r, (count,), torch.float) for r in range(size)]
    expected = reduced(given, "SUM")
    part = given[rank].chunk(size)[rank]  # in place
    reduce_scatter_single(part, given[rank], group=group)
    assert_same(part, expected.chunk(size)[rank])


def links(placement, _):
    """Whatever the link is thought to be: sizes around the parts and frames that messages are cut into."""
    size = here().size
    for link_bytes, ring_bytes in ((0, 16 << 10), (20 << 10, 2 << 20), (1 << 62, 2 << 20)):
        table = C.Tuning()
        table.link_bytes = link_bytes
        group = dist.new_group(pg_options=fastcoll.Options(tuning=table, ring_bytes=ring_bytes))
        for count in (0, 1, 15, 16, 17, 65, 300, 16_384, 16_385, 40_000):
            for case in (
                *(Case("broadcast", shape=(count,), root=root) for root in range(size)),
                Case("all_reduce", shape=(count,), exact=True),
                Case("all_reduce", dtype=torch.bfloat16, shape=(count,), exact=True),
                Case("reduce", shape=(count,), root=-1, exact=True),
                Case("reduce_scatter_single", shape=(count,), exact=True),
                Case("all_gather", shape=(count,)),
            ):
                Runner(case, group).check()
        dist.destroy_process_group(group)


def wires(placement, group):
    """An all_reduce rounds each host's sum to the wire; hosts are equal here, so that they are the tree's leaves."""
    rank, size = here().rank, here().size
    backend = group._get_backend(torch.device("cpu"))
    hosts = [[r for r in range(size) if placement[r] == host] for host in sorted(set(placement))]
    for wire in (torch.bfloat16, torch.half):
        for count in (100, 150_001):
            given = [sample(r, (count,), torch.float) for r in range(size)]
            narrow = [tensor.to(wire) for tensor in given]
            partial = [reduced([narrow[r] for r in ranks], "SUM") for ranks in hosts]
            expected = reduced(partial, "SUM").float()
            tensor = given[rank].clone()
            backend.all_reduce_fused([tensor], dist.ReduceOp.SUM, wire)
            assert_same(tensor, expected)
        given = [sample(r, (size * 3001,), torch.float) for r in range(size)]
        large = torch.full((100,), 60000.0)
        backend.all_reduce_fused([large], dist.ReduceOp.AVG, wire)
        assert_same(large, torch.full((100,), 60000.0).to(wire).float())  # no sum overflows float16
        part = torch.empty(3001)
        backend.reduce_scatter_fused(part, given[rank], dist.ReduceOp.SUM, wire)
        exact = reduced([tensor.to(wire).float() for tensor in given], "SUM")
        assert_same(part, exact.chunk(size)[rank])


def wires_in_fixed_order(placement, group):
    """With ``order="fixed"`` no host's sum is rounded, so the bits are those of one host."""
    rank, size = here().rank, here().size
    backend = group._get_backend(torch.device("cpu"))
    for wire, count, op in itertools.product(
        (torch.bfloat16, torch.half), (100, 150_001), ("SUM", "AVG")
    ):
        given = [sample(r, (count,), torch.float) for r in range(size)]
        tensor = given[rank].clone()
        backend.all_reduce_fused([tensor], getattr(dist.ReduceOp, op), wire)
        assert_same(tensor, reduced([each.to(wire) for each in given], op).float())


def averages_on_unequal_hosts(placement, group):
    """Every rank counts alike, however many are on its host; the values are exact in the wire's type."""
    rank, size = here().rank, here().size
    for wire in (torch.bfloat16, torch.half):
        for count in (100, 150_001):
            tensor = torch.full((count,), float(size * rank * rank))
            group._get_backend(tensor.device).all_reduce_fused([tensor], dist.ReduceOp.AVG, wire)
            assert_same(tensor, torch.full((count,), float(sum(r * r for r in range(size)))))


def reduces_by_parts(placement, group):
    """An uneven reduce_scatter, which is a reduce to each rank: all of one number, some of no concern to a host.

    A late rank in a call of several parts is no mismatch.
    """
    rank, size = here().rank, here().size
    for late in range(size):
        dist.barrier(group=group)
        if rank == late:
            time.sleep(1.5)
        given = [torch.full((4 + to,), float(rank + to)) for to in range(size)]
        part = torch.empty(4 + rank)
        dist.reduce_scatter(part, given, group=group)
        assert part.tolist() == [float(sum(range(size)) + size * rank)] * (4 + rank)


# Bytes around the least of a long message, which passes by the leaders, 32 KiB, and far from it.
SIZES = [0, 1, 300, 32 << 10, (32 << 10) + 1, 200_003]


def piece(sender, receiver, size):
    return torch.arange(size).add(sender * 31 + receiver * 7).to(torch.uint8)


def long_and_short(placement, group):
    """Long and short messages in one call, beside point-to-point messages of the same lengths between the same."""
    rank, size = here().rank, here().size
    other = size - 1 - rank
    for round_ in range(6):
        drawn = random.Random(round_)
        sizes = tuple(tuple(drawn.choice(SIZES) for _ in range(size)) for _ in range(size))
        given, got = piece(rank, other, sizes[rank][other]), piece(other, rank, sizes[other][rank])
        beside = torch.zeros_like(got)
        works = [dist.isend(given, other, group=group), dist.irecv(beside, other, group=group)]
        options = {"dtype": torch.uint8, "shape": (), "async_op": True, "seed": round_}
        runner = Runner(Case("all_to_all", splits=sizes, **options), group)
        for work in works:
            work.wait()
        runner.check()
        assert torch.equal(beside, got)


def long_with_a_root(placement, _):
    """The first one of a group may find the root late, or the others."""
    rank, size = here().rank, here().size
    for count in (SIZES[3], SIZES[4], SIZES[5]):
        for root in (0, size - 1):
            group = dist.new_group()
            if rank == root:
                time.sleep(0.2)
            for seed in range(3):
                for name in ("scatter", "gather"):
                    case = Case(name, dtype=torch.uint8, shape=(count,), root=root, seed=seed)
                    Runner(case, group).check()
            dist.destroy_process_group(group)


def placed(placement, function, options):
    """Call a function with a new group of these options."""
    os.environ["FASTCOLL_HOST_ID"] = placement[here().rank]
    group = dist.new_group(pg_options=fastcoll.Options(**options) if options else None)
    function(placement, group)
    dist.destroy_process_group(group)


def of(function, short, full=(), **options):
    """Return the cases of a function on the placements of either tier."""
    return [
        pytest.param(p, function, options, marks=[] if p in short else pytest.mark.full)
        for p in [*short, *full]
    ]


@pytest.mark.parametrize(
    "placement, function, options",
    [
        *of(chunks, ["0101"], ["0011", "0012", "012345"], ring_bytes=16 << 10),
        *of(chunks, ["0101"], ["0011", "0012", "012345"], ring_bytes=2 << 20),
        *of(large, ["01", "012", "0012"]),
        *of(links, ["0102"], ["0011", "012", "01234"]),
        *of(wires, ["0011"], ["012", "00001111", "00112233"]),
        *of(wires_in_fixed_order, ["00112"], ["0011", "0101", "012", "00001111"], order="fixed"),
        *of(long_and_short, ["0011", "0123"], ["0101", "0012"]),
        *of(long_with_a_root, ["0102"], ["0011", "0123"]),
        *of(averages_on_unequal_hosts, ["001"]),
        *of(reduces_by_parts, [], ["012"]),
    ],
)
def test_on_hosts(world, placement, function, options):
    world(len(placement)).run(placed, placement, function, options)


@on_ranks(2, fresh=True)
def test_it_says_where_ranks_are_and_why():
    os.environ["FASTCOLL_HOST_ID"] = f"rack {here().rank}"
    group = dist.new_group([0, 1])
    dist.barrier(group=group)

    def named():
        return [g for g in fastcoll.info.groups() if g["name"] == group.group_name]

    until(lambda: len(named()) == 1)  # a thread may still hold a group of that name that has ended
    (entry,) = named()
    assert entry["transport"] == "gloo"
    assert f"rank {1 - here().rank}" in entry["reason"] and "FASTCOLL_HOST_ID" in entry["reason"]
    os.environ["FASTCOLL_HOST_ID"] = "x" * 64
    with pytest.raises(ValueError, match="FASTCOLL_HOST_ID"):
        dist.new_group([0, 1])


@on_ranks(3, fresh=True)
def test_hosts_whose_restarts_are_counted_otherwise_meet():
    """torchrun counts each host's restarts, which differ where one restarts because another did."""
    os.environ |= {"FASTCOLL_HOST_ID": str(here().rank), "TORCHELASTIC_RUN_ID": "job"}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(here().rank)
    tensor = torch.tensor([float(here().rank)])
    dist.all_reduce(tensor, group=dist.new_group())
    assert tensor.item() == 3


@on_ranks(4, fresh=True)
def test_groups_inside_and_across():
    """A group inside a host shares memory, one across does not; both at once."""
    os.environ["FASTCOLL_HOST_ID"] = str(here().rank // 2)
    across = dist.new_group()
    inside = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][here().rank // 2]
    leaders = dist.new_group([0, 2])
    groups = [across, inside, *([leaders] if here().rank in (0, 2) else [])]
    for group in groups * 3:
        tensor = torch.tensor([float(here().rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(dist.get_process_group_ranks(group))
    assert (backend_of(across).transport(), backend_of(inside).transport()) == ("shm+gloo", "shm")
