"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import pytest
from world import Worlds


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Living ranks in which Triton interprets, whatever this process has imported."""
    worlds = Worlds(tmp_path_factory.mktemp("interpreted"), {"TRITON_INTERPRET": "1"})
    yield worlds
    worlds.close()
