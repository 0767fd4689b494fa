"""Calls under several streams, works that are waited for elsewhere or never, and barriers beside them."""

import time
from functools import partial

import pytest
import recording_device
import torch
import torch.distributed as dist
from backend import all_gather_single, reduce_scatter_single, wait_all
from device_ranks import called, in_order
from on_ranks import on_ranks
from own_threads import in_threads, thread_names
from suite_rules import until
from torch.distributed.distributed_c10d import _coalescing_manager

import fastcoll

pytestmark = on_ranks(3, world="nccl_world", around=in_order)

DEVICE = "recording:0"


def rank_values(count):
    return torch.full((count,), 1.0 + dist.get_rank(), device=DEVICE)


def total():
    size = dist.get_world_size()
    return size * (size + 1) / 2


def test_waited_on_another_stream():
    """The memory stays in use until the work ends: the stream that made it has not waited."""
    other = torch.Stream(device=DEVICE)
    x = torch.zeros(40, 2, device=DEVICE)
    x[:, 0] = 1
    other.wait_stream(torch.accelerator.current_stream())
    work = dist.all_reduce(x[:, 0], async_op=True)  # staged: the staging is the engine's own
    with other:
        work.wait()
    for _ in range(3):  # would get the staging's memory
        torch.ones(40, device=DEVICE).add_(1)
    torch.accelerator.current_stream().wait_stream(other)
    assert x[0, 0].item() == dist.get_world_size()


def test_batch_under_several_streams():
    """What each stream has done before is waited for."""
    me, size = dist.get_rank(), len(ranks())
    other = torch.Stream(device=DEVICE)
    first, got = rank_values(50), torch.empty(2, 50, device=DEVICE)
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        second = rank_values(50).mul_(10)
    with _coalescing_manager(device=torch.device(DEVICE), async_ops=True) as manager:
        dist.isend(first, (me + 1) % size)
        dist.irecv(got[0], (me - 1) % size)
        with other:
            dist.isend(second, (me + 1) % size)
            dist.irecv(got[1], (me - 1) % size)
    manager.wait()
    assert got[:, 0].tolist() == [1.0 + (me - 1) % size, 10.0 * (1 + (me - 1) % size)]
    other.wait_stream(torch.accelerator.current_stream())  # before `second` is freed


def ranks():
    return range(dist.get_world_size())


def test_dropped_with_gaps():
    """An output with gaps is written behind the call: it stays in memory although nobody waits."""
    for _ in range(3):
        base = torch.zeros(30, 3, device=DEVICE)
        dist.all_reduce(base[:, 1], async_op=True)
        del base
        torch.ones(90, device=DEVICE)
    x = rank_values(5)
    dist.all_reduce(x)
    assert x[0].item() == total()


def test_barrier_after_some_have_sent():
    """Ranks that have used the device meet those that have not."""
    own = dist.new_group()
    if dist.get_rank() == 0:
        dist.send(rank_values(3), 1, group=own)
    elif dist.get_rank() == 1:
        dist.recv(got := torch.empty(3, device=DEVICE), 0, group=own)
        assert got.tolist() == [1.0] * 3
    dist.barrier(group=own)
    dist.barrier(group=own, async_op=True).wait()


def test_barrier_of_a_group_without_devices():
    """It waits for no stream, whatever device the caller names."""
    own = dist.new_group()
    token = recording_device.hold(torch.accelerator.current_stream())
    dist.barrier(group=own, device_ids=[0])
    recording_device.release(token)


def test_changes_are_told_as_nccl_tells_them():
    """Autograd is told of the outputs of all_gather alone; tests/collectives has the CPU's table."""
    size = dist.get_world_size()
    x, y, whole = rank_values(4), rank_values(4), torch.empty(4 * size, device=DEVICE)
    pieces = [torch.empty(4, device=DEVICE) for _ in ranks()]
    tensors = [x, y, whole, *pieces]
    before = [tensor._version for tensor in tensors]
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    all_gather_single(whole, x)
    reduce_scatter_single(y, whole)
    dist.all_gather(pieces, x)
    changed = [tensor._version > old for tensor, old in zip(tensors, before, strict=True)]
    assert changed == [False] * 3 + [True] * size


def test_barrier_waits_for_the_stream():
    x = rank_values(4)
    dist.all_reduce(x)
    stream = torch.accelerator.current_stream()
    token = recording_device.hold(stream)
    x += 1
    work = dist.barrier(async_op=True)
    assert not work.is_completed()
    recording_device.release(token)
    work.wait()
    assert stream.query()


def test_nothing_on_some_ranks():
    """Ranks that have nothing to move take part all the same, in the first call of a group."""
    own = dist.new_group()
    me, last = dist.get_rank(), len(ranks()) - 1
    sizes = [4 if rank == last else 0 for rank in ranks()]
    outputs = [torch.zeros(size, device=DEVICE) for size in sizes]
    dist.all_gather(outputs, rank_values(sizes[me]), group=own)
    assert outputs[last].tolist() == [1.0 + last] * 4
    splits = [2 if rank == 0 else 0 for rank in ranks()] if me == 0 else [0] * len(ranks())
    output = torch.zeros(2 if me == 0 else 0, device=DEVICE)
    dist.all_to_all_single(output, rank_values(2 if me == 0 else 0), splits, splits, group=own)
    assert output.tolist() == [1.0] * len(output)


def test_an_error_in_a_batch():
    """The batch is over: what comes later is not collected."""
    backend = dist.group.WORLD._get_backend(torch.device(DEVICE))
    x = rank_values(3)
    backend._start_coalescing()
    with pytest.raises(ValueError, match="expected a root rank"):
        backend.broadcast([x], _root(len(ranks())))
    dist.all_reduce(x)
    assert x[0].item() == total()


def _root(rank):
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def test_factor_on_the_device():
    """PREMUL_SUM reads its factor on the stream: the host does not wait for it."""
    x = rank_values(9)
    factor = torch.full((1,), 0.5, device=DEVICE)
    dist.all_reduce(torch.ones(1, device=DEVICE))  # the communicator
    before = len(recording_device.log("synchronize"))
    work = dist.all_reduce(x, dist._make_nccl_premul_sum(factor), async_op=True)
    del factor
    torch.full((1,), 7.0, device=DEVICE)  # would get its memory
    assert len(recording_device.log("synchronize")) == before
    work.wait()
    assert x[0].item() == total() / 2
    with pytest.raises(TypeError, match="expected a factor of one element of float32, got 1 of"):
        wrong = torch.ones(1, dtype=torch.float64, device=DEVICE)
        dist.all_reduce(x, dist._make_nccl_premul_sum(wrong))


@pytest.mark.parametrize("sends", ["the device", "the CPU", "both"])
def test_plans_of_messages_of_a_device(sends):
    """A plan makes both messages, on whatever devices they are."""
    comm, me = fastcoll.communicator(), dist.get_rank()
    dist.all_reduce(torch.ones(1, device=DEVICE))  # the communicator
    if me == 2:
        return
    sent_on = {"the device": (DEVICE, "cpu"), "the CPU": ("cpu", DEVICE), "both": (DEVICE, DEVICE)}
    mine, theirs = sent_on[sends] if me == 0 else reversed(sent_on[sends])
    sent, received = torch.zeros(3, device=mine), torch.zeros(3, device=theirs)
    plan = comm.sendrecv_plan(sent, 1 - me, received, 1 - me)
    for turn in range(3):
        sent.fill_(2.0 * turn + me)
        plan()
        assert received.cpu().tolist() == [2.0 * turn + 1 - me] * 3


def test_a_plan_runs_on_the_stream_that_is_current():
    """It copies a tensor that is not dense each time, and refuses one that has left its memory."""
    comm, other = fastcoll.communicator(), torch.Stream(device=DEVICE)
    whole = torch.zeros(4, 2, device=DEVICE)
    plan = comm.all_reduce_plan(whole[:, 0])
    before = called("allReduce")
    for turn in range(3):
        whole.fill_(turn)
        plan()
        assert whole.cpu().tolist() == [[turn * comm.size, turn]] * 4
    whole.fill_(2.0)
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        plan()
    torch.accelerator.current_stream().wait_stream(other)
    assert whole[:, 0].cpu().tolist() == [2.0 * comm.size] * 4
    assert called("allReduce") == before + 4
    moved = torch.ones(3, device=DEVICE)
    plan = comm.all_reduce_plan(moved)
    plan()
    moved.set_(torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match="has left its memory"):
        plan()


def test_times():
    own = dist.new_group()
    x = rank_values(3)
    work = dist.all_reduce(x, group=own, async_op=True)
    work.wait()
    with pytest.raises(ValueError, match="was not timed"):
        work._get_duration()
    own._enable_collectives_timing()
    work = dist.all_reduce(x, group=own, async_op=True)
    work.wait()
    torch.recording.synchronize()
    assert work._get_duration() >= 0


def test_results():
    """A future that says how a call ended, when it has."""
    stream = torch.accelerator.current_stream()
    x = rank_values(3)
    dist.all_reduce(x)
    token = recording_device.hold(stream)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future_result()
    assert not future.done()
    recording_device.release(token)
    assert future.wait() == 0 and work.get_future_result().wait() == 0
    work.wait()


def test_blocking_waits():
    """With the option, the host waits; and so for a synchronous call."""
    own = dist.new_group(pg_options=fastcoll.Options(blocking_wait=True))
    stream = torch.accelerator.current_stream()
    x = rank_values(3)
    dist.all_reduce(x, group=own)
    assert stream.query()
    token = recording_device.hold(stream)
    work = dist.all_reduce(x, group=own, async_op=True)
    assert not work.is_completed()
    recording_device.release(token)
    work.wait()
    assert work.is_completed()


def test_threads_with_groups_of_their_own():
    """Each thread's first call makes a communicator; no thread waits for what another one makes."""
    groups = [dist.new_group() for _ in range(3)]

    def work(index):
        time.sleep(0.02 * index)
        own = groups[(index + dist.get_rank()) % 3]  # in another order on each rank
        with torch.Stream(device=DEVICE):
            for step in range(20):
                x = torch.full((50,), float(step), device=DEVICE)
                dist.all_reduce(x, group=own, async_op=bool(step % 2 == index % 2))
                torch.recording.synchronize()

    assert in_threads(*(partial(work, index) for index in range(3))) == []
    recording_device.join_threads()


def test_many_groups():
    """Forty groups with calls under way at once, and gone. Two threads watch them all."""
    groups = [dist.new_group() for _ in range(40)]
    tensors = [rank_values(8) for _ in groups]
    works = [
        dist.all_reduce(x, group=own, async_op=True) for x, own in zip(tensors, groups, strict=True)
    ]
    of_all = ["fastcoll-dog", "fastcoll-news"]
    until(lambda: sorted(name for name in thread_names() if name in of_all) == of_all)
    for work, x, own in zip(works, tensors, groups, strict=True):
        work.wait()
        assert x[0].item() == total()
        dist.destroy_process_group(own)


def test_the_host_waits_for_nothing():
    """Neither a call nor wait() waits for the device, which here does not get on."""
    size = dist.get_world_size()
    x = rank_values(6 * size)
    whole = torch.empty(6 * size * size, device=DEVICE)
    lists = [torch.empty_like(x) for _ in ranks()]
    dist.all_reduce(x)  # the communicator
    stream = torch.accelerator.current_stream()
    before = len(recording_device.log("synchronize"))
    with recording_device.held(stream):
        for async_op in (False, True):
            works = [
                dist.all_reduce(x, async_op=async_op),
                dist.broadcast(x, 0, async_op=async_op),
                dist.reduce(x, 0, async_op=async_op),
                dist.all_gather(lists, x, async_op=async_op),
                all_gather_single(whole, x, async_op=async_op),
                reduce_scatter_single(x[:6], x, async_op=async_op),
                dist.gather(x, lists if dist.get_rank() == 0 else None, async_op=async_op),
                dist.scatter(x, lists if dist.get_rank() == 0 else None, async_op=async_op),
                dist.all_to_all(lists, list(whole.chunk(size)), async_op=async_op),
                dist.all_to_all_single(whole[: x.numel()], x, async_op=async_op),
            ]
            wait_all(filter(None, works))
        assert not stream.query()
    assert len(recording_device.log("synchronize")) == before
    torch.recording.synchronize()
