"""FASTCOLL_TRANSPORT=gloo: the same calls give the same bits as over shared memory."""

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from collective_cases import MOVED, MOVING, REDUCED, REDUCING, Case, answers, operations
from oracle import bits, sample
from torch.nn.parallel import DistributedDataParallel
from world import here, init_group

pytestmark = beyond_gloo("fastcoll's own choice of a transport")

COUNT = itertools.count()
"""Of the groups that this process has started."""


def start(transport: str, timeout: float = 20.0) -> None:
    os.environ["FASTCOLL_TRANSPORT"] = transport
    init_group(f"{transport}{next(COUNT)}", timeout)


def used() -> str:
    dist.barrier()
    return dist.group.WORLD._get_backend(torch.device("cpu")).transport()


def reductions():
    """Every dtype with every op it has, small and past one frame."""
    mine = here().rank
    found = answers(
        Case("all_reduce", op, dtype, (count,))
        for dtype in REDUCED
        for op in operations("all_reduce", dtype)
        for count in ((0, 5, 4001) if op == "SUM" else (5, 4001))
    )
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for wire in (None, torch.bfloat16, torch.float16):
        for counts in ((5,), (4001, 0, 700_000)):
            tensors = [sample(mine, (count,), torch.float32) for count in counts]
            squares = torch.zeros(1, dtype=torch.float64)
            backend.all_reduce_fused(tensors, dist.ReduceOp.AVG, wire, squares)
            found[f"all_reduce_fused {wire} {counts}"] = b"".join(map(bits, tensors))
            # The share of a rank is its transport's affair; their sum is not, but for the order of its additions.
            dist.all_reduce(squares)
            total = sum(tensor.double().square().sum() for tensor in tensors)
            torch.testing.assert_close(squares, total.reshape(1), rtol=1e-12, atol=0)
    return found


def movements():
    """Every collective."""
    mine, size = here().rank, here().size
    # Row r of the table says what rank r sends to each.
    rows = tuple(tuple((i * j + i + 3) % 7 for j in range(size)) for i in range(size))
    found = answers(
        Case(collective, dtype=dtype, shape=(count,), root=2, splits=rows if count == 3 else ())
        for collective in MOVING
        for dtype in MOVED
        for count in (3, 3001)
    )
    for dtype in [torch.float32, torch.bfloat16, torch.int16]:
        found |= answers(
            Case(collective, dtype=dtype, shape=(1001,), root=1) for collective in REDUCING
        )
        tensors = [sample(mine + i, (10 + i,), dtype) for i in range(4)]
        dist.all_reduce_coalesced(tensors)
        found[f"all_reduce_coalesced {dtype}"] = b"".join(map(bits, tensors))
    entries = torch.arange(mine + 1).view(1, -1)  # more on each rank
    sparse = torch.sparse_coo_tensor(entries, sample(mine, (mine + 1,), torch.float32), (size,))
    dist.all_reduce(sparse)
    found["sparse"] = bits(sparse.to_dense())
    strided = sample(mine, (20, 15), torch.float32).t()
    dist.all_reduce(strided)
    found["strided"] = bits(strided)
    tensors = [sample(mine, (50,), torch.float32) for _ in range(9)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    found["async"] = b"".join(map(bits, tensors))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": mine, "text": "x" * mine})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]
    pair = dist.new_group([0, 2])
    if mine != 1:
        tensor = sample(mine, (9,), torch.float32)
        dist.all_reduce(tensor, group=pair)
        found["subgroup"] = bits(tensor)
    dist.barrier()
    return found


def messages():
    mine, size = here().rank, here().size
    after, before = (mine + 1) % size, (mine - 1) % size
    found = answers(Case("ring", dtype=dtype, shape=(70_001,)) for dtype in MOVED)
    out = [torch.full((4,), 10.0 * mine + tag) for tag in range(4)]
    works = [dist.isend(out[tag], after, tag=tag) for tag in range(4)]
    for tag in (2, 0, 3, 1):  # in another order than they were sent
        into = torch.empty(4)
        dist.recv(into, before, tag=tag)
        assert into.tolist() == [10.0 * before + tag] * 4
    for work in works:
        work.wait()
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
    ops = [
        dist.P2POp(dist.isend, torch.full((5,), float(mine)), after),
        dist.P2POp(dist.irecv, into := torch.empty(5), before),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert into.tolist() == [float(before)] * 5
    dist.barrier()
    return found


def training():
    torch.manual_seed(3)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = model(sample(here().rank + 10 * step, (8, 20), torch.float32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = {name: bits(p.detach()) for name, p in model.named_parameters()}
    return found | {"losses": repr(losses).encode()}


def over(transport, function, name=None):
    start(transport)
    found = function()
    assert used() == (name or transport)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("function", [reductions, movements, messages, training])
def test_same_bits_as_over_shared_memory(world, function):
    shared = world(3).run(over, "shm", function, init=False)
    for rank, found in enumerate(world(3).run(over, "gloo", function, init=False)):
        assert found.keys() == shared[rank].keys()
        differ = [name for name in found if found[name] != shared[rank][name]]
        assert not differ, f"rank {rank}: {differ}"


def other_shape(rank):
    dist.all_reduce(torch.ones(10 + rank))


def other_large_shape(rank):
    dist.all_reduce(torch.ones(100_000 + rank))


def other_dtype(rank):
    dist.all_reduce(torch.ones(10, dtype=[torch.float32, torch.int32][rank]))


def other_op(rank):
    dist.all_reduce(torch.ones(10), op=[dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank])


def other_root(rank):
    dist.broadcast(torch.ones(10), rank)
    dist.barrier()  # a root waits for nobody, and hears of it in its next call


def other_collective(rank):
    dist.barrier() if rank else dist.all_reduce(torch.ones(10))


def other_splits(rank):
    sizes = [[2, 3], [2, 2]][rank]  # rank 0 sends 3 to rank 1, which expects 2
    received = [2, 2]
    dist.all_to_all_single(torch.ones(4), torch.ones(sum(sizes)), received, sizes)


MISMATCHES = {
    other_shape: ("float32[10]", "float32[11]"),
    other_large_shape: ("float32[100000]", "float32[100001]"),
    other_dtype: ("float32[10]", "int32[10]"),
    other_op: ("SUM", "MAX"),
    other_root: ("root 0", "root 1"),
    other_collective: ("all_reduce(seq 2", "barrier(seq 2"),
    other_splits: ("8 bytes", "12"),
}


def mismatch(call):
    start("gloo")
    used()
    with pytest.raises(dist.DistBackendError) as caught:
        call(here().rank)
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize("call", MISMATCHES)
def test_mismatch_is_an_error_on_every_rank(world, call):
    one, other = MISMATCHES[call]
    for text in world(2).run(mismatch, call, init=False):
        assert "mismatch between collectives on ranks" in text, text
        assert one in text and other in text, text
        assert "rank 0" in text and "rank 1" in text
