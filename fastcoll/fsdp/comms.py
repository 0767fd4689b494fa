"""The all-gather and the reduce-scatter that FSDP2 calls instead of its own, and ``apply``, which sets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from fastcoll._group_backend import all_gather_flat, cpu_backend
from fastcoll.fsdp.staging import Staging

__all__ = ["SHARD_WIRES", "FusedAllGather", "FusedReduceScatter", "apply"]

SHARD_WIRES = (torch.bfloat16, torch.float16)
"""The dtypes in which float32 gradients may travel."""

_Call = Callable[..., dist.Work | None]

# The name since torch 2.13; 2.11 and 2.12 have the old one only.
_reduce_scatter: _Call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Staged:
    """Allocates FSDP's buffers."""

    def __init__(self, staging: Staging | None = None) -> None:
        self._staging = Staging() if staging is None else staging

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Returns a buffer; on the CPU the other ranks read it in place."""
        return self._staging.take([int(length) for length in size], dtype, device)


class FusedAllGather(_Staged, AllGather):
    """All-gathers parameters through shared memory: for ``FSDPModule.set_custom_all_gather``.

    Args:
        staging: The pool of buffers. None: a new one.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers the [n] of each rank into [ranks * n]."""
        work: dist.Work | None = all_gather_flat(
            output_tensor, input_tensor, group=group, async_op=async_op
        )
        return work


class FusedReduceScatter(_Staged, ReduceScatter):
    """Reduce-scatters gradients: for ``FSDPModule.set_custom_reduce_scatter``.

    With a wire dtype, each float32 gradient is rounded once, before it travels. The sum is made in float32 and not
    rounded. So gradients that were computed in 16 bits lose nothing.

    Args:
        wire_dtype: bfloat16 or float16: the dtype in which float32 gradients travel. Others travel in their own
            dtype. None: all gradients do.
        staging: The pool of buffers. None: a new one.

    Raises:
        ValueError: The wire dtype is unknown.
    """

    def __init__(
        self,
        wire_dtype: torch.dtype | None = None,
        staging: Staging | None = None,
    ) -> None:
        super().__init__(staging)
        if wire_dtype is not None and wire_dtype not in SHARD_WIRES:
            known = ", ".join(map(str, SHARD_WIRES))
            raise ValueError(
                f"fastcoll.fsdp: expected a wire_dtype of {known} or None, got {wire_dtype}"
            )
        self._wire = wire_dtype

    def __call__(  # type: ignore[no-untyped-def]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces [ranks * n] to this rank's [n].

        Raises:
            ValueError: On a device with a wire dtype, the operation is not SUM or AVG, or the call is asynchronous.
        """
        wire = self._wire if input_tensor.dtype == torch.float32 else None
        backend = cpu_backend(group, input_tensor.device)
        if backend is not None:
            work = backend.reduce_scatter_fused(
                output_tensor, input_tensor, op, wire, async_op=async_op
            )
            return work  # type: ignore[no-any-return]
        if wire is not None:
            self._by_all_to_all(output_tensor, input_tensor, group, op, wire, async_op)
            return None
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    def _by_all_to_all(  # type: ignore[no-untyped-def]
        self,
        output: Tensor,
        message: Tensor,
        group: dist.ProcessGroup,
        op,
        wire: torch.dtype,
        async_op: bool,
    ) -> None:
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"fastcoll.fsdp: expected a synchronous SUM or AVG with the wire dtype {wire} on {message.device}, "
                f"got op {op}, async_op={async_op}. Leave out the wire dtype or set_gradient_divide_factor."
            )
        sent = message.view(-1).to(wire)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        parts = received.view(dist.get_world_size(group), -1)
        # Only this rank sums its shard, in float32, so any order of torch's additions is right.
        add = torch.mean if op == dist.ReduceOp.AVG else torch.sum
        add(parts, 0, dtype=torch.float32, out=output.view(-1))


def apply(module: nn.Module, *, wire_dtype: torch.dtype | None = None) -> None:
    """Sets fastcoll's collectives in all FSDP2 modules of a module, itself included.

    Clip with ``torch.nn.utils.clip_grad_norm_``, which reads the shards of this rank only.

    Args:
        module: A module sharded by ``torch.distributed.fsdp.fully_shard``.
        wire_dtype: As for ``FusedReduceScatter``. Pass ``reduce_dtype=torch.float32`` to FSDP2 with it.

    Raises:
        ValueError: The module has no FSDP2 module, or the wire dtype is unknown.
    """
    modules = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if not modules:
        raise ValueError(
            f"fastcoll.fsdp.apply: expected a module sharded by fully_shard, got {type(module).__name__} with no "
            "FSDPModule in it."
        )
    staging = Staging()
    gather, scatter = FusedAllGather(staging), FusedReduceScatter(wire_dtype, staging)
    for part in modules:
        part.set_custom_all_gather(gather)
        part.set_custom_reduce_scatter(scatter)
