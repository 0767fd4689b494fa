"""A peer that is late, dead or ahead of itself: waits end, say whom they were for, and matter."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import peer_ranks
import pytest
import torch
from peer_ranks import barrier, here
from world import Worlds

SHOTS = [
    ("one_shot", "all_reduce"),
    ("two_shot", "all_reduce"),
]
RINGS = [
    ("ring", "all_reduce"),
    pytest.param("ring", "reduce_scatter", marks=pytest.mark.full),
    pytest.param("ring", "all_gather", marks=pytest.mark.full),
]
POLLS_PER_LOOK = 64  # as kernels/_signals.py has it
SPINS = 300  # a second or more: the living ranks come in time on a busy machine too


def call(modules: Any, buffers: Any, algorithm: str, collective: str, fill: float) -> torch.Tensor:
    """Runs one call on messages of `fill` and returns the result, which is -1 where nothing was written."""
    count = 900
    ranks = here().size
    source = torch.full((count * (ranks if collective == "reduce_scatter" else 1),), fill)
    out = torch.full((count * (ranks if collective == "all_gather" else 1),), -1.0)
    getattr(getattr(modules, algorithm), f"prepare_{collective}")(source, out, buffers)()
    return out


def fault_of(modules: Any, buffers: Any) -> tuple[int, int, list[int], str]:
    try:
        buffers.check()
    except modules.peers.PeerFault as fault:
        return fault.peer, fault.step, fault.absent, str(fault)
    raise AssertionError(f"rank {here().rank} did not notice")


@pytest.mark.parametrize("algorithm, collective", SHOTS + RINGS)
def test_a_rank_that_never_launches_is_named(
    algorithm: str, collective: str, interpreted: Worlds
) -> None:
    absent = 1
    answers = interpreted(3).run(without_rank, absent, algorithm, collective, init=False)
    for rank, (fault, polls, later) in enumerate(answers):
        if rank == absent:
            continue
        peer, _, missing, text = fault
        assert peer == absent or (algorithm == "ring" and missing == [absent])
        assert f"rank {absent}" in text
        assert SPINS <= polls <= 2 * (SPINS + 10)  # two channels at most, one after the other
        assert later == "nothing was touched"


def without_rank(absent: int, algorithm: str, collective: str) -> Any:
    import quick_interpreter

    modules = peer_ranks.interpret()
    buffers = peer_ranks.open_buffers(modules.peers.PeerLayout(2, 1024, 4, 512), SPINS)
    fault, polls, later = None, 0, ""
    barrier("launch")
    if here().rank != absent:
        before = quick_interpreter.polls[0]
        call(modules, buffers, algorithm, collective, 5.0)
        fault = fault_of(modules, buffers)
        polls = quick_interpreter.polls[0] - before
    barrier("noticed")
    if here().rank != absent:
        regions = [region.clone() for region in buffers.regions]
        out = call(modules, buffers, algorithm, collective, 6.0)
        assert fault_of(modules, buffers) == fault
        assert torch.all(out == -1)
        assert all(torch.equal(a, b) for a, b in zip(regions, buffers.regions, strict=True))
        later = "nothing was touched"
    barrier("stopped")
    return fault, polls, later


@pytest.mark.parametrize("algorithm, collective", SHOTS + RINGS)
def test_the_host_ends_waits(algorithm: str, collective: str, interpreted: Worlds) -> None:
    absent = 1
    answers = interpreted(3).run(ended_by_the_host, absent, algorithm, collective, init=False)
    for rank in (0, 2):
        polls, again, codes, untouched = answers[rank]
        assert polls > POLLS_PER_LOOK
        # two looks of two channels at most, and waits of a rank's own
        assert again <= 8 * POLLS_PER_LOOK
        assert codes[0] == codes[1] != 0, "the host got another status than the device"
        assert untouched


def ended_by_the_host(absent: int, algorithm: str, collective: str) -> Any:
    import quick_interpreter

    modules = peer_ranks.interpret()
    words = torch.zeros(2, dtype=torch.int64)
    buffers = peer_ranks.open_buffers(modules.peers.PeerLayout(2, 1024, 4, 512), 1 << 40, words)
    polls, answer = quick_interpreter.polls, None
    barrier("launch")
    if here().rank != absent:

        def end_soon() -> None:
            while polls[0] < POLLS_PER_LOOK + 8:
                time.sleep(0.001)
            words[0] = 1

        ending = threading.Thread(target=end_soon)
        ending.start()
        call(modules, buffers, algorithm, collective, 5.0)
        ending.join()
        first = polls[0]
        codes = int(buffers.state[0, 0]), int(words[1])
        buffers.state[0, 0] = 0  # as for a launch that began before any wait had been given up
        call(modules, buffers, algorithm, collective, 5.0)
        second = polls[0] - first
        out = call(modules, buffers, algorithm, collective, 6.0)
        answer = first, second, codes, bool(torch.all(out == -1))
    barrier("ended")
    return answer


@pytest.mark.parametrize("algorithm, collective", [SHOTS[1], RINGS[0]])
def test_a_rank_killed_in_a_launch_is_noticed_by_all_others(
    algorithm: str, collective: str, interpreted: Worlds
) -> None:
    dead = 1
    answers = interpreted(3).run(
        beside_a_death, dead, algorithm, collective, init=False, dying={dead}
    )
    assert answers[dead] is None
    for rank in (0, 2):
        peer, _, missing, _ = answers[rank]
        neighbour = algorithm == "ring" and rank == 0  # its left neighbour is rank 2, which waits
        assert peer == dead or missing == [dead] or (neighbour and peer == 2)
    assert answers[2][0] == dead


def beside_a_death(dead: int, algorithm: str, collective: str) -> Any:
    modules = peer_ranks.interpret()
    buffers = peer_ranks.open_buffers(modules.peers.PeerLayout(1, 1024, 4, 512), SPINS)
    pid = here().scratch / "pid"
    if here().rank == dead:
        pid.write_text(str(os.getpid()))
        barrier("ready")
        flags = buffers.regions[0][buffers.layout.flags_at : buffers.layout.staging_at]
        threading.Thread(target=die_when_set, args=(flags,), daemon=True).start()
        buffers.spins = peer_ranks.SPINS
        call(modules, buffers, algorithm, collective, 1.0)
        raise AssertionError("the launch ended though no other rank had launched")
    barrier("ready")
    wait_for_end(int(pid.read_text()))
    barrier("launch", here().size - 1)
    call(modules, buffers, algorithm, collective, 1.0)
    call(modules, buffers, algorithm, collective, 2.0)
    return fault_of(modules, buffers)


def die_when_set(flags: torch.Tensor) -> None:
    while not flags.any():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_end(pid: int) -> None:
    """Waits until the process is gone, or is only waiting to be reaped."""
    state = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while state.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            time.sleep(0.001)


@pytest.mark.parametrize("algorithm, collective", [*SHOTS, RINGS[0]])
def test_a_flag_that_is_set_too_early_shows_as_a_wrong_result(
    algorithm: str, collective: str, interpreted: Worlds
) -> None:
    """The comparison of the other tests can fail: without the wait, the peer's data is not there yet."""
    results = interpreted(2).run(with_stale_flags, algorithm, collective, init=False)
    right = 1.0 if collective == "all_gather" else 2.0
    assert not torch.all(results[0] == right)


def with_stale_flags(algorithm: str, collective: str) -> torch.Tensor:
    modules = peer_ranks.interpret()
    buffers = peer_ranks.open_buffers(modules.peers.PeerLayout(2, 4096, 4, 512))
    if here().rank == 0:
        flags = buffers.memory[buffers.layout.flags_at : buffers.layout.staging_at]
        flags.view(torch.int64).fill_(1 << 40)
    else:
        barrier("first", 1)
    out = torch.empty(0)
    if here().rank == 0:
        out = call(modules, buffers, algorithm, collective, 1.0)
        buffers.check()
    barrier("first")
    return out


def test_counters_beyond_32_bits_work(interpreted: Worlds) -> None:
    results = interpreted(2).run(with_old_counters, init=False)
    for one, ring in results:
        assert torch.all(one == 2) and torch.all(ring == 2)


def with_old_counters() -> tuple[torch.Tensor, torch.Tensor]:
    """All flags and counters as after 2^32 - 3 rounds; the next ones pass the end of 32 bits."""
    modules = peer_ranks.interpret()
    buffers = peer_ranks.open_buffers(modules.peers.PeerLayout(2, 1024, 4, 512))
    old = (1 << 32) - 3
    buffers.state[1:, :2] = old
    flags = buffers.memory[buffers.layout.flags_at : buffers.layout.staging_at]
    flags.view(torch.int64).fill_(old)
    barrier("old")
    one = call(modules, buffers, "one_shot", "all_reduce", 1.0)
    ring = call(modules, buffers, "ring", "all_reduce", 1.0)
    buffers.check()
    assert (buffers.state[1:, :2] > 1 << 32).any()
    return one, ring
