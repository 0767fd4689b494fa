"""A link between two hosts that goes down, with real namespaces: noticed within FASTCOLL_LINK_SECONDS, or mended."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from backend import BACKEND, beyond_gloo
from suite_rules import bound

from fastcoll.bench import namespaces

pytestmark = [
    pytest.mark.full,
    beyond_gloo("the bound on a silent host"),
    pytest.mark.skipif(namespaces.missing() != "", reason=namespaces.missing() or "-"),
]

BOUND = 3
"""Seconds of silence."""

LATE = bound(2 * BOUND + 2)
"""Seconds after which a silence is noticed too late: the kernel's own retries lie up to half the bound apart."""


def run_rank(call: str, folder: Path) -> None:
    """Repeat the call until it fails or the ranks agree that the file "enough" is there; write what came."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group(BACKEND)
    # Four ranks on two hosts: the last of one host talks with the first of the other.
    ends = (1, 2)
    large, small = torch.ones(3_000_000), torch.ones(3)

    def repeat() -> bool:
        """Return whether any rank has seen the file: then all leave after the same round."""
        if call == "all_reduce":
            large.fill_(1.0)
            large[0] = float((folder / "enough").exists())
            dist.all_reduce(large)
            return large[0].item() > 0
        if call == "idle" and rank == ends[0]:
            dist.recv(small, ends[1])  # nobody sends
        elif call == "send" and rank in ends:
            peer = ends[1 - ends.index(rank)]
            pair = [
                dist.P2POp(dist.isend, large, peer),
                dist.P2POp(dist.irecv, torch.empty_like(large), peer),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
        else:
            time.sleep(0.05)
        return False

    def meet() -> None:
        for turn in [dist.send, dist.recv] if rank == ends[0] else [dist.recv, dist.send]:
            turn(small, ends[1 - ends.index(rank)])

    error, rounds = "", 0
    try:
        dist.barrier()
        if rank in ends:
            meet()
        (folder / f"ready{rank}").touch()
        over = False
        while not over:
            over = repeat()
            rounds += 1
        dist.destroy_process_group()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    told = {"error": error, "at": time.monotonic(), "rounds": rounds}
    (folder / f"told{rank}.json").write_text(json.dumps(told))
    os._exit(0)


def start(cluster: namespaces.Cluster, call: str, folder: Path) -> list["subprocess.Popen[bytes]"]:
    common = {
        "FASTCOLL_LINK_SECONDS": str(BOUND),
        "GLOO_SOCKET_IFNAME": namespaces.INTERFACE,
        "MASTER_ADDR": cluster.address(0),
        "MASTER_PORT": "29533",
        "WORLD_SIZE": "4",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(Path(__file__).resolve()), call, str(folder)]
    ranks = [cluster.spawn(r // 2, command, {**common, "RANK": str(r)}) for r in range(4)]
    while not all((folder / f"ready{r}").exists() for r in range(4)):
        assert all(rank.poll() is None for rank in ranks), "a rank has ended"
        time.sleep(0.02)
    return ranks


def told(folder: Path, rank: int, until: float):
    file = folder / f"told{rank}.json"
    while time.monotonic() < until:
        if file.exists() and (text := file.read_text()):
            return json.loads(text)
        time.sleep(0.02)
    raise AssertionError(f"rank {rank} says nothing")


@pytest.mark.parametrize(
    "call, waiting", [("all_reduce", [0, 1, 2, 3]), ("send", [1, 2]), ("idle", [1])]
)
def test_a_link_that_stays_down_is_noticed(tmp_path, call, waiting):
    with namespaces.Cluster(2, 0) as cluster:
        start(cluster, call, tmp_path)
        cut = time.monotonic()
        cluster.cut(1)
        found = {rank: told(tmp_path, rank, cut + 2 * LATE) for rank in waiting}
    for rank, one in found.items():
        assert "connection closed by peer" in one["error"], one
        other = [2, 3] if rank < 2 else [0, 1]
        assert any(f"rank {r} (pid" in one["error"] for r in other), (rank, one)
        assert BOUND - 1 < one["at"] - cut < LATE, one["at"] - cut


def test_a_link_that_comes_back_costs_nothing_but_time(tmp_path):
    with namespaces.Cluster(2, 0) as cluster:
        start(cluster, "all_reduce", tmp_path)
        cluster.cut(1)
        time.sleep(BOUND / 3)
        cluster.mend(1)
        time.sleep(BOUND)
        (tmp_path / "enough").touch()
        found = [told(tmp_path, rank, time.monotonic() + bound(10)) for rank in range(4)]
    assert [one["error"] for one in found] == [""] * 4
    assert len({one["rounds"] for one in found}) == 1 and found[0]["rounds"] > 3, found


if __name__ == "__main__":
    run_rank(sys.argv[1], Path(sys.argv[2]))
