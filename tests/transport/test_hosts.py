"""Groups on several hosts, pretended by FASTCOLL_HOST_ID: the same calls give the same bits as on one."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, reduce_scatter_single
from collective_cases import Case, Runner
from oracle import assert_same, reduced, sample
from test_gloo import messages, movements, over, reductions, training, used
from world import here

pytestmark = beyond_gloo("fastcoll's own hosts")

# The host of each rank: one aside, in halves, in turns, of different sizes.
PLACEMENTS = ["001", "0011", "0101", "00112", "011000", "012012", "001122", "00001111"]
IN_SHORT = {"001", "0101", "012012"}
CASES = [
    *[(function, placement) for function in (reductions, movements) for placement in PLACEMENTS],
    *[(messages, "001"), (messages, "010"), (training, "0011"), (training, "012012")],
]


def tiered(*cases):
    """Return the cases, of which those whose placement is not in IN_SHORT are full."""
    return [
        pytest.param(*case, marks=[] if IN_SHORT & set(case) else pytest.mark.full)
        for case in cases
    ]


def on_hosts(placement, function):
    os.environ["FASTCOLL_HOST_ID"] = f"host {placement[here().rank]}"
    return over("auto", function, "shm+gloo" if len(set(placement)) > 1 else "shm")


@pytest.mark.parametrize("function, placement", tiered(*CASES))
def test_same_bits_as_on_one_host(world, placement, function):
    size = len(placement)
    alone = world(size).run(on_hosts, "0" * size, function, init=False)
    for rank, found in enumerate(world(size).run(on_hosts, placement, function, init=False)):
        assert found.keys() == alone[rank].keys()
        differ = [name for name in found if found[name] != alone[rank][name]]
        # A wire rounds the sum of each host: see test_a_wire_narrows_what_hosts_send_each_other.
        differ = [name for name in differ if not name.startswith("all_reduce_fused torch.")]
        assert not differ, f"rank {rank}: {differ}"


def chunks(placement, ring_bytes):
    """Messages of many segments, over two steps where there are more than two hosts."""
    import fastcoll

    os.environ["FASTCOLL_HOST_ID"] = placement[here().rank]
    size = here().size
    group = dist.new_group(pg_options=fastcoll.Options(ring_bytes=ring_bytes))
    for dtype, op in [(torch.float, "SUM"), (torch.bfloat16, "AVG"), (torch.half, "PREMUL_SUM")]:
        for name, count in [
            *(("all_reduce", 33_000), ("all_reduce", 33_000), ("reduce", 33_000)),
            *(("all_reduce", 150_001), ("all_reduce", 150_001), ("reduce", 150_001)),
            ("reduce_scatter_single", 30_001),
        ]:
            Runner(Case(name, op, dtype, (count,), root=-1, exact=True), group).check()
    for name, roots in [
        ("broadcast", range(size)),
        ("all_gather", [0]),
        ("all_to_all", [0]),
        ("scatter", [1]),
        ("gather", [0]),
    ]:
        for root in roots:
            Runner(Case(name, dtype=torch.int32, shape=(150_001,), root=root), group).check()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("ring_bytes", [16 << 10, 2 << 20])
@pytest.mark.parametrize(
    "placement", tiered(*([placement] for placement in ["0011", "0101", "0012", "012345"]))
)
def test_many_chunks(world, placement, ring_bytes):
    world(len(placement)).run(chunks, placement, ring_bytes)


def large(placement):
    """Messages of many chunks, where a host's operand is its partial result, and those that lie in pieces."""
    os.environ["FASTCOLL_HOST_ID"] = placement[here().rank]
    rank, size = here().rank, here().size
    group = dist.new_group()
    count = 3 * size * 400_001
    given = [sample(r, (count,), torch.float) for r in range(size)]
    expected = reduced(given, "SUM")
    apart = torch.zeros(count // 3, 6)
    for tensor in (given[rank].clone(), apart[:, ::2]):
        tensor.copy_(given[rank].view_as(tensor))
        dist.all_reduce(tensor, group=group)
        assert_same(tensor.flatten(), expected)
        tensor.copy_(given[rank].view_as(tensor))
        dist.reduce(tensor, 1, group=group)
        if rank == 1:
            assert_same(tensor.flatten(), expected)
    part = given[rank].chunk(size)[rank]  # in place
    reduce_scatter_single(part, given[rank], group=group)
    assert_same(part, expected.chunk(size)[rank])
    dist.destroy_process_group(group)


@pytest.mark.parametrize("placement", ["01", "012", "0012"])
def test_long_messages(world, placement):
    world(len(placement)).run(large, placement)


def links(placement):
    """Whatever the link is thought to be: sizes around the parts and frames that messages are cut into."""
    import fastcoll
    from fastcoll._load import C

    os.environ["FASTCOLL_HOST_ID"] = placement[here().rank]
    size = here().size
    for link_bytes in (0, 20 << 10, 1 << 62):
        table = C.Tuning()
        table.link_bytes = link_bytes
        group = dist.new_group(pg_options=fastcoll.Options(tuning=table))
        for count in (0, 1, 15, 16, 17, 65, 300, 16_384, 16_385, 40_000):
            for case in (
                *(Case("broadcast", shape=(count,), root=root) for root in range(size)),
                Case("all_reduce", shape=(count,), exact=True),
                Case("all_reduce", dtype=torch.bfloat16, shape=(count,), exact=True),
                Case("reduce", shape=(count,), root=-1, exact=True),
            ):
                Runner(case, group).check()
        dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "placement",
    ["0102", *(pytest.param(p, marks=pytest.mark.full) for p in ["0011", "012", "01234"])],
)
def test_no_link_changes_a_bit(world, placement):
    world(len(placement)).run(links, placement)


def wires(placement):

    os.environ["FASTCOLL_HOST_ID"] = placement[here().rank]
    rank, size = here().rank, here().size
    group = dist.new_group()
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
    dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "placement",
    ["0011", *(pytest.param(p, marks=pytest.mark.full) for p in ["00001111", "00112233"])],
)
def test_a_wire_narrows_what_hosts_send_each_other(world, placement):
    """An all_reduce rounds each host's sum to it; hosts are equal here, so that they are the tree's leaves."""
    world(len(placement)).run(wires, placement)


def reduces_by_parts():
    """An uneven reduce_scatter, which is a reduce to each rank: all of one number, some of no concern to a host."""
    os.environ["FASTCOLL_HOST_ID"] = str(here().rank)
    rank, size = here().rank, here().size
    group = dist.new_group()
    for late in range(size):
        dist.barrier(group=group)
        if rank == late:
            time.sleep(1.5)
        given = [torch.full((4 + to,), float(rank + to)) for to in range(size)]
        part = torch.empty(4 + rank)
        dist.reduce_scatter(part, given, group=group)
        assert part.tolist() == [float(sum(range(size)) + size * rank)] * (4 + rank)
    dist.destroy_process_group(group)


@pytest.mark.full
def test_a_late_rank_in_a_call_of_several_parts_is_no_mismatch(world):
    world(3).run(reduces_by_parts, fresh=True)


def told():
    import fastcoll.info

    os.environ["FASTCOLL_HOST_ID"] = f"rack {here().rank}"
    group = dist.new_group([0, 1])
    dist.barrier(group=group)
    (entry,) = [g for g in fastcoll.info.groups() if g["name"] == group.group_name]
    dist.destroy_process_group(group)
    os.environ["FASTCOLL_HOST_ID"] = "x" * 64
    with pytest.raises(ValueError, match="FASTCOLL_HOST_ID"):
        dist.new_group([0, 1])
    return entry


def test_it_says_where_ranks_are_and_why(world):
    for rank, entry in enumerate(world(2).run(told, fresh=True)):
        assert entry["transport"] == "gloo"
        assert f"rank {1 - rank}" in entry["reason"] and "FASTCOLL_HOST_ID" in entry["reason"]


def restarted():
    """torchrun counts each host's restarts, which differ where one restarts because another did."""
    os.environ |= {"FASTCOLL_HOST_ID": str(here().rank), "TORCHELASTIC_RUN_ID": "job"}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(here().rank)
    group = dist.new_group()
    tensor = torch.tensor([float(here().rank)])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == 3
    dist.destroy_process_group(group)


def test_hosts_whose_restarts_are_counted_otherwise_meet(world):
    world(3).run(restarted, fresh=True)


def subgroups():
    """A group inside a host shares memory, one across does not; both at once."""
    os.environ["FASTCOLL_HOST_ID"] = str(here().rank // 2)
    across = dist.new_group()
    inside = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][here().rank // 2]
    leaders = dist.new_group([0, 2])
    for _ in range(3):
        for group, members in ((across, range(4)), (inside, dist.get_process_group_ranks(inside))):
            tensor = torch.tensor([float(here().rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(members)
    if here().rank in (0, 2):
        tensor = torch.tensor([float(here().rank)])
        dist.all_reduce(tensor, group=leaders)
        assert tensor.item() == 2
    cpu = torch.device("cpu")
    return across._get_backend(cpu).transport(), inside._get_backend(cpu).transport()


def test_groups_inside_and_across(world):
    for across, inside in world(4).run(subgroups, fresh=True):
        assert (across, inside) == ("shm+gloo", "shm")


def test_default_group_of_one_host_is_not_spanning(world):
    assert world(2).run(used, fresh=True) == ["shm", "shm"]
