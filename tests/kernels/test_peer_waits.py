"""A peer that is late, dead or ahead of itself: waits end, say whom they were for, and matter."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peer_ranks
import pytest
import torch
from on_ranks import on_ranks
from peer_ranks import fault_of, here, open_buffers
from suite_rules import bound, full

SHOTS = [("one_shot", "all_reduce"), ("two_shot", "all_reduce")]
# Both wait in kernels/_exchange.py.
WAITING = [full(*SHOTS[0]), SHOTS[1]]
RINGS = [("ring", "all_reduce"), full("ring", "reduce_scatter"), full("ring", "all_gather")]
POLLS_PER_LOOK = 64  # as kernels/_signals.py has it
SECONDS = 2.0  # the living ranks come in time on a busy machine too


def prepared(
    buffers: Any, algorithm: str, collective: str, fill: float
) -> tuple[Callable[[], None], torch.Tensor]:
    """Returns a launch on messages of `fill`, and its result, which is -1 where nothing is written."""
    count = 900
    ranks = here().size
    source = torch.full((count * (ranks if collective == "reduce_scatter" else 1),), fill)
    out = torch.full((count * (ranks if collective == "all_gather" else 1),), -1.0)
    out.source = source  # launches know its address alone
    return peer_ranks.prepare(algorithm, collective, source, out, buffers), out


def call(*arguments: Any) -> torch.Tensor:
    """Runs one such launch and returns the result."""
    launch, out = prepared(*arguments)
    launch()
    return out


@pytest.mark.parametrize("algorithm, collective", WAITING + RINGS)
@on_ranks(3, world="interpreted", init=False)
def test_a_rank_that_never_launches_is_named(algorithm, collective):
    absent = 1
    buffers = open_buffers(seconds=SECONDS)
    here().meet("launch")
    if here().rank != absent:
        start = time.monotonic()
        launch, out = prepared(buffers, algorithm, collective, 5.0)
        launch()
        lasted = time.monotonic() - start
        fault = fault_of(buffers)
        assert fault is not None
        peer, _, missing, text = fault
        assert peer == absent or (algorithm == "ring" and missing == [absent])
        assert f"rank {absent}" in text
        assert SECONDS <= lasted < bound(3 * SECONDS) and f"within {SECONDS:g} s" in text
    here().meet("noticed")
    if here().rank != absent:
        # From now on nothing is touched, be it by what was prepared before.
        regions = [region.clone() for region in buffers.regions]
        out.fill_(-1)
        launch()
        later = call(buffers, algorithm, collective, 6.0)
        assert fault_of(buffers) == fault
        assert torch.all(out == -1) and torch.all(later == -1)
        assert all(torch.equal(a, b) for a, b in zip(regions, buffers.regions, strict=True))
    here().meet("stopped")


@pytest.mark.parametrize("algorithm, collective", WAITING + RINGS)
@on_ranks(3, world="interpreted", init=False)
def test_the_host_ends_waits(algorithm, collective):
    import quick_interpreter

    words = torch.zeros(2, dtype=torch.int64)
    buffers = open_buffers(seconds=1e6, words=words)
    polls = quick_interpreter.polls
    here().meet("launch")
    if here().rank != 1:
        start = polls[0]

        def end_soon() -> None:
            while polls[0] < start + POLLS_PER_LOOK + 8:
                time.sleep(0.001)
            words[0] = 1

        ending = threading.Thread(target=end_soon)
        ending.start()
        call(buffers, algorithm, collective, 5.0)
        ending.join()
        first = polls[0]
        assert first - start > POLLS_PER_LOOK
        assert int(buffers.state[0, 0]) == int(words[1]) != 0, "the host got another status"
        buffers.state[0, 0] = 0  # as for a launch that began before any wait had been given up
        call(buffers, algorithm, collective, 5.0)
        # two looks of two channels at most, and waits of a rank's own
        assert polls[0] - first <= 8 * POLLS_PER_LOOK
        assert torch.all(call(buffers, algorithm, collective, 6.0) == -1)
    here().meet("ended")


@pytest.mark.parametrize("algorithm, collective", [full(*SHOTS[1]), RINGS[0]])
@on_ranks(3, world="interpreted", init=False, dying={1})
def test_a_rank_killed_in_a_launch_is_noticed_by_all_others(algorithm, collective):
    dead = 1
    buffers = open_buffers(1, 1024, 4, 512, seconds=SECONDS)
    pid = here().scratch / "pid"
    if here().rank == dead:
        pid.write_text(str(os.getpid()))
        here().meet("ready")
        flags = buffers.regions[0][buffers.layout.flags_at : buffers.layout.staging_at]
        threading.Thread(target=die_when_set, args=(flags,), daemon=True).start()
        buffers.seconds = peer_ranks.SECONDS
        call(buffers, algorithm, collective, 1.0)
        raise AssertionError("the launch ended though no other rank had launched")
    here().meet("ready")
    wait_for_end(int(pid.read_text()))
    here().meet("the others launch", here().size - 1)
    call(buffers, algorithm, collective, 1.0)
    call(buffers, algorithm, collective, 2.0)
    fault = fault_of(buffers)
    assert fault is not None
    peer, _, missing, _ = fault
    if here().rank == 2:
        assert peer == dead
    else:  # of the ring the left neighbour is rank 2, which waits
        assert peer == dead or missing == [dead] or (algorithm == "ring" and peer == 2), (
            algorithm,
            buffers.state.tolist(),
        )


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
@on_ranks(2, world="interpreted", init=False)
def test_a_flag_that_is_set_too_early_shows_as_a_wrong_result(algorithm, collective):
    """The comparison of the other tests can fail: without the wait, the peer's data is not there yet."""
    buffers = open_buffers(2, 4096, 4, 512)
    if here().rank == 0:
        flags_of(buffers).fill_(1 << 40)
        out = call(buffers, algorithm, collective, 1.0)
        buffers.check()
        assert not torch.all(out == 2.0)
    here().meet("first")


@on_ranks(2, world="interpreted", init=False)
def test_counters_beyond_32_bits_work():
    """All flags and counters as after 2^32 - 3 rounds; the next ones pass the end of 32 bits."""
    buffers = open_buffers()
    old = (1 << 32) - 3
    buffers.state[1:, :2] = old
    flags_of(buffers).fill_(old)
    here().meet("old")
    for algorithm in ("one_shot", "ring"):
        assert torch.all(call(buffers, algorithm, "all_reduce", 1.0) == 2)
    buffers.check()
    assert (buffers.state[1:, :2] > 1 << 32).any()


def flags_of(buffers: Any) -> torch.Tensor:
    flags = buffers.memory[buffers.layout.flags_at : buffers.layout.staging_at]
    return flags.view(torch.int64)
