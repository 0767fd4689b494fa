"""Where kernels run: interpreted on the CPU, and in a run of `gpu` items only compiled on the GPU."""

import os

import pytest
import torch
from world import worlds_fixture


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of a test's tensors."""
    if request.param == "cpu":
        assert os.environ["TRITON_INTERPRET"] == "1"
        return torch.device("cpu")
    return _gpu()


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The GPU, for tests that nothing can take the place of; they are marked `gpu`."""
    return _gpu()


def _gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    assert "TRITON_INTERPRET" not in os.environ, "kernels are interpreted: pass -m gpu"
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def interpreting() -> None:
    """Asserts that kernels are interpreted in processes that are started."""
    assert os.environ["TRITON_INTERPRET"] == "1"


# Living ranks in which Triton interprets.
interpreted = worlds_fixture("launcher", "interpreting")

# Living ranks in which Triton compiles, all on one GPU.
compiled = worlds_fixture(
    "gpu",
    environ={
        # Streams that share a queue of the device would wait for each other.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        # Each allocation by itself: one from the pool may lie behind the start of what is mapped, and may be mapped
        # already, for a group that has ended.
        "TORCH_SYMMMEM_IMPLICIT_POOL": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    },
)
