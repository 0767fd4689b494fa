"""The handle of an asynchronous collective, and its futures."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from backend import IS_GLOO, TORCH, beyond_gloo, wait_all
from collective_cases import MOVING, REDUCING, Case, Runner
from on_ranks import on_ranks
from oracle import assert_same
from own_threads import in_threads
from suite_rules import until
from torch._C._distributed_c10d import _get_work_registry_size as get_work_registry_size
from torch.multiprocessing.reductions import StorageWeakRef
from words import await_word, say

pytestmark = on_ranks(2)

PATIENCE = 20.0


def issue(name):
    """Issue one collective; return its handle and the outputs its future must hold."""
    runner = Runner(Case(name, shape=(4,), async_op=True))
    return runner.work, runner.outputs


COLLECTIVES = [*REDUCING, *MOVING[:-1], "barrier"]
GLOO_ENDS = [name for name in COLLECTIVES if not name.startswith("reduce_scatter")]
GLOO_GIVES_OUTPUTS = [name for name in GLOO_ENDS if name != "all_gather_single"]


def collectives(*, known):
    """Parameters for all collectives, of which gloo's handles do it right for the known ones."""
    beyond = beyond_gloo("never completes without wait, has no future, or one of other tensors")
    return [pytest.param(name, marks=[] if name in known else beyond) for name in COLLECTIVES]


def flattened(value):
    return [value] if isinstance(value, torch.Tensor) else [t for v in value for t in flattened(v)]


def test_nobody_waits_after_waits():
    """A call without a waiter runs too, even if the callers before it waited."""
    tensor = torch.ones(3)
    for _ in range(9):
        dist.all_reduce(tensor, async_op=True).wait()
    work = dist.all_reduce(tensor, async_op=True)
    until(work.is_completed)
    assert_same(tensor, torch.full((3,), 2.0**10))
    dist.barrier()


def test_synchronous_call_registers_no_null():
    """A compiled graph may wait for a tensor whose collective has ended."""
    before, tensor = get_work_registry_size(), torch.ones(3)
    with funcol.allow_inflight_collective_as_graph_input_ctx():
        dist.all_reduce(tensor)
        assert get_work_registry_size() == before
        torch.ops._c10d_functional.wait_tensor(tensor)
    assert_same(tensor, torch.full((3,), 2.0))


def test_wait_for_messages_unregisters():
    before, peer = get_work_registry_size(), 1 - dist.get_rank()
    with funcol.allow_inflight_collective_as_graph_input_ctx():
        tensors = torch.ones(3), torch.empty(3)
        works = [dist.isend(tensors[0], peer), dist.irecv(tensors[1], peer)]
        assert get_work_registry_size() == before + 2
        wait_all(works)
    assert get_work_registry_size() == before


@on_ranks(3)
def test_wait_in_other_threads():
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=True)
    seen = []

    def wait():
        work.wait()
        seen.append(tensor.sum().item())

    assert in_threads(*[wait] * 4) == []
    assert seen == [1000.0 * dist.get_world_size()] * 4


def test_dropped_inputs():
    """The backend keeps what it reads alive, until it has read it."""
    rank, outputs = dist.get_rank(), [torch.empty(50_000) for _ in range(dist.get_world_size())]
    given = [torch.full((50_000,), rank + 1.0), torch.ones(50_000)]
    kept = [StorageWeakRef(tensor.untyped_storage()) for tensor in given]
    if rank == 1:
        await_word("looked")
    works = [dist.all_gather(outputs, given[0], async_op=True)]
    works.append(dist.all_reduce(given[1], async_op=True))
    del given
    if rank == 0:
        assert not any(one.expired() for one in kept)
        say("looked")
    wait_all(works)
    for source, output in enumerate(outputs):
        assert_same(output, torch.full((50_000,), source + 1.0))
    del works
    until(lambda: all(one.expired() for one in kept))


@pytest.mark.parametrize("name", collectives(known=GLOO_ENDS))
def test_life(name):
    if dist.get_rank() == 1:
        time.sleep(0.05)
    runner = Runner(Case(name, shape=(4,), async_op=True))
    work = runner.work
    until(work.is_completed)  # without a wait
    assert work.is_success()
    assert IS_GLOO or work.get_future_result().wait() == 0  # WorkResult::SUCCESS
    assert TORCH < (2, 13) or work.exception() is None  # 2.11 has no Python type for it
    assert work.wait() and work.wait(timedelta(seconds=5)) and work.is_completed()
    runner.check()


@pytest.mark.parametrize("name", collectives(known=GLOO_GIVES_OUTPUTS))
@on_ranks(1, 3)
def test_future_and_result(name):
    work, outputs = issue(name)
    future = work.get_future()
    value = future.wait()
    assert future.done() and work.wait()
    assert isinstance(value, list)
    got = flattened(value)
    assert len(got) == len(outputs)
    for tensor, output in zip(got, outputs, strict=True):
        assert_same(tensor, output)
        assert tensor.data_ptr() == output.data_ptr(), "the future holds the output itself"
    result = work.result()
    assert isinstance(result, list)
    for tensor, output in zip(result, outputs, strict=True):
        assert_same(tensor, output)


@pytest.mark.parametrize("name", collectives(known=GLOO_ENDS)[:-1])  # a barrier has no output
def test_wait_unregisters(name):
    """Torch keeps the work for each output, so that a compiled graph can wait for it."""
    before = get_work_registry_size()
    with funcol.allow_inflight_collective_as_graph_input_ctx():
        work, outputs = issue(name)
        assert get_work_registry_size() == before + len(outputs)
        work.wait()
        assert get_work_registry_size() == before


@beyond_gloo("has no durations")
@on_ranks(2, fresh=True)
def test_durations():
    """Only of works that were made after the timing was switched on, and have ended."""
    group = dist.new_group([0, 1])
    peer = 1 - dist.get_rank()

    def works():
        tensors = [torch.ones(5) for _ in range(3)]
        return [
            dist.all_reduce(tensors[0], group=group, async_op=True),
            dist.isend(tensors[1], peer, group=group),
            dist.irecv(tensors[2], peer, group=group),
        ]

    early = works()
    wait_all(early)
    group._enable_collectives_timing()
    for work in early:
        with pytest.raises(ValueError, match="was not timed"):
            work._get_duration()
    if dist.get_rank() == 1:
        await_word("asked too early")
    timed = works()
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="is still running"):
            timed[0]._get_duration()
        say("asked too early")
    wait_all(timed)
    assert all(0 <= work._get_duration() < 1000 * PATIENCE for work in timed)


@on_ranks(2, fresh=True)
def test_handle_outlives_its_group():
    tensor = torch.ones(5)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    future = work.get_future()
    dist.destroy_process_group()
    assert work.wait() and work.is_completed() and work.is_success()
    assert_same(future.wait()[0], torch.full((5,), float(2)))


def test_callbacks_that_block_on_collectives():
    """then() chains, each starting another collective without blocking."""
    group = dist.group.WORLD

    def again(future):
        tensor = future.value()[0]
        tensor.div_(dist.get_world_size()).add_(1)
        return dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()

    future = dist.all_reduce(torch.zeros(5), async_op=True).get_future()
    for _ in range(3):
        future = future.then(again)
    assert_same(future.wait()[0], torch.full((5,), float(3 * dist.get_world_size())))
