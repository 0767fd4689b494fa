"""Lightning's Trainer with its DDP strategy, which takes the name of a backend."""

import os

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from measured import STEPS, Measured, build_mlp, digits
from torch import nn
from torch.utils.data import DataLoader

BATCH = 64
RANKS = int(os.environ["WORLD_SIZE"])


class Classifier(lightning.LightningModule):
    """Logs the loss, its mean over the ranks, and a count of samples, an integer."""

    def __init__(self):
        super().__init__()
        self.network = build_mlp()
        self.measured = Measured()

    def training_step(self, batch, _):
        """Return the loss of a batch."""
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.network(inputs), labels)
        self.log("loss", loss, sync_dist=True)
        self.log("samples", torch.tensor(len(labels)), sync_dist=True, reduce_fx="sum")
        self.log("longest", len(labels), sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        """Take the loss of the step."""
        self.measured.step(outputs["loss"])

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_train_end(self):
        """Report while the group is there."""
        self.measured.report("lightning")


lightning.seed_everything(0)
trainer = lightning.Trainer(
    accelerator="cpu", devices=RANKS, max_epochs=1, logger=False, enable_checkpointing=False,
    strategy=DDPStrategy(process_group_backend=os.environ["BACKEND"]), enable_progress_bar=False,
)  # fmt: skip
trainer.fit(Classifier(), DataLoader(digits(STEPS * BATCH * RANKS), BATCH, shuffle=True))
assert trainer.callback_metrics["samples"] == BATCH * RANKS, trainer.callback_metrics
