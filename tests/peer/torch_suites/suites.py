"""Which of PyTorch's test files make which suite, and which are left out, with the reason."""

from __future__ import annotations

from pathlib import Path

# Patterns below test/distributed. A file belongs to the first suite that names it.
SUITES: dict[str, tuple[str, ...]] = {
    "fsdp1": ("fsdp/test_*.py",),
    "fsdp2": ("_composable/fsdp/test_*.py",),
    "compile": (
        "test_dynamo_distributed.py",
        "test_inductor_collectives.py",
        "test_compute_comm_reordering.py",
        "test_c10d_functional_native.py",
        "_composable/test_replicate_with_compiler.py",
        "_tensor/test_dtensor_compile.py",
        "tensor/test_dtensor_compile.py",
    ),
    "composable": ("_composable/**/test_*.py",),
    "tp": ("tensor/parallel/test_*.py",),
    "dtensor": ("_tensor/**/test_*.py", "tensor/**/test_*.py"),
    "checkpoint": ("checkpoint/**/test_*.py",),
    "sharded": ("_shard/**/test_*.py",),
    "mesh": ("test_device_mesh.py",),
    "functional": (
        "test_functional_api.py",
        "test_collective_utils.py",
        "test_c10d_object_collectives.py",
        "test_aten_comm_compute_reordering.py",
    ),
    "optim": ("optim/test_*.py",),
    "ddp": ("algorithms/**/test_*.py", "test_c10d_gloo.py", "test_c10d_spawn_gloo.py"),
    "pipelining": ("pipelining/test_*.py",),
    "c10d": (
        "test_c10d_common.py",
        "test_c10d_logger.py",
        "test_c10d_pypg.py",
        "test_backends.py",
        "test_pg_wrapper.py",
        "test_multi_threaded_pg.py",
        "test_control_collectives.py",
        "test_fake_pg.py",
        "test_store.py",
    ),
    "tools": ("_tools/test_*.py",),
    "rpc": ("rpc/test_*.py",),
}

# Suites that run only when they are named: they take long, and a backend matters little in them.
OPTIONAL = ("tools", "rpc")

# Files that are never run.
LEFT_OUT: dict[str, str] = {
    "test_distributed_spawn.py": "tests/peer/test_distributed_suite.py runs its tests",
    "test_c10d_nccl.py": "for NCCL only",
    "test_c10d_ops_nccl.py": "for NCCL only",
    "test_c10d_spawn_nccl.py": "for NCCL only",
    "test_nccl.py": "for NCCL only",
    "test_c10d_ucc.py": "for UCC only",
    "test_c10d_spawn_ucc.py": "for UCC only",
    "test_data_parallel.py": "torch.nn.DataParallel: one process, GPUs only",
    "test_symmetric_memory.py": "symmetric memory of GPUs only",
    "rpc/cuda/test_tensorpipe_agent.py": "for CUDA only",
    "_tensor/test_xla_integration.py": "for XLA only",
}

# Tests that gloo passes and fastcoll cannot, as FILE::CLASS.TEST, each with the reason.
_CREATE_DEVICE = "calls create_device, a method of torch's own ProcessGroupGloo only"
_CUSTOM = 'expects a group to call itself "gloo"; torch says "custom" of every backend not its own'
NOT_APPLICABLE: dict[str, str] = {
    "test_c10d_gloo.py::CommTest.test_broadcast_coalesced_gloo_cpu": _CREATE_DEVICE,
    "test_c10d_gloo.py::DistributedDataParallelTest.test_gloo_backend_cpu_module": _CREATE_DEVICE,
    "test_c10d_gloo.py::DistributedDataParallelTest.test_gloo_backend_cpu_module_grad_is_view": (
        _CREATE_DEVICE
    ),
    "test_c10d_gloo.py::GlooProcessGroupWithDispatchedCollectivesTests.test_all_to_all_single": (
        "expects gloo's error for a tensor with strides, which fastcoll sends"
    ),
    "test_c10d_gloo.py::GlooProcessGroupWithDispatchedCollectivesTests."
    "test_init_process_group_for_all_backends": _CUSTOM,
    "test_c10d_common.py::ProcessGroupWithDispatchedCollectivesTests."
    "test_init_process_group_for_all_backends": _CUSTOM,
    "test_backends.py::TestMiscCollectiveUtilsCPU.test_create_pg_cpu": _CUSTOM,
    "test_c10d_common.py::PythonProcessGroupExtensionTest.test_backend_config": (
        'expects str(BackendConfig("gloo")) to name gloo, where FASTCOLL_REPLACE=gloo says who serves'
    ),
}


def files_of(root: Path, chosen: list[str]) -> dict[str, list[str]]:
    """Returns the files of each chosen suite, as paths below `root`."""
    taken = set(LEFT_OUT)
    found: dict[str, list[str]] = {}
    for suite, patterns in SUITES.items():
        paths = {path.relative_to(root).as_posix() for p in patterns for path in root.glob(p)}
        files = sorted(paths - taken)
        taken |= paths
        if suite in chosen:
            found[suite] = files
    return found
