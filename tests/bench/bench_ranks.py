"""A run of the benchmark on living ranks: what ``python -m fastcoll.bench`` does, without new interpreters."""

import contextlib
import io
import os
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from world import Worlds, here

from fastcoll._launch import rank_variables
from fastcoll.bench.record import read_record

FEW = ("-n", "1", "--rounds", "1", "-w", "0")
SHORT = (
    *("-b", "4", "-e", "64K", "-f", "16384"),
    *("-n", "4", "--rounds", "2", "-w", "1", "--turn-ms", "0"),
)


@dataclass(frozen=True)
class Ended:
    """How a run ended: what rank 0 printed, and the record; {} without one."""

    stdout: str
    record: dict[str, Any]

    @property
    def cases(self) -> list[dict[str, Any]]:
        """The cases of the record."""
        return list(self.record["cases"])


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
    worlds: Worlds,
    ranks: int,
    *arguments: Any,
    module: str = "fastcoll.bench.__main__",
    status: int = 0,
) -> Ended:
    """Run the benchmark of a module with ``run_rank`` on the ranks of a world, which end with this status."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    path = Path(tempfile.mkdtemp(), "deep", "record.jsonl")
    given = [str(argument) for argument in (*arguments, "--json", path)]
    answers = worlds(ranks).run(as_one_rank, store.port, module, given, init=False)
    found = next((code for code, _, _ in answers if code), 0)
    assert found == status, answers
    return Ended(answers[0][1], read_record(path) if path.exists() else {})
