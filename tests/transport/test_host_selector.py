"""The selector between hosts takes what the alpha-beta rule calls cheapest, among what frames have room for.

A step that sends m bytes takes alpha + m beta; here beta is 1, so alpha is the link's bytes. Of n hosts and S bytes:
broadcast flat alpha + (n-1) S; scatter_all_gather 2 alpha + (1 + (n-2)/(n-1)) S, of two hosts one step; chain of k
segments (n+k-2) (alpha + S/k) (Pjesivac-Grbovic et al. 2007; Chan et al. 2007). A sum in one step alpha + (n-1) S;
each half of one in two steps alpha + (n-1)/n S (Chan et al. 2007). In fractions, so that all are exact.
"""

from fractions import Fraction

import pytest
from backend import beyond_gloo

from fastcoll._load import C

pytestmark = beyond_gloo("fastcoll's own hosts")

FRAME = 64 << 10
HOSTS = [*range(2, 10), 16, 33, 64]
LINKS = [1, 1000, 20 << 10, 250_000, 10 << 20]
SIZES = sorted({(1 << power) + more for power in range(25) for more in (-1, 0, 1)})


@pytest.mark.parametrize("alpha", LINKS)
@pytest.mark.parametrize("hosts", HOSTS)
def test_broadcast(hosts, alpha):
    chosen = set()
    for size in map(Fraction, SIZES):
        part = -(-size // (hosts - 1) // 64) * 64  # whole cache lines
        segments = max(1, -(-size // max(FRAME, size // 8)))
        steps = 1 if hosts == 2 else 2
        passed_on = (hosts - 2) * size / (hosts - 1)
        costs = {"chain": (hosts + segments - 2) * (alpha + size / segments)}
        if size <= FRAME:
            costs["flat"] = alpha + (hosts - 1) * size
        if part <= FRAME:
            costs["scatter_all_gather"] = steps * alpha + size + passed_on
        name = C.select_host_broadcast(hosts, int(size), alpha)
        assert costs[name] == min(costs.values()), f"{name} of {size} bytes"
        chosen.add(name)
    assert chosen >= {"flat", "chain"}


@pytest.mark.parametrize("alpha", LINKS)
@pytest.mark.parametrize("hosts", HOSTS)
def test_reduction(hosts, alpha):
    found = set()
    for size in map(Fraction, SIZES):
        for partial, result in ((size, size), (2 * size, size), (size, 2 * size), (3 * size, size)):
            one = alpha + (hosts - 1) * partial
            two = 2 * alpha + (hosts - 1) * (partial + result) / hosts
            # Where one step sends no more than two do, nothing need fit.
            fits = partial <= FRAME or one + alpha <= two
            chosen = C.reduces_in_one_step(hosts, int(partial), int(result), alpha)
            assert chosen == (fits and one <= two), f"{partial} and {result} bytes"
            found.add(chosen)
    assert found == {False, True}


def test_nothing_is_sent_in_no_time():
    assert C.select_host_broadcast(4, 0, 0) == "flat"
    assert C.select_host_broadcast(4, 1, 0) == "scatter_all_gather"
    assert C.select_host_broadcast(4, FRAME, 1 << 62) == "flat"
    assert C.reduces_in_one_step(4, 0, 0, 0)
    assert not C.reduces_in_one_step(4, FRAME + 1, FRAME + 1, 1 << 62)
