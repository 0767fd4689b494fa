"""The recording device finds what has no order, and leaves alone what has one."""

import ctypes

import pytest
import recording_device as recording
import torch

BYTES = 4 * 1000


def new(device="recording:0"):
    """A tensor and two streams that may be in use when it is freed."""
    recording.clear()
    tensor = torch.zeros(1000, device=device)
    a, b = torch.Stream(device=device), torch.Stream(device=device)
    tensor.record_stream(a)
    tensor.record_stream(b)
    torch.recording.synchronize(device)
    return tensor, a, b


def only(kind):
    """The one violation there is."""
    found = recording.violations()
    assert [violation.kind for violation in found] == [kind], found
    recording.clear()
    return found[0]


def read_without_waiting_for_the_write():
    tensor, a, b = new()
    with a:
        tensor.fill_(1)
    with b:
        doubled = tensor * 2
    found = only("race")
    assert (found.first.what, found.first.stream) == ("aten::fill_", recording.name_of(a))
    assert (found.second.what, found.second.stream) == ("aten::mul", recording.name_of(b))
    assert (found.first.write, found.second.write) == (True, False)
    assert found.first.address == found.second.address == tensor.data_ptr()
    assert found.first.bytes == found.second.bytes == BYTES
    for word in ("aten::fill_", "aten::mul", recording.name_of(a), recording.name_of(b)):
        assert word in found.text
    assert doubled.tolist() == [2.0] * 1000


def write_without_waiting_for_the_read():
    tensor, a, b = new()
    with a:
        doubled = tensor * 2
    with b:
        tensor[500:].fill_(1)
    found = only("race")
    assert (found.first.what, found.second.what) == ("aten::mul", "aten::fill_")
    assert (found.first.write, found.second.write) == (False, True)
    assert found.second.address == tensor[500:].data_ptr()
    assert found.first.bytes == found.second.bytes == BYTES // 2
    del doubled


def two_writes():
    tensor, a, b = new()
    with a:
        tensor.add_(1)
    with b:
        torch.mul(tensor, 0, out=tensor)
    # One for what is written, one for what is read: it is the same tensor.
    assert {violation.kind for violation in recording.violations()} == {"race"}
    recording.clear()


def wait_for_an_event_recorded_too_early():
    tensor, a, b = new()
    event = a.record_event()
    with a:
        tensor.fill_(1)
    b.wait_event(event)
    with b:
        tensor.sum()
    only("race")


def wait_for_another_stream_than_the_writer():
    tensor, a, b = new()
    with a:
        tensor.fill_(1)
    b.wait_stream(torch.Stream(device="recording:0"))
    with b:
        tensor.sum()
    only("race")


def copy_to_the_host_without_blocking_orders_nothing():
    tensor, a, b = new()
    with a:
        tensor.fill_(1)
        tensor.to("cpu", non_blocking=True)
    with b:
        tensor.sum()
    only("race")


def synchronize_before_the_write():
    tensor, a, b = new()
    a.synchronize()
    with a:
        tensor.fill_(1)
    with b:
        tensor.sum()
    only("race")


def overlapping_columns():
    _, a, b = new()
    matrix = torch.zeros(8, 8, device="recording:0")
    torch.recording.synchronize()
    with a:
        matrix[:, :3].fill_(1)
    with b:
        matrix[:, 2:].fill_(2)
    found = only("race")
    assert (found.first.address, found.first.bytes) == (matrix[0, 2].data_ptr(), 4)


def free_before_the_other_stream_is_done():
    recording.clear()
    side = torch.Stream(device="recording:0")
    tensor = torch.ones(1000, device="recording:0")
    side.wait_stream(torch.recording.current_stream())
    with side:
        total = tensor.sum()
    address = tensor.data_ptr()
    del tensor
    found = only("freed early")
    assert (found.first.what, found.first.stream) == ("aten::sum", recording.name_of(side))
    assert found.second.stream == recording.name_of(torch.recording.default_stream())
    assert (found.first.address, found.first.bytes) == (address, BYTES)
    del total


def record_stream_of_one_stream_and_use_on_another():
    recording.clear()
    told, used = torch.Stream(device="recording:0"), torch.Stream(device="recording:0")
    tensor = torch.ones(1000, device="recording:0")
    used.wait_stream(torch.recording.current_stream())
    with used:
        tensor.sum()
    tensor.record_stream(told)
    del tensor
    only("freed early")


def new_memory_while_its_stream_is_busy():
    """The memory may be what the kernel still uses: torch's allocator reuses within a stream."""
    recording.clear()
    side = torch.Stream(device="recording:0")
    busy = torch.ones(1000, device="recording:0") * 2
    fresh = torch.empty(1000, device="recording:0")
    with side:
        fresh.fill_(1)
    assert only("race").first.what == "allocation"
    del busy


def memory_in_use_again_before_the_other_stream_is_done():
    recording.clear()
    side = torch.Stream(device="recording:0")
    with recording.judged_at_reuse():
        tensor = torch.ones(1000, device="recording:0")
        side.wait_stream(torch.recording.current_stream())
        with side:
            tensor.sum()
        del tensor
        assert recording.violations() == []
        fresh = torch.zeros(10, device="recording:0")
    found = only("freed early")
    assert (found.first.what, found.first.stream) == ("aten::sum", recording.name_of(side))
    assert (found.second.what, found.second.address) == ("aten::zero_", fresh.data_ptr())


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


def native_library_holds_the_stream():
    _, a, _ = new()
    hold = library().recordingDeviceHold(a.native_handle)
    event = a.record_event()
    assert hold and not event.query()
    library().recordingDeviceRelease(hold)
    assert event.query()
    assert library().recordingDeviceHold(None) == 0


def native_library_with_wrong_arguments():
    tensor, a, _ = new()
    library().recordingDeviceAccess(None, tensor.data_ptr(), BYTES, 1, b"all_reduce")
    assert "all_reduce" in only("unknown stream").text
    library().recordingDeviceAccess(a.native_handle, tensor.data_ptr(), BYTES + 1, 1, b"broadcast")
    assert only("not device memory").second.bytes == BYTES + 1
    host = torch.zeros(4)
    library().recordingDeviceAccess(a.native_handle, host.data_ptr(), 16, 0, b"broadcast")
    assert only("not device memory").second.address == host.data_ptr()


def kernel_that_torch_does_not_see():
    tensor, a, b = new()
    with a:
        recording.launch("fused", writes=[tensor[:10]])
        recording.cpu_view(tensor)[:10] = 7
    with b:
        recording.launch("fused", reads=[tensor[9:]])
    assert only("race").first.bytes == 4
    assert tensor[:10].tolist() == [7.0] * 10


def between_devices_without_order():
    tensor, a, _ = new("recording:0")
    there = torch.zeros(1000, device="recording:1")
    with a:
        tensor.fill_(3)
    there.copy_(tensor, non_blocking=True)  # by the current streams, not by a
    assert only("race").second.what == "aten::copy_"


@pytest.mark.parametrize(
    "case",
    [
        read_without_waiting_for_the_write,
        write_without_waiting_for_the_read,
        two_writes,
        wait_for_an_event_recorded_too_early,
        wait_for_another_stream_than_the_writer,
        copy_to_the_host_without_blocking_orders_nothing,
        synchronize_before_the_write,
        overlapping_columns,
        free_before_the_other_stream_is_done,
        record_stream_of_one_stream_and_use_on_another,
        new_memory_while_its_stream_is_busy,
        memory_in_use_again_before_the_other_stream_is_done,
        native_library,
        native_library_with_wrong_arguments,
        kernel_that_torch_does_not_see,
        between_devices_without_order,
    ],
)
def test_finds(device_world, case):
    device_world(1).run(case, init=False)


def same_stream():
    tensor, a, _ = new()
    with a:
        for _ in range(3):
            tensor.fill_(1)
            tensor.mul_(2).sum()


def event_recorded_and_waited_for():
    tensor, a, b = new()
    with a:
        tensor.fill_(1)
    b.wait_event(a.record_event())
    with b:
        tensor.add_(1)
    a.wait_stream(b)
    with a:
        assert tensor.add_(1).sum().item() == 3000


def order_through_a_third_stream():
    tensor, a, b = new()
    between = torch.Stream(device="recording:1")
    with a:
        tensor.fill_(1)
    between.wait_stream(a)
    b.wait_stream(between)
    with b:
        tensor.add_(1)


def host_waits(wait):
    tensor, a, b = new()
    with a:
        tensor.fill_(1)
        wait(tensor, a)
    with b:
        tensor.add_(1)
    b.synchronize()


def stream_synchronize():
    host_waits(lambda tensor, stream: stream.synchronize())


def event_synchronize():
    host_waits(lambda tensor, stream: stream.record_event().synchronize())


def device_synchronize():
    host_waits(lambda tensor, stream: torch.recording.synchronize())


def queried_event():
    def poll(tensor, stream):
        assert stream.record_event().query()

    host_waits(poll)


def item():
    host_waits(lambda tensor, stream: tensor[0].item())


def copy_to_the_host():
    host_waits(lambda tensor, stream: tensor.cpu())


def two_reads():
    tensor, a, b = new()
    for stream in (a, b):
        with stream:
            tensor.sum()


def separate_columns():
    _, a, b = new()
    matrix = torch.zeros(8, 8, device="recording:0")
    torch.recording.synchronize()
    with a:
        matrix[:, :3].fill_(1)
    with b:
        matrix[:, 3:].fill_(2)
    torch.recording.synchronize()
    assert matrix.sum().item() == 8 * (3 + 10)


def record_stream():
    recording.clear()
    side = torch.Stream(device="recording:0")
    tensor = torch.ones(1000, device="recording:0")
    side.wait_stream(torch.recording.current_stream())
    with side:
        tensor.sum()
    tensor.record_stream(side)
    address = tensor.data_ptr()
    del tensor
    (entry,) = recording.log("record_stream")
    assert entry.stream == recording.name_of(side)
    assert (entry.touches[0].address, entry.touches[0].bytes) == (address, BYTES)


def free_after_its_own_stream_waited():
    recording.clear()
    side = torch.Stream(device="recording:0")
    tensor = torch.ones(1000, device="recording:0")
    side.wait_stream(torch.recording.current_stream())
    with side:
        tensor.sum()
    torch.recording.current_stream().wait_stream(side)
    del tensor


def wait_between_free_and_reuse():
    recording.clear()
    side = torch.Stream(device="recording:0")
    with recording.judged_at_reuse():
        for _ in range(3):
            tensor = torch.ones(1000, device="recording:0")
            side.wait_stream(torch.recording.current_stream())
            with side:
                tensor.sum()
            del tensor
            torch.recording.current_stream().wait_stream(side)


def made_and_freed_on_a_side_stream():
    recording.clear()
    with torch.Stream(device="recording:0"):
        for _ in range(3):
            tensor = torch.ones(1000, device="recording:0") * 2
            del tensor


def between_devices():
    tensor, _, _ = new("recording:0")
    there = torch.zeros(1000, device="recording:1")
    tensor.fill_(3)
    there.copy_(tensor, non_blocking=True)
    tensor.zero_()
    with torch.recording.device(1):
        assert there.sum().item() == 3000


@pytest.mark.parametrize(
    "case",
    [
        same_stream,
        event_recorded_and_waited_for,
        order_through_a_third_stream,
        stream_synchronize,
        event_synchronize,
        device_synchronize,
        queried_event,
        item,
        copy_to_the_host,
        two_reads,
        separate_columns,
        record_stream,
        free_after_its_own_stream_waited,
        wait_between_free_and_reuse,
        made_and_freed_on_a_side_stream,
        native_library_holds_the_stream,
        between_devices,
    ],
)
def test_accepts(device_world, case):
    device_world(1).run(accepted, case, init=False)


def accepted(case):
    with recording.no_violations():
        case()
    assert recording.violations() == []
