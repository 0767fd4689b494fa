"""Streams that are being captured into a graph, as the stand-in for a driver tells it (captures.py)."""

import datetime

import pytest
import recording_device
import torch
import torch.distributed as dist
from captures import driver
from fault_list import plays
from on_ranks import on_ranks

pytestmark = on_ranks(2, world="nccl_world", kill=True, fresh=True)  # with its driver

DEVICE = "recording:0"


def test_captured_calls():
    loaded = driver()
    own = dist.new_group()
    stream = torch.accelerator.current_stream()
    x = torch.ones(5, device=DEVICE)

    # No communicator can be made while a stream is captured, and the group is as good as before.
    loaded.capture(stream.native_handle)
    with pytest.raises(ValueError, match="cannot be captured into a graph"):
        dist.all_reduce(x, group=own)
    with pytest.raises(ValueError, match="a barrier waits on the host"):
        dist.barrier(group=own)
    loaded.capture(None)
    dist.all_reduce(x, group=own)
    dist.all_reduce(x, group=own, async_op=True)  # dropped: asked for later, but not in a capture

    loaded.capture(stream.native_handle)
    before = len(recording_device.log("query"))
    for _ in range(3):
        work = dist.all_reduce(x, group=own, async_op=True)
        assert not work.is_completed()
        work.wait()
    dist.all_reduce(x, group=own)
    mine = recording_device.log("query")[before:]
    names = {entry.thread for entry in recording_device.log("launch")}
    assert not [entry for entry in mine if entry.thread in names]
    loaded.capture(None)

    # Its own works are none of the watchdog's business: they run when the graph does.
    backend = own._get_backend(torch.device(DEVICE))
    backend.shutdown()
    assert loaded.relaxed_threads() >= 1


@plays(68)
def test_aborted_while_captured():
    """A group that ends in the middle of a capture: later calls say so, captured or not."""
    loaded = driver()
    own = dist.new_group()
    stream = torch.accelerator.current_stream()
    x = torch.ones(5, device=DEVICE)
    dist.all_reduce(x, group=own)
    dist.barrier()
    loaded.capture(stream.native_handle)
    dist.all_reduce(x, group=own, async_op=True)
    broken = loaded.broken_captures()
    own.abort()
    for _ in range(2):
        with pytest.raises(dist.DistBackendError, match=r"rank \d aborted the group"):
            dist.all_reduce(x, group=own)
        assert loaded.broken_captures() == broken  # by a query of an event that is not relaxed
        loaded.capture(None)
    dist.barrier()
    again = dist.new_group()
    dist.all_reduce(x, group=again)
    again._get_backend(torch.device(DEVICE)).shutdown()


def test_another_thread_captures():
    """Calls of this thread query events, and leave the other thread's capture alone."""
    loaded = driver()
    own = dist.new_group()
    x = torch.ones(5, device=DEVICE)
    backend = own._get_backend(torch.device(DEVICE))
    own._enable_collectives_timing()
    dist.all_reduce(x, group=own)
    work = dist.all_reduce(x, group=own, async_op=True)
    work.get_future_result().wait()  # the watchdog has seen the end
    del work  # so the next call queries its event
    loaded.capture(torch.Stream(DEVICE).native_handle)
    dist.all_reduce(x, group=own)
    work = dist.all_reduce(x, group=own, async_op=True)
    work.wait(datetime.timedelta(seconds=30))
    assert work.is_completed() and work._get_duration() >= 0
    dist.barrier(group=own)
    assert loaded.broken_captures() == 0
    dist.all_reduce(x, group=own, async_op=True)
    backend.shutdown()
    assert loaded.broken_captures() == 0
    # Other calls of this thread are refused as before.
    end = torch.Event(DEVICE)
    end.record()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        end.query()
    loaded.capture(None)
