"""Fixtures of the tests of algorithms on devices."""

import sys
from pathlib import Path

from world import worlds_fixture

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("device", "kernels")]

import peer_memory

# Like ``nccl_world``, of ranks that also map memory of each other.
peer_world = worlds_fixture(
    "launcher", "without_nccl", "device_libraries", prepare=peer_memory.prepare
)
