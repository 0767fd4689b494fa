"""PyTorch's own backend suite, loaded with this module, by the launcher, and run in gloo's place.

torch ships `DistributedTest._DistTestBase`: 285 tests of everything a c10d backend does, guarded by
decorators that compare the environment variable BACKEND with "gloo", "nccl" or "mpi" while the module
is imported. Here it is "gloo", which `torch_suites` has served by the backend under test.
"""

from __future__ import annotations

import os
import sys
import time
import types
import unittest
from pathlib import Path
from typing import Any

import torch.distributed as dist
from test_distributed_suite import TESTS
from torch.distributed import distributed_c10d

os.environ.update(BACKEND="gloo", WORLD_SIZE="4", INIT_METHOD="file:///set/per/test")
from torch.testing._internal.common_distributed import TEST_SKIPS
from torch.testing._internal.distributed import distributed_test

_BASE = distributed_test.DistributedTest._DistTestBase
assert sorted(name for name in dir(_BASE) if name.startswith("test_")) == TESTS

_WORLD_SIZE = 3
_FOUR_RANKS = frozenset(  # the suite lets these run on 4 ranks only
    f"test_{name}"
    for name in (
        "3_level_hierarchical_model_averager",
        "gather_object",
        "gather_object_subgroup",
        "new_subgroups_by_enumeration_input_rank_exceeds_world_size",
        "new_subgroups_overlap_not_allowed",
        "new_subgroups_with_group_param",
        "new_subgroups_world_size_not_divisible_by_group_size",
    )
)

# Guards that say nothing about a backend. "small world" skips below 8 ranks, to keep PyTorch's 4-GPU CI
# green, though the groups that it guards are [1, 2]; "Only MPI" is older than gloo's all_to_all.
_LIFTED_WRAPPERS = ("skip_if_small_worldsize.<locals>.wrapper",)
_LIFTED_REASONS = ("Only MPI supports",)


class DistributedSuite(distributed_test.TestDistBackend, _BASE):  # type: ignore[misc, name-defined]
    """The suite's tests, each on ranks of its own."""

    def setUp(self) -> None:
        self._set_world_size()
        super().setUp()
        distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]
        self._spawn_processes()

    def _set_world_size(self) -> None:
        os.environ["WORLD_SIZE"] = str(4 if self._testMethodName in _FOUR_RANKS else _WORLD_SIZE)

    def _skip(self) -> str | None:
        """Returns why the test's guards skip it, or None; they are what runs before its own code."""
        method = body = getattr(type(self), self._testMethodName)
        while hasattr(body, "__wrapped__"):
            body = body.__wrapped__

        def stop(frame: types.FrameType, *_: Any) -> None:
            if frame.f_code is body.__code__:
                raise _Reached

        self._set_world_size()
        self.rank = 0
        sys.settrace(stop)
        try:
            method(self)
        except unittest.SkipTest as skip:
            return str(skip)
        except SystemExit as end:
            return next(skip.message for skip in TEST_SKIPS.values() if skip.exit_code == end.code)
        except _Reached:
            return None
        finally:
            sys.settrace(None)
            self.rank = self.MAIN_PROCESS_RANK
        return None

    def _check_return_codes(self, *arguments: Any) -> None:
        super()._check_return_codes(*arguments)
        codes = [process.exitcode for process in self.processes]
        assert not any(codes), f"expected every rank to end well, got {codes}"


class _Reached(BaseException):
    pass


_barriers_passed = 0


def _barrier_by_files(wait_for: int | None = None, timeout: float = 60) -> None:
    """The suite's own file barrier, polled every 2 ms where torch's sleeps 100 ms and locks a file."""
    global _barriers_passed
    _barriers_passed += 1
    wait_for = wait_for or int(os.environ["WORLD_SIZE"])
    folder = Path(os.environ["TEMP_DIR"], "barrier", str(_barriers_passed))
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + timeout
    while (arrived := len(os.listdir(folder))) < wait_for:
        if time.monotonic() > deadline:
            raise RuntimeError(f"barrier: {arrived} of {wait_for} ranks after {timeout} s")
        time.sleep(0.002)


distributed_test.Barrier.sync = staticmethod(_barrier_by_files)


_wrap = distributed_c10d._create_process_group_wrapper


def _wrap_on_all(
    wrapped_pg: Any, store_prefix: str, store: dist.Store, rank: int, world_size: int, **named: Any
) -> Any:
    """Wraps a group, and returns when all ranks have.

    torch's wrapper connects a gloo group, which fails on a rank whose peer has already left the group.
    """
    wrapper = _wrap(wrapped_pg, store_prefix, store, rank, world_size, **named)
    if store.add(f"{store_prefix}/wrapped", 1) == world_size:
        store.set(f"{store_prefix}/wrapped_by_all", "")
    store.wait([f"{store_prefix}/wrapped_by_all"])
    return wrapper


distributed_c10d._create_process_group_wrapper = _wrap_on_all


def _with_globals(function: Any, **names: Any) -> Any:
    changed = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


def _lift_guards(name: str) -> None:
    lifted = getattr(_BASE, name)
    while hasattr(lifted, "__wrapped__") and lifted.__code__.co_qualname in _LIFTED_WRAPPERS:
        lifted = lifted.__wrapped__
    if getattr(lifted, "__unittest_skip_why__", "").startswith(_LIFTED_REASONS):
        lifted = _with_globals(lifted)
    setattr(DistributedSuite, name, lifted)


for _test in TESTS:
    if not _test.endswith("_cuda"):
        _lift_guards(_test)

if os.environ["TORCH_SUITES_BACKEND"] != "gloo":

    class _Logged(types.ModuleType):
        """`torch.distributed`, with the name that DDP's C++ logger has for every third-party backend."""

        __getattr__ = staticmethod(lambda name: getattr(distributed_test.dist, name))
        get_backend = staticmethod(lambda group=None: "custom")

    DistributedSuite.test_ddp_logging_data_cpu = _with_globals(
        _BASE.test_ddp_logging_data_cpu, dist=_Logged("dist")
    )

for _test in TESTS:
    if (_why := DistributedSuite(_test)._skip()) is not None:
        setattr(DistributedSuite, _test, unittest.skip(_why)(lambda self: None))
