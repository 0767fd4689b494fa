"""Ways to train: torch's DDP, and two of fastcoll.ddp, a DDP hook and a synchronizer."""

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from fastcoll.ddp import FusedAllreduceState, GradientSynchronizer, fused_allreduce_hook

OWN = ("wire_dtype", "average", "gradient_norm", "overlap")
"""Options of the hook; all others are DDP's."""


def stock(
    model: nn.Module, group: ProcessGroup | None = None, **options: Any
) -> tuple[nn.Module, None]:
    """Return DDP's wrapper."""
    return DistributedDataParallel(model, process_group=group, **options), None


def hooked(
    model: nn.Module,
    group: ProcessGroup | None = None,
    state: FusedAllreduceState | None = None,
    **options: Any,
) -> tuple[nn.Module, FusedAllreduceState]:
    """Return DDP's wrapper with the hook, and the hook's state."""
    own = {name: options.pop(name) for name in OWN if name in options}
    state = state or FusedAllreduceState(group, **own)
    ddp, _ = stock(model, group, **options)
    ddp.register_comm_hook(state, fused_allreduce_hook)
    return ddp, state


def synchronized(
    model: nn.Module, group: ProcessGroup | None = None, **options: Any
) -> tuple[nn.Module, GradientSynchronizer]:
    """Return the module, and the synchronizer of its gradients."""
    return model, GradientSynchronizer(model, group, **options)


WAYS = {"hook": hooked, "synchronizer": synchronized}
ALL_WAYS = {"stock": stock, **WAYS}
