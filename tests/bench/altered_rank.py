"""A benchmark with backends that misbehave, and with a small model of DDP's steps."""

from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import nn

from fastcoll.bench import __main__ as bench
from fastcoll.bench.collectives import Case
from fastcoll.bench.control import Control
from fastcoll.bench.gradients import MODELS
from fastcoll.bench.peers import ADAPTERS as ALL_BUT_OURS
from fastcoll.bench.torch_peer import TorchPeer
from fastcoll.bench.turn import Call


class AlteredGloo(TorchPeer):
    """Gloo under another name."""

    def __init__(self, name: str, control: Control, timeout: timedelta) -> None:
        super().__init__("gloo", control, timeout)
        self.name = name

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        return ""


class Corrupting(AlteredGloo):
    """The last element of every result on rank 1 is off by one."""

    def bind(self, case: Case) -> Call:
        call = super().bind(case)

        def corrupt() -> None:
            call()
            if case.rank == 1:
                case.receive[-1] += 1

        return corrupt


class Refusing(AlteredGloo):
    """Knows no collective."""

    def bind(self, case: Case) -> Call:
        raise NotImplementedError("not today\nand a second line")


class Unwrapping(AlteredGloo):
    """Trains no model."""

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        raise TypeError("not today")


ADAPTERS = {
    **ALL_BUT_OURS,
    "corrupting": Corrupting,
    "refusing": Refusing,
    "unwrapping": Unwrapping,
}

SMALL = [(512, 512), (7,), (600, 400)]
"""Two megabytes: DDP's first bucket is of one."""


def run_rank(arguments: list[str]) -> int:
    """Be one rank."""
    with mock.patch.dict(MODELS, small=lambda: SMALL):
        return bench.run_rank(arguments, ADAPTERS)
