"""Fixtures of the whole suite."""

import contextlib
from collections.abc import Iterator

import pytest
import recording_device
from world import Worlds


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the recording device if a test needs it: here, where no test's time limit runs."""
    needed = any("device_world" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.option.collectonly:
        with contextlib.suppress(
            RuntimeError
        ):  # for the fixture to raise, in the tests that need it
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
    recording_device.build()
    worlds = Worlds(tmp_path_factory.mktemp("device-worlds"), prepare=recording_device.load)
    yield worlds
    worlds.close()
