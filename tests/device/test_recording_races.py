"""The recording device finds what has no order."""

import pytest
import recording_device as recording
import torch
from two_streams import BYTES, new, only


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


def one_race_hides_no_other():
    tensor, a, b = new()
    third = torch.Stream(device="recording:0")
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


def between_devices_without_order():
    tensor, a, _ = new("recording:0")
    there = torch.zeros(1000, device="recording:1")
    with a:
        tensor.fill_(3)
    there.copy_(tensor, non_blocking=True)  # by the current streams, not by a
    assert only("race").second.what == "aten::copy_"


def reported_accesses():
    """The log says of each operator what it read and what it wrote."""
    a, b = torch.ones(4, device="recording:0"), torch.ones(4, device="recording:0")
    out = torch.empty(4, device="recording:0")
    recording.clear()
    torch.mul(a, b, out=out)
    a.copy_(b)
    out[1:3].zero_()
    touches = [
        (entry.what, [(touch.address, touch.bytes, touch.write) for touch in entry.touches])
        for entry in recording.log("launch")
    ]
    assert touches == [
        (
            "aten::mul",
            [(a.data_ptr(), 16, False), (b.data_ptr(), 16, False), (out.data_ptr(), 16, True)],
        ),
        ("aten::copy_", [(b.data_ptr(), 16, False), (a.data_ptr(), 16, True)]),
        ("aten::zero_", [(out.data_ptr() + 4, 8, True)]),
    ]


def new_memory_holds_no_zeros():
    assert torch.empty(4, device="recording:0").abs().min().item() > 1e28


@pytest.mark.parametrize(
    "case",
    [
        read_without_waiting_for_the_write,
        write_without_waiting_for_the_read,
        two_writes,
        one_race_hides_no_other,
        wait_for_an_event_recorded_too_early,
        wait_for_another_stream_than_the_writer,
        copy_to_the_host_without_blocking_orders_nothing,
        synchronize_before_the_write,
        overlapping_columns,
        free_before_the_other_stream_is_done,
        record_stream_of_one_stream_and_use_on_another,
        new_memory_while_its_stream_is_busy,
        between_devices_without_order,
        reported_accesses,
        new_memory_holds_no_zeros,
    ],
)
def test_finds(device_world, case):
    device_world(1).run(case, init=False)
