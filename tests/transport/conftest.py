"""Fixtures of the transport tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from world import Worlds


@pytest.fixture
def own_worlds(tmp_path: Path) -> Iterator[Worlds]:
    """Worlds of one test, whose ranks may change user or network, or be too many to keep."""
    worlds = Worlds(tmp_path)
    yield worlds
    worlds.close()
