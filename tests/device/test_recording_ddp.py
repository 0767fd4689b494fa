"""DDP on the recording device, over a process group that is in order, or lacks one thing.

The group has one rank. It does on streams what a backend for GPUs does, written out in Python.
"""

import copy

import pytest
import recording_device as recording
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class StreamWork(dist._Work):
    """A collective that was launched; the future's value waits for it on the callers' streams."""

    def __init__(self, future, end):
        super().__init__()
        self._future, self._end = future, end

    def wait(self, timeout=None):
        torch.recording.current_stream().wait_event(self._end)
        return True

    def get_future(self):
        return self._future


class OneRank(dist.ProcessGroup):
    """All-reduce and broadcast on a communication stream."""

    def __init__(self, lacking):
        super().__init__(0, 1)
        self.lacking = lacking
        self.stream = torch.Stream(device="recording:0", priority=-1)

    def allreduce(self, tensors, options):
        return self._launch("all_reduce", tensors)

    def broadcast(self, tensors, options):
        return self._launch("broadcast", tensors)

    def allgather(self, outputs, inputs, options):
        for output, tensor in zip(outputs[0], inputs, strict=True):
            output.copy_(tensor)
        future = torch.futures.Future()
        future.set_result(outputs)
        return StreamWork(future, torch.recording.current_stream().record_event())

    def getBackendName(self):
        return "one-rank"

    def _launch(self, what, tensors):
        if self.lacking != "the wait before":
            self.stream.wait_stream(torch.recording.current_stream())
        with self.stream:
            recording.launch(what, reads=tensors, writes=tensors)
            for tensor in tensors:
                tensor.record_stream(self.stream)
            future = torch.futures.Future(devices=["recording:0"])
            if self.lacking != "the wait after":
                future.set_result(tensors)
        if self.lacking == "the wait after":
            future.set_result(tensors)
        return StreamWork(future, self.stream.record_event())


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)
    )


def train(model, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        inputs = torch.randn(6, 8, generator=random).to(device)
        loss = model(inputs).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def train_with_ddp(lacking):
    """Train on device and on CPU; return the kinds of violations and what they name."""
    expected = train(network(), "cpu")
    recording.clear()
    group = OneRank(lacking)
    model = DistributedDataParallel(
        copy.deepcopy(network()).to("recording:0"), process_group=group, bucket_cap_mb=0.001
    )
    parameters = train(model, "recording:0")
    for ours, theirs in zip(parameters, expected, strict=True):
        assert torch.equal(ours, theirs)
    reduced = [e for e in recording.log("launch") if e.what == "all_reduce"]
    assert len(reduced) > 3, reduced  # more than one bucket in three steps
    assert {entry.stream for entry in reduced} == {recording.name_of(group.stream)}
    del model
    found = recording.violations()
    recording.clear()
    return [(v.kind, v.first.what, v.second.what) for v in found]


def test_ddp_in_order(device_world):
    assert device_world(1).run(train_with_ddp, None, init=False) == [[]]


@pytest.mark.parametrize("lacking", ["the wait before", "the wait after"])
def test_ddp_out_of_order(device_world, lacking):
    (found,) = device_world(1).run(train_with_ddp, lacking, init=False)
    assert found
    assert {kind for kind, _, _ in found} <= {"race", "freed early"}
    assert any("all_reduce" in (first, second) for _, first, second in found)
