"""Every environment variable that fastcoll reads: name, type, default and meaning.

The C++ side reads those with ``read_in_cpp`` by itself, in csrc/base/env.cpp. A variable that is set wins
over the field of ``fastcoll.Options`` with the same meaning.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["GROUPS", "VARIABLES", "Variable", "read", "unknown"]

GROUPS = ("Start here", "Several hosts", "Faults and trace", "Tuning", "CUDA")
"""Titles of the reference's parts, in its order."""


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: With the prefix.
        group: One of ``GROUPS``.
        default: Its value when it is not set; an int means that the variable is a whole number.
        meaning: One sentence, with the unit.
        allowed: The words it may hold, or the least and the greatest number; empty for any text.
        read_in_cpp: Whether csrc/base/env.cpp reads it too.
    """

    name: str
    group: str
    default: str | int
    meaning: str
    allowed: tuple[Any, ...] = ()
    read_in_cpp: bool = True

    def parse(self, text: str) -> str | int:
        """Returns the value that `text` stands for.

        Raises:
            ValueError: It stands for none; the message says what would.
        """
        if isinstance(self.default, int):
            least, most = self.allowed
            with contextlib.suppress(ValueError):
                if least <= int(text) <= most:
                    return int(text)
            expected = f"an integer from {least} to {most}"
        else:
            for choice in self.allowed or [text]:
                if choice.lower() == text.lower():
                    return str(choice)
            expected = f"one of {', '.join(self.allowed)}"
        raise ValueError(f"{self.name}={text}: expected {expected}. Correct or unset the variable.")


VARIABLES = (
    Variable(
        "FASTCOLL_DEBUG",
        "Start here",
        "WARN",
        "Level of the log. INFO reports which transport each group uses, and why.",
        ("OFF", "WARN", "INFO", "TRACE"),
    ),
    Variable(
        "FASTCOLL_DEFAULT",
        "Start here",
        "",
        "Devices for which fastcoll serves groups that name no backend: `cpu` or `cpu,cuda`. 1 means `cpu`.",
        read_in_cpp=False,
    ),
    Variable(
        "FASTCOLL_REPLACE",
        "Start here",
        "",
        "Backends that fastcoll replaces in groups that name them: `gloo`, `nccl` or `gloo,nccl`.",
        read_in_cpp=False,
    ),
    Variable(
        "FASTCOLL_TRANSPORT",
        "Start here",
        "auto",
        "Transport of CPU tensors. auto uses shared memory between ranks of a host, and Gloo between hosts.",
        ("auto", "shm", "gloo"),
    ),
    Variable(
        "FASTCOLL_SHARED_TENSORS",
        "Start here",
        0,
        "1 puts CPU tensors of 32 KiB and more into shared memory, if they are made after init_process_group. "
        "Peers read and reduce them in place.",
        (0, 1),
    ),
    Variable(
        "FASTCOLL_HOST_ID",
        "Several hosts",
        "",
        "Name of this host, of at most 63 characters. Case does not matter. Ranks of one user with equal names "
        "share memory. If it is unset, fastcoll reads the machine's identity.",
    ),
    Variable(
        "FASTCOLL_LINK_SECONDS",
        "Several hosts",
        10,
        "Seconds without any TCP response after which a host is treated as lost. 0 keeps the TCP defaults.",
        (0, 86400),
    ),
    Variable(
        "FASTCOLL_TRACE_DUMP",
        "Faults and trace",
        "",
        "Path to which each rank appends its number. It dumps its trace there when a group fails. The folder must "
        "exist.",
    ),
    Variable(
        "FASTCOLL_TRACE_SIGNAL",
        "Faults and trace",
        "none",
        "Signal that makes a rank dump its trace, to `/tmp/fastcoll_trace_<rank>` without FASTCOLL_TRACE_DUMP.",
        ("none", "USR1", "USR2", "HUP", "QUIT"),
    ),
    Variable(
        "FASTCOLL_TRACE_STACKS",
        "Faults and trace",
        0,
        "1 records the Python stack of each call in the trace.",
        (0, 1),
    ),
    Variable(
        "FASTCOLL_TRACE_SIZE",
        "Faults and trace",
        2000,
        "Number of calls that the trace of a process keeps. 0 disables the trace.",
        (0, 1 << 20),
    ),
    Variable(
        "FASTCOLL_TUNING",
        "Tuning",
        "auto",
        "Tuning table: a file that `fastcoll tune` wrote, or `default`, the shipped table. auto uses "
        "this host's table if there is one, else the shipped table.",
        read_in_cpp=False,
    ),
    Variable(
        "FASTCOLL_RING_BYTES",
        "Tuning",
        2 << 20,
        "Bytes of a rank's ring in shared memory, one for each group. A group of several hosts uses four times as "
        "much.",
        (16 << 10, 1 << 30),
    ),
    Variable(
        "FASTCOLL_SPIN_US",
        "Tuning",
        -1,
        "Time that a wait spins before it sleeps, in microseconds. -1 means 50 if each rank has its own core, "
        "else 0.",
        (-1, 1_000_000),
    ),
    Variable(
        "FASTCOLL_STORES",
        "Tuning",
        "auto",
        "How segments are written to shared memory. streaming bypasses the caches. auto begins with plain. It "
        "takes streaming for segments of 8 KiB and more once plain costs 6 times as much. It goes back once plain "
        "costs less than 4 times as much.",
        ("auto", "plain", "streaming"),
    ),
    Variable(
        "FASTCOLL_ISA",
        "Tuning",
        "auto",
        "Instruction set of the reductions.",
        ("auto", "avx512", "avx2", "baseline"),
    ),
    Variable(
        "FASTCOLL_ARENA_BYTES",
        "Tuning",
        64 << 30,
        "Address space reserved for shared memory by each process, in bytes. Only used pages take memory.",
        (16 << 20, 1 << 44),
    ),
    Variable(
        "FASTCOLL_SHARED_BUCKETS",
        "Tuning",
        1,
        "0 keeps DDP's buckets of CPU tensors in private memory, as DDP_DISABLE_COMM_MEM=1 does. With a GPU, they "
        "are there unless DDP_DISABLE_COMM_MEM is 0.",
        (0, 1),
    ),
    Variable(
        "FASTCOLL_ALGO",
        "CUDA",
        "auto",
        "Algorithm of each all_reduce of CUDA tensors, equal on all ranks. ring also serves reduce_scatter_tensor "
        "and all_gather_into_tensor. A call that it cannot serve raises. auto chooses by size and topology. nccl "
        "maps no memory of peers.",
        ("auto", "nccl", "one_shot", "two_shot", "ring"),
        read_in_cpp=False,
    ),
    Variable(
        "FASTCOLL_ERROR_HANDLING",
        "CUDA",
        "teardown",
        "What happens after a CUDA error that was not raised within 1 s. teardown ends the process. raise keeps "
        "it, and the next call of the group raises. If it is unset, TORCH_NCCL_ASYNC_ERROR_HANDLING decides.",
        ("teardown", "raise"),
    ),
    Variable(
        "FASTCOLL_HEARTBEAT_SECONDS",
        "CUDA",
        480,
        "Seconds that the watchdog of CUDA tensors may be blocked before the process ends. 0 disables this, and "
        "so does FASTCOLL_ERROR_HANDLING=raise. If it is unset, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC and "
        "TORCH_NCCL_ENABLE_MONITORING decide.",
        (0, 86400),
    ),
)


def read(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns what each variable holds, by name; its default where it is unset or empty.

    Raises:
        ValueError: One holds what it may not; the message names it and says what it may hold.
    """
    return {
        one.name: one.parse(text) if (text := environ.get(one.name)) else one.default
        for one in VARIABLES
    }


def unknown(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the names that begin as ours do and mean nothing to us: most likely misspelt."""
    known = {variable.name for variable in VARIABLES}
    ours = {name for name in environ if name.startswith("FASTCOLL_")}
    return sorted(n for n in ours - known if not n.startswith("FASTCOLL_TEST_"))
