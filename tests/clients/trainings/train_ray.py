"""Ray Train: TorchTrainer starts the ranks itself; TorchConfig takes the name of a backend."""

import json
import os
import sys
import tempfile
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

BATCH = 64
FOLDER = str(Path(__file__).parent)


def train(settings):
    """Is one rank."""
    sys.path.insert(0, settings["folder"])
    import torch
    from measured import STEPS, Measured, build_mlp, digits
    from torch import nn
    from torch.utils.data import DataLoader

    context = ray.train.get_context()
    data = digits(STEPS * BATCH * context.get_world_size())
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, BATCH, shuffle=False))
    model = ray.train.torch.prepare_model(build_mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    measured = Measured()
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        measured.step(loss)
    ray.train.report({"loss": measured.losses[-1]})
    if context.get_world_rank() == 0:
        Path(settings["result"]).write_text(json.dumps(measured.result("ray")))


ray.init(num_cpus=int(os.environ["RANKS"]) + 1, include_dashboard=False, log_to_driver=False)
with tempfile.TemporaryDirectory() as folder:
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": FOLDER, "result": f"{folder}/result.json"},
        torch_config=TorchConfig(backend=os.environ["BACKEND"]),
        scaling_config=ScalingConfig(num_workers=int(os.environ["RANKS"]), use_gpu=False),
        run_config=RunConfig(storage_path=folder),
    )
    trainer.fit()
    print("\nCLIENT " + Path(folder, "result.json").read_text(), flush=True)
ray.shutdown()
