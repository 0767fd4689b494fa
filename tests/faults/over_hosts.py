"""The mark of tests that `make test-all` plays with their ranks on two pretended hosts, too."""

import pytest

__all__ = ["over_hosts"]

over_hosts = pytest.mark.parametrize(
    "pretended_hosts",
    [pytest.param(1, id="one host"), pytest.param(2, id="two hosts", marks=pytest.mark.full)],
)
