"""The norm of reduced gradients, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastcoll.ddp.logical import LogicalRanks
from fastcoll.ddp.shards import Blocks, Shards, shards_of
from fastcoll.ddp.squares import Squares

__all__ = ["GradientStatistics"]


class GradientStatistics:
    """Norm and finiteness of the gradients of the last backward pass: base of the state and of the synchronizer.

    The gradients are measured while they are reduced. The first call of a method after a backward pass may exchange
    the sums of the ranks' shares (see squares.py). So all ranks must make this call, after the same passes.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        gradient_norm: bool,
        wire_dtype: torch.dtype | None = None,
        logical_ranks: int | None = None,
    ) -> None:
        self.process_group = process_group
        self._squares = Squares(process_group) if gradient_norm else None
        self._blocks: Blocks | None = None  # with logical ranks
        if logical_ranks is not None:
            who = f"fastcoll.{type(self).__name__}"
            self._blocks = Blocks(LogicalRanks(who, process_group, logical_ranks, wire_dtype))

    def grad_norm(self) -> Tensor:
        """Returns the L2 norm of all gradients that the last backward pass has reduced.

        Returns:
            A float64 tensor without dimensions, on the gradients' device, with the same bits on all ranks. It is not
            finite if a gradient is not.

        Raises:
            RuntimeError: ``gradient_norm`` is false, or no backward pass has reduced gradients yet.
        """
        return self._measured().norm()

    @property
    def found_inf(self) -> Tensor:
        """1.0 if a gradient is infinite or NaN, else 0.0: float32 of shape [1], as optimizers take it.

        Raises:
            RuntimeError: As ``grad_norm``.
        """
        return (~self.grad_norm().isfinite()).float().reshape(1)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scales the gradients to a norm of at most ``max_norm``, without a pass that measures the norm.

        Args:
            parameters: All parameters whose gradients were reduced.
            max_norm: As in ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The norm before, as ``grad_norm``.

        Raises:
            RuntimeError: As ``grad_norm``.
        """
        norm = self.grad_norm()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def clip_in_step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clips in the next step of a fused optimizer, which scales the gradients as it reads them.

        So clipping takes no pass over the gradients. The step does nothing if a gradient is not finite. Call this
        before each step that clips.

        Args:
            optimizer: An optimizer of torch with ``fused=True``, which uses the attribute ``grad_scale``.
            max_norm: The largest norm, above 0.

        Returns:
            The norm before, as ``grad_norm``.

        Raises:
            TypeError: The optimizer is not fused.
            ValueError: ``max_norm`` is not above 0.
            RuntimeError: As ``grad_norm``.
        """
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise TypeError(
                "fastcoll.ddp: expected an optimizer that scales gradients in its step, got "
                f"{type(optimizer).__name__} without fused=True. Make it with fused=True, or use clip_grad_norm_."
            )
        if not max_norm > 0:
            raise ValueError(f"fastcoll.ddp: expected a max_norm above 0, got {max_norm}")
        norm, divisor, found_inf = self._measured().clipping(max_norm)
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]

        def forget(optimizer: torch.optim.Optimizer, *_: object) -> None:
            hook.remove()
            for name in ("grad_scale", "found_inf"):
                if hasattr(optimizer, name):
                    delattr(optimizer, name)

        # Only for the next step: attributes that stay would scale, or skip, every later step.
        hook = optimizer.register_step_post_hook(forget)
        return norm

    def _shards(
        self, parameters: Callable[[], Iterable[Tensor]], no_sync: Callable[[], Any]
    ) -> Shards:
        blocks = self._blocks
        if blocks is None:
            raise ValueError(
                f"fastcoll.{type(self).__name__}: expected logical_ranks for shards(), got none. Create it with "
                "logical_ranks, such as 8."
            )
        return Shards(lambda: shards_of(blocks, parameters, no_sync))

    def _forget(self) -> None:
        """Drops the values of the previous backward pass."""
        if self._squares is not None:
            self._squares.clear()

    def _measured(self) -> Squares:
        if not self._squares:
            raise RuntimeError(
                f"fastcoll.{type(self).__name__}: there is no norm yet. Create it with gradient_norm=True, and call "
                "backward() on the model before, outside of no_sync()."
            )
        return self._squares
