"""DeepSpeed's all-reduce for inference on CPUs of one host: the sources of its package, compiled for the torch here."""

from __future__ import annotations

import importlib.util
import os
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fastcoll.bench.collectives import Case
from fastcoll.bench.control import Control
from fastcoll.bench.peer import LocalPeer
from fastcoll.bench.turn import Call

__all__ = ["DeepSpeedPeer", "build"]

_NAME = "deepspeed_shm_comm"
_FOLDER = "compiled"


def build(prefix: Path, site: Path) -> None:
    """Compiles, with the flags that DeepSpeed's own builder uses.

    Args:
        prefix: Of the environment.
        site: Of its Python packages.
    """
    from torch.utils.cpp_extension import load  # takes long, and only the build needs it

    sources = site / "deepspeed" / "ops" / "csrc" / "cpu" / "comm"
    folder = prefix / _FOLDER
    folder.mkdir(exist_ok=True)
    load(
        _NAME,
        [str(sources / "shm_interface.cpp"), str(sources / "shm.cpp")],
        extra_cflags=["-O2", "-fopenmp"],
        extra_ldflags=["-fopenmp"],
        build_directory=str(folder),
        is_python_module=False,
    )


def _load() -> Any:
    path = Path(os.environ["DEEPSPEED_PREFIX"]) / _FOLDER / f"{_NAME}.so"
    specification = importlib.util.spec_from_file_location(_NAME, path)
    if specification is None or specification.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class DeepSpeedPeer(LocalPeer):
    """What ``deepspeed.comm.inference_all_reduce`` ends in."""

    def __init__(self, name: str, control: Control, timeout: timedelta) -> None:
        super().__init__(name, control, timeout)
        self.library = f"DeepSpeed {version('deepspeed')}"
        os.environ["LOCAL_SIZE"] = str(control.world_size)
        parts = (os.getuid(), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], control.rank)
        named = Path("/dev/shm", "_".join(("deepspeed_allreduce_buffer", *map(str, parts))))
        named.unlink(missing_ok=True)
        control.barrier()
        _load().initialize(control.world_size, control.rank)
        control.barrier()  # all have mapped it; DeepSpeed would leave it there
        named.unlink(missing_ok=True)

    def bind(self, case: Case) -> Call:
        """Returns the operator, without the Python around it."""
        if case.collective.name != "all_reduce" or case.op != "sum":
            raise NotImplementedError(f"DeepSpeed has no {case.collective.name} {case.op}")
        if case.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise NotImplementedError(f"DeepSpeed has no sum of {case.dtype}")
        return partial(torch.ops.deepspeed.inference_all_reduce_, case.receive)

    def close(self) -> None:
        """Leaves the mapping to the end of the process."""
