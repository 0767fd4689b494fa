"""The benchmark of objects: a short run of it, and a wrong result that it must notice."""

from unittest import mock

import pytest
from backend import beyond_gloo
from bench_ranks import FEW, run_on

from fastcoll.bench import __main__ as bench
from fastcoll.bench import objects

pytestmark = [beyond_gloo("it measures both backends by itself"), pytest.mark.full]


def test_a_short_run(world):
    ended = run_on(world, 2, "objects", *FEW)
    assert ended.record["command"].startswith("python -m fastcoll.bench objects -n 1")
    assert len(ended.cases) == 10
    for case in ended.cases:
        assert set(case["backends"]) == {"fastcoll", "fastcoll-direct", "gloo"}
        assert all(one["wrong"] == 0 for one in case["backends"].values())
    assert "wrong elements: 0 OK" in ended.stdout


def run_rank(arguments):
    """Be one rank that takes every object for wrong."""
    with mock.patch.object(objects, "_equal", lambda one, other: False):
        return bench.run_rank(arguments)


def test_a_wrong_object_is_counted(world):
    chosen = ("--backend", "fastcoll-direct")
    ended = run_on(world, 2, "objects", *FEW, *chosen, module=__name__, status=1)
    assert "wrong elements: 20" in ended.stdout or "wrong elements: 40" in ended.stdout, ended
