"""The example that counts launches of a backward pass, on a recorded device."""

import runpy
from pathlib import Path

import recording_device
import torch
from on_ranks import on_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cuda_gradients.py"


def launches(example, way):
    """How many kernels a backward pass of the example's model launches on the device."""
    model = example["build"](way)
    for _ in range(2):  # DDP builds its buckets anew after the first pass
        recording_device.clear()
        example["backward"](model)
    return len(recording_device.log("launch"))


@on_ranks(1, world="nccl_world")
def test_the_synchronizer_launches_less_than_ddp():
    example = runpy.run_path(str(EXAMPLE))
    values = example["build"].__globals__
    values.update(DEVICE=torch.device("recording:0"), STOCK="fastcoll")
    ways = {way: launches(example, way) for way in ("alone", "DDP", "GradientSynchronizer")}
    alone, ddp, ours = ways.values()
    assert ours == alone  # one rank's average in place needs no launch
    assert ddp >= alone + 160  # a copy of each gradient, and more
