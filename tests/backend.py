"""The backend under test, and the mark of what the stock CPU backend cannot do."""

import os

import pytest

__all__ = ["BACKEND", "IS_GLOO", "beyond_gloo"]

BACKEND = os.environ.get("FASTCOLL_TEST_BACKEND", "fastcoll")
"""Name given to ``init_process_group``: ``fastcoll``, or ``gloo`` to check the tests themselves."""

IS_GLOO = BACKEND == "gloo"


def beyond_gloo(reason: str) -> pytest.MarkDecorator:
    """Mark a test, or a parameter, of what gloo cannot do; with any other backend it runs."""
    return pytest.mark.skipif(IS_GLOO, reason=f"beyond gloo: {reason}")
