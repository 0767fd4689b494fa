"""Lists and wires while the user captures a graph: what is launched is what is launched at other times."""

import contextlib
import os
from datetime import timedelta

import peer_memory
import pytest
import recording_device
import torch
import torch.distributed as dist
from captures import driver
from on_ranks import on_ranks
from peer_memory import DEVICE

import fastcoll
from fastcoll import buckets

pytestmark = on_ranks(2, world="peer_world", kill=True, fresh=True)  # with its driver


class Capture:
    """A graph that captures the current stream, as the stand-in for a driver tells it to everyone who asks.

    Work is done at once nevertheless.
    """

    def __init__(self):
        self._driver = driver()
        self._stream = None
        buckets._is_captured = lambda device: self._captures()

    def destroy(self, graph):
        self._driver.destroy_graph(graph)

    def _captures(self):
        current = torch.accelerator.current_stream(torch.device(DEVICE))
        return self._stream is not None and current == self._stream

    @contextlib.contextmanager
    def __call__(self):
        self._stream = torch.accelerator.current_stream(torch.device(DEVICE))
        self._driver.capture(self._stream.native_handle)
        with recording_device.no_violations():
            yield
        self._driver.capture(None)
        self._stream = None
        assert self._driver.broken_captures() == 0


def ones(count=6):
    return [torch.ones(20, device=DEVICE) for _ in range(count)]


def captured_launches():
    """What went into the graph."""
    stream = torch.accelerator.current_stream(torch.device(DEVICE))
    made = [entry.what for entry in recording_device.log("launch", stream=stream)]
    return [what for what in made if not what.startswith("aten::fill_")]


def test_the_first_call_for_kernels_cannot_be_captured():
    """Where the ranks map nothing, this call agrees on kernels, and compiles them."""
    with peer_memory.MAPPER.changed(refuses={"missing"}):
        group = dist.new_group()
        dist.all_reduce(ones(1)[0], group=group)
    capture = Capture()
    with capture(), pytest.raises(ValueError, match=r"compiles kernels.*before the capture"):
        fastcoll.all_reduce_coalesced(ones(), group=group)
    fastcoll.all_reduce_coalesced(ones(), group=group)
    tensors = ones()
    with capture():
        fastcoll.all_reduce_coalesced(tensors, group=group)
    assert all(tensor.cpu().eq(2).all() for tensor in tensors)


@pytest.mark.parametrize(
    ("algorithm", "launches"), [("two_shot", (2, 2)), ("ring", (3, 3)), ("nccl", (3, 5))]
)
def test_a_capture_launches_what_a_call_outside_of_it_does(algorithm, launches):
    """Lists whose tensors are others than before the capture, with no list before it at all on rank 1."""
    os.environ["FASTCOLL_ALGO"] = algorithm
    group = dist.new_group()
    dist.all_reduce(torch.ones(3, device=DEVICE), group=group)
    reduces = peer_memory.reduces_of(group)
    capture = Capture()
    wires = (None, torch.bfloat16)
    outside = {}
    for wire in wires:
        recording_device.clear()
        fastcoll.all_reduce_coalesced(ones(), group=group, wire_dtype=wire)
        outside[wire] = [what for what in captured_launches() if what != "aten::copy_"]
    if dist.get_rank() == 1:
        reduces.plans.clear()
        reduces._workspaces.clear()
    for wire, number in zip(wires, launches, strict=True):
        kept = ones()  # alive, so that no later list gets its addresses
        with capture():
            tensors = ones()
            fastcoll.all_reduce_coalesced(tensors, group=group, wire_dtype=wire)
            assert captured_launches() == outside[wire]
        assert reduces.plans.pinned[-1].launches == number
        assert all(tensor.cpu().eq(2).all() for tensor in tensors)
        # The tables are there for calls of the same tensors outside of the graph, too.
        fastcoll.all_reduce_coalesced(tensors, group=group, wire_dtype=wire)
        assert all(tensor.cpu().eq(4).all() for tensor in tensors)
        del kept
    with capture():
        single = torch.ones(77, device=DEVICE)
        fastcoll.all_reduce_coalesced([single], group=group, wire_dtype=torch.bfloat16)
    assert single.cpu().eq(2).all()


def test_captures_with_a_factor_and_a_new_timeout():
    """A capture has a plan of its own, with the timeout of then; what was captured goes on after the next timeout."""
    dist.all_reduce(torch.ones(3, device=DEVICE))
    reduces = peer_memory.reduces_of()
    capture = Capture()
    scaled = ones()
    fastcoll.all_reduce_coalesced(scaled, scale=0.25)
    built = reduces.plans.built
    with capture():
        dist.group.WORLD.set_timeout(timedelta(seconds=17))
        fastcoll.all_reduce_coalesced(scaled, scale=0.25)
        fastcoll.all_reduce_coalesced(scaled, scale=0.25)
    (plan,) = reduces.plans.pinned  # once
    assert plan.launches == 2 and reduces.plans.built == built + 1
    fastcoll.all_reduce_coalesced(scaled, scale=0.25)
    assert reduces.region.peers.buffers.seconds == 2 * 17
    assert reduces.plans.built == built + 2
    assert len(reduces.plans.pinned) == 1, "a plan of the graph was forgotten with its timeout"
    assert all(tensor.cpu().eq(2.0**-4).all() for tensor in scaled)


def test_two_graphs_share_no_workspace_and_free_what_they_used():
    """Each graph may be replayed on another stream."""
    os.environ["FASTCOLL_ALGO"] = "nccl"
    group = dist.new_group()
    tensors = ones()
    fastcoll.all_reduce_coalesced(tensors, group=group)
    plans = peer_memory.reduces_of(group).plans
    capture = Capture()
    buckets = []
    for _ in range(2):
        with capture():
            for _ in range(2):
                fastcoll.all_reduce_coalesced(tensors, group=group)
            reduced = [e for e in recording_device.log("launch") if e.what == "allReduce"]
        buckets.append({touch.address for entry in reduced for touch in entry.touches})
    assert [len(of) for of in buckets] == [1, 1]  # a graph's calls take turns
    assert buckets[0].isdisjoint(buckets[1])
    fastcoll.all_reduce_coalesced(tensors, group=group)
    assert len(plans.pinned) == 2
    for left in (1, 0):
        capture.destroy(left + 1)
        fastcoll.all_reduce_coalesced(tensors, group=group)
        assert len(plans.pinned) == left
    assert all(tensor.cpu().eq(2.0**8).all() for tensor in tensors)


def test_a_launch_follows_the_last_of_its_kind():
    """The second of two launches follows the first, though a graph has captured one in between.

    It waits for nothing that the first one's stream got later.
    """
    x, y, z = (torch.ones(500, device=DEVICE) for _ in range(3))
    dist.all_reduce(x)
    loaded = driver()
    recording_device.clear()
    work = dist.all_reduce(y, async_op=True)
    later = dist.all_reduce(torch.ones(3, dtype=torch.int64, device=DEVICE), async_op=True)
    loaded.capture(torch.accelerator.current_stream().native_handle)
    dist.all_reduce(z)
    loaded.capture(None)
    dist.all_reduce(x)
    current = recording_device.name_of(torch.accelerator.current_stream())
    marks = recording_device.log("record", "block", "launch")
    kernels = [at for at, e in enumerate(marks) if e.what == "staged_kernel"]
    here = [at for at in kernels if marks[at].stream == current]
    first = marks[kernels[0]].stream
    captured_at, last = here
    assert first != current
    between = marks[captured_at + 1 : last]
    waits = [e.event for e in between if e.kind == "block" and e.stream == current]
    nccl = min(at for at, e in enumerate(marks) if e.what == "allReduce" and e.stream == first)
    made = [e.event for e in marks[kernels[0] : nccl] if e.kind == "record" and e.stream == first]
    found = [(e.kind, e.stream, e.event, e.what) for e in marks]
    assert set(waits) & set(made), found
    assert not [e for e in marks[nccl:last] if e.kind == "record" and e.event in waits], found
    work.wait()
    later.wait()
