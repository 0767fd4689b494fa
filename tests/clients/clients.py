"""The frameworks that are trained on fastcoll beside gloo: their versions, and how each is told to take fastcoll."""

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT = "FASTCOLL_DEFAULT=1"
REPLACE = "FASTCOLL_REPLACE=gloo"


@dataclass(frozen=True)
class Client:
    """One training.

    setting is the environment variable that changes the backend of a script that is otherwise the
    same; or the framework's own way to name a backend, for which the script reads BACKEND.
    """

    title: str
    script: str
    environment: str
    setting: str
    torchrun: bool = True

    def variables(self, backend: str) -> dict[str, str]:
        """Return what is set in the environment of a training on a backend."""
        if self.setting not in (DEFAULT, REPLACE):
            return {"BACKEND": backend}
        name, _, value = self.setting.partition("=")
        return {name: value} if backend == "fastcoll" else {}


ENVIRONMENTS: Mapping[str, tuple[str, ...]] = {
    "torch": (),
    "accelerate": ("accelerate==1.15.0",),
    "transformers": ("transformers==5.23.0", "accelerate==1.15.0"),
    "lightning": ("lightning==2.6.6",),
    "ray": ("ray[train]==2.60.0",),
    "deepspeed": ("deepspeed==0.19.8",),
    "ignite": ("pytorch-ignite==0.5.5",),
    "torchtitan": ("torchtitan==0.3.0",),
}
"""What pip installs, by environment. torch and fastcoll are those of the environment in use."""

PREPARED: Mapping[str, str] = {
    "deepspeed": "from deepspeed.comm.torch import build_shm_op; build_shm_op()",
}
"""Python that runs once in a new environment, and compiles what the trainings need."""

CLIENTS: Mapping[str, Client] = {
    "ddp": Client("DistributedDataParallel", "train_ddp.py", "torch", DEFAULT),
    "gpt": Client("small GPT, DDP", "train_gpt.py", "torch", 'init_process_group("fastcoll")'),
    "fsdp2": Client("FSDP2", "train_fsdp2.py", "torch", DEFAULT),
    "tensor_parallel": Client("tensor parallelism", "train_tensor_parallel.py", "torch", DEFAULT),
    "accelerate": Client("Accelerate", "train_accelerate.py", "accelerate", REPLACE),
    "trainer": Client("Hugging Face Trainer", "train_trainer.py", "transformers", REPLACE),
    "lightning": Client(
        "Lightning Trainer",
        "train_lightning.py",
        "lightning",
        'DDPStrategy(process_group_backend="fastcoll")',
    ),
    "fabric": Client(
        "Lightning Fabric",
        "train_fabric.py",
        "lightning",
        'DDPStrategy(process_group_backend="fastcoll")',
    ),
    "ray": Client(
        "Ray Train", "train_ray.py", "ray", 'TorchConfig(backend="fastcoll")', torchrun=False
    ),
    "deepspeed": Client(
        "DeepSpeed, ZeRO-1",
        "train_deepspeed.py",
        "deepspeed",
        'init_distributed(dist_backend="fastcoll")',
    ),
    "ignite": Client("Ignite", "train_ignite.py", "ignite", REPLACE),
    "torchtitan": Client(
        "torchtitan's model and parallelisms", "train_torchtitan.py", "torchtitan", DEFAULT
    ),
}
"""By the word of the command line, in the order of the table."""
