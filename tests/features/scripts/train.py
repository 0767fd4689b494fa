"""Trains with DDP under torchrun; rank 0 writes its parameters."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import assert_replicated, network, train


def main(path, steps, ending):
    dist.init_process_group(os.environ["FASTCOLL_TEST_BACKEND"])
    model = DistributedDataParallel(network(), bucket_cap_mb=0.001)
    train(model, int(steps))
    assert_replicated(model.module)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), path)
    level = dist.get_debug_level().name
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} at level {level}")
    if ending == "destroy":
        dist.destroy_process_group()
    return model


model = main(*sys.argv[1:])
if sys.argv[3] == "destroy":
    del model  # else the interpreter ends with group and model alive
