"""Fixtures of the whole suite."""

from collections.abc import Iterator

import pytest
import recording_device
from world import Worlds


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the recording device if a test needs it: here, where no test's time limit runs."""
    if any("device_world" in getattr(item, "fixturenames", ()) for item in session.items):
        recording_device.build()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """``world(n).run(function, *arguments)``: run a function on n living ranks."""
    worlds = Worlds(tmp_path_factory.mktemp("worlds"))
    yield worlds
    worlds.close()


@pytest.fixture(scope="session")
def device_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Like ``world``, of ranks whose torch has the recording device."""
    worlds = Worlds(tmp_path_factory.mktemp("device-worlds"), prepare=recording_device.load)
    yield worlds
    worlds.close()
