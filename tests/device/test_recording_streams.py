"""Streams, events, futures and threads of the recording device."""

import threading
import time

import pytest
import recording_device as recording
import torch


def launched(what, **filters):
    """The streams on which this was launched."""
    return [entry.stream for entry in recording.log("launch", **filters) if entry.what == what]


def log_of_events():
    recording.clear()
    a, b = torch.Stream(device="recording:0"), torch.Stream(device="recording:0")
    event = torch.Event(device="recording:0")
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


def held_streams_do_not_finish():
    recording.clear()
    a, b = torch.Stream(device="recording:0"), torch.Stream(device="recording:0")
    before = a.record_event()
    token = recording.hold(a)
    with a:
        torch.ones(4, device="recording:0")
    behind = a.record_event()
    assert before.query()
    assert not behind.query()
    assert not a.query()
    unrelated = b.record_event()
    b.wait_event(behind)
    waiting = b.record_event()
    assert unrelated.query()
    assert not waiting.query()
    recording.release(token)
    assert behind.query()
    assert waiting.query()
    assert b.query()


def holds_queue_up():
    recording.clear()
    side = torch.Stream(device="recording:0")
    first = recording.hold(side)
    between = side.record_event()
    second = recording.hold(side)
    after = side.record_event()
    recording.release(first)
    assert between.query()
    assert not after.query()
    recording.release(second)
    assert after.query()
    with recording.held(side):
        recording.hold(side)
        assert not side.query()
        recording.release(side)
        assert side.query()


def waits_until_released(wait):
    recording.clear()
    side = torch.Stream(device="recording:0")
    with side:
        tensor = torch.ones(4, device="recording:0")
    token = recording.hold(side)
    released = []

    def let_go():
        time.sleep(0.05)
        released.append(True)
        recording.release(token)

    thread = threading.Thread(target=let_go)
    thread.start()
    with side:
        wait(side, tensor)
    assert released
    thread.join()


def synchronizes_stream(stream, tensor):
    stream.synchronize()


def synchronizes_event(stream, tensor):
    stream.record_event().synchronize()


def synchronizes_device(stream, tensor):
    torch.recording.synchronize()


def reads_item(stream, tensor):
    assert tensor[0].item() == 1


def copies_to_host(stream, tensor):
    assert tensor.tolist() == [1.0] * 4


def nonzero_needs_a_size(stream, tensor):
    tensor.nonzero()


def indexes_by_a_mask(stream, tensor):
    assert tensor[tensor > 0].numel() == 4


WAITS = [
    synchronizes_stream,
    synchronizes_event,
    synchronizes_device,
    reads_item,
    copies_to_host,
    nonzero_needs_a_size,
    indexes_by_a_mask,
]
"""Called with a stream and a tensor of ones."""


def index_does_not_wait():
    recording.clear()
    table = torch.arange(10, device="recording:0")
    torch.recording.synchronize()
    with recording.held(torch.recording.current_stream()):
        picked = table[table[:3]]
    assert picked.tolist() == [0, 1, 2]


def callbacks_of_futures():
    """They run on streams of their own, which wait for the value and are told of its memory."""
    recording.clear()
    side = torch.Stream(device="recording:0")
    future = torch.futures.Future(devices=["recording:0"])
    ran = []

    def double(done):
        ran.append(torch.recording.current_stream())
        return done.value() * 2

    doubled = future.then(double)
    with side:
        value = torch.ones(1000, device="recording:0")
        future.set_result(value)
    (stream,) = ran
    assert stream not in (side, torch.recording.current_stream())
    assert launched("aten::mul") == [recording.name_of(stream)]
    assert recording.log("record")[0].stream == recording.name_of(side)
    assert recording.log("block")[0].stream == recording.name_of(stream)
    result = doubled.wait()  # the current stream waits for the callback's, the host for nothing
    assert recording.log("synchronize") == []
    assert recording.log("block")[-1].stream == "recording:0 default"
    told = [(e.stream, e.touches[0].address) for e in recording.log("record_stream")]
    assert (recording.name_of(stream), value.data_ptr()) in told
    assert ("recording:0 default", result.data_ptr()) in told
    del value, future
    assert result.sum().item() == 2000
    assert recording.violations() == []


def backward_runs_on_the_streams_of_forward():
    recording.clear()
    side = torch.Stream(device="recording:0")
    weight = torch.ones(1000, device="recording:0", requires_grad=True)
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


def backward_knows_what_its_caller_waited_for():
    recording.clear()
    side = torch.Stream(device="recording:0")
    weight = torch.ones(1000, device="recording:0", requires_grad=True)
    side.wait_stream(torch.recording.current_stream())
    loss = weight.sin().sum()
    with side, torch.no_grad():
        scale = torch.full((), 2.0, device="recording:0")
    side.synchronize()
    loss.backward(scale)
    assert weight.grad.shape == (1000,)
    assert recording.violations() == []


def knowledge_of_another_thread():
    def synchronize_elsewhere(then):
        recording.clear()
        a, b = torch.Stream(device="recording:0"), torch.Stream(device="recording:0")
        tensor = torch.ones(1000, device="recording:0")
        tensor.record_stream(a)
        tensor.record_stream(b)
        a.wait_stream(torch.recording.current_stream())
        with a:
            tensor.fill_(1)
        thread = threading.Thread(target=a.synchronize)
        thread.start()
        thread.join()
        then()
        with b:
            tensor.sum()
        found = [violation.kind for violation in recording.violations()]
        recording.clear()
        return found

    assert synchronize_elsewhere(lambda: None) == ["race"]
    assert synchronize_elsewhere(recording.join_threads) == []


@pytest.mark.parametrize(
    "case",
    [
        log_of_events,
        held_streams_do_not_finish,
        holds_queue_up,
        index_does_not_wait,
        callbacks_of_futures,
        backward_runs_on_the_streams_of_forward,
        backward_knows_what_its_caller_waited_for,
        knowledge_of_another_thread,
    ],
)
def test_streams(device_world, case):
    device_world(1).run(case, init=False)


@pytest.mark.parametrize("wait", WAITS)
def test_host_waits_for_held_work(device_world, wait):
    device_world(1).run(waits_until_released, wait, init=False)
