"""``python -m fastcoll.bench --simulate``: what cost models predict, by algorithm, world size and message size.

python -m fastcoll.bench --simulate --gpus 8..16384
python -m fastcoll.bench --simulate --gpus 64,512 --sizes 1K..1G --collective reduce_scatter --plot models.png
python -m fastcoll.bench --list-algorithms

Nothing is measured. The models are those of ``fastcoll.costs``; beside them stands what NCCL's own model predicts
for its ring, its tree and its sums in switches.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastcoll.bench import plot
from fastcoll.bench.machine import describe_run
from fastcoll.bench.options import parse_size
from fastcoll.costs import HGX_H200, Platform, nccl, predict

__all__ = ["asked", "main", "parse_counts", "parse_sizes", "record_of"]

_FLAGS = ("--simulate", "--list-algorithms")
_SIZES = "1K,64K,1M,32M,1G"


def asked(arguments: Sequence[str]) -> bool:
    """Tells whether a command line is for this module."""
    return any(flag in arguments for flag in _FLAGS)


def _range(first: int, last: int, text: str) -> list[int]:
    """Returns first, twice first, ... up to last."""
    if not 0 < first <= last:
        raise argparse.ArgumentTypeError(
            f"expected a..b with 0 < a <= b for a, 2a, 4a, ... up to b, got {text!r}"
        )
    values = [first]
    while 2 * values[-1] <= last:
        values.append(2 * values[-1])
    return values


def parse_counts(text: str) -> list[int]:
    """Returns the world sizes that ``8..64`` (8, 16, 32, 64) or ``8,24,72`` names.

    Raises:
        argparse.ArgumentTypeError: It names none.
    """
    try:
        if ".." in text:
            first, last = map(int, text.split(".."))
            counts = _range(first, last, text)
        else:
            counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 2:
        raise argparse.ArgumentTypeError(
            f"expected a..b (powers of two times a) or a list a,b,c, of 2 and more, got {text!r}"
        )
    return list(dict.fromkeys(counts))


def parse_sizes(text: str) -> list[int]:
    """Returns the bytes that ``1K..1G`` (by factors of two) or ``4K,1M`` names.

    Raises:
        argparse.ArgumentTypeError: It names none.
    """
    if ".." in text:
        first, _, last = text.partition("..")
        return _range(parse_size(first), parse_size(last), text)
    return list(dict.fromkeys(parse_size(word) for word in text.split(",")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll.bench --simulate",
        description="Predicts times by alpha-beta models of algorithms. A model, no measurement.",
    )
    add = parser.add_argument
    add("--simulate", action="store_true", help="print predictions")
    add("--list-algorithms", action="store_true", help="print the algorithms and their formulas")
    add("--gpus", type=parse_counts, default="8..16384", metavar="A..B|A,B",
        help="world sizes: A, 2A, ... up to B, or a list (%(default)s)")  # fmt: skip
    add("--sizes", type=parse_sizes, default=_SIZES, metavar="A..B|A,B",
        help="bytes of the message, with K, M or G (%(default)s)")  # fmt: skip
    add("--collective", choices=nccl.COLLECTIVES, default="all_reduce", help="(%(default)s)")
    add("--per-node", type=int, default=HGX_H200.per_node, help="GPUs of a node (%(default)s)")
    add("--nvlink", type=float, default=HGX_H200.intra_bandwidth / 1e9, metavar="GB/s",
        help="of a GPU, each way (%(default)s)")  # fmt: skip
    add("--nic", type=float, default=HGX_H200.inter_bandwidth / 1e9, metavar="GB/s",
        help="of the network card of a GPU, each way (%(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write constants, sources and predictions")
    add("--plot", metavar="FILE.png", help="draw time against size, a picture for each world size")
    return parser


def _problem(options: argparse.Namespace) -> str:
    if options.per_node < 1 or not (options.nvlink > 0 and options.nic > 0):
        return "--per-node, --nvlink and --nic: expected numbers above 0"
    if options.nic > options.nvlink:
        return "--nic: expected no more than --nvlink, which the models rely on"
    uneven = [n for n in options.gpus if n > options.per_node and n % options.per_node]
    if uneven:
        return (
            f"--gpus {uneven[0]}: expected one node or full ones of {options.per_node} (--per-node)"
        )
    if importlib.util.find_spec("rich") is None:
        return "the tables need rich: pip install rich, or pip install 'fastcoll[bench]'"
    return plot.missing() if options.plot else ""


def record_of(
    platform: Platform, collective: str, counts: Sequence[int], sizes: Sequence[int]
) -> dict[str, Any]:
    """Returns constants and predictions.

    Args:
        platform: Whose constants are used.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        counts: World sizes.
        sizes: Bytes of the message.

    Returns:
        ``cases``: for each world size and size the ``seconds`` by algorithm with ``protocol``, ``steps`` and
        ``wire_bytes``; the ``best`` of them; ``nccl``: what NCCL's own model says.
    """
    cases = []
    for ranks in counts:
        for size in sizes:
            predictions = predict(collective, ranks, size, platform)
            cases.append({
                "ranks": ranks,
                "size": size,
                "best": min(predictions, key=lambda prediction: prediction.seconds).algorithm,
                "algorithms": {
                    prediction.algorithm: {
                        "seconds": prediction.seconds,
                        "protocol": prediction.protocol,
                        "steps": prediction.cost.steps,
                        "wire_bytes": float(prediction.cost.wire_bytes),
                        "inter_bytes": float(prediction.cost.inter_bytes),
                    }
                    for prediction in predictions
                },
                "nccl": {
                    prediction.algorithm: {
                        "seconds": prediction.seconds,
                        "protocol": prediction.protocol,
                    }
                    for prediction in nccl.predict(collective, ranks, size, platform.per_node)
                },
            })  # fmt: skip
    return {
        "kind": "model, not a measurement",
        "collective": collective,
        "platform": dataclasses.asdict(platform),
        "nccl_model": nccl.SOURCE,
        "unit": "seconds of a call, bytes",
        "cases": cases,
    }


def main(arguments: Sequence[str]) -> int:
    """Prints what was asked for; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if problem := _problem(options):
        parser.error(problem)
    from fastcoll.bench.simulate_report import (
        draw,
        print_formulas,
        print_implemented,
        print_predictions,
    )

    if options.list_algorithms:
        print_formulas(sys.stdout)
        print_implemented(sys.stdout)
    if not options.simulate:
        return 0
    platform = dataclasses.replace(
        HGX_H200,
        per_node=options.per_node,
        intra_bandwidth=options.nvlink * 1e9,
        inter_bandwidth=options.nic * 1e9,
    )
    record = record_of(platform, options.collective, options.gpus, options.sizes)
    changed = [
        name
        for name in ("intra_bandwidth", "inter_bandwidth")
        if getattr(platform, name) != getattr(HGX_H200, name)
    ]
    record["platform"]["sources"] |= dict.fromkeys(changed, "given on the command line")
    print_predictions(record, sys.stdout)
    if options.json:
        run = describe_run(list(arguments))
        record = {name: run[name] for name in ("date", "command", "revision", "versions")} | record
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.plot:
        draw(record, options.plot)
    return 0
