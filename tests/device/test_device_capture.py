"""Streams that are being captured into a graph, as a driver tells it that is not there: a stand-in for it."""

import ctypes
import datetime
import subprocess

import pytest
import recording_device
import torch
import torch.distributed as dist
from fault_list import plays
from on_ranks import on_ranks
from world import here

pytestmark = on_ranks(2, world="nccl_world", kill=True, fresh=True)  # with its driver

DEVICE = "recording:0"

DRIVER = """
static const void* captured;
static int relaxed, broken;
static unsigned long long graphs;  /* the number of a graph is also the id of its capture */
static struct { void (*end)(void*); void* object; unsigned long long graph; } kept[16];
static __thread int mode;  /* "global" at first */
void capture(const void* stream) { captured = stream; graphs += stream != 0; }
int cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void** graph,
                              void* dependencies, void* count) {
  *status = captured && stream == captured;
  *id = graphs;
  *graph = (void*)graphs;
  return 0;
}
int cuUserObjectCreate(int* made, void* object, void (*end)(void*), unsigned count, unsigned flags) {
  for (*made = 0; kept[*made].end; ++*made) continue;
  kept[*made].end = end;
  kept[*made].object = object;
  return count == 1 && flags == 1 ? 0 : 1;
}
int cuGraphRetainUserObject(void* graph, long object, unsigned count, unsigned flags) {
  kept[(int)object].graph = (unsigned long long)graph;
  return count == 1 && flags == 1 ? 0 : 1;
}
void destroy_graph(unsigned long long graph) {
  for (int i = 0; i < 16; ++i) {
    if (kept[i].end && kept[i].graph == graph) kept[i].end(kept[i].object), kept[i].end = 0;
  }
}
int relaxed_threads(void) { return relaxed; }
int broken_captures(void) { return broken; }
int recordingDeviceCaptures(const void* stream) { return captured && stream == captured; }
int recordingDeviceRefuses(void) {
  if (!captured || mode == 2) return 0;
  __atomic_add_fetch(&broken, 1, __ATOMIC_SEQ_CST);
  return 1;
}
int cuStreamIsCapturing(void* stream, int* status) {
  *status = captured && stream == captured;
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* other) {
  int before = mode;
  mode = *other;
  *other = before;
  if (mode == 2) __atomic_add_fetch(&relaxed, 1, __ATOMIC_SEQ_CST);
  return 0;
}
"""


def driver():
    """Builds and loads it, under the name by which a driver is found."""
    folder = here().scratch / f"driver{here().rank}"
    folder.mkdir()
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True
    )
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    loaded.capture.argtypes = [ctypes.c_void_p]
    loaded.destroy_graph.argtypes = [ctypes.c_ulonglong]
    return loaded


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
