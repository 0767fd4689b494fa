"""Data-parallel training: norm, finiteness and casts of gradients are part of the all-reduce, not separate passes.

hook.py           FusedAllreduceState, fused_allreduce_hook: for DistributedDataParallel.register_comm_hook
synchronizer.py   GradientSynchronizer: reduces the gradients where they are, in place of DistributedDataParallel
statistics.py     the norm of the reduced gradients, and clipping
reduction.py      the all-reduce of one bucket
logical.py        logical ranks: which shards and which parts of their sum belong to a rank
shards.py         passes over the shards of a batch, with the same bits on any number of ranks
"""

from fastcoll._wires import WIRE_DTYPES
from fastcoll.ddp.hook import FusedAllreduceState, fused_allreduce_hook
from fastcoll.ddp.statistics import GradientStatistics
from fastcoll.ddp.synchronizer import GradientSynchronizer

__all__ = [
    "WIRE_DTYPES",
    "FusedAllreduceState",
    "GradientStatistics",
    "GradientSynchronizer",
    "fused_allreduce_hook",
]
