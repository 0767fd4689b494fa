"""Loading the recording device into a process, and what lives beside it there."""

import pytest
import recording_device as recording
import torch
import torch.distributed as dist
from world import Worlds


def load_after_backward():
    with pytest.raises(RuntimeError, match=r"call recording_device.load\(\) first"):
        recording.violations()
    torch.ones(1, requires_grad=True).sum().backward()
    with pytest.raises(RuntimeError, match="load\\(\\) comes too late"):
        recording.load()


def test_load_after_backward_says_so(device_world, tmp_path):
    worlds = Worlds(tmp_path)
    worlds(1).run(load_after_backward, init=False)
    worlds.close()


def collectives_on_cpu():
    tensor = torch.full((10,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    words = [None] * dist.get_world_size()
    dist.all_gather_object(words, f"rank {dist.get_rank()}")
    return tensor[0].item(), words


def test_collectives_on_cpu_beside_it(device_world):
    expected = (3.0, ["rank 0", "rank 1"])
    assert device_world(2).run(collectives_on_cpu) == [expected, expected]


def load_again():
    recording.clear()
    torch.ones(3, device="recording:0")
    recording.load()
    assert len(recording.log("launch")) == 1
    return str(recording.build())


def test_load_again_changes_nothing(device_world):
    assert device_world(1).run(load_again, init=False) == [str(recording.build())]
