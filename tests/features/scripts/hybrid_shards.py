"""FSDP2 under torchrun: shards inside a host, replicas between hosts, against one process."""

import os

import torch.distributed as dist
from test_hosts_training import hybrid_shards

dist.init_process_group(os.environ["FASTCOLL_TEST_BACKEND"])
print(f"rank {dist.get_rank()} shards over {hybrid_shards()}")
dist.destroy_process_group()
