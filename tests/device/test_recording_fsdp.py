"""FSDP on the recording device: torch's own streams and events are all in order.

The collectives do nothing, so numbers mean nothing here; only the order is looked at.
"""

import recording_device as recording
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train_sharded():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("recording:fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("recording", (2,))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("recording:0")
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    recording.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Gradients are made on the stream of the reduce-scatter, which waits for the optimizer later.
    with recording.no_violations(), recording.judged_at_reuse():
        for _ in range(3):
            model(torch.ones(4, 8, device="recording:0")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    streams = {entry.stream for entry in recording.log("launch")}
    assert "recording:0 default" in streams
    assert len([name for name in streams if "high" in name]) >= 2, streams
    assert recording.log("synchronize") == []


def test_fsdp_in_order(device_world):
    device_world(1).run(train_sharded, init=False)
