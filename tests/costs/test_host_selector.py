"""The selector between hosts takes what the formulas call cheapest, among what frames have room for."""

from fractions import Fraction

import pytest
from backend import beyond_gloo

from fastcoll._load import C
from fastcoll.costs import ALGORITHMS, Link, Machine, broadcast

pytestmark = beyond_gloo("fastcoll's own hosts")

FRAME = 64 << 10
HOSTS = [*range(2, 10), 16, 33, 64]
LINKS = [1, 1000, 20 << 10, 250_000, 10 << 20]
SIZES = sorted({(1 << power) + more for power in range(25) for more in (-1, 0, 1)})


def machine_of(link_bytes):
    """Return hosts on a link with 1 second a byte."""
    link = Link(Fraction(link_bytes), Fraction(1))
    return Machine(link, link, per_node=1)


@pytest.mark.parametrize("link_bytes", LINKS)
@pytest.mark.parametrize("hosts", HOSTS)
def test_broadcast(hosts, link_bytes):
    machine, chosen = machine_of(link_bytes), set()
    for size in map(Fraction, SIZES):
        part = -(-size // (hosts - 1) // 64) * 64  # whole cache lines
        fits = {"flat": size <= FRAME, "scatter_all_gather": part <= FRAME}
        costs = {
            name: ALGORITHMS["broadcast"][name].cost(hosts, size, machine)
            for name, fit in fits.items()
            if fit
        }
        chunks = -(-size // max(FRAME, size // 8))
        costs["chain"] = broadcast.chain(hosts, size, machine, max(1, chunks))
        name = C.select_host_broadcast(hosts, int(size), link_bytes)
        least = min(cost.seconds(machine) for cost in costs.values())
        assert costs[name].seconds(machine) == least, f"{name} of {size} bytes"
        chosen.add(name)
    assert chosen >= {"flat", "chain"}


@pytest.mark.parametrize("link_bytes", LINKS)
@pytest.mark.parametrize("hosts", HOSTS)
def test_reduction(hosts, link_bytes):
    machine, found = machine_of(link_bytes), set()
    for size in map(Fraction, SIZES):
        for partial, result in ((size, size), (2 * size, size), (size, 2 * size), (3 * size, size)):
            seconds = {
                (collective, name, sent): ALGORITHMS[collective][name]
                .cost(hosts, sent, machine)
                .seconds(machine)
                for collective, name, sent in (
                    ("all_reduce", "one_shot", partial),
                    ("reduce_scatter", "direct", partial),
                    ("all_gather", "direct", result),
                )
            }
            one, *halves = seconds.values()
            # Where one step sends no more than two do, nothing need fit.
            fits = partial <= FRAME or one + link_bytes <= sum(halves)
            chosen = C.reduces_in_one_step(hosts, int(partial), int(result), link_bytes)
            assert chosen == (fits and one <= sum(halves)), f"{partial} and {result} bytes"
            found.add(chosen)
    assert found == {False, True}


def test_nothing_is_sent_in_no_time():
    assert C.select_host_broadcast(4, 0, 0) == "flat"
    assert C.select_host_broadcast(4, 1, 0) == "scatter_all_gather"
    assert C.select_host_broadcast(4, FRAME, 1 << 62) == "flat"
    assert C.reduces_in_one_step(4, 0, 0, 0)
    assert not C.reduces_in_one_step(4, FRAME + 1, FRAME + 1, 1 << 62)
