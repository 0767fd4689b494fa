"""The interface behind which every backend is compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastcoll.bench.candidate import Candidate
from fastcoll.bench.collectives import Case
from fastcoll.bench.control import Control
from fastcoll.bench.turn import Call, synchronize

__all__ = ["Peer", "problem_of"]


def problem_of(error: Exception) -> str:
    """Returns the first line of an error, with its type."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


class Peer(ABC):
    """One backend, connected to all ranks of the run.

    Args:
        name: The word of the command line.
        control: Of all ranks.
        timeout: Of each call.

    Attributes:
        delivers: Whether what the ranks have reaches all.
        trains: Whether DistributedDataParallel can be made on its group.
        group: The process group, for what needs one (``ddp``); None where there is none.
        library: Name and version of what is measured.
    """

    delivers = True
    trains = True
    group: dist.ProcessGroup | None = None
    library = ""

    def __init__(self, name: str, control: Control, timeout: timedelta) -> None:
        self.name = name

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Returns why this process cannot load the backend, or "" if it can; connects to nobody."""
        return ""

    @abstractmethod
    def bind(self, case: Case) -> Call:
        """Returns a call without arguments that does the whole collective, ready to be timed."""

    def prepare(self, case: Case) -> Candidate:
        """Makes the first call, so that what the backend cannot do is raised here.

        Returns:
            The case, ready to be verified and timed.
        """
        call = self.bind(case)
        call()
        synchronize(case.send.device)
        return Candidate(case, call)

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """Returns the model under DistributedDataParallel on this backend; for peers that have a group."""
        return DistributedDataParallel(model, process_group=self.group, **options)

    @abstractmethod
    def close(self) -> None:
        """Disconnects; afterwards the peer is of no use."""
