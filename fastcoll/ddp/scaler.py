"""Loss scaling that does not read the gradients: their reduction has found whether they are finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from fastcoll.ddp.statistics import GradientStatistics, clip_divisor

__all__ = ["FusedGradScaler"]


class FusedGradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` that uses the measurements of a ``GradientStatistics``.

    It does not read the gradients to find infinities. With an optimizer of ``fused=True``, unscaling and clipping
    take no pass over the gradients, because the step divides them. With another optimizer they take one pass.

        scaler = FusedGradScaler(state, device="cuda")
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    Args:
        statistics: A state or a synchronizer with ``gradient_norm=True``, of all gradients of the optimizers.
        options: Arguments of ``torch.amp.GradScaler``. ``device`` is the device of the parameters.

    Raises:
        ValueError: ``gradient_norm`` of the statistics is false.
    """

    def __init__(self, statistics: GradientStatistics, **options: Any) -> None:
        if not statistics.gradient_norm:
            raise ValueError(
                f"fastcoll.FusedGradScaler: expected a {type(statistics).__name__} with gradient_norm=True, got one "
                "without. Pass gradient_norm=True."
            )
        super().__init__(**options)
        self._statistics = statistics
        self._clipping: dict[int, Tensor] = {}
        self._given: list[
            tuple[torch.optim.Optimizer, Tensor]
        ] = []  # fused optimizers and their divisors

    def clip_grad_norm_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clips the unscaled gradients to a norm of at most ``max_norm``, in the next step.

        Call it before ``step``. After ``unscale_`` it scales the gradients at once, unless the optimizer is fused.

        Args:
            optimizer: Optimizer of the gradients.
            max_norm: The largest norm, above 0.

        Returns:
            The norm of the unscaled gradients, a float64 tensor without dimensions.

        Raises:
            ValueError: ``max_norm`` is not above 0.
            RuntimeError: No backward pass has reduced gradients yet, or no loss was scaled.
        """
        norm = self._statistics.grad_norm()
        if not self.is_enabled():
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
            return norm
        scale = self._get_scale_async()
        if scale is None:
            raise RuntimeError(
                "fastcoll.FusedGradScaler: expected scaler.scale(loss).backward() before, got no scaled loss. Scale "
                "the loss."
            )
        norm = norm / scale.double()
        divisor = clip_divisor(norm, max_norm)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale = divisor  # type: ignore[attr-defined]  # step() multiplies it by the loss's
            self._given.append((optimizer, divisor))
        elif self._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:
            torch._foreach_div_(_gradients(optimizer), divisor)
        else:
            self._clipping[id(optimizer)] = divisor
        return norm

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale, as the base class does, and drops clipping that no step has applied.

        Args:
            new_scale: The new scale, a float or a float32 tensor of one element. None: torch's rule decides.
        """
        self._clipping.clear()
        for optimizer, divisor in self._given:
            if getattr(optimizer, "grad_scale", None) is divisor:  # no step has taken it
                del optimizer.grad_scale  # type: ignore[attr-defined]
        self._given.clear()
        super().update(new_scale)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Called by the base class to check the gradients and divide them; with allow_fp16, only to check."""
        found = self._statistics.found_inf.squeeze().to(found_inf.device)
        if not allow_fp16:
            grads = _gradients(optimizer)
            if any(grad.dtype == torch.float16 for grad in grads):
                raise ValueError(
                    "fastcoll.FusedGradScaler: expected gradients of float32 or bfloat16 to unscale, got float16. Keep "
                    "the parameters in float32."
                )
            factor = inv_scale / self._clipping.pop(id(optimizer), torch.ones_like(inv_scale))
            torch._foreach_mul_(grads, factor)
        return {found.device: found}


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.grad for p in parameters if p.grad is not None]
