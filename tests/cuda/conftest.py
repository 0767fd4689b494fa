"""Fixtures of the tests that run CuPy over the stand-in for NCCL."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "fake_nccl"))

from build import build  # noqa: E402

Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def stand_in() -> str:
    """Path of the stand-in."""
    pytest.importorskip("cupy", reason="no CuPy: install the extra `test`")
    if torch.version.cuda is not None:
        pytest.skip("this torch loads an NCCL of its own, and a process may have only one")
    return str(build())


@pytest.fixture
def script(stand_in: str, tmp_path: Path) -> Script:
    """``script(text, NAME="value")`` runs a program in an interpreter that has the stand-in loaded."""

    def run(
        text: str, *, timeout: float = 60, preload: str | None = stand_in, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        variables = {**os.environ, **environment}
        variables["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT / "tests"), str(ROOT / "tests" / "cuda")]
        )
        if preload is not None:
            variables["LD_PRELOAD"] = preload
        return subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", text],
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run
