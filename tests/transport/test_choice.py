"""Which transport a group takes, why, and where it says so."""

import os
import re

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from fault_list import plays
from machine import NOBODY, enter_network, two_networks
from on_ranks import on_ranks
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
    return "".join(world.log(rank) for rank in ranks)


# --- what it says --------------------------------------------------------------------------------


def chosen(shared_memory, debug, by):
    os.environ["FASTCOLL_DEBUG"] = debug
    named = {}
    if by != "options":
        os.environ["FASTCOLL_SHARED_MEMORY"] = shared_memory
    if by != "environment":
        outdone = "require" if shared_memory == "off" else "off"
        option = outdone if by == "both" else shared_memory
        named["pg_options"] = fastcoll.Options(shared_memory=option)
    init_group(**named)
    before = fastcoll.info.groups()
    after = reduce_and_report()
    dist.destroy_process_group()
    return before, after, fastcoll.info.groups()


@pytest.mark.parametrize("by", ["environment", "options", "both"])
@pytest.mark.parametrize("shared_memory", ["auto", "require", "off"])
def test_transport_and_reason_are_told(own_worlds, shared_memory, by):
    expected = "gloo" if shared_memory == "off" else "shm"
    answers = own_worlds(2).run(chosen, shared_memory, "INFO", by, init=False)
    for rank, (before, after, gone) in enumerate(answers):
        assert [(g["transport"], g["reason"]) for g in before] == [("undecided", "not used yet")]
        assert (after["rank"], after["size"], after["transport"]) == (rank, 2, expected)
        assert gone == []
        reason = (
            "turned shared memory off"
            if expected == "gloo"
            else "all ranks share one host and user"
        )
        assert reason in after["reason"], after
        log = log_of(own_worlds(2), rank)
        assert len(re.findall(r"\[fastcoll\] group '.*'", log)) == 1, log
        assert reason in log and ("transport shm" in log or "gloo between them" in log), log


def test_nothing_is_logged_when_all_is_well(own_worlds):
    own_worlds(2).run(chosen, "auto", "WARN", "options", init=False)
    own_worlds(2).run(chosen, "off", "WARN", "options", init=False)
    assert "[fastcoll]" not in log_of(own_worlds(2), 0, 1)


@on_ranks(3, world="own_worlds", init=False)
def test_one_rank_without_shared_memory_stays_apart():
    os.environ["FASTCOLL_SHARED_MEMORY"] = "off" if here().rank == 1 else "auto"
    init_group()
    group = reduce_and_report()
    dist.destroy_process_group()
    assert group["transport"] == "shm+gloo"
    assert "rank 1 has turned shared memory off" in group["reason"]


@on_ranks(2, world="own_worlds", init=False, deadline=30)
def test_one_rank_requires_what_another_has_turned_off():
    """An error on every rank, the one that would have had its way included."""
    os.environ["FASTCOLL_SHARED_MEMORY"] = "off" if here().rank == 1 else "require"
    init_group()
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    of_rank = [
        ("shared memory is required", "rank 1 has turned shared memory off"),
        ("rank 0", "require"),
    ]
    assert all(part in str(caught.value) for part in of_rank[here().rank]), caught.value


@on_ranks(2, world="own_worlds", init=False)
def test_a_network_that_does_not_exist():
    os.environ["FASTCOLL_NETWORK"] = "carrier_pigeon"
    said = "'carrier_pigeon': expected one of gloo. Correct or unset it."
    with pytest.raises(ValueError, match=re.escape(said)):
        init_group()


# --- a network that cannot be used ---------------------------------------------------------------


@on_ranks(2, world="own_worlds", init=False)
def test_an_interface_that_does_not_exist_is_named_on_all_ranks():
    os.environ["FASTCOLL_HOST_ID"] = str(here().rank)
    if here().rank == 0:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere"
    init_group()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    text = str(caught.value)
    assert f" [group '0', rank {here().rank}/2" in text and "rank 0 (pid " in text, text
    assert "Gloo cannot use interface 'nowhere'" in text, text
    assert "Set GLOO_SOCKET_IFNAME to an interface of this host: " in text and "lo" in text


# --- another user --------------------------------------------------------------------------------


def other_user(shared_memory):
    os.environ["FASTCOLL_SHARED_MEMORY"] = shared_memory
    if here().rank == 1:
        os.seteuid(NOBODY)
    try:
        everyone = dist.new_group()
        if shared_memory == "require":
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
    assert "the ranks are on 2 hosts, with gloo between them, because" in warnings[0]
    assert "another user" in warnings[0]


@as_root
def test_shared_memory_that_is_required_and_cannot_be(own_worlds):
    for text in own_worlds(2).run(other_user, "require", fresh=True):
        assert "shared memory is required (FASTCOLL_SHARED_MEMORY or" in text, text
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
    assert logs.count("the ranks are on 2 hosts, with gloo between them") == 1, logs
