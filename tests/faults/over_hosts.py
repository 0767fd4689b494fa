"""Marks of tests that are played with their ranks on several pretended hosts, too."""

import pytest
from suite_rules import full

APART = 64
"""Hosts, far more than ranks: each rank is alone, so that Gloo's sockets set the pace."""

over_hosts = pytest.mark.parametrize(
    "pretended_hosts", [pytest.param(1, id="one host"), full(2, id="two hosts")]
)
"""On one host; in ``make test-all`` on two."""

apart = pytest.mark.parametrize(
    "pretended_hosts", [pytest.param(1, id="one host"), pytest.param(APART, id="each alone")]
)
"""On one host, and each rank on one of its own."""
