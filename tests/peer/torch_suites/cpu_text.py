"""Turns test files that insist on CUDA into tests of CPU tensors.

PyTorch's FSDP and checkpoint suites name "cuda" and "nccl" in their text, though most of what they
test holds on any device. Their text is changed to CPU and gloo, alike for both backends. What then
still asks for a GPU (memory counts, streams, Triton) fails or is skipped on both.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDERS = ("fsdp", "_composable", "_shard", "checkpoint", "optim", "algorithms", "tensor/parallel")

_CHANGES = (
    (r"\btorch\.device\((['\"])cuda\1,[^()]*(?:\(\))?[^()]*\)", "torch.device('cpu')"),
    (r"\bcpu:gloo,cuda:nccl\b", "gloo"),
    (r"(['\"])nccl\1", r"\1gloo\1"),
    (r"\bBackend\.NCCL\b", "Backend.GLOO"),
    (r"@requires_nccl\(\)", "@requires_gloo_here"),
    (r"@requires_nccl_version\(\([\d, ]+\),[^)]*\)", "@requires_gloo_here"),
    (r"(f?)(['\"])cuda(:\d+|:\{[^}'\"]*\})?\2", r"\2cpu\2"),
    (r"\.cuda\([\w.]*\)", ".cpu()"),
    (r"\bdevice_ids=\[(self\.)?rank\]", "device_ids=None"),
    (r"\b(device|device_id)=(self\.)?rank\b(?![.(])", r"\1=torch.device('cpu')"),
    (r"(\btorch\.device|\.to)\((self\.)?rank\)", r"\1('cpu')"),
    (r"\btorch\.cuda\.device_count\(\)", "2"),
    (r"\btorch\.cuda\.(?!is_available|nccl|amp)", "torch.cpu."),
    (r"rank\}:cuda:\{\w+\}", "rank}:cpu"),
)
_IMPORTED = "from torch_suites.harness import unguarded as requires_gloo_here\n"


def _changed(text: str) -> str:
    for pattern, replacement in _CHANGES:
        text = re.sub(pattern, replacement, text)
    if "requires_gloo_here" in text:
        # After the docstring, the comments and `from __future__`: right before the first import.
        text = re.sub(r"^(?=import |from (?!__future__))", _IMPORTED, text, count=1, flags=re.M)
    return text


def is_changed(file: str) -> bool:
    """Tells whether a test file is one of those whose text is changed."""
    return any(f"/test/distributed/{part}/" in file for part in FOLDERS)


def convert(folder: Path) -> None:
    """Changes the test files of `FOLDERS` below `folder` in place."""
    for part in FOLDERS:
        for path in (folder / part).rglob("*.py"):
            text = path.read_text()
            changed = _changed(text)
            if changed != text:
                path.write_text(changed)
