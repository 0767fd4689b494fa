"""A communication hook for DistributedDataParallel, with wire dtypes and a norm of the gradients.

    state = FusedAllreduceState(wire_dtype=torch.bfloat16, gradient_norm=True)
    ddp.register_comm_hook(state, fused_allreduce_hook)
    loss.backward()
    state.clip_grad_norm_(ddp.parameters(), 1.0)

Without a wire dtype the all-reduce averages, so DDP has no division to do. With one, gradients travel in fewer bits,
are summed in float32 on their way, and the sum is rounded once. So the error does not grow with the number of ranks,
as it does if each hop of a ring rounds. Norm and finiteness are measured with the reduction (see reduction.py), whereas
torch's ``clip_grad_norm_`` reads all gradients again.
"""

# No `from __future__ import annotations`: DDP reads the hook's annotations.
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from fastcoll.ddp.overlap import are_shared, can_overlap
from fastcoll.ddp.reduction import Settings, reduce_bucket
from fastcoll.ddp.shards import Blocks, Shards, reduce_shards
from fastcoll.ddp.statistics import GradientStatistics

__all__ = ["FusedAllreduceState", "fused_allreduce_hook"]


class FusedAllreduceState(GradientStatistics):
    """Settings of ``fused_allreduce_hook``, and the statistics of the last backward pass, for one DDP module.

    Make one state for each DDP module. The base class ``GradientStatistics`` has the norm and clipping.

    Args:
        process_group: The group of the DDP module. None: the default group.
        wire_dtype: One of ``fastcoll.ddp.WIRE_DTYPES``: the dtype in which wider floating-point gradients travel.
            They are summed in float32. With CPU tensors on several hosts, the sum of each host travels in this dtype
            too. None: gradients travel in their own dtype.
        average: Whether to divide the sum by the number of ranks, as DDP does.
        gradient_norm: Whether to measure what ``grad_norm``, ``found_inf`` and clipping need.
        overlap: True: reduce each bucket during the backward pass. False: reduce all buckets together at its end.
            None: choose; on the CPU, False if the ranks are on one host and their threads use all its cores. Pass the
            same value on all ranks. The results are the same. Sparse buckets, and those with ``logical_ranks``, are
            never delayed.
        logical_ranks: Shards of a batch, for ``shards``. The result then does not depend on the number of ranks
            either. None: each rank makes one pass, and the ranks' gradients are summed.

    Raises:
        ValueError: The wire dtype is unknown, or there is one with ``logical_ranks``; or these are fewer than the
            group's ranks.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None = None,
        *,
        wire_dtype: torch.dtype | None = None,
        average: bool = True,
        gradient_norm: bool = False,
        overlap: bool | None = None,
        logical_ranks: int | None = None,
    ) -> None:
        super().__init__(process_group, gradient_norm, wire_dtype, logical_ranks)
        self.settings = Settings(process_group, wire_dtype, average)
        self._overlap = overlap  # None: not known yet
        self._shared: bool | None = None  # not known yet either
        self._kept: list[tuple[Tensor, Future[Tensor]]] = []  # for the end of the backward pass
        self._served = WeakTensorKeyDictionary()  # the module's parameters
        self._knows_all = False

    def shards(self, module: DistributedDataParallel) -> Shards:
        """Returns this rank's shards of a batch, for a loop with one backward pass each; see ``Shards``.

        Args:
            module: The DDP module.

        Raises:
            ValueError: There are no ``logical_ranks``, or the module finds unused parameters or has a static graph.
        """
        if module.find_unused_parameters or module.static_graph:
            raise ValueError(
                "fastcoll.FusedAllreduceState: expected a DDP module that reduces every parameter in each pass, got "
                "one with find_unused_parameters or static_graph. Make it without, or leave out logical_ranks."
            )
        ignored = module.parameters_to_ignore

        def parameters() -> list[Tensor]:
            named = module.module.named_parameters()
            return [parameter for name, parameter in named if name not in ignored]

        return self._shards(parameters, module.no_sync)

    def _takes(self, bucket: GradBucket) -> bool:
        """Takes a bucket of the module, and returns whether a backward pass begins with it.

        In the first pass of a static graph torch marks each bucket as the first one, and none as the last one. Then a
        pass begins when a parameter comes again.

        Raises:
            RuntimeError: The bucket belongs to another module than the buckets before, and that module still exists.
        """
        if self._knows_all and bucket.index() != 0:
            return False
        parameters = bucket.parameters()
        begins = bucket.index() == 0 and (
            len(self._served) == 0  # the first bucket, or the module is gone
            or any(parameter in self._served for parameter in parameters)
        )
        if begins and len(self._served) == 0:
            self._knows_all = False
        if self._knows_all and not begins:
            rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
            raise RuntimeError(
                f"fastcoll.FusedAllreduceState [rank {rank}/{size}]: expected the buckets of one DDP module, got one "
                f"of another, whose first parameter has the shape {tuple(parameters[0].shape)}. Make a "
                "state for each module."
            )
        if not self._knows_all:
            self._served.update(dict.fromkeys(parameters))
            self._knows_all = bucket.is_last()
        return begins


def fused_allreduce_hook(state: FusedAllreduceState, bucket: GradBucket) -> Future[Tensor]:
    """Reduces a bucket of gradients in place: the hook for ``DistributedDataParallel.register_comm_hook``.

        state = FusedAllreduceState(wire_dtype=torch.bfloat16, gradient_norm=True)
        ddp.register_comm_hook(state, fused_allreduce_hook)
        loss.backward()
        state.clip_grad_norm_(ddp.parameters(), 1.0)

    Args:
        state: State of this DDP module.
        bucket: A bucket of DDP; its buffer is a tensor of one dimension.

    Returns:
        A future of the reduced buffer. Its error is that of the group.

    Raises:
        RuntimeError: The state belongs to another DDP module.
        ValueError: The gradients are sparse, and the state has a wire dtype or measures the norm.
    """
    begins = state._takes(bucket)
    buffer = bucket.buffer()
    if begins:
        state._forget()
        state._kept.clear()
    if state._blocks is not None:
        return _reduced_shards(bucket, state, state._blocks)
    if state._overlap is None:
        state._overlap = can_overlap(state.process_group, buffer.device)
    if buffer.layout != torch.strided:
        future = _reduced_sparse(buffer, state)
    elif state._overlap:
        future = reduce_bucket([buffer], state.settings, state._squares).then(buffer)
    else:
        future = Future(devices=None if buffer.is_cpu else [buffer.device])
        state._kept.append((buffer, future))
    if bucket.is_last() or not state._knows_all:  # it may be the last one of a static graph
        _reduce_kept(state)
    return future


def _reduce_kept(state: FusedAllreduceState) -> None:
    kept, state._kept = state._kept, []
    if kept and state._shared is None:
        state._shared = are_shared(state.process_group, kept[0][0])
    for alike in _messages(kept, state):
        buffers = [buffer for buffer, _ in alike]
        reduction = reduce_bucket(buffers, state.settings, state._squares)
        reduction.then(buffers[0]).add_done_callback(partial(_fulfil, alike))


def _messages(
    kept: list[tuple[Tensor, Future[Tensor]]], state: FusedAllreduceState
) -> list[list[tuple[Tensor, Future[Tensor]]]]:
    """Makes one message of all buckets of a dtype; but a bucket that peers reduce in place is a message alone."""
    messages: dict[object, list[tuple[Tensor, Future[Tensor]]]] = {}
    for index, (buffer, future) in enumerate(kept):
        alone = state._shared and state.settings.wire_of(buffer.dtype) is None
        messages.setdefault(index if alone else buffer.dtype, []).append((buffer, future))
    return list(messages.values())


def _fulfil(kept: list[tuple[Tensor, Future[Tensor]]], done: Future[Tensor]) -> None:
    try:
        done.value()
    except Exception as error:
        for _, future in kept:
            future.set_exception(error)  # type: ignore[arg-type]
    else:
        for buffer, future in kept:
            future.set_result(buffer)


def _reduced_shards(
    bucket: GradBucket, state: FusedAllreduceState, blocks: Blocks
) -> Future[Tensor]:
    if bucket.buffer().layout != torch.strided:
        raise ValueError(
            "fastcoll.FusedAllreduceState: expected dense gradients with logical_ranks, got sparse ones. Use "
            "sparse=False in the embedding."
        )
    gradients = dict(zip(bucket.parameters(), bucket.gradients(), strict=True))
    return reduce_shards(gradients, state.settings, blocks, state._squares).then(bucket.buffer())


def _reduced_sparse(buffer: Tensor, state: FusedAllreduceState) -> Future[Tensor]:
    settings = state.settings
    if settings.wire_dtype is not None or state._squares is not None:
        raise ValueError(
            f"fastcoll.FusedAllreduceState: expected dense gradients with a wire dtype or a norm, got one of layout "
            f"{buffer.layout}. Use sparse=False in the embedding, or leave them out."
        )
    work = dist.all_reduce(buffer, group=settings.process_group, async_op=True)
    divisor = dist.get_world_size(settings.process_group) if settings.average else None

    def finish(done: Future[list[Tensor]]) -> Tensor:
        (result,) = done.value()
        return result if divisor is None else result / divisor

    future: Future[list[Tensor]] = work.get_future()
    return future.then(finish)
