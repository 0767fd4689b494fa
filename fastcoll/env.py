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
        "Level of the log. INFO reports which transport each group uses, and why.",
        ("OFF", "WARN", "INFO", "TRACE"),
    )
    transport: str = _variable(
        "TRANSPORT",
        "auto",
        "Transport of CPU tensors. auto uses shared memory between ranks of a host, and Gloo between hosts.",
        ("auto", "shm", "gloo"),
    )
    host_id: str = _variable(
        "HOST_ID",
        "",
        "Name of this host, of at most 63 characters, in any case. Ranks of one user with equal names share memory. If "
        "it is unset, fastcoll reads the machine's identity.",
    )
    ring_bytes: int = _variable(
        "RING_BYTES",
        2 << 20,
        "Size of a rank's ring in shared memory, for each group, in bytes. In a group of several hosts it is "
        "four times as large.",
        least=16 << 10,
        most=1 << 30,
    )
    stores: str = _variable(
        "STORES",
        "auto",
        "How segments are written to shared memory. streaming bypasses the caches. auto chooses for segments of 8 KiB "
        "and more: streaming when plain costs 6 times as much, until it costs less than 4 times as much.",
        ("auto", "plain", "streaming"),
    )
    spin_us: int = _variable(
        "SPIN_US",
        -1,
        "Time that a wait spins before it sleeps, in microseconds. -1 means 50 if each rank has its own core, else 0.",
        least=-1,
        most=1_000_000,
    )
    link_seconds: int = _variable(
        "LINK_SECONDS",
        10,
        "Seconds without any TCP response after which a host is treated as lost. 0 keeps the TCP defaults.",
        least=0,
        most=86400,
    )
    error_handling: str = _variable(
        "ERROR_HANDLING",
        "teardown",
        "What happens after a CUDA error that was not raised within 1 s. teardown ends the process. raise keeps it, "
        "and the next call of the group raises. If it is unset, TORCH_NCCL_ASYNC_ERROR_HANDLING decides.",
        ("teardown", "raise"),
    )
    heartbeat_seconds: int = _variable(
        "HEARTBEAT_SECONDS",
        480,
        "Seconds that the watchdog of CUDA tensors may be blocked before the process ends. 0 disables this, and so "
        "does FASTCOLL_ERROR_HANDLING=raise. If it is unset, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC and "
        "TORCH_NCCL_ENABLE_MONITORING decide.",
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
        "Address space reserved for shared memory by each process, in bytes. Only used pages take memory.",
        least=16 << 20,
        most=1 << 44,
    )
    shared_tensors: int = _variable(
        "SHARED_TENSORS",
        0,
        "1 puts CPU tensors of 32 KiB and more into shared memory, if they are made after init_process_group. Peers "
        "read and reduce them in place.",
        least=0,
        most=1,
    )

    shared_buckets: int = _variable(
        "SHARED_BUCKETS",
        1,
        "0 keeps DDP's buckets of CPU tensors in private memory, as DDP_DISABLE_COMM_MEM=1 does. With a GPU, they are "
        "there unless DDP_DISABLE_COMM_MEM is 0.",
        least=0,
        most=1,
    )

    default: str = _variable(
        "DEFAULT",
        "",
        "Devices, `cpu` or `cpu,cuda`, for which fastcoll serves groups that name no backend. 1 means `cpu`.",
        read_in_cpp=False,
    )

    replace: str = _variable(
        "REPLACE",
        "",
        "Backends that fastcoll replaces in groups that name them: `gloo`, `nccl` or `gloo,nccl`.",
        read_in_cpp=False,
    )

    tuning: str = _variable(
        "TUNING",
        "auto",
        "Tuning table: a file that `python -m fastcoll.tune` wrote, or `default`, the shipped table. auto uses this "
        "host's table if there is one, else the shipped table.",
        read_in_cpp=False,
    )

    algo: str = _variable(
        "ALGO",
        "auto",
        "Algorithm of each all_reduce of CUDA tensors, equal on all ranks. A call that it cannot serve raises. "
        "auto chooses by size and topology. nccl maps no memory of peers.",
        ("auto", "nccl", "one_shot", "two_shot", "ring"),
        read_in_cpp=False,
    )

    trace_size: int = _variable(
        "TRACE_SIZE",
        2000,
        "Number of calls that the trace of a process keeps. 0 disables the trace.",
        least=0,
        most=1 << 20,
    )
    trace_stacks: int = _variable(
        "TRACE_STACKS",
        0,
        "1 records the Python stack of each call in the trace.",
        least=0,
        most=1,
    )
    trace_dump: str = _variable(
        "TRACE_DUMP",
        "",
        "Path to which each rank appends its number. It dumps its trace there when a group fails.",
    )
    trace_signal: str = _variable(
        "TRACE_SIGNAL",
        "none",
        "Signal that makes a rank dump its trace, to /tmp/fastcoll_trace_<rank> without FASTCOLL_TRACE_DUMP.",
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
