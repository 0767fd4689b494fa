"""Ignite: idist.Parallel makes the group, and knows its backends by name."""

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.metrics import Average
from measured import STEPS, Measured, build_mlp, digits
from torch import nn

BATCH = 64


def train(rank):
    """Is one rank."""
    ranks = idist.get_world_size()
    loader = idist.auto_dataloader(digits(STEPS * BATCH * ranks), batch_size=BATCH * ranks)
    model = idist.auto_model(build_mlp())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)
    Average().attach(trainer, "loss")  # of all ranks, at the end of the epoch
    measured = Measured()
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: measured.step(engine.state.output)
    )
    state = trainer.run(loader, max_epochs=1)
    assert state.metrics["loss"] > 0
    assert idist.all_reduce(1) == ranks
    idist.barrier()
    measured.report("pytorch-ignite")


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(train)
