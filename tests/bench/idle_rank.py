"""One rank that lets its companions rest and writes what CPU time they took; started by test_bench_companions.py.

Arguments: the file that rank 0 writes, and the flags of a benchmark.
"""

import json
import sys
import time
from pathlib import Path

import torch
from altered_rank import ADAPTERS

from fastcoll.bench.collectives import build_case
from fastcoll.bench.options import parse
from fastcoll.bench.run import open_run

SETTLE_SECONDS = 0.2  # for what a turn leaves to be done
REST_SECONDS = 1.0

if __name__ == "__main__":
    with open_run(parse(sys.argv[2:]), sys.argv[2:], ADAPTERS) as run:
        arguments = ("all_reduce", 4096, torch.float32, "sum", run.rank, run.world_size, 0)
        for peer in run.peers:
            candidate = peer.prepare(build_case(*arguments, torch.device("cpu")))
            assert len(candidate.turn(run.control.barrier, 1, 20)) == 20
        time.sleep(SETTLE_SECONDS)
        busy = [peer.cpu_seconds() for peer in run.peers]
        time.sleep(REST_SECONDS)
        rested = [peer.cpu_seconds() - before for peer, before in zip(run.peers, busy, strict=True)]
        ranks = run.control.all_gather(rested)
        if run.rank == 0:
            names = [peer.name for peer in run.peers]
            result = dict(zip(names, map(max, zip(*ranks, strict=True)), strict=True))
            Path(sys.argv[1]).write_text(json.dumps({"rested": result, "left_out": run.left_out}))
