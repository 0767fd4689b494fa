"""Fixtures of the transport tests."""

from world import worlds_fixture

# Worlds of one test, whose ranks may change user or network, or be too many to keep.
own_worlds = worlds_fixture("launcher", scope="function")
