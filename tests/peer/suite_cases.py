"""PyTorch's own backend suite, opened to any backend name.

torch ships `DistributedTest._DistTestBase`: 285 tests of everything a c10d backend does, guarded by
decorators that compare the environment variable BACKEND with "gloo", "nccl" or "mpi" while the module
is imported. Here it is imported under the name "gloo", so that every guard decides as it does for gloo,
and its own tables are then turned to the backend under test. Only names inside the test module change;
torch itself stays as it is.
"""

from __future__ import annotations

import importlib
import os
import time
import types
from pathlib import Path
from typing import Any

__all__ = ["BACKEND", "load_suite", "prepare_rank", "world_size"]

BACKEND = os.environ.get("FASTCOLL_TEST_BACKEND", "fastcoll")
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


def load_suite() -> type:
    """Returns the suite's TestCase class, with every test that gloo may run open to `BACKEND`."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE="4", INIT_METHOD="file:///set/per/test")
    module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    os.environ["BACKEND"] = module.BACKEND = BACKEND
    if BACKEND not in module.dist.Backend.backend_list:
        importlib.import_module(BACKEND)
    for table in (
        module.PROFILING_SUPPORTED_BACKENDS,
        module.CUDA_PROFILING_SUPPORTED_BACKENDS,
        module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        if BACKEND not in table:
            table.append(BACKEND)
    module.dist = _DistributedForTests(module.dist)
    module.Barrier.sync = staticmethod(_barrier_by_files)

    base = module.DistributedTest._DistTestBase
    suite = type("DistributedSuite", (module.TestDistBackend, base), {"__module__": __name__})
    # The only place that reads BACKEND to choose a CPU model rather than to name a backend.
    suite._test_accumulate_gradients_no_sync = _with_globals(
        base._test_accumulate_gradients_no_sync, BACKEND="gloo"
    )
    if BACKEND != "gloo":
        # DDP's C++ logger calls every third-party backend "custom"; the test wants get_backend().
        logged = _DistributedForTests(module.dist)
        logged.get_backend = lambda group=None: "custom"
        suite.test_ddp_logging_data_cpu = _with_globals(base.test_ddp_logging_data_cpu, dist=logged)
    for name in dir(suite):
        if name.startswith("test_") and not name.endswith("_cuda"):
            _lift_guards(suite, name)
    return suite


def world_size(test: str) -> int:
    """Returns the number of ranks on which the test runs."""
    return 4 if test in _FOUR_RANKS else _WORLD_SIZE


def prepare_rank(suite: type, test: str, folder: str) -> None:
    """Gives one freshly forked rank the environment of its test."""
    os.environ.update(
        WORLD_SIZE=str(world_size(test)),
        TEMP_DIR=folder,
        INIT_METHOD=f"file://{folder}/init_dir/shared_init_file",
        MASTER_ADDR="127.0.0.1",
    )
    module = importlib.import_module(suite.__mro__[1].__module__)
    module.INIT_METHOD = os.environ["INIT_METHOD"]


class _DistributedForTests(types.ModuleType):
    """`torch.distributed` as the suite sees it.

    Its `monitored_barrier` asks the group, where torch's own refuses every name but "gloo" first.
    """

    def __init__(self, dist: Any) -> None:
        super().__init__(dist.__name__)
        self._dist = dist

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dist, name)

    def monitored_barrier(
        self, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        c10d = self._dist.distributed_c10d
        if c10d._rank_not_in_group(group):
            return None
        if self._dist.get_backend(group) == "gloo":
            return self._dist.monitored_barrier(group, timeout, wait_all_ranks)
        if timeout is None:
            timeout = c10d._get_default_timeout("gloo")
        elif isinstance(timeout, float):
            timeout = c10d.timedelta(seconds=timeout)
        return (group or c10d._get_default_group()).monitored_barrier(
            timeout, wait_all_ranks=wait_all_ranks
        )


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
    while len(os.listdir(folder)) < wait_for:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"barrier timeout: {len(os.listdir(folder))} of {wait_for} ranks after {timeout} s"
            )
        time.sleep(0.002)


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


def _lift_guards(suite: type, name: str) -> None:
    method = getattr(suite, name)
    lifted = method
    while hasattr(lifted, "__wrapped__") and lifted.__code__.co_qualname in _LIFTED_WRAPPERS:
        lifted = lifted.__wrapped__
    why = getattr(lifted, "__unittest_skip_why__", "")
    if why.startswith(_LIFTED_REASONS):
        lifted = _with_globals(lifted)
    if lifted is not method:
        setattr(suite, name, lifted)
