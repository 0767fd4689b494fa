"""Rows 45 and 61 to 64: runs that take their time, and tools."""

import os
import subprocess
import sys
import time
from pathlib import Path

from fault_rank import Rank
from matrix_machine import refuse_calls
from matrix_ranks import finish, works
from matrix_row import NotPlayed, Outcome, Stage, Verdict, row
from soak_load import sampled
from soak_verdict import growths

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[3]


def tool(stage: Stage, *command: str) -> Outcome:
    """Run a command of the project; it must end well."""
    if not stage.native:
        raise NotPlayed("it is about fastcoll's own code")
    if not stage.builds:
        raise NotPlayed(f"takes minutes: --builds, or {' '.join(command)}")
    start = time.monotonic()
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1800, env=environment
    )
    seconds = time.monotonic() - start
    if done.returncode == 0:
        return Outcome(Verdict.AS_WANTED, seconds)
    return Outcome(Verdict.FAILS, seconds, (done.stdout + done.stderr)[-500:])


@row(
    45,
    "soak: a mixed load for a long time",
    "memory, descriptors, threads stay",
    "test_soak.py::test_nothing_grows",
)
def soak(stage: Stage) -> Outcome:
    seconds = 15.0
    job = stage.jobs(3, sampled, seconds)
    answers = job.hear_all(timeout=seconds + 30.0)
    grown = [text for samples in answers.values() for text in growths(samples)]
    return Outcome(Verdict.LEFTOVERS if grown else Verdict.AS_WANTED, seconds, "; ".join(grown))


@row(61, "data races in the protocol", "ThreadSanitizer finds none", quick=False)
def races(stage: Stage) -> Outcome:
    return tool(stage, "bash", "tests/cpp/sanitize.sh", "thread")


@row(
    62,
    "lost wake-ups, memory used again too early",
    "the model has none; its mutants are found",
    "test_model.py::test_model",
    "test_model.py::test_mutant_is_found",
)
def model(stage: Stage) -> Outcome:
    return tool(stage, "python3", "tests/model/check_model.py")


@row(63, "memory errors", "AddressSanitizer and UBSan find none", quick=False)
def memory_errors(stage: Stage) -> Outcome:
    return tool(stage, "bash", "tests/cpp/sanitize.sh", "address")


@row(
    64,
    "placement of memory is refused (NUMA, huge pages)",
    "works: refusals are ignored",
)
def no_placement(stage: Stage) -> Outcome:
    return stage.checks(stage.jobs(2, without_placement))


def without_placement(rank: Rank):
    refuse_calls("mbind", "set_mempolicy", "get_mempolicy", "madvise", error=1)
    rank.used()
    works(rank, 1 << 20)
    return finish(rank)
