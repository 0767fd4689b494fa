"""torchtitan's Llama 3, its parallel dimensions and its FSDP. Its Trainer knows no CPU, so the loop stands here."""

import torch
from measured import STEPS, Measured, text
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CommConfig, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

BATCH = 2

# Without an accelerator they say "cuda".
parallel_dims.device_type = dist_utils.device_type = "cpu"
ranks = dist_utils.init_distributed(CommConfig())
parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
dims = ParallelDims.from_config(parallelism, ranks)
dist_utils.set_spmd_backend(parallelism.spmd_backend)
training = TrainingConfig(mixed_precision_param="float32", disable_cuda_graphs=True)
specification = model_registry("debugmodel")
for layer in specification.model.layers:  # flex and varlen have no backward on CPU
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
with torch.device("meta"):
    model = specification.model.build()
model = specification.parallelize_fn(
    model, parallel_dims=dims, training=training, parallelism=parallelism,
    compile_config=CompileConfig(), ac_config=None, dump_folder="",
)  # fmt: skip
torch.manual_seed(0)
for module in model.modules():  # else FSDP asks for PREMUL_SUM, which gloo has not
    if isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)
model.to_empty(device="cpu")
model.init_weights(buffer_device=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
own = text(STEPS * BATCH * ranks)[torch.distributed.get_rank() :: ranks]
measured = Measured()
for tokens in own.split(BATCH):
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    dist_utils.clip_grad_norm_(list(model.parameters()), 1.0)
    optimizer.step()
    measured.step(dist_utils.dist_mean(loss.detach(), dims.get_mesh("batch")))
measured.report("torchtitan")
torch.distributed.destroy_process_group()
