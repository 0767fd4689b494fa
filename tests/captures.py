"""A stand-in for the driver that tells whether a stream is being captured into a graph."""

import contextlib
import ctypes
import subprocess
from collections.abc import Iterator

import device_ranks
import torch
from rank import here

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


def driver() -> ctypes.CDLL:
    """Builds and loads it on a rank, under the name by which a driver is found."""
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


@contextlib.contextmanager
def captured(loaded: ctypes.CDLL) -> Iterator[None]:
    """Captures the current stream in the block: NCCL's stand-in keeps its calls for ``replay()``."""
    nccl = device_ranks.stand_in()
    nccl.fakeNcclCapture.argtypes = [ctypes.c_void_p]
    stream = torch.accelerator.current_stream().native_handle
    nccl.fakeNcclCapture(stream)
    loaded.capture(stream)
    try:
        yield
    finally:
        loaded.capture(None)
        nccl.fakeNcclCapture(None)


def replay() -> bool:
    """Makes the captured calls, and waits for their end; returns False if they have failed."""
    return device_ranks.stand_in().fakeNcclReplay() == 0
