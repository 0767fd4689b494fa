"""Fixtures of the tests of algorithms on devices."""

import peer_memory
from world import worlds_fixture

# Like ``nccl_world``, of ranks that also map memory of each other.
peer_world = worlds_fixture(
    "launcher", "without_nccl", "device_libraries", prepare=peer_memory.prepare
)
