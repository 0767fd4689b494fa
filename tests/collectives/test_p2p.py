"""send, recv, isend, irecv, batch_isend_irecv."""

import time

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from oracle import assert_same, sample
from suite_rules import bound
from words import await_word, say

SHAPES = [(1,), (3, 5), (4097,), (0,), ()]


def around_the_ring(shapes):
    mine, size = dist.get_rank(), dist.get_world_size()
    before, after = (mine - 1) % size, (mine + 1) % size
    for seed, shape in enumerate(shapes):
        given, output = sample(mine, shape, torch.float, seed), torch.empty(shape)
        if mine % 2 == 0:
            dist.send(given, after)
            assert dist.recv(output, before) == before
        else:
            assert dist.recv(output, before) == before
            dist.send(given, after)
        assert_same(output, sample(before, shape, torch.float, seed))
        assert_same(given, sample(mine, shape, torch.float, seed))


def many_both_ways(count, elements):
    """Every rank sends to and receives from every other, all at once."""
    mine, size = dist.get_rank(), dist.get_world_size()
    others = [r for r in range(size) if r != mine]
    works, expected = [], []
    for number in range(count):
        given = sample(mine, (elements,), torch.float, number)
        works += [dist.isend(given, other) for other in others]
    for number in range(count):
        for other in others:
            output = torch.empty(elements)
            works.append(dist.irecv(output, other))
            expected.append((output, sample(other, (elements,), torch.float, number)))
    for work in works:
        assert work.wait()
    for output, wanted in expected:
        assert_same(output, wanted)


def tags_in_any_order(count):
    if dist.get_rank() == 0:
        works = [dist.isend(torch.full((9,), float(tag)), 1, tag=tag) for tag in range(count)]
        for work in works:
            work.wait()
    else:
        for tag in [*range(count - 1, -1, -2), *range(count % 2, count, 2)]:
            output = torch.empty(9)
            dist.recv(output, 0, tag=tag)
            assert_same(output, torch.full((9,), float(tag)))


def tags_with_receives_first(count):
    mine, other = dist.get_rank(), 1 - dist.get_rank()
    outputs = {tag: torch.empty(9) for tag in reversed(range(count))}
    works = [dist.irecv(output, other, tag=tag) for tag, output in outputs.items()]
    works += [dist.isend(torch.full((9,), mine * 100.0 + t), other, tag=t) for t in range(count)]
    for work in works:
        work.wait()
    for tag, output in outputs.items():
        assert_same(output, torch.full((9,), other * 100.0 + tag))


def same_tag_keeps_its_order(count):
    if dist.get_rank() == 0:
        for number in range(count):
            dist.send(torch.tensor([number]), 1, tag=3)
    else:
        got = [torch.empty(1, dtype=torch.int64) for _ in range(count)]
        works = [dist.irecv(output, 0, tag=3) for output in got]
        for work in works:
            work.wait()
        assert torch.cat(got).tolist() == list(range(count))


def from_any_source(messages):
    mine, size = dist.get_rank(), dist.get_world_size()
    if mine != 0:
        for number in range(messages):
            dist.send(torch.tensor([mine, number]), 0, tag=7)
        return None
    got = []
    for _ in range(messages * (size - 1)):
        output = torch.empty(2, dtype=torch.int64)
        source = dist.recv(output, tag=7)
        assert source == output[0].item()
        got.append(tuple(output.tolist()))
    return got


def any_source_before_a_late_sender():
    if dist.get_rank() == 2:
        await_word("looked")
        dist.send(torch.tensor([5.0]), 0)
    elif dist.get_rank() == 0:
        output = torch.empty(1)
        work = dist.irecv(output)
        assert not work.is_completed()
        say("looked")
        work.wait()
        assert work._source_rank() == 2 and output.item() == 5.0


def batch_is_a_list_of_works():
    """On CPU each operation of a batch is a work of its own."""
    mine, size = dist.get_rank(), dist.get_world_size()
    output = torch.empty(1)
    ops = [
        dist.P2POp(dist.isend, torch.full((1,), float(mine)), (mine + 1) % size),
        dist.P2POp(dist.irecv, output, (mine - 1) % size),
    ]
    send, receive = dist.batch_isend_irecv(ops)
    receive.wait()
    send.wait()
    assert output.item() == (mine - 1) % size


def batch(order):
    mine, size = dist.get_rank(), dist.get_world_size()
    before, after = (mine - 1) % size, (mine + 1) % size
    outputs = [torch.empty(100), torch.empty(100, dtype=torch.int64)]
    ops = [
        dist.P2POp(dist.isend, sample(mine, (100,), torch.float), after),
        dist.P2POp(dist.isend, sample(mine, (100,), torch.int64), after),
        dist.P2POp(dist.irecv, outputs[0], before),
        dist.P2POp(dist.irecv, outputs[1], before),
    ]
    for work in dist.batch_isend_irecv([ops[i] for i in order]):
        work.wait()
    assert_same(outputs[0], sample(before, (100,), torch.float))
    assert_same(outputs[1], sample(before, (100,), torch.int64))


def batch_with_one_side_only():
    """A batch need not concern every rank."""
    output = torch.empty(10)
    if dist.get_rank() == 0:
        ops = [dist.P2POp(dist.isend, sample(0, (10,), torch.float), 2)]
    elif dist.get_rank() == 2:
        ops = [dist.P2POp(dist.irecv, output, 0)]
    else:
        return
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if dist.get_rank() == 2:
        assert_same(output, sample(0, (10,), torch.float))


def in_group(members):
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    mine, size = group.rank(), len(members)
    output = torch.empty(5)
    sending = dist.isend(sample(mine, (5,), torch.float), group=group, group_dst=(mine + 1) % size)
    source = members[(mine - 1) % size]
    assert dist.recv(output, source, group=group) == source
    sending.wait()
    assert_same(output, sample((mine - 1) % size, (5,), torch.float))


def beside_collectives():
    """Messages posted before, matched during and received after collectives of the same group."""
    mine, other = dist.get_rank(), 1 - dist.get_rank()
    outputs = [torch.empty(50_000) for _ in range(4)]
    receives = [dist.irecv(output, other, tag=tag) for tag, output in enumerate(outputs)]
    sums = [torch.full((30_000,), float(mine + n)) for n in range(4)]
    reductions = [dist.all_reduce(tensor, async_op=True) for tensor in sums]
    sends = [dist.isend(sample(mine, (50_000,), torch.float, t), other, tag=t) for t in range(4)]
    dist.barrier()
    for work in [*reductions, *receives, *sends]:
        work.wait()
    for number in range(4):
        assert_same(outputs[number], sample(other, (50_000,), torch.float, number))
        assert_same(sums[number], torch.full((30_000,), 2.0 * number + 1))


def both_ways_at_once(elements, order, shared):
    """Every size in one exchange each; `shared`: the tensors lie in shared memory."""
    mine, other = dist.get_rank(), 1 - dist.get_rank()
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))

    def empty(count):
        if not shared:
            return torch.empty(count, dtype=torch.uint8)
        return backend.allocate_tensor(count, dtype=torch.uint8, device=torch.device("cpu"))

    for seed, count in enumerate(elements):
        given, output = empty(count), empty(count)
        given.copy_(sample(mine, (count,), torch.uint8, seed))
        ops = [dist.P2POp(dist.isend, given, other), dist.P2POp(dist.irecv, output, other)]
        for work in dist.batch_isend_irecv([ops[i] for i in order]):
            work.wait()
        assert_same(output, sample(other, (count,), torch.uint8, seed))
        assert_same(given, sample(mine, (count,), torch.uint8, seed))


def pieces_of_shared_memory(shape):
    """Parts of a tensor in shared memory, one of them with gaps, and a reused buffer."""
    mine, other = dist.get_rank(), 1 - dist.get_rank()
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    count = shape[0] * shape[1]
    whole = backend.allocate_tensor(count, dtype=torch.float, device=torch.device("cpu"))
    whole = whole.view(shape)
    for seed in range(4):
        whole.copy_(sample(mine, shape, torch.float, seed))
        output = torch.empty(shape)
        receives = [
            dist.irecv(output[: shape[0] // 2], other, tag=1),
            dist.irecv(output[shape[0] // 2 :], other, tag=2),
        ]
        turned = torch.empty(shape[1], shape[0])
        receives.append(dist.irecv(turned, other, tag=3))
        sends = [
            dist.isend(whole[shape[0] // 2 :], other, tag=2),
            dist.isend(whole.t(), other, tag=3),
            dist.isend(whole[: shape[0] // 2], other, tag=1),
        ]
        for work in [*sends, *receives]:
            work.wait()
        wanted = sample(other, shape, torch.float, seed)
        assert_same(output, wanted)
        assert_same(turned, wanted.t().contiguous())


def ends_unattended(count, shared):
    """A message ends though nobody waits for it."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    tensor = torch.zeros(count)
    if shared:
        tensor = backend.allocate_tensor(count, dtype=torch.float, device=torch.device("cpu"))
    done = []
    if dist.get_rank() == 0:
        tensor.fill_(3.0)
        work = dist.isend(tensor, 1)
    else:
        work = dist.irecv(tensor, 0)
    work.get_future().then(lambda _: done.append(True))
    end = time.monotonic() + bound(5)
    while not done:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert_same(tensor, torch.full((count,), 3.0))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_ring(world, size):
    world(size).run(around_the_ring, SHAPES)


def test_large(world):
    world(2).run(around_the_ring, [(8 * 2**20 + 1,)])


@pytest.mark.parametrize(
    ("size", "count", "elements"), [(2, 300, 1), (3, 40, 1000), (4, 5, 100_000), (2, 2, 8 * 2**20)]
)
def test_many_both_ways(world, size, count, elements):
    world(size).run(many_both_ways, count, elements)


def test_tags_in_any_order(world):
    world(2).run(tags_in_any_order, 20)
    world(2).run(tags_with_receives_first, 20)


def test_same_tag_keeps_its_order(world):
    world(2).run(same_tag_keeps_its_order, 100)


def test_any_source(world):
    got = world(3).run(from_any_source, 10)[0]
    for source in (1, 2):
        assert [number for s, number in got if s == source] == list(range(10))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (2, 0, 3, 1)], ids=str)
def test_batch(world, order):
    world(3).run(batch, order)
    world(2).run(batch, order)


# Around what goes in one line, in one record, unasked, in half a ring, in a ring, and in several.
EDGES = [32, 64, 2048, 16384, 65536, 262144, 1 << 20, 1 << 21, 3 << 21]


@pytest.mark.parametrize(
    "shared",
    [False, pytest.param(True, marks=beyond_gloo("has no shared memory"))],
    ids=["heap", "shared"],
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_every_size_both_ways(world, order, shared):
    sizes = [edge + more for edge in EDGES for more in (-1, 0, 1)]
    world(2).run(both_ways_at_once, sizes, order, shared)


@beyond_gloo("has no shared memory")
def test_pieces_of_shared_memory(world):
    world(2).run(pieces_of_shared_memory, (600, 500))


@beyond_gloo("needs a wait")
@pytest.mark.parametrize("shared", [False, True], ids=["heap", "shared"])
@pytest.mark.parametrize("count", [10, 10**6])
def test_ends_unattended(world, count, shared):
    world(2).run(ends_unattended, count, shared)


def test_ranks_of_a_group(world):
    world(4).run(in_group, [1, 2, 3])


def wrong_ranks(size):
    tensor = torch.ones(3)
    for rank in (-1, size, -size):
        for call in (dist.send, dist.isend, dist.recv, dist.irecv):
            with pytest.raises(ValueError, match=rf"rank from 0 to {size - 1}, got {rank}"):
                call(tensor, rank)
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    elif dist.get_rank() == 1:
        dist.recv(tensor, 0)


@beyond_gloo("crashes")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_are_not_in_the_group(world, size):
    world(size).run(wrong_ranks, size)


def more_small_ones_than_a_ring_has_lines():
    """The receiver looks at none of them before all are sent; the ring has 512 lines, one for each."""
    if dist.get_rank() == 0:
        works = [dist.isend(torch.tensor([number]), 1) for number in range(600)]
        say("sent")
        for work in works:
            work.wait()
        return
    await_word("sent")
    tensor = torch.empty(1, dtype=torch.int64)
    for number in range(600):
        dist.recv(tensor, 0)
        assert tensor.item() == number


def test_more_small_messages_than_a_ring_holds(world):
    world(2).run(more_small_ones_than_a_ring_has_lines, fresh=True)


@pytest.mark.parametrize(
    ("job", "size"),
    [
        (any_source_before_a_late_sender, 3),
        (batch_is_a_list_of_works, 2),
        (batch_with_one_side_only, 3),
        (beside_collectives, 2),
    ],
)
def test_between_ranks(world, job, size):
    world(size).run(job)
