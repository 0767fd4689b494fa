"""One rank of a benchmark with backends that misbehave; started by test_bench_run.py."""

import sys
from datetime import timedelta

import torch

from fastcoll.bench.__main__ import run_rank
from fastcoll.bench.collectives import Case
from fastcoll.bench.peers import ADAPTERS, TorchPeer
from fastcoll.bench.timing import Call


class AlteredGloo(TorchPeer):
    """Gloo under another name."""

    def __init__(self, name: str, timeout: timedelta) -> None:
        super().__init__("gloo", timeout)
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


if __name__ == "__main__":
    altered = {"corrupting": Corrupting, "refusing": Refusing}
    sys.exit(run_rank(sys.argv[1:], {**ADAPTERS, **altered}))
