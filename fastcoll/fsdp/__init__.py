"""The collectives of FSDP2 with staging in memory that the ranks share, a wire dtype, and the norm of the shards.

model = FSDP2's fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
shards = fastcoll.fsdp.apply(model, wire_dtype=torch.bfloat16, gradient_norm=True)
loss.backward()
shards.clip_grad_norm_(model.parameters(), 1.0)

plug.py       apply, ShardedGradients
comms.py      FusedAllGather, FusedReduceScatter: for FSDPModule.set_custom_all_gather, set_custom_reduce_scatter
received.py   the sum of what the ranks have sent to this one, in float32
staging.py    buffers that are used again
"""

from fastcoll.fsdp.comms import FusedAllGather, FusedReduceScatter
from fastcoll.fsdp.plug import ShardedGradients, apply

__all__ = ["FusedAllGather", "FusedReduceScatter", "ShardedGradients", "apply"]
