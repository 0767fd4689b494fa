"""A run of the benchmark on living ranks: what ``python -m fastcoll.bench`` does, without new interpreters."""

import contextlib
import io
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from world import Worlds, here

from fastcoll._launch import rank_variables

FEW = ("-n", "1", "--rounds", "1", "-w", "0")
SHORT = (
    *("-b", "4", "-e", "64K", "-f", "16384"),
    *("-n", "4", "--rounds", "2", "-w", "1", "--turn-ms", "0"),
)


@dataclass(frozen=True)
class Ended:
    """How a run ended: the first status that is not 0, and what rank 0 printed."""

    status: int
    stdout: str
    stderr: str


def as_one_rank(store_port: int, module: str, arguments: list[str]) -> tuple[int, str, str]:
    """Be one rank, with the variables that torchrun sets; return the status and what was printed."""
    import importlib

    place = here().rank, here().size
    os.environ |= rank_variables(*place, *place, "127.0.0.1", store_port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = importlib.import_module(module).run_rank(arguments)
    return status, out.getvalue(), err.getvalue()


def run_on(
    worlds: Worlds, ranks: int, *arguments: Any, module: str = "fastcoll.bench.__main__"
) -> Ended:
    """Run the benchmark of a module with ``run_rank`` on the ranks of a world."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    given = [str(argument) for argument in arguments]
    answers = worlds(ranks).run(as_one_rank, store.port, module, given, init=False)
    statuses = [status for status, _, _ in answers if status]
    return Ended(statuses[0] if statuses else 0, *answers[0][1:])
