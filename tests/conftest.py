"""Fixtures of the whole suite."""

from collections.abc import Iterator

import pytest
from world import Worlds


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """``world(n).run(function, *arguments)``: run a function on n living ranks."""
    worlds = Worlds(tmp_path_factory.mktemp("worlds"))
    yield worlds
    worlds.close()
