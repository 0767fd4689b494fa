"""``python tools/kernel_table.py``: compiles every configuration for every GPU, and prints a table.

No GPU is needed. For each configuration and architecture: registers, spills, shared memory, programs that
fit on a multiprocessor, and how wide the accesses to global memory are, read off the machine code.
``--check`` compares with the recorded table and fails when a row differs; ``--record`` records it anew.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

KERNEL_MODULES = ("flatten", "reduce", "staged", "bucket_all_reduce", "ring", "norm")
"""Modules of fastcoll.kernels that have ``configurations()``."""

KERNELS = (
    *("flatten", "unflatten", "reduce", "one_shot", "two_shot", "bucket_all_reduce", "ring"),
    "norm",
)
"""First words of the configurations' names."""

RECORDED = Path(__file__).with_suffix(".json")

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities: A100, H100 and H200, B200."""

_REGISTERS = 65536  # of a multiprocessor, on all of them
_THREADS = 2048
_SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}  # bytes of a multiprocessor


@dataclass(frozen=True)
class Row:
    """What one configuration became on one architecture.

    Attributes:
        name: Of the configuration.
        architecture: Compute capability, 90 for 9.0.
        registers: Of a thread.
        spills: Bytes of a thread's stack; with a local load or store there are some even if this is 0.
        shared: Shared memory of a program in bytes.
        resident: Programs that fit on a multiprocessor at once.
        loads: Of the main path: bits of an access to global memory, and how many such instructions load.
        stores: The same of those that store.
        wide: Whether the configuration promises 128-bit accesses.
    """

    name: str
    architecture: int
    registers: int
    spills: int
    shared: int
    resident: int
    loads: dict[str, int]
    stores: dict[str, int]
    wide: bool

    @property
    def key(self) -> str:
        """Identifies the row in a recorded table."""
        return f"{self.name} sm_{self.architecture}"

    def faults(self) -> list[str]:
        """Returns what is wrong with the row by itself."""
        found = []
        if self.spills:
            found.append(f"{self.key}: expected no spills, got {self.spills} bytes of stack")
        if self.wide:
            for what, counts in (("loads", self.loads), ("stores", self.stores)):
                if max((int(bits) for bits in counts), default=0) < 128:
                    found.append(
                        f"{self.key}: expected 128-bit {what}, got {counts or 'none'} (bits: number)"
                    )
        return found


def analyse(
    configurations: Sequence[Any], architectures: Sequence[int], code: Path | None = None
) -> list[Row]:
    """Returns the rows of configurations; they share the start of the disassembler, once an architecture.

    A file of this process in the folder ``code`` gets a line for each row: its key, PTX and instructions.
    """
    import machine_code
    from ahead_of_time import compile_for_each

    from fastcoll.kernels._launch import require_parameters

    compiled = [compile_for_each(configuration, architectures) for configuration in configurations]
    rows, lines = [], []
    for position, architecture in enumerate(architectures):
        kernels = [each[position] for each in compiled]
        codes = machine_code.disassemble([kernel.asm["cubin"] for kernel in kernels], architecture)
        for configuration, kernel, instructions in zip(configurations, kernels, codes, strict=True):
            require_parameters(configuration, kernel)
            registers, stack = machine_code.resources(kernel.asm["cubin"])
            loads, stores = machine_code.widths(instructions)
            shared, threads = kernel.metadata.shared, 32 * configuration.num_warps
            rows.append(
                Row(
                    configuration.name,
                    architecture,
                    registers,
                    stack or 4 * machine_code.spill_instructions(instructions),
                    shared,
                    _resident(registers, shared, threads, architecture),
                    loads,
                    stores,
                    configuration.wide,
                )
            )
            texts = [text for _, text in instructions]
            lines.append(json.dumps([rows[-1].key, kernel.asm["ptx"], texts]))
    if code is not None:
        (code / f"{os.getpid()}.jsonl").write_text("\n".join(lines))
    return rows


def _resident(registers: int, shared: int, threads: int, architecture: int) -> int:
    """Returns programs that fit on a multiprocessor; registers are given out in units of 256 a warp."""
    of_warp = -(-registers * 32 // 256) * 256
    fits = min(_THREADS // threads, _REGISTERS // of_warp // (threads // 32), 32)
    return min(fits, _SHARED[architecture] // (shared + 1024))


def _rows_of(
    modules: Sequence[str],
    architectures: Sequence[int],
    only: str,
    code: Path | None,
    part: int,
    parts: int,
) -> list[Row]:
    # Takes a quarter of the time; the code is the same.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    found = [
        configuration
        for module in modules
        for configuration in importlib.import_module(f"fastcoll.kernels.{module}").configurations()
        if only in configuration.name
    ]
    chosen = found[part::parts]
    return analyse(chosen, architectures, code) if chosen else []


def collect(
    modules: Iterable[str] = KERNEL_MODULES,
    architectures: Sequence[int] = ARCHITECTURES,
    only: str = "",
    jobs: int = 0,
    code: Path | None = None,
) -> list[Row]:
    """Compiles and analyses configurations in parallel processes.

    Args:
        modules: Of fastcoll.kernels, each with ``configurations()``.
        architectures: Compute capabilities.
        only: A part of the names of the configurations that are wanted.
        jobs: Processes; 0 takes the cores that this process may use.
        code: A folder for files of lines, each a row's key, PTX and instructions.

    Raises:
        RuntimeError: TRITON_INTERPRET is set: interpreted kernels do not compile.
    """
    import triton

    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "expected TRITON_INTERPRET to be unset, as interpreted kernels are not compiled. Unset it."
        )
    modules = list(modules)
    jobs = jobs or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        # Every so many-th configuration, so that all processes end at about the same time.
        tasks = [
            pool.submit(_rows_of, modules, architectures, only, code, part, jobs)
            for part in range(jobs)
        ]
        rows = [row for task in tasks for row in task.result()]
    names = [row.name for row in rows]
    order = {name: position for position, name in enumerate(dict.fromkeys(sorted(names)))}
    rows.sort(key=lambda row: (order[row.name], row.architecture))
    keys = [row.key for row in rows]
    if len(set(keys)) != len(keys):
        twice = [key for key, count in Counter(keys).items() if count > 1]
        raise RuntimeError(
            f"expected different names of configurations, got {twice} more than once"
        )
    return rows


def compare(rows: Sequence[Row], recorded: Mapping[str, Any]) -> list[str]:
    """Compares rows with the recorded table, ``{key: row as a dict}``.

    Returns:
        A sentence for each row that differs, is not recorded, or is recorded and not found.
    """
    found = {row.key: asdict(row) for row in rows}
    return [
        f"{key}: expected {recorded.get(key)}, got {found.get(key)}. If the change is meant: --record"
        for key in {**recorded, **found}
        if recorded.get(key) != found.get(key)
    ]


def _lines(rows: Sequence[Row]) -> list[str]:
    width = max((len(row.name) for row in rows), default=4)
    head = (
        f"{'configuration':{width}}  sm   regs spill shared fits  loads (bits: number)      stores"
    )
    lines = [head]
    for row in rows:
        loads, stores = (
            " ".join(f"{bits}:{number}" for bits, number in counts.items())
            for counts in (row.loads, row.stores)
        )
        lines.append(
            f"{row.name:{width}}  {row.architecture:<4} {row.registers:4} {row.spills:5} {row.shared:6} "
            f"{row.resident:4}  {loads:25} {stores}"
        )
    return lines


def _text(version: str, table: Mapping[str, Any]) -> str:
    """Returns JSON with one line for each row."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in table.items())
    return f'{{\n "triton": {json.dumps(version)},\n "rows": {{\n{lines}\n }}\n}}\n'


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tools/kernel_table.py", description=__doc__)
    parser.add_argument("--only", default="", help="part of the names wanted")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--jobs", type=int, default=0, help="processes; default: one a core")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--code", type=Path, help="write PTX and machine code into this folder")
    parser.add_argument("--check", action="store_true", help="compare with the recorded table")
    parser.add_argument("--record", action="store_true", help="write the table to compare with")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table.

    Returns:
        The exit status: 1 if a row has a fault or is not as recorded.
    """
    import triton

    options = _parse(sys.argv[1:] if arguments is None else arguments)
    rows = collect(
        architectures=options.arch, only=options.only, jobs=options.jobs, code=options.code
    )
    print("\n".join(_lines(rows)))
    print(f"# Triton {triton.__version__}; {len(rows)} rows")
    table = {row.key: asdict(row) for row in rows}
    for path in filter(None, (options.json, options.record and RECORDED)):
        path.write_text(_text(triton.__version__, table))
    faults = [fault for row in rows for fault in row.faults()]
    if options.check:
        recorded = json.loads(RECORDED.read_text())
        wanted = {
            key: row
            for key, row in recorded["rows"].items()
            if options.only in row["name"] and row["architecture"] in options.arch
        }
        faults += compare(rows, wanted)
    for fault in faults:
        print(f"# {fault}")
    print(f"# {len(faults)} faults {'FAILED' if faults else 'OK'}")
    return 1 if faults or not rows else 0


if __name__ == "__main__":  # else the processes of `collect` would start tables
    sys.exit(main())
