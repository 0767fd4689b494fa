"""The collectives of FSDP2 with staging buffers in shared memory, and float32 sums of 16-bit messages.

model = FSDP2's fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
fastcoll.fsdp.apply(model, wire_dtype=torch.bfloat16)

comms.py      FusedAllGather, FusedReduceScatter: for FSDPModule.set_custom_all_gather, set_custom_reduce_scatter;
              apply, which sets them
staging.py    buffers that are reused
"""

from fastcoll.fsdp.comms import FusedAllGather, FusedReduceScatter, apply

__all__ = ["FusedAllGather", "FusedReduceScatter", "apply"]
