"""The recording device finds what has no order, and notes what the host waits for.

What it takes wrongly for a violation fails the tests that meet it.
"""

import ctypes
import threading
import time

import pytest
import recording_device as recording
import torch
from on_ranks import on_ranks

DEVICE = "recording:0"
BYTES = 4 * 1000

pytestmark = on_ranks(1, world="device_world", init=False)


def new():
    """A tensor, and two streams that may be in use when it is freed."""
    recording.clear()
    tensor = torch.zeros(1000, device=DEVICE)
    a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    tensor.record_stream(a)
    tensor.record_stream(b)
    torch.recording.synchronize(DEVICE)
    return tensor, a, b


def only(kind):
    """The one violation there is."""
    found = recording.violations()
    assert [violation.kind for violation in found] == [kind], found
    recording.clear()
    return found[0]


def fill(tensor):
    tensor.fill_(1)


def double(tensor):
    return tensor * 2


def nothing(a, b):
    return lambda: None


def an_event_recorded_before(a, b):
    event = a.record_event()
    return lambda: b.wait_event(event)


def a_wait_for_another_stream(a, b):
    return lambda: b.wait_stream(torch.Stream(device=DEVICE))


def a_wait_of_the_host_before(a, b):
    a.synchronize()
    return lambda: None


FILL, MUL = ("aten::fill_", True), ("aten::mul", False)
RACES = {
    # What stream a does; what is meant to order b behind it; what b does; both accesses, and the first byte.
    "a read behind a write": (fill, nothing, double, FILL, MUL, 0),
    "a write behind a read": (double, nothing, lambda t: t[500:].fill_(1), MUL, FILL, BYTES // 2),
    "a write behind a write": (fill, nothing, fill, FILL, FILL, 0),
    "an event recorded before": (fill, an_event_recorded_before, double, FILL, MUL, 0),
    "another stream": (fill, a_wait_for_another_stream, double, FILL, MUL, 0),
    "the host waits before": (fill, a_wait_of_the_host_before, double, FILL, MUL, 0),
    "a copy to the host that does not block": (
        *(lambda t: (fill(t), t.to("cpu", non_blocking=True)), nothing, double),
        *(FILL, MUL, 0),
    ),
}


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_found(name):
    does, order, does_behind, *sides, at = RACES[name]
    tensor, a, b = new()
    wait = order(a, b)
    with a:
        does(tensor)
    wait()
    with b:
        does_behind(tensor)
    found = only("race")
    for side, stream, expected in zip((found.first, found.second), (a, b), sides, strict=True):
        assert (side.what, side.write) == expected
        assert side.stream == recording.name_of(stream)
        assert side.address == tensor.data_ptr() + at and side.bytes == BYTES - at
        assert side.what in found.text and side.stream in found.text


def test_one_race_hides_no_other():
    tensor, a, b = new()
    third = torch.Stream(device=DEVICE)
    tensor.record_stream(third)
    with a:
        tensor.fill_(1)
    with b:
        tensor.fill_(2)
    third.wait_stream(b)
    with third:
        tensor.sum()
    assert [(found.first.stream, found.second.stream) for found in recording.violations()] == [
        (recording.name_of(a), recording.name_of(b)),
        (recording.name_of(a), recording.name_of(third)),
    ]


def test_of_columns_those_that_overlap_race():
    _, a, b = new()
    matrix = torch.zeros(8, 8, device=DEVICE)
    torch.recording.synchronize()
    with a:
        matrix[:, :3].fill_(1)
    with b:
        matrix[:, 3:6].fill_(2)
    assert recording.violations() == []
    with b:
        matrix[:, 2:].fill_(2)
    found = only("race")
    assert (found.first.address, found.first.bytes) == (matrix[0, 2].data_ptr(), 4)


@pytest.mark.parametrize("told", ["nobody", "another stream"])
def test_memory_that_is_freed_while_another_stream_uses_it(told):
    recording.clear()
    side = torch.Stream(device=DEVICE)
    tensor = torch.ones(1000, device=DEVICE)
    side.wait_stream(torch.recording.current_stream())
    with side:
        tensor.sum()
    if told == "another stream":
        tensor.record_stream(torch.Stream(device=DEVICE))
    address = tensor.data_ptr()
    del tensor
    found = only("freed early")
    assert (found.first.what, found.first.stream) == ("aten::sum", recording.name_of(side))
    assert found.second.stream == recording.name_of(torch.recording.default_stream())
    assert (found.first.address, found.first.bytes) == (address, BYTES)


def test_new_memory_while_its_stream_is_busy():
    """The memory may be what the kernel still uses: torch's allocator reuses within a stream."""
    recording.clear()
    side = torch.Stream(device=DEVICE)
    busy = torch.ones(1000, device=DEVICE) * 2
    fresh = torch.empty(1000, device=DEVICE)
    with side:
        fresh.fill_(1)
    assert only("race").first.what == "allocation"
    del busy


def test_devices_without_order_between_them():
    tensor, a, _ = new()
    there = torch.zeros(1000, device="recording:1")
    with a:
        tensor.fill_(3)
    there.copy_(tensor, non_blocking=True)  # by the current streams, not by a
    assert only("race").second.what == "aten::copy_"


def test_what_one_thread_waits_for_another_does_not_know():
    for then, kinds in ((lambda: None, ["race"]), (recording.join_threads, [])):
        tensor, a, b = new()
        with a:
            tensor.fill_(1)
        thread = threading.Thread(target=a.synchronize)
        thread.start()
        thread.join()
        then()
        with b:
            tensor.sum()
        assert [violation.kind for violation in recording.violations()] == kinds


def test_accesses_of_native_libraries_are_checked():
    tensor, a, _ = new()
    access = ctypes.CDLL(None).recordingDeviceAccess
    address, size = ctypes.c_void_p, ctypes.c_size_t
    access.argtypes = [address, address, size, ctypes.c_int, ctypes.c_char_p]
    access.restype = None
    access(None, tensor.data_ptr(), BYTES, 1, b"all_reduce")
    assert "all_reduce" in only("unknown stream").text
    access(a.native_handle, tensor.data_ptr(), BYTES + 1, 1, b"broadcast")
    assert only("not device memory").second.bytes == BYTES + 1
    host = torch.zeros(4)
    access(a.native_handle, host.data_ptr(), 16, 0, b"broadcast")
    assert only("not device memory").second.address == host.data_ptr()


def test_the_log_has_what_each_operator_read_and_wrote():
    a, b = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
    out = torch.empty(4, device=DEVICE)
    assert out.abs().min().item() > 1e28  # no zeros, which would hide what is not written
    recording.clear()
    torch.mul(a, b, out=out)
    a.copy_(b)
    out[1:3].zero_()
    launched = [
        (entry.what, [(touch.address, touch.bytes, touch.write) for touch in entry.touches])
        for entry in recording.log("launch")
    ]
    x, y, z = (tensor.data_ptr() for tensor in (a, b, out))
    assert launched == [
        ("aten::mul", [(x, 16, False), (y, 16, False), (z, 16, True)]),
        ("aten::copy_", [(y, 16, False), (x, 16, True)]),
        ("aten::zero_", [(z + 4, 8, True)]),
    ]


def test_the_log_has_what_streams_and_the_host_wait_for():
    _, a, b = new()
    recording.clear()
    event = torch.Event(device=DEVICE)
    assert event.query()  # never recorded: nothing to ask
    event.record(a)
    event.wait(b)
    assert event.query()
    assert event.query()
    event.synchronize()
    b.synchronize()
    assert b.query()
    name_a, name_b = recording.name_of(a), recording.name_of(b)
    entries = recording.log("record", "block", "query", "synchronize")
    number = entries[0].event
    assert [(e.kind, e.what, e.stream, e.event) for e in entries] == [
        ("record", "", name_a, number),
        ("block", "", name_b, number),
        ("query", "finished", name_a, number),
        ("synchronize", "event", name_a, number),
        ("synchronize", "stream", name_b, 0),
        ("query", "finished", name_b, 0),
    ]
    assert [e.kind for e in recording.log(stream=b)] == ["block", "synchronize", "query"]


WAITS = {
    "stream": lambda stream, tensor: stream.synchronize(),
    "event": lambda stream, tensor: stream.record_event().synchronize(),
    "device": lambda stream, tensor: torch.recording.synchronize(),
    "item": lambda stream, tensor: tensor[0].item(),
    "copy to the host": lambda stream, tensor: tensor.tolist(),
    "size of a result": lambda stream, tensor: tensor.nonzero(),
    "index by a mask": lambda stream, tensor: tensor[tensor > 0],
}


@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits_for_held_work(name):
    recording.clear()
    side = torch.Stream(device=DEVICE)
    with side:
        tensor = torch.ones(4, device=DEVICE)
    token, released = recording.hold(side), []

    def let_go():
        time.sleep(0.05)
        released.append(True)
        recording.release(token)

    thread = threading.Thread(target=let_go)
    thread.start()
    with side:
        WAITS[name](side, tensor)
    assert released and recording.log("synchronize")
    thread.join()


def test_backward_runs_on_the_streams_of_forward():
    recording.clear()
    side = torch.Stream(device=DEVICE)
    weight = torch.ones(1000, device=DEVICE, requires_grad=True)
    side.wait_stream(torch.recording.current_stream())
    with side:
        loss = (weight.sin() * 3).sum()
    weight.record_stream(side)
    here = recording.log("launch")[-1].thread
    loss.backward()
    torch.recording.current_stream().wait_stream(side)
    (cos,) = [entry for entry in recording.log("launch") if entry.what == "aten::cos"]
    assert cos.stream == recording.name_of(side)
    assert cos.thread != here
    torch.testing.assert_close(weight.grad.cpu(), torch.ones(1000).cos() * 3)
    assert recording.violations() == []
