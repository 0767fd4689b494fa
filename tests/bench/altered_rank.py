"""A benchmark with backends that misbehave, and with a small model of DDP's steps."""

from typing import Any
from unittest import mock

from torch import nn

from fastcoll._measure import Call
from fastcoll.bench import __main__ as bench
from fastcoll.bench.collectives import Case
from fastcoll.bench.gradients import MODELS
from fastcoll.bench.peer import Peer
from fastcoll.bench.run import ADAPTERS as ALL_BUT_OURS


class Altered(Peer):
    """A backend under another name."""

    backend = "gloo"

    @classmethod
    def parts(cls, name: str) -> tuple[str, str]:
        return cls.backend, ""


class Corrupting(Altered):
    """The last element of every result on rank 1 is off by one."""

    backend = "fastcoll"

    def bind(self, case: Case) -> Call:
        call = super().bind(case)

        def corrupt() -> None:
            call()
            if case.rank == 1:
                case.receive[-1:] += 1

        return corrupt


class Refusing(Altered):
    """Knows no collective."""

    def bind(self, case: Case) -> Call:
        raise NotImplementedError("not today\nand a second line")


class Unwrapping(Altered):
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
