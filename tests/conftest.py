"""Fixtures of the whole suite."""

import os
from collections.abc import Iterator

import pytest
from world import Worlds


def pytest_configure(config: pytest.Config) -> None:
    # Triton reads this when a kernel is decorated, its own included, so it is set before any test module is
    # imported, and no conftest.py imports Triton.
    # Kernels are interpreted, on CPU tensors, in every run but `pytest -m gpu`.
    if config.option.markexpr == "gpu":
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """``world(n).run(function, *arguments)``: run a function on n living ranks."""
    worlds = Worlds(tmp_path_factory.mktemp("worlds"))
    yield worlds
    worlds.close()
