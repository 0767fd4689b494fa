"""Ranks on this machine's GPU, with NCCL itself."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_ranks import own_host
from world import Worlds

sys.path.append(str(Path(__file__).parents[1] / "device"))


@pytest.fixture(scope="session")
def gpu_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Like ``world``, of ranks that share a GPU and reach each other by NCCL over sockets."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    environ = {
        "FASTCOLL_TEST_DEVICE": "cuda:0",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "2",
    }
    worlds = Worlds(tmp_path_factory.mktemp("gpu-worlds"), prepare=own_host, environ=environ)
    yield worlds
    worlds.close()
