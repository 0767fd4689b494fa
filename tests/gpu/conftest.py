"""Ranks on this machine's GPU, with NCCL itself."""

import pytest
import torch
from gpu_ranks import first_gpu
from world import worlds_fixture

_ENVIRON = {
    "FASTCOLL_TEST_DEVICE": "cuda:0",
    "FASTCOLL_ERROR_HANDLING": "raise",
    "GLOO_SOCKET_IFNAME": "lo",
    "FASTCOLL_SHARE_GPU": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
}


@pytest.fixture(scope="session")
def gpu() -> None:
    """Skips the test if there is no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")


# Ranks that share a GPU and reach each other by NCCL over sockets.
gpu_world = worlds_fixture("gpu", prepare=first_gpu, environ=_ENVIRON)

# Ranks that share a GPU as if each had its own: they reach each other through memory, so no socket closes with one.
gpu_memory_world = worlds_fixture(
    "gpu",
    prepare=first_gpu,
    environ={
        "FASTCOLL_ERROR_HANDLING": "raise",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # torch's backend too leaves the process alive
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "1",
    },
)

# They also map memory of each other.
gpu_peer_world = worlds_fixture(
    "gpu",
    prepare=first_gpu,
    environ={
        **_ENVIRON,
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    },
)
