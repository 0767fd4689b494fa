"""The recording device leaves alone what is in order."""

import pytest
import recording_device as recording
import torch
from test_recording_streams import WAITS
from two_streams import BYTES, new


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
        wait(a, tensor[:4])
    with b:
        tensor.add_(1)
    b.synchronize()


def asks_event(stream, tensor):
    assert stream.record_event().query()


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
        two_reads,
        separate_columns,
        record_stream,
        free_after_its_own_stream_waited,
        made_and_freed_on_a_side_stream,
        between_devices,
    ],
)
def test_accepts(device_world, case):
    device_world(1).run(accepted, case, init=False)


@pytest.mark.parametrize("wait", [*WAITS, asks_event])
def test_accepts_what_the_host_waited_for(device_world, wait):
    device_world(1).run(accepted, host_waits, wait, init=False)


def accepted(case, *arguments):
    with recording.no_violations():
        case(*arguments)
    assert recording.violations() == []
