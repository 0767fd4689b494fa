"""Fixtures of the tests that run CuPy over the stand-in for NCCL."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_nccl.build import build
from nccl_scripts import Ended, Script

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def stand_in(without_nccl: None) -> str:
    """Path of the stand-in."""
    pytest.importorskip("cupy", reason="no CuPy: install the extra `test`")
    return str(build())


@pytest.fixture(scope="session")
def launcher(stand_in: str) -> Iterator["subprocess.Popen[str]"]:
    if torch.version.cuda is not None:
        pytest.skip("this torch loads an NCCL; these programs are of interpreters with none")
    path = [str(TESTS), str(TESTS / "cuda"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, "-X", "faulthandler", str(TESTS / "cuda" / "nccl_launcher.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


@pytest.fixture
def script(launcher: "subprocess.Popen[str]", stand_in: str, tmp_path: Path) -> Script:
    """``script(text, NAME="value")`` runs a program in an interpreter that has the stand-in loaded."""

    def run(
        text: str, *, limit: float = 60, library: str | None = stand_in, **environment: str
    ) -> Ended:
        load = (
            f"import ctypes; ctypes.CDLL({library!r}, mode=ctypes.RTLD_GLOBAL)\n" if library else ""
        )
        request = {
            "text": load + text,
            "environment": environment,
            "folder": str(tmp_path),
            "limit": limit,
        }
        assert launcher.stdin is not None and launcher.stdout is not None
        print(json.dumps(request), file=launcher.stdin, flush=True)
        status = json.loads(launcher.stdout.readline())
        return Ended(status, *((tmp_path / name).read_text() for name in ("stdout", "stderr")))

    return run
