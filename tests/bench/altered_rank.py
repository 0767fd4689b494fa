"""A benchmark with backends that misbehave, here or in companions, and with a small model of DDP's steps."""

from datetime import timedelta
from pathlib import Path
from typing import ClassVar
from unittest import mock

import torch

from fastcoll.bench import __main__ as bench
from fastcoll.bench.collectives import Case
from fastcoll.bench.companion_peer import CompanionPeer
from fastcoll.bench.control import Control
from fastcoll.bench.environments import Environment
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


def environment(kind: str, **options: str) -> Environment:
    """Of companions that load a class of companion_backends.py."""
    beside = {"PYTHONPATH": str(Path(__file__).parent)}
    return Environment(kind, f"companion_backends:{kind}", variables=beside, **options)


class Companions(CompanionPeer):
    """Gloo in companions, which ends in many ways."""

    environments: ClassVar = {
        **{kind: environment(kind) for kind in ("Gloo", "Wrong", "Dying", "Hanging", "Unloadable")},
        "unstartable": environment("Gloo", launcher="false", rank_variables=("RANK",)),
        "uninstalled": environment("Gloo", packages=("nothing==1",)),
    }


ADAPTERS = {
    **ALL_BUT_OURS,
    "corrupting": Corrupting,
    "refusing": Refusing,
    **dict.fromkeys(Companions.environments, Companions),
}

SMALL = [(512, 512), (7,), (600, 400)]
"""Two megabytes: DDP's first bucket is of one."""


def run_rank(arguments: list[str]) -> int:
    """Be one rank."""
    with mock.patch.dict(MODELS, small=lambda: SMALL):
        return bench.run_rank(arguments, ADAPTERS)
