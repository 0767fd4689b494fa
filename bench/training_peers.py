"""Ways to train a module in data parallel that differ from plain DistributedDataParallel over a backend."""

# No `from __future__ import annotations`: DDP looks at the hook's.
import inspect
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fastcoll.bench.control import Control
from fastcoll.bench.torch_peer import TorchPeer
from fastcoll.ddp import FusedAllreduceState, GradientSynchronizer, fused_allreduce_hook

__all__ = ["BatchedPeer", "CompressPeer", "HookPeer", "SynchronizerPeer", "UnreducedPeer"]


class _TrainingPeer(TorchPeer):
    """The backend before the first hyphen of the name; only its way of training is another."""

    def __init__(self, name: str, control: Control, timeout: timedelta) -> None:
        super().__init__(name.partition("-")[0], control, timeout)
        self.name = name
        self._wire = torch.bfloat16 if name.endswith("-bf16") else None

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Asks as for the backend."""
        return super().missing(name.partition("-")[0], device)


class HookPeer(_TrainingPeer):
    """DDP with fastcoll's hook, whose gradients are the buckets: "fastcoll-fused", and "-bf16" with that wire dtype."""

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """Registers the hook."""
        views = {"gradient_as_bucket_view": True, **options}
        ddp = DistributedDataParallel(model, process_group=self.group, **views)
        state = FusedAllreduceState(self.group, wire_dtype=self._wire)
        ddp.register_comm_hook(state, fused_allreduce_hook)
        return ddp


class SynchronizerPeer(_TrainingPeer):
    """The model itself with a GradientSynchronizer: "fastcoll-sync", or "fastcoll-sync-bf16" with that wire dtype."""

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """Attaches the synchronizer."""
        # DDP's: there is no bucket beside the gradients here.
        options.pop("gradient_as_bucket_view", None)
        GradientSynchronizer(model, self.group, wire_dtype=self._wire, **options)
        return model


class UnreducedPeer(TorchPeer):
    """DDP whose buckets nobody reduces: what DDP itself adds to a step, on any backend. "unreduced"."""

    delivers = False

    def __init__(self, name: str, control: Control, timeout: timedelta) -> None:
        super().__init__("gloo", control, timeout)
        self.name = name
        self.library = "none"

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Asks for gloo, by which DDP compares the models of the ranks once."""
        if device.type != "cpu":
            return "gloo compares models in CPU memory only"
        return super().missing("gloo", device)

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """Registers a hook that gives the bucket back as it is."""
        ddp = DistributedDataParallel(model, process_group=self.group, **options)
        ddp.register_comm_hook(None, _give_back)
        return ddp


def _give_back(state: None, bucket: GradBucket) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


class CompressPeer(_TrainingPeer):
    """DDP with torch's bf16_compress_hook, whose gradients are the buckets: "nccl-bf16"."""

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """Registers the hook."""
        views = {"gradient_as_bucket_view": True, **options}
        ddp = DistributedDataParallel(model, process_group=self.group, **views)
        ddp.register_comm_hook(self.group, bf16_compress_hook)
        return ddp


class BatchedPeer(_TrainingPeer):
    """DDP that copies the gradients of a bucket at once: "gloo-batched", "fastcoll-batched", "nccl-batched"."""

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Looks for the option in this torch's DDP."""
        if "batched_grad_copy" not in inspect.signature(DistributedDataParallel).parameters:
            return (
                f"torch {torch.__version__} has no DistributedDataParallel(batched_grad_copy=True)"
            )
        return super().missing(name, device)

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """Asks DDP for it."""
        return DistributedDataParallel(
            model, process_group=self.group, batched_grad_copy=True, **options
        )
