"""``python -m fastcoll.bench.exactness``: how far bfloat16 gradients are from their float64 mean, by number of ranks.

Real ranks average the same gradients with fastcoll and with gloo. Beside them, for more ranks than a machine has, two
sums made here: a stock ring's, whose partial results travel in bfloat16, so that every hop rounds; and one in float32
that is rounded once, as fastcoll makes it. What one rounding of the exact mean costs is drawn with them: no result in
bfloat16 can be nearer.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastcoll.bench import plot
from fastcoll.bench.launch import launch
from fastcoll.bench.machine import describe_machine, describe_run
from fastcoll.kernels import reference_ranks

__all__ = ["Deviation", "error_of", "gradients", "main", "ring_mean", "rounded_once"]

BACKENDS = ("fastcoll", "gloo")
WIRE = torch.bfloat16
_MODULE = "fastcoll.bench.exactness"


@dataclass(frozen=True)
class Deviation:
    """How far a result in bfloat16 is from the exact one.

    Attributes:
        relative: Norm of the difference over the norm of the exact result.
        roundings: The largest error of an element, over the most that one rounding of it to bfloat16 can cost
            (2**-8 of the exact value): at most 1 if it was rounded once, and the sum was exact.
        not_nearest: Share of the elements that are not the bfloat16 number nearest to the exact result.
    """

    relative: float
    roundings: float
    not_nearest: float


def gradients(ranks: int, elements: int, seed: int = 0) -> Tensor:
    """Returns what the ranks have: bfloat16 [ranks, elements].

    A mean gradient that all share and as much noise of each rank's own batch, over five orders of magnitude.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    size = 10.0 ** (5 * torch.rand(elements, generator=generator, dtype=torch.float64) - 6)
    return (size * (normal(elements) + normal(ranks, elements))).to(WIRE)


def error_of(found: Tensor, given: Tensor) -> Deviation:
    """Compares a mean with the float64 mean of what the ranks had.

    Args:
        found: bfloat16 [elements].
        given: bfloat16 [ranks, elements].
    """
    exact = given.double().mean(0)
    difference = (found.double() - exact).abs()
    allowed = exact.abs() * torch.finfo(WIRE).eps / 2
    return Deviation(
        relative=(difference.norm() / exact.norm()).item(),
        roundings=(difference / allowed)[allowed > 0].max().item(),
        not_nearest=(found != exact.to(WIRE)).double().mean().item(),
    )


def ring_mean(given: Tensor) -> Tensor:
    """Returns the mean that a ring makes whose partial results travel in bfloat16: each hop rounds."""
    return reference_ranks.ring_all_reduce(list(given), "avg", wire_dtype=WIRE)


def rounded_once(given: Tensor) -> Tensor:
    """Returns the mean that is summed in float32, in rank order, and rounded once."""
    return reference_ranks.all_reduce(list(given), "avg", wire_dtype=WIRE)


def _average(given: Tensor, backend: str) -> Tensor:
    """Averages this rank's gradients as DDP does with a backend."""
    mine = given[dist.get_rank()].clone()
    if backend == "fastcoll":
        dist.all_reduce(mine, dist.ReduceOp.AVG)
        return mine
    mine /= dist.get_world_size()  # DDP's own order: gloo has no average
    dist.all_reduce(mine)
    return mine


def _run_rank(options: argparse.Namespace) -> int:
    """Is one rank: both backends, one after the other; rank 0 writes what it found."""
    torch.set_num_threads(1)
    errors = {}
    given = gradients(int(os.environ["WORLD_SIZE"]), options.elements, options.seed)
    for backend in BACKENDS:
        dist.init_process_group(backend)
        errors[backend] = asdict(error_of(_average(given, backend), given))
        rank = dist.get_rank()
        gc.collect()
        dist.destroy_process_group()
    if rank == 0:
        Path(options.rank_result).write_text(json.dumps(errors))
    return 0


def _measured(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "errors.json")
        command = [sys.executable, "-m", _MODULE, "--rank-result", str(result)]
        command += ["--elements", str(options.elements), "--seed", str(options.seed)]
        if status := launch(command, ranks):
            raise SystemExit(f"{_MODULE}: a rank of {ranks} ended with status {status}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def _case(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    given = gradients(ranks, options.elements, options.seed)
    exact = given.double().mean(0)
    case: dict[str, Any] = {
        "ranks": ranks,
        "one rounding of the exact mean": asdict(error_of(exact.to(WIRE), given)),
        "float32, rounded once": asdict(error_of(rounded_once(given), given)),
        "ring, each hop rounds": asdict(error_of(ring_mean(given), given)),
    }
    if ranks <= options.real:
        case |= _measured(options, ranks)
    return case


def _print(cases: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'ranks':>5}  {'mean by':<32}{'relative error':>15}{'roundings':>11}{'not nearest':>13}"
    )
    for case in cases:
        for name, error in case.items():
            if name != "ranks":
                print(
                    f"{case['ranks']:>5}  {name:<32}{error['relative']:>15.3e}{error['roundings']:>11.2f}"
                    f"{error['not_nearest']:>12.2%}"
                )


def draw(record: dict[str, Any], path: str) -> None:
    """Writes a picture: relative error, and the share of elements that are not the nearest number, by ranks.

    Args:
        record: What ``--json`` writes.
        path: The file; its suffix selects the format.
    """
    figure = plot.new_figure(10, 4)
    styles = {
        "one rounding of the exact mean": {"color": "black", "linestyle": ":"},
        "float32, rounded once": {"color": "C0", "linestyle": "-"},
        "ring, each hop rounds": {"color": "C3", "linestyle": "-"},
        "fastcoll": {"color": "C0", "linestyle": "none", "marker": "o"},
        "gloo": {"color": "C3", "linestyle": "none", "marker": "s"},
    }
    kinds = (
        ("relative", "relative error (norms)"),
        ("not_nearest", "elements not nearest (share)"),
    )
    for axes, (key, what) in zip(figure.subplots(1, 2), kinds, strict=True):
        for name, style in styles.items():
            there = [case for case in record["cases"] if name in case]
            label = f"{name}, real ranks" if name in BACKENDS else name
            axes.plot(
                [c["ranks"] for c in there], [c[name][key] for c in there], label=label, **style
            )
        axes.set_xscale("log", base=2)
        axes.set(xlabel="ranks", ylabel=what, ylim=(0, None))
        axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)
    figure.suptitle(
        f"Mean of bfloat16 gradients against float64, {record['elements']} elements; {record['date'][:10]}"
    )
    plot.save(figure, record, path, dpi=90)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("--most", type=int, default=64, help="ranks: 2, 4, ... (%(default)s)")
    parser.add_argument(
        "--real", type=int, default=8, help="of which so many are started (%(default)s)"
    )
    parser.add_argument("--elements", type=int, default=1 << 17, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the gradients (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the record")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the errors")
    parser.add_argument("--rank-result", help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    if options.rank_result:
        return _run_rank(options)
    if options.most < 2 or options.elements < 1:
        parser.error("--most: expected 2 ranks or more; --elements: 1 or more")
    if options.plot and (problem := plot.missing()):
        parser.error(problem)
    cases = [_case(options, 1 << power) for power in range(1, options.most.bit_length())]
    _print(cases)
    record = {
        **describe_run(given),
        "command": " ".join(["python", "-m", _MODULE, *given]),
        "machine": describe_machine(torch.device("cpu")),
        "elements": options.elements,
        "seed": options.seed,
        "unit": "see fastcoll.bench.exactness.Deviation",
        "cases": cases,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.plot:
        draw(record, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
