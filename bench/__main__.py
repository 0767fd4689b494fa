"""``python -m fastcoll.bench``: backends side by side: collectives, or what the first word names.

python -m fastcoll.bench all_reduce -b 4 -e 64M -f 4 --backend fastcoll,gloo
torchrun --nproc-per-node 2 -m fastcoll.bench all -d bfloat16 --json result.jsonl
mpiexec.gforker -n 2 python -m fastcoll.bench --backend fastcoll,gloo,mpi
python -m fastcoll.bench ddp resnet50 --backend fastcoll,gloo
python -m fastcoll.bench objects
python -m fastcoll.bench compiled
python -m fastcoll.bench cores
torchrun --nproc-per-node 8 -m fastcoll.bench all --device cuda --backend fastcoll,nccl -b 1K -e 1G --json result.jsonl
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping

import torch

from fastcoll._launch import launch
from fastcoll.bench import cores, mpi, plot
from fastcoll.bench.conditions import last_level_cache
from fastcoll.bench.ddp import compare_steps
from fastcoll.bench.gradients import MODELS
from fastcoll.bench.options import parse
from fastcoll.bench.peer import Peer
from fastcoll.bench.run import ADAPTERS, Run, open_run
from fastcoll.bench.sweep import sweep

__all__ = ["main", "run_rank"]


def _measurement(word: str) -> Callable[[Run], int]:
    if word == "objects":
        from fastcoll.bench.objects import compare_objects

        return compare_objects
    if word == "compiled":  # loads torch's compiler
        from fastcoll.bench.compiled import compare_compiled

        return compare_compiled
    return compare_steps if word == "ddp" else sweep


def run_rank(arguments: list[str], adapters: Mapping[str, type[Peer]] = ADAPTERS) -> int:
    """Runs one rank, in a process with the environment variables that torchrun sets.

    Args:
        arguments: Arguments of the command line.
        adapters: Backends that need a class of their own, by name.

    Returns:
        The exit status.
    """
    options = parse(arguments, MODELS)
    with open_run(options, arguments, adapters) as run:
        status = _measurement(options.word)(run)
        if options.plot and run.rank == 0:
            plot.draw(run.record, options.plot)
    return status


def main(arguments: list[str] | None = None) -> int:
    """Runs one rank if RANK is set, else starts ``--nproc`` ranks.

    Returns:
        The exit status: 0, 1 if a result was wrong, 2 if nothing could be measured.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if mpi.started() and "RANK" not in os.environ:
        with mpi.as_torchrun():
            return main(arguments)
    options = parse(arguments, MODELS)
    ranks = int(os.environ.get("WORLD_SIZE", options.nproc))
    problem = plot.missing() if options.plot else ""
    if options.root >= ranks:
        problem = f"--root {options.root}: there are {ranks} ranks"
    if options.device == "cuda" and not torch.cuda.is_available():
        problem = "--device cuda: torch finds no CUDA device"
    if options.cold and not last_level_cache():
        problem = "--cold: the kernel does not report the size of the last-level cache"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    needed, allowed = here * (options.cores or 0), len(os.sched_getaffinity(0))
    if needed > allowed:
        problem = (
            f"--cores {options.cores}: {here} ranks need {needed} cores, and may use {allowed}"
        )
    if options.word == "cores" and "mpi" in options.backends and not shutil.which(cores.MPIEXEC):
        problem = f"cores: there is no {cores.MPIEXEC}, which starts the ranks of mpi"
    if options.word == "cores" and "RANK" in os.environ:
        problem = "cores: expected no launcher, because it starts its ranks itself"
    if problem:
        print(f"fastcoll.bench: {problem}", file=sys.stderr)
        return 2
    if options.word == "cores":
        return cores.compare_cores(options, arguments)
    if "RANK" in os.environ:
        return run_rank(arguments)
    command = [sys.executable, "-m", "fastcoll.bench", *arguments]
    return launch(command, options.nproc, options.cores or 1)


if __name__ == "__main__":
    sys.exit(main())
