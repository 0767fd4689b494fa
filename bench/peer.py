"""The interface behind which every backend is compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastcoll.bench.candidate import Candidate, CaseCall
from fastcoll.bench.collectives import Case
from fastcoll.bench.control import Control
from fastcoll.bench.turn import Call, synchronize

__all__ = ["LocalPeer", "Peer"]


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
        settings: Environment variables that it was given and the ranks were not; ``{prefix}`` is its folder.
    """

    delivers = True
    trains = True
    group: dist.ProcessGroup | None = None
    library = ""
    settings: Mapping[str, str] = {}

    def __init__(self, name: str, control: Control, timeout: timedelta) -> None:
        self.name = name

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Returns why this process cannot load the backend, or "" if it can; connects to nobody."""
        return ""

    @abstractmethod
    def prepare(self, case: Case) -> Candidate:
        """Makes the first call, so that what the backend cannot do is raised here.

        Returns:
            The case, ready to be verified and timed.
        """

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """Returns the model under DistributedDataParallel on this backend; for peers that have a group."""
        return DistributedDataParallel(model, process_group=self.group, **options)

    def cpu_seconds(self) -> float:
        """Returns the time that the backend's own processes of this rank have used on all cores."""
        return 0.0

    @abstractmethod
    def close(self) -> None:
        """Disconnects; afterwards the peer is of no use."""


class LocalPeer(Peer):
    """A backend in this process."""

    @abstractmethod
    def bind(self, case: Case) -> Call:
        """Returns a call without arguments that does the whole collective, ready to be timed."""

    def prepare(self, case: Case) -> Candidate:
        """Binds and calls."""
        call = self.bind(case)
        call()
        synchronize(case.send.device)
        return CaseCall(case, call)
