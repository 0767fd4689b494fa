"""Which transport a group takes, why, and where it says so."""

import os
import re

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from fault_list import plays
from machine import NOBODY, enter_network, two_networks
from world import here, init_group

import fastcoll
import fastcoll.info

pytestmark = beyond_gloo("fastcoll's own choice of a transport")

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: changing the user")


def reduce_and_report(group=None):
    tensor = torch.full((2000,), here().rank + 1.0)
    for _ in range(3):
        dist.all_reduce(tensor, group=group)
        tensor /= here().size
    whole = sum(range(1, here().size + 1)) / here().size
    assert torch.allclose(tensor, torch.full((2000,), whole))
    name = (group or dist.group.WORLD).group_name
    return next(g for g in fastcoll.info.groups() if g["name"] == name)


def log_of(world, *ranks: int) -> str:
    return "".join(world.logs[rank].read_text() for rank in ranks)


# --- what it says --------------------------------------------------------------------------------


def chosen(transport, debug, by):
    os.environ["FASTCOLL_DEBUG"] = debug
    named = {}
    if by != "options":
        os.environ["FASTCOLL_TRANSPORT"] = transport
    if by != "environment":
        outdone = "shm" if transport == "gloo" else "gloo"
        named["pg_options"] = fastcoll.Options(transport=outdone if by == "both" else transport)
    init_group(**named)
    before = fastcoll.info.groups()
    after = reduce_and_report()
    dist.destroy_process_group()
    return before, after, fastcoll.info.groups()


@pytest.mark.parametrize("by", ["environment", "options", "both"])
@pytest.mark.parametrize("transport", ["auto", "shm", "gloo"])
def test_transport_and_reason_are_told(own_worlds, transport, by):
    expected = "gloo" if transport == "gloo" else "shm"
    answers = own_worlds(2).run(chosen, transport, "INFO", by, init=False)
    for rank, (before, after, gone) in enumerate(answers):
        assert [(g["transport"], g["reason"]) for g in before] == [("undecided", "not used yet")]
        assert (after["rank"], after["size"], after["transport"]) == (rank, 2, expected)
        assert gone == []
        reason = "requests gloo" if expected == "gloo" else "all ranks share one host and user"
        assert reason in after["reason"], after
        log = log_of(own_worlds(2), rank)
        assert len(re.findall(r"\[fastcoll\] group '.*'", log)) == 1, log
        assert reason in log and ("transport shm" in log or "Gloo between them" in log), log


def test_nothing_is_logged_when_all_is_well(own_worlds):
    own_worlds(2).run(chosen, "auto", "WARN", "options", init=False)
    own_worlds(2).run(chosen, "gloo", "WARN", "options", init=False)
    assert "[fastcoll]" not in log_of(own_worlds(2), 0, 1)


def one_asks_for_gloo(others):
    os.environ["FASTCOLL_TRANSPORT"] = "gloo" if here().rank == 1 else others
    init_group()
    if others == "shm":
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
        return str(caught.value)
    group = reduce_and_report()
    dist.destroy_process_group()
    return group["transport"], group["reason"]


def test_one_rank_that_asks_for_gloo_stays_apart(own_worlds):
    for transport, reason in own_worlds(3).run(one_asks_for_gloo, "auto", init=False):
        assert transport == "shm+gloo" and "rank 1 requests gloo" in reason


def test_ranks_that_demand_different_transports(own_worlds):
    """An error on every rank, the one that would have had its way included."""
    texts = own_worlds(2).run(one_asks_for_gloo, "shm", init=False, deadline=30)
    assert "shared memory was demanded" in texts[0] and "rank 1 requests gloo" in texts[0]
    assert "rank 0" in texts[1] and "demand" in texts[1], texts[1]


# --- a network that cannot be used ---------------------------------------------------------------


def one_names_no_interface():
    os.environ["FASTCOLL_HOST_ID"] = str(here().rank)
    if here().rank == 0:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere"
    init_group()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    return str(caught.value)


def test_an_interface_that_does_not_exist_is_named_on_all_ranks(own_worlds):
    for rank, text in enumerate(own_worlds(2).run(one_names_no_interface, init=False)):
        assert f" [group '0', rank {rank}/2" in text and "rank 0 (pid " in text, text
        assert "Gloo cannot use interface 'nowhere'" in text, text
        assert "Set GLOO_SOCKET_IFNAME to an interface of this host: " in text and "lo" in text


# --- another user --------------------------------------------------------------------------------


def other_user(transport):
    os.environ["FASTCOLL_TRANSPORT"] = transport
    if here().rank == 1:
        os.seteuid(NOBODY)
    try:
        everyone = dist.new_group()
        if transport == "shm":
            with pytest.raises(dist.DistBackendError) as caught:
                dist.all_reduce(torch.ones(3), group=everyone)
            return str(caught.value)
        group = reduce_and_report(everyone)
        if here().rank == 0:
            dist.send(torch.ones(4), 1, everyone)
        else:
            dist.recv(torch.ones(4), 0, everyone)
        return group["transport"], group["reason"]
    finally:
        dist.destroy_process_group()
        if here().rank == 1:
            os.seteuid(0)


@plays(38)
@as_root
def test_ranks_of_two_users_take_gloo_and_warn_once(own_worlds):
    for transport, reason in own_worlds(2).run(other_user, "auto", fresh=True):
        assert transport == "gloo"
        assert re.search(r"rank [01] \(host .*\) runs as another user \(uid (0|65534)\)", reason)
    logs = log_of(own_worlds(2), 0, 1)
    warnings = re.findall(r"\[fastcoll\].*", logs)
    assert len(warnings) == 1, logs
    assert "the ranks are on 2 hosts, with Gloo between them, because" in warnings[0]
    assert "another user" in warnings[0]


@as_root
def test_shared_memory_that_is_demanded_and_cannot_be(own_worlds):
    for text in own_worlds(2).run(other_user, "shm", fresh=True):
        assert "shared memory was demanded (FASTCOLL_TRANSPORT=shm or" in text, text
        assert "another user" in text and "Unset it" in text, text


# --- two hosts -----------------------------------------------------------------------------------


def on_two_hosts(networks):
    enter_network(networks[here().rank])
    init_group()
    group = reduce_and_report()
    mine, other = here().rank, 1 - here().rank
    out, into = torch.full((50_000,), float(mine)), torch.empty(50_000)
    work = dist.isend(out, other)
    dist.recv(into, other)
    work.wait()
    assert torch.all(into == other)
    gathered = [None, None]
    dist.all_gather_object(gathered, f"rank {mine}")
    assert gathered == ["rank 0", "rank 1"]
    dist.destroy_process_group()
    return group["transport"], group["reason"]


@plays(41)
def test_two_hosts(own_worlds):
    with two_networks() as (_, networks):
        answers = own_worlds(2).run(on_two_hosts, networks, init=False)
    for transport, reason in answers:
        assert transport == "gloo"
        assert re.search(r"rank [01] \(host \S+\) runs in another network namespace", reason)
    logs = log_of(own_worlds(2), 0, 1)
    assert logs.count("the ranks are on 2 hosts, with Gloo between them") == 1, logs
