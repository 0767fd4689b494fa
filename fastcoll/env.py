"""Every environment variable that fastcoll reads: name, type, default and meaning.

The C++ side reads those with ``read_in_cpp`` by itself, in csrc/base/env.cpp. A variable that is set wins
over the field of :class:`fastcoll.Options` with the same meaning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["PREFIX", "Env", "Variable", "unknown", "variables"]

PREFIX = "FASTCOLL_"
_OF_TESTS = "FASTCOLL_TEST_"


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: With the prefix.
        default: Its value when it is not set; an int means that the variable is a whole number.
        choices: The words it may hold; empty for a number, and for any text.
        least: The least number it may hold.
        most: The greatest number it may hold.
        meaning: One sentence, with the unit.
        read_in_cpp: Whether csrc/base/env.cpp reads it too.
    """

    name: str
    default: str | int
    choices: tuple[str, ...]
    least: int
    most: int
    meaning: str
    read_in_cpp: bool = True

    def parse(self, text: str) -> str | int:
        """Returns the value that `text` stands for.

        Raises:
            ValueError: It stands for none; the message says what would.
        """
        if isinstance(self.default, int):
            try:
                number = int(text)
            except ValueError:
                number = self.least - 1
            if self.least <= number <= self.most:
                return number
            raise ValueError(
                f"{self.name}={text}: expected an integer from {self.least} to {self.most}. "
                "Correct or unset the variable."
            )
        if not self.choices:
            return text
        for choice in self.choices:
            if choice.lower() == text.lower():
                return choice
        raise ValueError(
            f"{self.name}={text}: expected one of {', '.join(self.choices)}. "
            "Correct or unset the variable."
        )


def _variable(
    name: str,
    default: str | int,
    meaning: str,
    choices: tuple[str, ...] = (),
    least: int = 0,
    most: int = 0,
    read_in_cpp: bool = True,
) -> Any:
    variable = Variable(PREFIX + name, default, choices, least, most, meaning, read_in_cpp)
    return field(default=default, metadata={"variable": variable})


@dataclass(frozen=True)
class Env:
    """The variables of a process, one field each."""

    debug: str = _variable(
        "DEBUG",
        "WARN",
        "How much goes to the log; INFO says which transport a group uses and why.",
        ("OFF", "WARN", "INFO", "TRACE"),
    )
    transport: str = _variable(
        "TRANSPORT",
        "auto",
        "What moves bytes: auto takes shared memory where all ranks can map each other, else Gloo.",
        ("auto", "shm", "gloo"),
    )
    host_id: str = _variable(
        "HOST_ID",
        "",
        "Ranks with equal ones are on one host, and share memory; by default the machine tells.",
    )
    ring_bytes: int = _variable(
        "RING_BYTES",
        2 << 20,
        "Shared memory, for each group, through which the data of a rank goes, in bytes.",
        least=16 << 10,
        most=1 << 30,
    )
    stores: str = _variable(
        "STORES",
        "auto",
        "How segments of 8 KiB and more are written to shared memory: auto begins to take streaming stores where "
        "plain ones cost six times as much, and ends where they cost less than four times as much.",
        ("auto", "plain", "streaming"),
    )
    spin_us: int = _variable(
        "SPIN_US",
        -1,
        "How long a wait spins before it sleeps, in microseconds; -1 chooses by the cores.",
        least=-1,
        most=1_000_000,
    )
    link_seconds: int = _variable(
        "LINK_SECONDS",
        10,
        "After how many seconds of silence of its kernel another host counts as lost; 0: after TCP's own bounds.",
        least=0,
        most=86400,
    )
    error_handling: str = _variable(
        "ERROR_HANDLING",
        "teardown",
        "What a fault of device tensors does that the program is not told of within a second: teardown ends the "
        "process, raise leaves it to the group's next call. Unset, TORCH_NCCL_ASYNC_ERROR_HANDLING says it.",
        ("teardown", "raise"),
    )
    heartbeat_seconds: int = _variable(
        "HEARTBEAT_SECONDS",
        480,
        "How long a watchdog of device tensors may stand still before the process is ended, in seconds; 0: for ever. "
        "Unset, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC and TORCH_NCCL_ENABLE_MONITORING say it.",
        least=0,
        most=86400,
    )
    isa: str = _variable(
        "ISA",
        "auto",
        "Instruction set of the reductions.",
        ("auto", "avx512", "avx2", "baseline"),
    )
    arena_bytes: int = _variable(
        "ARENA_BYTES",
        64 << 30,
        "Address space of a process's shared memory, in bytes; memory itself is taken only as used.",
        least=16 << 20,
        most=1 << 44,
    )
    shared_tensors: int = _variable(
        "SHARED_TENSORS",
        0,
        "Whether CPU tensors of 32 KiB and more that are made after init_process_group lie in shared memory, where "
        "peers read and reduce them in place: 0 or 1.",
        least=0,
        most=1,
    )

    shared_buckets: int = _variable(
        "SHARED_BUCKETS",
        1,
        "Whether DDP's buckets of CPU tensors lie in shared memory, unless DDP_DISABLE_COMM_MEM is 1: 0 or 1.",
        least=0,
        most=1,
    )

    default: str = _variable(
        "DEFAULT",
        "",
        "Devices, such as `cpu` or `cpu,cuda`, for which fastcoll serves groups that name no backend; 1 is `cpu`.",
        read_in_cpp=False,
    )

    replace: str = _variable(
        "REPLACE",
        "",
        "Backends, `gloo`, `nccl` or both with a comma, in whose place fastcoll serves the groups that name them.",
        read_in_cpp=False,
    )

    tuning: str = _variable(
        "TUNING",
        "auto",
        "Tuning table: a file that `python -m fastcoll.tune` wrote, `default` for the shipped one; "
        "auto takes this host's where it was tuned, else the shipped one.",
        read_in_cpp=False,
    )

    algo: str = _variable(
        "ALGO",
        "auto",
        "Algorithm of every all_reduce of CUDA tensors, equal on all ranks; a call that it cannot serve is an error. "
        "auto chooses by size and topology, nccl uses no memory of peers.",
        ("auto", "nccl", "one_shot", "two_shot", "ring"),
        read_in_cpp=False,
    )

    trace_size: int = _variable(
        "TRACE_SIZE",
        2000,
        "Calls that the trace of a process keeps; 0 switches it off.",
        least=0,
        most=1 << 20,
    )
    trace_stacks: int = _variable(
        "TRACE_STACKS",
        0,
        "Whether the trace keeps the Python stack of each call: 0 or 1.",
        least=0,
        most=1,
    )
    trace_dump: str = _variable(
        "TRACE_DUMP",
        "",
        "Prefix of the file, the rank is the rest, to which each rank dumps its trace when a group fails.",
    )
    trace_signal: str = _variable(
        "TRACE_SIGNAL",
        "none",
        "Signal at which a rank dumps its trace, to /tmp/fastcoll_trace_<rank> if TRACE_DUMP is not set.",
        ("none", "USR1", "USR2", "HUP", "QUIT"),
    )

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Env:
        """Reads the variables.

        Raises:
            ValueError: One holds what it may not; the message names it and says what it may hold.
        """
        values: dict[str, Any] = {
            attribute: variable.parse(environ[variable.name])
            for attribute, variable in _by_field()
            if environ.get(variable.name)
        }
        return cls(**values)


def _by_field() -> list[tuple[str, Variable]]:
    return [(item.name, item.metadata["variable"]) for item in fields(Env)]


def variables() -> list[Variable]:
    """Returns all variables, in the order of the fields of :class:`Env`."""
    return [variable for _, variable in _by_field()]


def unknown(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the names that begin as ours do and mean nothing to us: most likely misspelt."""
    known = {variable.name for variable in variables()}
    return sorted(
        name
        for name in environ
        if name.startswith(PREFIX) and not name.startswith(_OF_TESTS) and name not in known
    )
