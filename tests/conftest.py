"""Fixtures of the whole suite."""

import contextlib
import os
import tempfile

import device_ranks
import launcher as launchers
import pytest
import recording_device
import suite_rules
import torch
from hypothesis import HealthCheck, settings
from on_ranks import pytest_pyfunc_call
from rank import ThisRank
from suite_rules import (
    pytest_runtest_makereport,
    pytest_runtest_setup,
    pytest_sessionfinish,
    pytest_terminal_summary,
)
from world import worlds_fixture

__all__ = [
    "pytest_pyfunc_call",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
]

# `make test-all` loads `drawn`, and passes a seed.
# A busy machine draws slowly, and hypothesis would report that as a fault of the test.
COMMON = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, **COMMON)
settings.register_profile("drawn", derandomize=False, print_blob=True, **COMMON)
settings.load_profile("fixed")


def _remove_what_ranks_leave(config: pytest.Config) -> None:
    """Gives all processes of the run one temporary folder, and removes it at the end. A killed rank removes nothing.

    What the next run may use stays: Inductor's cache, and pytest's folders of failed tests.
    """
    usual = tempfile.gettempdir()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{usual}/torchinductor_{os.getuid()}")
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)
    folder = tempfile.TemporaryDirectory(prefix="fastcoll-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["TMPDIR"] = tempfile.tempdir = folder.name


def pytest_configure(config: pytest.Config) -> None:
    suite_rules.watch_pauses()
    if not hasattr(config, "workerinput"):
        _remove_what_ranks_leave(config)
    # Inductor starts no compilers of Triton in each rank, and compiles no probes of the processor.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    # Triton reads TRITON_INTERPRET when a kernel is decorated, its own kernels included. So it is set before any
    # test module is imported, and no conftest.py imports Triton.
    # Every run interprets kernels on CPU tensors, except a run of only `gpu` items.
    if suite_rules.is_gpu_run(config.option.markexpr):
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"
        _replace_nccl()


def _replace_nccl() -> None:
    """Makes a CUDA build of torch use NCCL's stand-in, in all processes that are started.

    A process may have only one NCCL. With a GPU it is the real one, and tests of the stand-in are skipped.
    """
    if torch.version.cuda is None or torch.cuda.is_available():
        return
    with contextlib.suppress(RuntimeError):  # no compiler: the fixtures raise it
        others = [os.environ["LD_PRELOAD"]] if os.environ.get("LD_PRELOAD") else []
        os.environ["LD_PRELOAD"] = ":".join([str(device_ranks.build_stand_in()), *others])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the launcher and build the device's libraries here, outside any test's time limit."""
    if session.config.option.collectonly:
        return
    used = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if "launcher" in used:
        launchers.default()  # loads in the background
    if "device_libraries" in used:
        # The fixture raises it too, in the tests that need it.
        with contextlib.suppress(RuntimeError):
            device_ranks.build()


def pytest_unconfigure() -> None:
    launchers.close_default()


@pytest.fixture(scope="session")
def launcher() -> launchers.Launcher:
    """The process that forks ranks."""
    return launchers.default().wait()


@pytest.fixture(scope="session")
def device_libraries() -> None:
    """Builds the recording device and NCCL's stand-in."""
    device_ranks.build()


@pytest.fixture(scope="session")
def without_nccl() -> None:
    """Skips the test if there is another NCCL than the stand-in."""
    if torch.cuda.is_available():
        pytest.skip("torch has its own NCCL here, for the GPU, and a process may have only one")


@pytest.fixture(scope="session")
def rank() -> ThisRank:
    """The rank itself, for a test that runs on ranks."""
    return ThisRank()


# ``world(n).run(function, *arguments)`` runs a function on n living ranks.
world = worlds_fixture("launcher")

# With the recording device in the ranks' torch.
device_world = worlds_fixture("launcher", "device_libraries", prepare=recording_device.load)

# The recording device's tensors go through NCCL's stand-in.
nccl_world = worlds_fixture(
    "launcher", "without_nccl", "device_libraries", prepare=device_ranks.prepare
)
