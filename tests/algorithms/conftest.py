"""Fixtures of the tests of algorithms on devices."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import recording_device
from world import Worlds

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("device", "kernels")]

import peer_memory


@pytest.fixture(scope="session")
def peer_world(without_nccl: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Like ``nccl_world``, of ranks that also map memory of each other."""
    recording_device.build()
    worlds = Worlds(tmp_path_factory.mktemp("peer-worlds"), prepare=peer_memory.prepare)
    yield worlds
    worlds.close()
