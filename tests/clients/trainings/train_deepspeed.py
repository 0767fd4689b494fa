"""DeepSpeed with ZeRO-1: the optimizer's state is spread over the ranks."""

import os

import deepspeed
import torch
from measured import STEPS, Measured, build_mlp, digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

BATCH = 64

deepspeed.init_distributed(dist_backend=os.environ["BACKEND"])
ranks = torch.distributed.get_world_size()
model = build_mlp()
settings = {
    "train_micro_batch_size_per_gpu": BATCH,
    "train_batch_size": BATCH * ranks,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
data = digits(STEPS * BATCH * ranks)
measured = Measured()
for inputs, labels in DataLoader(data, BATCH, sampler=DistributedSampler(data)):
    loss = nn.functional.cross_entropy(engine(inputs), labels)
    engine.backward(loss)
    engine.step()
    measured.step(loss)
measured.report("deepspeed")
torch.distributed.destroy_process_group()
