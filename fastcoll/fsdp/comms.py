"""The all-gather and the reduce-scatter that FSDP2 calls instead of its own, and ``apply``, which sets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fastcoll._group_backend import all_gather_flat, cpu_backend, reduce_scatter_flat
from fastcoll._wires import require_wire
from fastcoll.ddp.logical import LogicalRanks
from fastcoll.ddp.shards import (
    Blocks,
    Shards,
    divide,
    gradients_of,
    require_no_gradients,
    taken,
)
from fastcoll.fsdp.staging import Staging

__all__ = ["FusedAllGather", "FusedReduceScatter", "apply"]


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
        blocks: With logical ranks, the sums of one FSDP2 module. All passes but the last leave gradients of 0 then.

    Raises:
        ValueError: The wire dtype is unknown.
    """

    def __init__(
        self,
        wire_dtype: torch.dtype | None = None,
        staging: Staging | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__(staging)
        require_wire("fastcoll.fsdp", wire_dtype)
        self._wire = wire_dtype
        self._blocks = blocks

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
                With logical ranks, it is not AVG, or asynchronous.
            RuntimeError: With logical ranks, the pass is not one of ``shards``.
        """
        if self._blocks is not None:
            self._of_shards(output_tensor, input_tensor, group, op, async_op, self._blocks)
            return None
        wire = self._wire if input_tensor.dtype == torch.float32 else None
        backend = cpu_backend(group, input_tensor.device)
        given = (output_tensor, input_tensor)
        work: dist.Work | None = None
        if backend is not None:
            work = backend.reduce_scatter_fused(*given, op, wire, async_op=async_op)
        elif wire is not None:
            self._by_all_to_all(*given, group, op, wire, async_op)
        else:
            work = reduce_scatter_flat(*given, op=op, group=group, async_op=async_op)
        return work

    @torch.no_grad()
    def _of_shards(  # type: ignore[no-untyped-def]
        self,
        output: Tensor,
        message: Tensor,
        group: dist.ProcessGroup,
        op,
        async_op: bool,
        blocks: Blocks,
    ) -> None:
        if async_op or op != dist.ReduceOp.AVG:
            raise ValueError(
                f"fastcoll.fsdp: expected a synchronous AVG with logical_ranks, got op {op}, async_op={async_op}. "
                "Leave out set_gradient_divide_factor and set_force_sum_reduction_for_comms."
            )
        ranks = blocks.ranks
        if not ranks.is_last:
            if ranks.counts:
                blocks.add({None: message.clone()})
            output.zero_()
            return
        ranks.require_order(message.device)
        sums = {block: part for block, (part,) in blocks.joined({None: message}).items()}
        if ranks.whole:
            reduce_scatter_flat(output, *sums.values(), op=dist.ReduceOp.SUM, group=group)
        else:
            output.copy_(ranks.share_of_sum(sums))
        divide([output], ranks.count)

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


def _passes(modules: Sequence[FSDPModule], kept: Sequence[Blocks]) -> Iterator[int]:
    """Yields the shard of each backward pass; all ranks make as many.

    A rank with fewer shards makes its first pass several times, and only the last of these counts.
    """
    ranks = kept[0].ranks
    _require_one_sum(ranks.who, modules)
    parameters = [one.sharded_param for group in _groups(modules) for one in group.fsdp_params]
    require_no_gradients(ranks.who, parameters)
    if ranks.count > len(ranks.mine):
        try:
            for blocks in kept:
                blocks.clear()
            for shard in ranks.passes(idle=True):
                yield shard
                # Each FSDP2 module has served this pass with all its parameters, or one has no gradient.
                check = gradients_of if ranks.is_last else taken
                check(ranks.who, parameters)
        finally:
            for blocks in kept:
                blocks.clear()
        return
    # FSDP2 has no collective on one rank. So gradients are summed where it leaves them.
    blocks = Blocks(ranks)
    for shard in ranks.passes():
        yield shard
        if not ranks.is_last:
            blocks.add(taken(ranks.who, parameters))
            continue
        last = gradients_of(ranks.who, parameters)
        (sums,) = blocks.joined(last).values()
        divide(sums, ranks.count)
        with torch.no_grad():
            torch._foreach_copy_(list(last.values()), sums)


def apply(
    module: nn.Module, *, wire_dtype: torch.dtype | None = None, logical_ranks: int | None = None
) -> Shards | None:
    """Sets fastcoll's collectives in all FSDP2 modules of a module, itself included.

    Clip with ``torch.nn.utils.clip_grad_norm_``, which reads the shards of this rank only.

    Args:
        module: A module sharded by ``torch.distributed.fsdp.fully_shard``.
        wire_dtype: As for ``FusedReduceScatter``. Pass ``reduce_dtype=torch.float32`` to FSDP2 with it.
        logical_ranks: Shards of a batch. The result then does not depend on the number of ranks either.

    Returns:
        With ``logical_ranks``, the shards of each batch, to iterate over in each step; see ``fastcoll.ddp.shards``.
        Ranks with fewer shards than others repeat their first pass, whose gradients are then dropped.

    Raises:
        ValueError: The module has no FSDP2 module, or the wire dtype is unknown. Or there are logical ranks and a wire
            dtype, fewer of them than ranks, a module that is sharded over one dimension and replicated over another,
            or gradients that are not reduced in float32.
    """
    modules = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if not modules:
        raise ValueError(
            f"fastcoll.fsdp.apply: expected a module sharded by fully_shard, got {type(module).__name__} with no "
            "FSDPModule in it."
        )
    staging = Staging()
    gather, scatter = FusedAllGather(staging), FusedReduceScatter(wire_dtype, staging)
    if logical_ranks is None:
        for part in modules:
            part.set_custom_all_gather(gather)
            part.set_custom_reduce_scatter(scatter)
        return None
    who = "fastcoll.fsdp.apply"
    ranks = LogicalRanks(who, _require_one_sum(who, modules), logical_ranks, wire_dtype)
    kept = [Blocks(ranks) for _ in modules]
    for part, blocks in zip(modules, kept, strict=True):
        part.set_custom_all_gather(gather)
        part.set_custom_reduce_scatter(FusedReduceScatter(staging=staging, blocks=blocks))
    return Shards(lambda: _passes(modules, kept))


def _groups(modules: Sequence[FSDPModule]) -> Iterator[FSDPParamGroup]:
    """Yields the parameters that are sharded together."""
    for part in modules:
        state = part._get_fsdp_state()
        if (several := getattr(state, "_fsdp_param_groups", None)) is None:  # torch 2.11
            several = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        yield from several


def _require_one_sum(who: str, modules: Sequence[FSDPModule]) -> dist.ProcessGroup:
    """Returns the group of the modules' ranks.

    Raises:
        ValueError: It is not one group, or not one sum of float32 gradients.
    """
    groups: set[dist.ProcessGroup] = set()
    for parameters in _groups(modules):
        mesh: Any = parameters.mesh_info
        policy = parameters.mp_policy
        trained = [one.sharded_param for one in parameters.fsdp_params]
        dtypes = {one.dtype for one in trained if one.requires_grad}
        given = policy.reduce_dtype or policy.param_dtype
        divides = (
            parameters.gradient_divide_factor is not None
            or parameters.force_sum_reduction_for_comms
        )
        known = type(mesh) is FSDPMeshInfo and dtypes <= {torch.float32}
        if not known or given not in (None, torch.float32) or divides:
            raise ValueError(
                f"{who}: expected modules that logical_ranks serve, of a mesh with one dimension, with float32 "
                f"parameters and sums, got {type(mesh).__name__}, parameters of {sorted(map(str, dtypes))}, "
                f"reduce_dtype {given}, own divisor {divides}. Shard over all ranks, pass "
                "reduce_dtype=torch.float32, and leave the division to FSDP2."
            )
        groups.add(mesh.shard_process_group)
    if len(groups) != 1:
        raise ValueError(
            f"{who}: expected one group for all modules, got {len(groups)}. Shard all over one mesh."
        )
    return groups.pop()
