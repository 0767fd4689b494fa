"""Work that torch does not see: the C interface of the recording device, and ``launch_at``."""

import ctypes

import pytest
import recording_device as recording
import torch
from two_streams import BYTES, new, only


def library():
    """The device's own library, as a native library finds it."""
    symbols = ctypes.CDLL(None)
    symbols.recordingDeviceAccess.argtypes = [
        *[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]
    ]
    symbols.recordingDeviceAccess.restype = None
    symbols.recordingDeviceCurrentStream.restype = ctypes.c_void_p
    symbols.recordingDeviceHold.argtypes = [ctypes.c_void_p]
    symbols.recordingDeviceHold.restype = ctypes.c_uint64
    symbols.recordingDeviceRelease.argtypes = [ctypes.c_uint64]
    symbols.recordingDeviceOf.argtypes = [ctypes.c_void_p]
    return symbols


def native_library():
    tensor, a, b = new()
    with a:
        handle = library().recordingDeviceCurrentStream(0)
        assert handle == library().recordingDeviceCurrentStream(-1) == a.native_handle
    library().recordingDeviceAccess(handle, tensor.data_ptr(), BYTES, 1, b"all_reduce")
    with b:
        tensor.sum()
    found = only("race")
    assert (found.first.what, found.first.stream) == ("all_reduce", recording.name_of(a))
    assert library().recordingDeviceOf(tensor.data_ptr()) == 0
    assert library().recordingDeviceOf(tensor.cpu().data_ptr()) == -1


def native_library_with_wrong_arguments():
    tensor, a, _ = new()
    library().recordingDeviceAccess(None, tensor.data_ptr(), BYTES, 1, b"all_reduce")
    assert "all_reduce" in only("unknown stream").text
    library().recordingDeviceAccess(a.native_handle, tensor.data_ptr(), BYTES + 1, 1, b"broadcast")
    assert only("not device memory").second.bytes == BYTES + 1
    host = torch.zeros(4)
    library().recordingDeviceAccess(a.native_handle, host.data_ptr(), 16, 0, b"broadcast")
    assert only("not device memory").second.address == host.data_ptr()


def native_library_holds_the_stream():
    _, a, _ = new()
    hold = library().recordingDeviceHold(a.native_handle)
    event = a.record_event()
    assert hold and not event.query()
    library().recordingDeviceRelease(hold)
    assert event.query()
    assert library().recordingDeviceHold(None) == 0


def kernel_that_torch_does_not_see():
    tensor, a, b = new()
    with a:
        recording.launch_at("fused", [(tensor.data_ptr(), 40, True)], "recording:0")
        recording.cpu_view(tensor)[:10] = 7
    with b:
        recording.launch_at("fused", [(tensor[9:].data_ptr(), BYTES - 36, False)], "recording:0")
    assert only("race").first.bytes == 4
    assert tensor[:10].tolist() == [7.0] * 10


@pytest.mark.parametrize(
    "case",
    [
        native_library,
        native_library_with_wrong_arguments,
        native_library_holds_the_stream,
        kernel_that_torch_does_not_see,
    ],
)
def test_work_unseen_by_torch(device_world, case):
    device_world(1).run(case, init=False)
