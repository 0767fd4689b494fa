"""Plans of calls on device tensors: what a run costs the host, and runs in flight."""

import json
import time
from datetime import timedelta

import plan_cost
import recording_device
import torch
import torch.distributed as dist
from device_ranks import DEVICE, fault_of, has_failed, in_order, used_group
from on_ranks import on_ranks
from programs import python
from suite_rules import until

import fastcoll


def test_a_run_allocates_nothing(without_nccl, device_libraries):
    """Only NCCL's stand-in does; see repeated_calls.c."""
    ended = python(plan_cost.__file__, 2, "plan", "plan with the GIL", "NCCL", seconds=120)
    assert ended.returncode == 0, ended.stderr
    costs = json.loads(ended.stdout)
    bare = costs["NCCL"]["allocations"]
    assert bare >= plan_cost.CALLS  # they are counted
    # On a busy machine the watchdog comes late, and a few runs more than before are under way at once.
    for way in ("plan", "plan with the GIL"):
        assert bare <= costs[way]["allocations"] < bare + plan_cost.CALLS // 20


def queries_in_a_second() -> int:
    before = len(recording_device.log("query"))
    time.sleep(1)
    return len(recording_device.log("query")) - before


@on_ranks(2, world="nccl_world", around=in_order)
def test_many_runs_in_flight():
    """One plan often, and many that are dropped meanwhile: the watchdog makes few queries."""
    comm, stream = fastcoll.communicator(), torch.accelerator.current_stream()
    x, others = torch.ones(3, device=DEVICE), torch.ones(100, 2, device=DEVICE)
    plan = comm.all_reduce_plan(x)
    plan()
    with recording_device.held(stream):
        for _ in range(200):
            x.fill_(1.0)
            plan()
        for other in others:
            comm.all_reduce_plan(other)()
        # Ten turns, each with the logarithm of 300.
        assert 0 < queries_in_a_second() < 10 * 15
    assert x.tolist() == [2.0] * 3
    assert torch.equal(others.cpu(), torch.full((100, 2), 2.0))
    # With the records of the earlier runs, from several turns of the watchdog.
    for turn in range(300):
        x.fill_(turn)
        plan()
        time.sleep(0.001)
    assert x.tolist() == [2.0 * 299] * 3


@on_ranks(2, world="nccl_world", around=in_order)
def test_works_outlive_the_records_of_later_calls():
    """A work that the program keeps is of its own call, whatever calls are made after it."""
    x = torch.ones(3, device=DEVICE)
    own = dist.new_group()
    dist.all_reduce(x, group=own)
    kept = []
    for _ in range(30):
        kept.append(dist.all_reduce(x.clone(), group=own, async_op=True))
        kept[-1].wait()
        dist.all_reduce(x, dist.ReduceOp.AVG, group=own)
        time.sleep(0.02)
    with recording_device.held(torch.accelerator.current_stream()):
        for work in kept:
            assert work.is_completed() and work.is_success()
            work.synchronize()


@on_ranks(2, world="nccl_world", fresh=True)
def test_a_deadline_behind_longer_ones():
    """The call whose time is over is named, though an earlier one on its stream has not ended either."""
    own, x = used_group(1)
    options = dist.AllreduceOptions()
    options.timeout, options.asyncOp = timedelta(seconds=60), False
    with recording_device.held(torch.accelerator.current_stream()):
        own._get_backend(x.device).allreduce([x], options)
        plan = fastcoll.communicator(own).all_reduce_plan(x)
        for _ in range(5):
            plan()
        until(lambda: has_failed(own))
        text, _ = fault_of(plan)
        assert "all_reduce(seq 3, float32[4]) timed out after 1000 ms" in text
