"""What is changed in torch's test harness, alike for gloo and fastcoll.

- Ranks are forked where torch spawns: a rank then costs milliseconds, not a new import of torch.
- A host without an accelerator counts as one with two devices: FSDP's classes, which would end on
  such a host, run with 2 ranks, FSDP takes CPU where no device is named, and "skip if fewer than N
  GPUs" lets through the tests whose text `cpu_text` has changed.
- Names that older test files import and torch has renamed since are there under both names.

All that is done when this module is imported: by a launcher, and by ranks that a test spawns.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import multiprocessing
import os
from typing import Any

from torch_suites import cpu_text

_DEVICES = 2


def unguarded(function: Any) -> Any:
    """Decorator in place of a guard that asks for NCCL or a GPU."""
    return function


def _lifted_for_changed_files(guard: Any) -> Any:
    def skip_if_lt_x_gpu(*arguments: Any, **keywords: Any) -> Any:
        stock = guard(*arguments, **keywords)

        def decorator(function: Any) -> Any:
            changed = cpu_text.is_changed(inspect.getfile(function))
            return function if changed else stock(function)

        return decorator

    return skip_if_lt_x_gpu


def _cpu_if_none_is_named(init_device_handle: Any) -> Any:
    def init(state: Any, module: Any, ignored: Any, device_id: Any) -> Any:
        import torch

        named = torch.device("cpu") if device_id is None else device_id
        return init_device_handle(state, module, ignored, named)

    return init


def _fork_processes(test_case: Any) -> None:
    test_case._start_processes(multiprocessing.get_context("fork").Process)


def _compiled_fsdp_test(**_: Any) -> Any:
    return unguarded


def _add_missing(module: Any, **names: Any) -> None:
    for name, value in names.items():
        if not hasattr(module, name):
            setattr(module, name, value)


def _change_harness() -> None:
    import torch
    from torch.testing._internal import common_distributed

    # Read when common_fsdp and the test files are imported.
    common_distributed.skip_if_lt_x_gpu = _lifted_for_changed_files(
        common_distributed.skip_if_lt_x_gpu
    )
    common_distributed.MultiProcessTestCase._spawn_processes = _fork_processes
    common_distributed.initialize_temp_directories()
    with contextlib.suppress(RuntimeError):
        torch.multiprocessing.set_start_method("fork")

    from torch.testing._internal import common_fsdp
    from torch.testing._internal.distributed._shard import sharded_tensor
    from torch.testing._internal.distributed._tensor import common_dtensor

    fsdp = importlib.import_module("torch.distributed.fsdp.fully_sharded_data_parallel")
    fsdp._init_device_handle = _cpu_if_none_is_named(fsdp._init_device_handle)
    common_fsdp.DEVICE_COUNT = _DEVICES
    # FSDPTest's own _run counts accelerators; the mixin's has the same text and admits CPU.
    if hasattr(common_fsdp, "FSDPTestMixin"):
        common_fsdp.FSDPTest._run = classmethod(common_fsdp.FSDPTestMixin._run.__func__)
        common_fsdp.FSDPTestContinuous.world_size = _DEVICES
        common_fsdp.FSDPTestContinuous._init_pg = classmethod(
            common_distributed.MultiProcContinuousTest._init_pg.__func__
        )
    # with_comms's own default, "nccl", ends a test on a host without GPUs.
    sharded_tensor.with_comms.__defaults__ = (None, True, "gloo")
    base = sharded_tensor.ShardedTensorTestBase
    base.init_pg.__defaults__ = ("gloo",)
    base.init_comms.__defaults__ = (True, "gloo")
    base.init_rpc = _init_rpc_without_devices
    common_dtensor.DTensorTestBase.backend = property(lambda _: "gloo")

    _add_missing(torch.cpu, _sleep=lambda cycles: None, manual_seed=torch.manual_seed)
    _add_missing(
        common_distributed, MultiProcContinousTest=common_distributed.MultiProcContinuousTest
    )
    _add_missing(common_fsdp, test_compiled_fsdp=_compiled_fsdp_test)


def _init_rpc_without_devices(test_case: Any) -> None:
    from torch.distributed import rpc
    from torch.testing._internal.common_distributed import tp_transports

    options = rpc.TensorPipeRpcBackendOptions(_transports=tp_transports())
    options.init_method = f"file://{test_case.file_name}"
    rpc.init_rpc(
        name=f"worker{test_case.rank:d}",
        rank=test_case.rank,
        world_size=test_case.world_size,
        rpc_backend_options=options,
    )


def _check_who_serves(backend: str) -> None:
    from torch.distributed import Backend

    told = str(Backend("gloo"))
    if told != backend:  # FASTCOLL_REPLACE=gloo in the environment
        raise RuntimeError(f"expected {backend!r} for a group named 'gloo', got {told!r}")


_change_harness()
_check_who_serves(os.environ["TORCH_SUITES_BACKEND"])
