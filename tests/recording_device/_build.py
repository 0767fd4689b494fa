"""Compiles the device, once for each state of its sources."""

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

NAME = "_recording_device"
SOURCES = Path(__file__).parent / "csrc"
BUILD = Path(__file__).parents[2] / "build" / "recording_device"
# Compile time matters more than the device's speed.
FLAGS = ["-O1", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]


def build() -> Path:
    """Return the compiled library; the first call after a change compiles it, which takes half a minute.

    Processes that build at the same time wait for the first one.
    """
    library = BUILD / _digest() / f"{NAME}.so"
    done = library.with_suffix(".done")
    if done.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    # Not torch's own lock: it is a file that a killed process leaves behind forever.
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _compile(library)
            done.touch()
    return library


def load_library(library: Path) -> ModuleType:
    """Import the compiled library, with its C interface visible to dlsym everywhere."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(library))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_GLOBAL)
    try:
        module = importlib.util.module_from_spec(spec)
    finally:
        sys.setdlopenflags(flags)
    loader.exec_module(module)
    return module


def _digest() -> str:
    digest = hashlib.sha256()
    for text in (torch.__version__, sys.version, *FLAGS):
        digest.update(text.encode() + b"\0")
    for path in sorted([*SOURCES.iterdir(), Path(__file__)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _compile(library: Path) -> None:
    from torch.utils import cpp_extension

    library.with_name("lock").unlink(missing_ok=True)
    # One unit, because the headers of torch take far longer than these sources.
    joined = library.with_name("joined.cpp")
    joined.write_text("".join(f'#include "{path}"\n' for path in sorted(SOURCES.glob("*.cpp"))))
    # torch quotes all paths of its commands except this one, which may contain a space.
    quoted = shlex.quote(cpp_extension.TORCH_LIB_PATH)
    with _scripts_on_path(), mock.patch.object(cpp_extension, "TORCH_LIB_PATH", quoted):
        cpp_extension.load(
            NAME,
            [str(joined)],
            extra_cflags=FLAGS,
            extra_ldflags=["-ltorch_python"],
            build_directory=str(library.parent),
            is_python_module=False,
            is_standalone=False,
            verbose=False,
        )


@contextlib.contextmanager
def _scripts_on_path() -> Iterator[None]:
    path = os.environ["PATH"]
    os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + path
    try:
        yield
    finally:
        os.environ["PATH"] = path
