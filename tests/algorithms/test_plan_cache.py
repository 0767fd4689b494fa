"""Plans are kept for the kind of call they were made for, and dropped oldest first."""

import pytest
import torch

from fastcoll.cuda.algorithms.algorithm import Place, Prepared
from fastcoll.cuda.algorithms.call import Call
from fastcoll.cuda.plans import Part, Plan, PlanCache, Recent


def noting(log, *names):
    """A plan of one part for each name, with two launches."""
    call = Call(torch.float32, "SUM", (1,), None, 1.0)
    return Plan(
        Part(
            "one_shot",
            call,
            (at,),
            Prepared((lambda place, name=name: log.append((name, place)),) * 2),
        )
        for at, name in enumerate(names)
    )


def test_a_plan_runs_where_it_is_told() -> None:
    log: list[tuple[str, Place]] = []
    plan = noting(log, "a", "b")
    assert plan.launches == 4 and not plan.uses_peers and plan.left == []
    for places in ([Place(1, 2), Place(3, 4)], [Place(5, 6), Place(7, 8)]):
        log.clear()
        plan.run(places)
        assert log == [("a", places[0])] * 2 + [("b", places[1])] * 2
    with pytest.raises(ValueError, match="zip"):
        plan.run([Place(1, 2)])


def test_what_was_not_used_longest_goes_first() -> None:
    recent: Recent[str] = Recent(2)
    for key in "ab":
        recent.add(key, key)
    assert recent.find("a") == "a"
    recent.add("c", "c")
    assert [key for key in "abc" if recent.find(key)] == ["a", "c"] and len(recent) == 2
    assert recent.values() == ["a", "c"]


def test_a_pinned_plan_lives_with_the_cache() -> None:
    cache = PlanCache(1)
    first, second = noting([], "a"), noting([], "b")
    cache.add("a", first)
    cache.pin(first)
    cache.pin(first)
    cache.add("b", second)
    assert cache.find("a") is None and cache.pinned == [first] and cache.built == 2
    cache.forget()
    assert len(cache) == 0 and cache.pinned == [first]
    cache.clear()
    assert cache.pinned == []
