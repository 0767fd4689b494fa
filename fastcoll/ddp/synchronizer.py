"""Reduces gradients in place, during the backward pass.

DistributedDataParallel copies every gradient into a bucket before its hook gets it. Unless gradients are views of
buckets, it also copies them back. Here a bucket is a list: its gradients are read and written in place, by one message
on the CPU and by fused kernels on a device.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fastcoll.ddp.bucket import Bucket, cut
from fastcoll.ddp.overlap import can_overlap, makes_shared
from fastcoll.ddp.reduction import Settings, reduce_bucket
from fastcoll.ddp.replicas import broadcast_from_first, require_equal_shapes, require_trainable
from fastcoll.ddp.shards import Shards, reduce_shards
from fastcoll.ddp.squares import Squares
from fastcoll.ddp.statistics import GradientStatistics

__all__ = ["GradientSynchronizer"]


class _ForwardHook:
    """A hook of the module. In a copy of the module, or a loaded one, the hook does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, module: nn.Module, *arguments: object) -> None:
        if self._call is not None:
            self._call(*arguments)

    def __reduce__(self) -> tuple[type[_ForwardHook], tuple[()]]:
        return _ForwardHook, ()


class GradientSynchronizer(GradientStatistics):
    """Averages the gradients of a module over the ranks of a group, in place of DistributedDataParallel.

        synchronizer = GradientSynchronizer(model, gradient_norm=True)
        loss_of(model(inputs)).backward()          # gradients are reduced meanwhile
        synchronizer.clip_in_step(optimizer, 1.0)
        optimizer.step()

    Use the module as it is, without a wrapper. The gradients are reduced when ``backward()`` returns. On a device, the
    stream under which it was called waits for them. The module keeps the synchronizer alive. A copy of the module
    (``copy.deepcopy``, ``torch.save``) has none.

    Limits:

    - All ranks may freeze and unfreeze the same parameters between passes, but not replace them.
    - Uneven inputs (``join``) need DistributedDataParallel with ``fastcoll.ddp.fused_allreduce_hook``.
    - ``torch.compile(fullgraph=True)`` rejects a module with hooks.
    - With reentrant checkpoints, call the module itself and not only its parts. Its hooks detect the end of the
      backward pass.

    Args:
        module: The module to train. Its parameters and buffers get the values of rank 0.
        process_group: None: the default group.
        wire_dtype: As for ``fastcoll.ddp.FusedAllreduceState``.
        average: Whether to divide the sum by the number of ranks. If it is false, accumulate gradients inside
            ``no_sync`` only.
        gradient_norm: Whether to measure what ``grad_norm``, ``found_inf`` and clipping need.
        bucket_cap_mb: Size of a bucket in MiB.
        overlap: True: reduce each bucket during the backward pass. False: reduce all buckets at its end, on the
            thread that called ``backward()``. None: choose; on the CPU, False if the ranks are on one host and their
            threads use all its cores. The results are the same.
        find_unused_parameters: Whether a parameter may get no gradient in a backward pass. A parameter that gets none
            on any rank stays without. If this is false and the loss of a rank reaches no parameter, the other ranks
            time out. The error then names this rank.
        broadcast_buffers: Whether buffers get the values of rank 0 before each forward pass in training mode.
        logical_ranks: Shards of a batch, for ``shards``. The result then does not depend on the number of ranks
            either. None: each rank makes one pass, and the ranks' gradients are summed.

    Raises:
        RuntimeError: The parameters of the ranks differ in shape, dtype or ``requires_grad``. A later pass raises it
            if a parameter gets no gradient, or two, or was replaced.
        ValueError: The wire dtype is unknown, the bucket size is not positive, or this rank is not in the group. Or
            the module has no parameters, has parameters without data, or is wrapped in DistributedDataParallel.
        TypeError: A gradient is sparse.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        *,
        wire_dtype: torch.dtype | None = None,
        average: bool = True,
        gradient_norm: bool = False,
        bucket_cap_mb: float = 25.0,
        overlap: bool | None = None,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        logical_ranks: int | None = None,
    ) -> None:
        super().__init__(process_group, gradient_norm, wire_dtype, logical_ranks)
        if logical_ranks is not None and find_unused_parameters:
            raise ValueError(
                "fastcoll.GradientSynchronizer: expected every parameter to get a gradient with logical_ranks, got "
                "find_unused_parameters=True. Freeze the parameters that no loss depends on."
            )
        if not 0 < bucket_cap_mb < float("inf"):
            raise ValueError(
                f"fastcoll.GradientSynchronizer: expected bucket_cap_mb above 0, got {bucket_cap_mb}"
            )
        require_trainable(module, process_group)
        alone = makes_shared(process_group, next(iter(module.parameters())).device)
        self.settings = Settings(process_group, wire_dtype, average, alone)
        self.module = module
        self._cap = int(bucket_cap_mb * 2**20)
        self._finds_unused = find_unused_parameters
        self._broadcasts = broadcast_buffers
        self._enabled = True
        self._lock = threading.Lock()  # a backward pass has a thread for each device
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._places = [
            (part._parameters, name, parameter)
            for part in module.modules()
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]
        # The order in which gradients become ready, as far as it is known.
        self._order = list(reversed(self._names))
        self._arrived: list[nn.Parameter] | None = []  # only in the first pass
        self._trained: list[nn.Parameter] = []
        self._cut_for: list[tuple[int, torch.dtype, torch.device]] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._launched = 0  # buckets; without overlap, complete ones
        self._under_way = False
        self._watched = False  # whether this backward pass will call _end
        self._orders = require_equal_shapes(self._names, process_group)
        devices = dict.fromkeys(parameter.device for parameter in self._names)
        self._overlaps = all(
            can_overlap(process_group, device) if overlap is None else overlap for device in devices
        )
        broadcast_from_first([*self._names, *module.buffers()], process_group)
        # Only the module holds this object: Python's collector does not see the hooks of parameters.
        this = weakref.ref(self)

        def arrive(parameter: nn.Parameter) -> None:
            if (alive := this()) is not None:
                alive._arrive(parameter)

        self._on_arrival = arrive
        self._hooked: set[nn.Parameter] = set()
        self._hooks = [
            module.register_forward_pre_hook(_ForwardHook(self._before_forward)),
            module.register_forward_hook(_ForwardHook(self._after_forward)),
        ]
        self._hook_trained()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes accumulate gradients without communication.

        The next backward pass outside of it reduces the sums.
        """
        enabled, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = enabled

    def shards(self) -> Shards:
        """Returns this rank's shards of a batch, for a loop with one backward pass each; see ``Shards``."""
        return self._shards(self.module.parameters, self.no_sync)

    def remove(self) -> None:
        """Removes all hooks from the module, which is then as before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _measured(self) -> Squares:
        self._require_complete()
        return super()._measured()

    def _hook_trained(self) -> None:
        """Adds hooks to the parameters that are trainable for the first time."""
        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                hook = parameter.register_post_accumulate_grad_hook(self._on_arrival)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _before_forward(self, arguments: object) -> None:
        self._require_complete()
        self._watched = False  # a pass that raised has not called _end
        if torch.is_grad_enabled():
            self._require_same_parameters()
        self._hook_trained()
        if self._broadcasts and self._enabled and self.module.training and torch.is_grad_enabled():
            broadcast_from_first(list(self.module.buffers()), self.process_group)

    def _after_forward(self, arguments: object, outputs: object) -> None:
        """Watches for the backward pass of these outputs; of nested passes, for the outermost."""
        if not torch.is_grad_enabled():
            return
        for output in torch.utils._pytree.tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self._watch)  # type: ignore[no-untyped-call]

    def _watch(self, gradient: Tensor) -> None:
        if self._enabled and not self._watched:
            self._watched = True
            self._call_at_the_end(self._end)

    def _end(self) -> None:
        """Called at the end of a watched backward pass."""
        trains = any(parameter.requires_grad for parameter in self._order)
        if self._finds_unused and trains and not self._under_way:
            self._begin()  # while _watched is set: else it would queue a second callback
        self._watched = False
        if not self._under_way:
            return
        if self._finds_unused:
            self._finish_with_unused()
            return
        if self._launched < len(self._buckets):
            self._require_complete()
        self._finish()

    def _arrive(self, parameter: nn.Parameter) -> None:
        """Called when a gradient is ready."""
        if not self._enabled:
            self._forget()
            return
        with self._lock:
            if not self._under_way:
                self._begin()
            if self._arrived is not None:
                self._arrived.append(parameter)
            missing = self._bucket_of[parameter].missing
            if parameter not in missing:
                raise RuntimeError(
                    f"{self._name()}: expected one gradient of each parameter in a pass, got a second one of "
                    f"{self._names[parameter]}. Call backward() once for all losses, or all passes but the last one "
                    "inside no_sync(); a layer that is used in several reentrant checkpoints needs use_reentrant=False."
                )
            missing.remove(parameter)
            if parameter.device.type != "cpu":
                stream = torch.accelerator.current_stream(parameter.device)
                self._bucket_of[parameter].streams.add(stream)
            self._launch_ready()

    def _begin(self) -> None:
        self._forget()
        trained = [parameter for parameter in self._order if parameter.requires_grad]
        kinds = [(id(parameter), parameter.dtype, parameter.device) for parameter in trained]
        if kinds != self._cut_for:
            self._trained, self._buckets, self._cut_for = trained, cut(trained, self._cap), kinds
            self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        for bucket in self._buckets:
            bucket.begin()
        self._launched, self._under_way = 0, True
        if self._finds_unused and not self._watched:
            self._call_at_the_end(self._finish_with_unused)

    def _launch_ready(self) -> None:
        """Launches complete buckets, in the same order on all ranks."""
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            if self._overlaps:
                self._launch(self._buckets[self._launched], True)
            self._launched += 1
        if self._launched == len(self._buckets) and not (self._finds_unused or self._watched):
            # Queued only now, because a checkpoint's nested pass ends long before the whole pass.
            self._call_at_the_end(self._finish)

    @staticmethod
    def _call_at_the_end(callback) -> None:  # type: ignore[no-untyped-def]
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _launch(self, bucket: Bucket, async_op: bool) -> None:
        for stream in bucket.streams:
            here = torch.accelerator.current_stream(stream.device)
            if stream != here:
                here.wait_stream(stream)
        grads = {parameter: self._gradient_of(parameter) for parameter in bucket.parameters}
        if self._blocks is not None:
            bucket.reduction = reduce_shards(
                grads, self.settings, self._blocks, self._squares, async_op
            )
        else:
            # A gradient in memory order is contiguous. The order is rank 0's, so no rank must have it.
            arranged = [
                grad if (order := self._orders.get(parameter)) is None else grad.permute(order)
                for parameter, grad in grads.items()
            ]
            bucket.reduction = reduce_bucket(arranged, self.settings, self._squares, async_op)

    def _gradient_of(self, parameter: nn.Parameter) -> Tensor:
        grad = parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise TypeError(
                f"fastcoll.GradientSynchronizer: expected dense gradients, got one of layout {grad.layout} of "
                f"{self._names[parameter]}. Use sparse=False, or DistributedDataParallel."
            )
        return grad

    def _launch_kept(self) -> None:
        """Launches the buckets that were kept for the end of the pass."""
        for bucket in self._buckets:
            if bucket.reduction is None:
                self._launch(bucket, False)

    def _finish(self) -> None:
        self._launch_kept()
        for bucket in self._buckets:
            assert bucket.reduction is not None
            bucket.reduction.wait()
            bucket.reduction = None
        self._under_way = False
        if self._arrived is not None:
            self._learn_order(self._arrived)
            self._arrived = None

    def _finish_with_unused(self) -> None:
        """Reduces zeros for missing gradients; a parameter without a gradient on all ranks stays without."""
        absent = {parameter for parameter in self._trained if parameter.grad is None}
        for parameter in absent:
            parameter.grad = torch.zeros_like(parameter)
        for bucket in self._buckets[self._launched :]:
            bucket.missing = set()
        used = torch.tensor([p not in absent for p in self._trained], dtype=torch.uint8)
        used = used.to(self._trained[0].device)
        with self._lock:
            self._launch_ready()
        self._launch_kept()
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.process_group)
        self._arrived = None  # the ranks may have used different parameters
        self._finish()
        anywhere = dict(zip(self._trained, used.tolist(), strict=True))
        for parameter in absent:
            if not anywhere[parameter]:
                parameter.grad = None

    def _learn_order(self, arrived: Sequence[nn.Parameter]) -> None:
        """Orders the buckets of later passes by rank 0's first pass."""
        places = {parameter: place for place, parameter in enumerate(self._names)}
        frozen = [parameter for parameter in self._order if not parameter.requires_grad]
        order = torch.tensor([places[parameter] for parameter in [*arrived, *frozen]])
        broadcast_from_first([order], self.process_group, arrived[0].device)
        parameters = list(self._names)
        self._order = [parameters[place] for place in order.tolist()]

    def _name(self) -> str:
        rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        return f"fastcoll.GradientSynchronizer [rank {rank}/{size}]"

    def _require_same_parameters(self) -> None:
        """Checks that no parameter of the module was replaced.

        Raises:
            RuntimeError: One was. The gradient of the new parameter would not be reduced.
        """
        for parameters, place, known in self._places:
            found = parameters.get(place)
            if found is known or not isinstance(found, nn.Parameter):
                continue  # a tensor that is no parameter is a value for this call, as in torch.func
            if found.requires_grad and found not in self._names:
                raise RuntimeError(
                    f"{self._name()}: expected the parameters that it was made with, got another one as "
                    f"{self._names[known]}, as load_state_dict(assign=True) puts there. Load without assign; or call "
                    "remove(), make another GradientSynchronizer, and another optimizer, which has the old ones too."
                )

    def _require_complete(self) -> None:
        """Checks that no bucket lacks a gradient.

        Raises:
            RuntimeError: The last backward pass has not made all gradients.
        """
        if not self._under_way:
            return
        names = ", ".join(
            self._names[p] for b in self._buckets for p in b.parameters if p in b.missing
        )
        raise RuntimeError(
            f"{self._name()}: expected a gradient for every parameter in the last backward pass, got none for "
            f"{names or 'what follows an error in it'}. Pass find_unused_parameters=True, freeze the parameters that "
            "no loss depends on, or, if backward() has raised, restart the job: the ranks are out of sync."
        )
