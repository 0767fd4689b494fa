"""The Hugging Face Trainer with a small GPT-2 of random weights."""

import tempfile

import torch
from measured import STEPS, VOCABULARY, Measured, text
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

BATCH = 8
measured = Measured()


class Laps(TrainerCallback):
    """Takes the loss that the Trainer logs after each step."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Called on every rank after each step, as logging_steps is 1."""
        if "loss" in logs:
            measured.step(logs["loss"])


class Sequences(torch.utils.data.Dataset):
    """Tokens, in the form in which the Trainer wants them."""

    def __init__(self, samples):
        self.tokens = text(samples)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=BATCH, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, seed=0, learning_rate=1e-3,
    )  # fmt: skip
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    data = Sequences(STEPS * BATCH * arguments.world_size)
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[Laps()])
    trainer.train()
    assert trainer.evaluate(Sequences(32))["eval_loss"] > 0
measured.report("transformers", "accelerate")
