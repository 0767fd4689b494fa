"""Fixtures of the tests that run CuPy over the stand-in for NCCL."""

from collections.abc import Callable, Iterator
from pathlib import Path

import nccl_ranks
import pytest
import torch
from fake_nccl.build import build
from launcher import Ended, Launcher
from world import worlds_fixture


@pytest.fixture(scope="session")
def stand_in(without_nccl: None) -> str:
    """Path of the stand-in."""
    pytest.importorskip("cupy", reason="no CuPy: install the extra `test`")
    return str(build())


# Ranks that have loaded the stand-in.
stand_in_world = worlds_fixture("launcher", "stand_in", prepare=nccl_ranks.prepare)


@pytest.fixture(scope="session")
def cupy_launcher(stand_in: str) -> Iterator[Launcher]:
    """Forks processes that have torch and CuPy loaded, and no NCCL."""
    if torch.version.cuda is not None:
        pytest.skip("torch has its own NCCL here; these programs are of interpreters with none")
    launcher = Launcher(preload=["torch.distributed", "cupy", "fastcoll.cuda.nccl"])
    yield launcher.wait()
    launcher.close()


@pytest.fixture
def script(cupy_launcher: Launcher, stand_in: str, tmp_path: Path) -> Callable[..., Ended]:
    """``script(text, NAME="value")`` runs a program in an interpreter that has the stand-in loaded."""

    def run(
        text: str, *, limit: float = 60, library: str | None = stand_in, **environment: str
    ) -> Ended:
        load = (
            f"import ctypes; ctypes.CDLL({library!r}, mode=ctypes.RTLD_GLOBAL)\n" if library else ""
        )
        return cupy_launcher.program(load + text, tmp_path, limit=limit, **environment)

    return run
