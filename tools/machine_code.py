"""What the machine code of a compiled kernel says: registers, spills, widths of its accesses to memory."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import triton

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?);", re.MULTILINE)
_BRANCH = re.compile(r"\b(?:BRA|BRX|JMP|EXIT|RET)\b")
_TARGET = re.compile(r"\b(?:BRA|JMP|BSSY|BSSY\.RECONVERGENT)\b.*?\b0x([0-9a-f]+)\s*$")
_ACCESS = re.compile(r"\b(LDG|STG|LD|ST)\.(E[A-Z0-9_.]*)")
_WIDTH = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}


def _run(program: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / program
    done = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{program} {' '.join(arguments)}: expected status 0, got {done.returncode}: {done.stderr}"
        )
    return done.stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """Returns registers of a thread, and bytes of its stack.

    Raises:
        RuntimeError: cuobjdump's answer is not understood.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage: expected REG and STACK, got {usage!r}")
    return int(found[1]), int(found[2])


def _code(cubin: bytes) -> bytes:
    """Returns the instructions: the section ``.text.<kernel>`` of the ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(number)]
    start_of_names = sections[names][4]
    found = [
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in sections
        if cubin[start_of_names + name :].startswith(b".text.")
    ]
    if len(found) != 1:
        raise RuntimeError(f"expected one section of code, got {len(found)}")
    return found[0]


def disassemble(cubins: Sequence[bytes], architecture: int) -> list[list[tuple[int, str]]]:
    """Returns (address, instruction) of each kernel; one process for all, as its start takes the time.

    Args:
        cubins: Compiled kernels of one architecture.
        architecture: Compute capability, 90 for 9.0.
    """
    codes = [_code(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        text = _run("nvdisasm", "--binary", f"SM{architecture}", file.name)
    instructions = [(int(found[1], 16), found[2]) for found in _INSTRUCTION.finditer(text)]
    kernels: list[list[tuple[int, str]]] = []
    begin = 0
    for code in codes:
        end = begin + len(code)
        kernels.append([item for item in instructions if begin <= item[0] < end])
        begin = end
    if sum(map(len, kernels)) != len(instructions) or not all(kernels):
        raise RuntimeError("nvdisasm: expected instructions at addresses of the code, got others")
    return kernels


def spill_instructions(instructions: Sequence[tuple[int, str]]) -> int:
    """Returns how many instructions load from or store to a thread's local memory."""
    return sum(bool(re.search(r"\b(?:LDL|STL)\b", text)) for _, text in instructions)


def widest(counts: Mapping[str, int]) -> int:
    """Returns the greatest width, 0 of none."""
    return max((int(bits) for bits in counts), default=0)


def widths(instructions: Sequence[tuple[int, str]]) -> tuple[dict[str, int], dict[str, int]]:
    """Returns how many loads and stores of global memory have which width in bits.

    Counts the main path: the basic blocks that hold the widest accesses of the kernel. Most look-ups in
    tables, and the tails of tensors, are in others.
    """
    targets = {int(found[1], 16) for _, text in instructions if (found := _TARGET.search(text))}
    blocks: list[tuple[Counter[str], Counter[str]]] = [(Counter(), Counter())]
    for address, text in instructions:
        if address in targets:
            blocks.append((Counter(), Counter()))
        access = _ACCESS.search(text)
        if access:
            bits = next((_WIDTH[part] for part in access[2].split(".") if part in _WIDTH), 32)
            blocks[-1][not access[1].startswith("LD")][str(bits)] += 1
        if _BRANCH.search(text):
            blocks.append((Counter(), Counter()))
    most = max(widest(loads | stores) for loads, stores in blocks)
    main = [pair for pair in blocks if widest(pair[0] | pair[1]) == most]
    return (
        _sorted(sum((loads for loads, _ in main), Counter())),
        _sorted(sum((stores for _, stores in main), Counter())),
    )


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return {bits: counts[bits] for bits in sorted(counts, key=int)}
