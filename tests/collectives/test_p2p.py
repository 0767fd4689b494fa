"""send, recv, isend, irecv, batch_isend_irecv."""

import random

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, wait_all
from on_ranks import on_ranks
from oracle import assert_same, sample
from suite_rules import until
from words import await_word, say

import fastcoll

pytestmark = on_ranks(2)


@pytest.mark.parametrize(
    ("size", "count", "elements"), [(2, 300, 1), (3, 40, 1000), (4, 5, 100_000), (2, 2, 8 * 2**20)]
)
@on_ranks()
def test_many_both_ways(count, elements):
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
    wait_all(works)
    for output, wanted in expected:
        assert_same(output, wanted)


@pytest.mark.parametrize("seed", range(3))
def test_messages_of_one_tag_keep_their_order(seed):
    """Whatever is posted first: the k-th receive of a tag gets its k-th message. Sizes of all paths."""
    mine, other, draw = dist.get_rank(), 1 - dist.get_rank(), random.Random(seed)
    tags = [draw.choice([0, 1, 2**31 - 1, draw.randrange(500)]) for _ in range(400)]
    counts = [draw.choice([1, 9, 3000, 40_000] if draw.random() < 0.1 else [1, 9]) for _ in tags]

    def values(sender, number):
        return torch.full((counts[number],), sender * 1000.0 + number)

    # Both ranks draw the same: each posts in its own order, which keeps that of each tag.
    order = {tag: iter([n for n, one in enumerate(tags) if one == tag]) for tag in tags}
    received = random.Random(seed + mine).sample(tags, len(tags))
    receives = [next(order[tag]) for tag in received]
    first, works, outputs = draw.randrange(len(tags)), [], {}
    for number in receives[:first]:
        outputs[number] = torch.empty(counts[number])
        works.append(dist.irecv(outputs[number], other, tag=tags[number]))
    works += [dist.isend(values(mine, n), other, tag=tag) for n, tag in enumerate(tags)]
    for number in receives[first:]:
        outputs[number] = torch.empty(counts[number])
        source = other if number % 2 else None
        works.append(dist.irecv(outputs[number], source, tag=tags[number]))
    wait_all(works)
    for number, output in outputs.items():
        assert_same(output, values(other, number))


@on_ranks(3)
def test_any_source():
    mine, size = dist.get_rank(), dist.get_world_size()
    if mine != 0:
        for number in range(10):
            dist.send(torch.tensor([mine, number]), 0, tag=7)
        return
    got = []
    for _ in range(10 * (size - 1)):
        output = torch.empty(2, dtype=torch.int64)
        source = dist.recv(output, tag=7)
        assert source == output[0].item()
        got.append(output.tolist())
    for source in range(1, size):
        assert [number for s, number in got if s == source] == list(range(10))


@on_ranks(3)
def test_any_source_before_a_late_sender():
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


def test_any_source_after_a_long_message_has_begun_to_arrive():
    """Nothing else is under way then that would read the rest of the message."""
    long, short = torch.full((2**20,), 3.0), torch.ones(1)
    if dist.get_rank() == 1:
        wait_all([dist.isend(long, 0, tag=1), dist.isend(short, 0, tag=2)])
        return
    dist.recv(torch.empty(1), tag=2)
    output = torch.empty(2**20)
    dist.recv(output, tag=1)
    assert_same(output, long)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (2, 0, 3, 1)], ids=str)
@on_ranks(2, 3)
def test_batch(order):
    """On CPU each operation of a batch is a work of its own."""
    mine, size = dist.get_rank(), dist.get_world_size()
    before, after = (mine - 1) % size, (mine + 1) % size
    outputs = [torch.empty(100), torch.empty(100, dtype=torch.int64)]
    ops = [
        dist.P2POp(dist.isend, sample(mine, (100,), torch.float), after),
        dist.P2POp(dist.isend, sample(mine, (100,), torch.int64), after),
        dist.P2POp(dist.irecv, outputs[0], before),
        dist.P2POp(dist.irecv, outputs[1], before),
    ]
    works = dist.batch_isend_irecv([ops[i] for i in order])
    assert len(works) == len(ops)
    wait_all(works)
    assert_same(outputs[0], sample(before, (100,), torch.float))
    assert_same(outputs[1], sample(before, (100,), torch.int64))


# Around what goes in one line, in one record, in one cell, in all cells, unasked, in half a ring, in a ring, and in
# several.
EDGES = [32, 64, 2048, 16384, 65536, 262144, 1 << 19, 1 << 20, 1 << 21, 3 << 21]


@pytest.mark.parametrize(
    "shared",
    [False, pytest.param(True, marks=beyond_gloo("has no shared memory"))],
    ids=["heap", "shared"],
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_every_size_both_ways(order, shared):
    mine, other = dist.get_rank(), 1 - dist.get_rank()
    empty = fastcoll.empty_shared if shared else torch.empty
    for seed, count in enumerate(edge + more for edge in EDGES for more in (-1, 0, 1)):
        given, output = (empty(count, dtype=torch.uint8) for _ in range(2))
        given.copy_(sample(mine, (count,), torch.uint8, seed))
        ops = [dist.P2POp(dist.isend, given, other), dist.P2POp(dist.irecv, output, other)]
        wait_all(dist.batch_isend_irecv([ops[i] for i in order]))
        assert_same(output, sample(other, (count,), torch.uint8, seed))
        assert_same(given, sample(mine, (count,), torch.uint8, seed))


@beyond_gloo("sends from a thread")
def test_what_a_send_needs_not_ask_for_is_sent_at_once():
    """The sender may compute for long before it waits."""
    mine, other = dist.get_rank(), 1 - dist.get_rank()
    small = torch.ones(1)
    wait_all([dist.isend(small, other), dist.irecv(torch.empty(1), other)])
    large = sample(mine, (1 << 19,), torch.uint8, 1)
    work = dist.isend(large, other)
    assert work.is_completed()
    output = torch.empty_like(large)
    dist.recv(output, other)
    assert_same(output, sample(other, (1 << 19,), torch.uint8, 1))


@on_ranks(2, 3)
def test_back_and_forth_and_in_one_direction():
    """The pieces of messages pass memory back and forth between two ranks, while there is some."""
    mine, size = dist.get_rank(), dist.get_world_size()
    behind, ahead = (mine - 1) % size, (mine + 1) % size
    for number, count in enumerate([600, 4096, 16384, 16385, 65536, 65537, 300_000] * 4):
        given = sample(mine, (count,), torch.float, number)
        output = torch.empty(count)
        pattern = number % 4
        if pattern < 2:  # an exchange, and messages that turn round
            first, then = (ahead, behind) if (mine + pattern) % 2 else (behind, ahead)
            works = [dist.isend(given, first), dist.isend(given, then)]
            for peer in (behind, ahead):
                dist.recv(output, peer)
                assert_same(output, sample(peer, (count,), torch.float, number))
            wait_all(works)
        elif pattern == 2 and mine == 0:  # more than there is memory for
            for turn in range(9):
                dist.send(sample(turn, (count,), torch.float, number), 1)
        elif pattern == 2 and mine == 1:
            for turn in range(9):
                dist.recv(output, 0)
                assert_same(output, sample(turn, (count,), torch.float, number))
        elif mine == 0:  # there and back
            dist.send(given, 1)
            dist.recv(output, 1)
            assert_same(output, given + 1)
        elif mine == 1:
            dist.recv(output, 0)
            dist.send(output + 1, 0)


@beyond_gloo("has no shared memory")
def test_pieces_of_shared_memory():
    """Parts of a tensor in shared memory, one of them with gaps, and a reused buffer."""
    mine, other, shape = dist.get_rank(), 1 - dist.get_rank(), (600, 500)
    whole = fastcoll.empty_shared(shape, dtype=torch.float)
    for seed in range(4):
        whole.copy_(sample(mine, shape, torch.float, seed))
        output, turned = torch.empty(shape), torch.empty(shape[::-1])
        outputs = {1: output[:300], 2: output[300:], 3: turned}
        works = [dist.irecv(part, other, tag=tag) for tag, part in outputs.items()]
        givens = {2: whole[300:], 3: whole.t(), 1: whole[:300]}
        works += [dist.isend(part, other, tag=tag) for tag, part in givens.items()]
        wait_all(works)
        wanted = sample(other, shape, torch.float, seed)
        assert_same(output, wanted)
        assert_same(turned, wanted.t().contiguous())


@beyond_gloo("needs a wait")
@pytest.mark.parametrize("shared", [False, True], ids=["heap", "shared"])
@pytest.mark.parametrize("count", [10, 10**6])
def test_ends_unattended(count, shared):
    """A message completes without a wait."""
    tensor = (fastcoll.empty_shared if shared else torch.empty)(count, dtype=torch.float)
    done = []
    mine = dist.get_rank()
    work = dist.irecv(tensor.zero_(), 0) if mine else dist.isend(tensor.fill_(3.0), 1)
    work.get_future().then(lambda _: done.append(True))
    until(lambda: done)
    assert_same(tensor, torch.full((count,), 3.0))


@beyond_gloo("crashes")
@on_ranks(2, 3)
def test_ranks_that_are_not_in_the_group():
    tensor, size = torch.ones(3), dist.get_world_size()
    for rank in (-1, size, -size):
        for call in (dist.send, dist.isend, dist.recv, dist.irecv):
            with pytest.raises(ValueError, match=rf"rank from 0 to {size - 1}, got {rank}"):
                call(tensor, rank)
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    elif dist.get_rank() == 1:
        dist.recv(tensor, 0)


@on_ranks(2, fresh=True)
def test_more_small_messages_than_a_ring_holds():
    """The receiver looks at none of them before all are sent; the ring has 512 lines, one for each."""
    if dist.get_rank() == 0:
        works = [dist.isend(torch.tensor([number]), 1) for number in range(600)]
        say("sent")
        wait_all(works)
        return
    await_word("sent")
    tensor = torch.empty(1, dtype=torch.int64)
    for number in range(600):
        dist.recv(tensor, 0)
        assert tensor.item() == number
