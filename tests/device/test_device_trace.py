"""What the trace keeps of calls on device tensors, and what two ranks' dumps say of a fault."""

from datetime import timedelta

import pytest
import recording_device
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from suite_rules import until
from torch._C._distributed_c10d import ErrorType
from torch.distributed.distributed_c10d import _coalescing_manager
from world import here

import fastcoll.trace
from fastcoll.trace.analysis import analyse
from fastcoll.trace.dumps import parse, read
from fastcoll.trace.flight_recorder import flight_recorder

DEVICE = "recording:0"


def ours(group):
    return [
        record
        for record in fastcoll.trace.records()
        if record["fastcoll"]["group"] == group.group_name
        and record["profiling_name"].startswith("nccl:")
    ]


@on_ranks(3, world="nccl_world")
def test_calls_are_recorded():
    own = dist.new_group()
    me, size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(3, 4, device=DEVICE)
    dist.all_reduce(x, group=own)
    stream = torch.accelerator.current_stream()
    token = recording_device.hold(stream)
    work = dist.all_reduce(x, group=own, async_op=True)
    assert ours(own)[1]["state"] == "started"
    recording_device.release(token)
    work.wait()
    with _coalescing_manager(own, torch.device(DEVICE), async_ops=True) as manager:
        dist.isend(x, (me + 1) % size, group=own)
        dist.irecv(torch.empty_like(x), (me - 1) % size, group=own)
    manager.wait()
    until(lambda: all(record["state"] == "completed" for record in ours(own)))
    records = ours(own)
    assert [record["fastcoll"]["name"] for record in records] == [
        "all_reduce", "all_reduce", "send", "recv",
    ]  # fmt: skip
    assert [record["collective_seq_id"] for record in records[:2]] == [1, 2]
    assert (
        records[0]["input_sizes"] == [[3, 4]] and records[0]["profiling_name"] == "nccl:all_reduce"
    )
    assert all(record["time_discovered_completed_ns"] for record in records)
    dist.all_reduce(torch.ones(2), group=own)  # on CPU, with numbers of its own
    assert len(ours(own)) == 4


def one_does_not_come():
    own = dist.new_group(timeout=timedelta(seconds=60))
    x = torch.ones(3, device=DEVICE)
    dist.all_reduce(x, group=own)
    backend = own._get_backend(torch.device(DEVICE))
    backend.set_timeout(timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="timed out"):
            dist.all_reduce(x, group=own)
    until(lambda: backend.get_error() != ErrorType.SUCCESS)
    fastcoll.trace.dump(str(here().scratch / f"t_{dist.get_rank()}"))
    if dist.get_rank() == 1:
        with pytest.raises(dist.DistBackendError, match="another rank met a fault"):
            dist.broadcast(x, 0, group=own)
    return ours(own)[-1], str(here().scratch / "t_")


def test_the_rank_that_did_something_else_is_named(nccl_world):
    nccl_world(2).close()  # the trace of a process has what other tests did, and failed in
    (late, prefix), (other, _) = nccl_world(2).run(one_does_not_come, fresh=True)
    assert late["fastcoll"]["error"] and "timed out after 1000 ms" in late["fastcoll"]["error"]
    assert "another rank met a fault" in other["fastcoll"]["error"]
    report = analyse([parse(flight_recorder(trace)) for trace in read(prefix)])
    assert report.guilty == (1,) and not report.healthy
    assert report.first_error is not None and report.first_error[0] == 0
