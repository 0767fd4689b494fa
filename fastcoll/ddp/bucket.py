"""Buckets without a buffer: lists of parameters whose gradients travel together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fastcoll.ddp.reduction import BucketReduction

__all__ = ["Bucket", "cut"]

_FIRST_BUCKET = 1 << 20
"""Bytes; small, because communication should begin early in the backward pass."""


class Bucket:
    """Parameters of one dtype, on one device.

    Args:
        parameters: Parameters in the order in which their gradients become ready, as far as it is known.

    Attributes:
        missing: Parameters whose gradients are not ready.
        streams: On a device, the streams on which gradients became ready.
        reduction: The reduction in progress; None: not launched.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.missing = set(self.parameters)
        self.streams: set[torch.Stream] = set()
        self.reduction: BucketReduction | None = None

    def begin(self) -> None:
        """Prepares for a new backward pass."""
        self.missing, self.reduction = set(self.parameters), None
        self.streams.clear()


def cut(parameters: Sequence[nn.Parameter], capacity: int) -> list[Bucket]:
    """Cuts parameters into buckets of one dtype and device each, in the order of their last parameters.

    Args:
        parameters: Parameters in the order in which their gradients become ready.
        capacity: Bytes from which on a bucket is full.
    """
    buckets: list[Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        alike = filling.setdefault((parameter.dtype, parameter.device), [])
        alike.append(parameter)
        full = min(capacity, _FIRST_BUCKET) if not buckets else capacity
        if sum(p.numel() * p.element_size() for p in alike) >= full:
            buckets.append(Bucket(alike))
            del filling[parameter.dtype, parameter.device]
    return buckets + [Bucket(alike) for alike in filling.values()]
