"""Plans are kept for what they were made for, and dropped oldest first."""

import pytest

from fastcoll.cuda.algorithms.algorithm import Prepared
from fastcoll.cuda.plans import PlanCache


def counting(log, *names):
    return Prepared(tuple((lambda name=name: log.append(name)) for name in names))


def test_a_plan_is_built_once_for_a_key() -> None:
    log: list[str] = []
    cache = PlanCache()
    for _ in range(3):
        for key in ("a", "b"):
            plan = cache.find(key) or cache.add(key, lambda key=key: counting(log, key))
            plan.run()
    assert cache.built == 2 and log == ["a", "b"] * 3


def test_the_one_that_was_not_used_longest_goes_first() -> None:
    cache = PlanCache(2)
    for key in "ab":
        cache.add(key, lambda: counting([]))
    assert cache.find("a") is not None
    cache.add("c", lambda: counting([]))
    assert [key for key in "abc" if cache.find(key)] == ["a", "c"] and len(cache) == 2


def test_a_build_that_fails_leaves_nothing() -> None:
    cache = PlanCache()

    def fail() -> Prepared:
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        cache.add("a", fail)
    assert cache.find("a") is None and cache.built == 0


def test_a_pinned_plan_lives_with_the_cache() -> None:
    cache = PlanCache(1)
    first = cache.add("a", lambda: counting([]))
    cache.pin(first)
    cache.pin(first)
    cache.add("b", lambda: counting([]))
    assert cache.find("a") is None and cache._pinned == [first]
    cache.clear()
    assert cache._pinned == [] and len(cache) == 0
