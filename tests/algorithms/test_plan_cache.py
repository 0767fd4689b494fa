"""Plans are kept for the kind of call they were made for, and dropped oldest first."""

from fastcoll.cuda.plans import Plan, PlanCache, Recent


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
    first, second = Plan([]), Plan([])
    cache.add("a", first)
    cache.pin(first)
    cache.pin(first)
    cache.add("b", second)
    assert cache.find("a") is None and cache.pinned == [first] and cache.built == 2
    cache.forget()
    assert len(cache) == 0 and cache.pinned == [first]
    cache.clear()
    assert cache.pinned == []
