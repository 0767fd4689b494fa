"""The command line: nccl-tests' flags, and those that comparing backends needs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from fastcoll.bench.collectives import COLLECTIVES

__all__ = ["DTYPES", "MOST_ATTEMPTS", "OPS", "Options", "parse", "parse_size", "size_text", "sizes"]

DTYPES: dict[str, torch.dtype] = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
}
MOST_ATTEMPTS = 20
OPS = ("sum", "prod", "min", "max", "avg")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_FLAGS = {
    "iterations": "iters",
    "min_bytes": "minbytes",
    "max_bytes": "maxbytes",
    "step_factor": "stepfactor",
}
_ABSENT: dict[str, Any] = {  # what only the other of the two parsers knows
    "minbytes": 0,
    "maxbytes": 0,
    "stepfactor": 2.0,
    "op": "sum",
    "root": 0,
    "baseline": None,
    "wide": False,
    "plot": None,
    "gflop": 0.0,
    "keep_gradients": False,
    "profile": False,
}
_BACKENDS = {"cpu": "fastcoll,gloo", "cuda": "fastcoll,nccl"}


@dataclass(frozen=True)
class Options:
    """What a run was asked for; the fields are described in :func:`parse`.

    Attributes:
        names: Collectives, or models for ``ddp``.
    """

    names: tuple[str, ...]
    ddp: bool
    backends: tuple[str, ...]
    nproc: int
    device: str
    min_bytes: int
    max_bytes: int
    step_factor: float
    iterations: int
    rounds: int
    warmup: int
    turn_ms: float
    quiet: float | None
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    check: int
    root: int
    baseline: str | None
    wide: bool
    gflop: float
    keep_gradients: bool
    profile: bool
    seed: int
    timeout: float
    json: str | None
    plot: str | None


def parse_size(text: str) -> int:
    """Returns the bytes that `text` names: ``4``, ``64K``, ``1.5M``, ``1G``; units are powers of 1024.

    Raises:
        argparse.ArgumentTypeError: It names none.
    """
    digits, unit = text.strip().upper().removesuffix("B").removesuffix("I"), 1
    if digits and digits[-1] in _UNITS:
        digits, unit = digits[:-1], _UNITS[digits[-1]]
    try:
        size = int(float(digits) * unit)
        if size >= 0:
            return size
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no size: write it as 4, 64K, 1M or 1G")


def size_text(size: int) -> str:
    """Returns bytes in the largest unit of which they are a multiple: ``64 KiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def sizes(least: int, most: int, factor: float) -> Iterator[int]:
    """Yields least, least x factor, ... up to most, in bytes."""
    size = least
    while size <= most:
        yield size
        size = max(size + 1, int(size * factor))


def _words(text: str, known: Iterable[str], every: Iterable[str] | None = None) -> tuple[str, ...]:
    """Splits a list at its commas; ``all`` stands for `every`."""
    known = tuple(known)
    words = [word for word in text.split(",") if word]
    if words == ["all"]:
        return tuple(known if every is None else every)
    for word in words:
        if word not in known:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join((*known, 'all'))}")
    return tuple(dict.fromkeys(words))


def _number(kind: type, least: float) -> Any:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= least:
            raise argparse.ArgumentTypeError(f"expected a number from {least:g}, got {text!r}")
        return value

    return convert


def _parser(ddp: bool, names: tuple[str, ...]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll.bench" + (" ddp" if ddp else ""),
        description="What DistributedDataParallel adds to a training step."
        if ddp
        else "Times collectives of several backends side by side; `ddp` as first word: whole steps.",
        epilog="The ranks are started here, or by torchrun -m fastcoll.bench. Exit status: 1 if a result is "
        "wrong, 2 if nothing could be measured.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="|".join((*names, "all")), help="what to time")
    add(
        "--backend",
        help="comma-separated (default: fastcoll,gloo; with --device cuda fastcoll,nccl)"
        + ("; unreduced: DDP alone, whose buckets nobody reduces" if ddp else ""),
    )
    add(
        "--nproc", type=_number(int, 1), default=2, help="ranks to start, unless under torchrun (2)"
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the buffers lie (cpu)")
    add(
        "-n",
        "--iters",
        type=_number(int, 1),
        default=20 if ddp else 100,
        help="timed calls (%(default)s)",
    )
    add("--rounds", type=_number(int, 1), default=5 if ddp else 10,
        help="the backends take turns so many times within a size (%(default)s)")  # fmt: skip
    add("-w", "--warmup", type=_number(int, 0), default=1 if ddp else 2,
        help="untimed calls at the start of each round (%(default)s)")  # fmt: skip
    add("-c", "--check", type=_number(int, 0), default=1,
        help="verified calls before, and again after, the timed ones; 0: none (1)")  # fmt: skip
    add(
        "-d",
        "--datatype",
        default="float",
        help=f"comma-separated: {', '.join(DTYPES)}, all (float)",
    )
    add(
        "--turn-ms",
        type=_number(float, 0),
        default=2.0,
        help="fast calls are made more often, to fill this time in each round (%(default)s)",
    )
    add(
        "--quiet",
        type=_number(float, 0),
        metavar="PERCENT",
        help=f"measure again, up to {MOST_ATTEMPTS} times, while other processes use more of the machine",
    )
    add("--seed", type=_number(int, 0), default=1, help="of the verified data (1)")
    add(
        "--timeout", type=_number(float, 1), default=120.0, help="limit of a call, in seconds (120)"
    )
    add("--json", metavar="FILE", help="write machine, versions, command and every statistic")
    if ddp:
        add("--gflop", type=_number(float, 0), default=0.0,
            help="arithmetic of an emulated backward pass, which communication may overlap (0)")  # fmt: skip
        add("--keep-gradients", action="store_true",
            help="steps zero the gradients of the step before and add to them (zero_grad(set_to_none=False)), "
            "in DDP's buckets (gradient_as_bucket_view=True)")  # fmt: skip
        add("--profile", action="store_true",
            help="also tell, by torch.profiler, what each step launches beside its collectives")  # fmt: skip
        return parser
    add("-b", "--minbytes", type=parse_size, default="4", help="smallest size, with K, M or G (4)")
    add("-e", "--maxbytes", type=parse_size, default="64M", help="largest size (64M)")
    add("-f", "--stepfactor", type=_number(float, 1.01), default=4.0, help="from size to size (4)")
    add("-o", "--op", default="sum", help=f"comma-separated: {', '.join(OPS)}, all (sum)")
    add("-r", "--root", type=_number(int, 0), default=0, help="of the rooted collectives (0)")
    add("--baseline", metavar="BACKEND",
        help="what the ratios are over (the slowest backend of each size)")  # fmt: skip
    add(
        "--wide",
        action="store_true",
        help="more columns: quartiles, ratios by minima, others' load",
    )
    add("--plot", metavar="FILE.png", help="draw latency and bandwidth against size")
    return parser


def parse(arguments: list[str], models: Iterable[str] = ()) -> Options:
    """Reads the command line; argparse ends the process where it is wrong.

    Args:
        arguments: Without the program's name; ``ddp`` as the first word selects whole steps.
        models: Names known to ``ddp``; the first two are its default, as the others take long.
    """
    ddp = arguments[:1] == ["ddp"]
    names = tuple(models) if ddp else tuple(COLLECTIVES)
    parser = _parser(ddp, names)
    given = _ABSENT | vars(parser.parse_args(arguments[1:] if ddp else arguments))
    try:
        chosen = _words(",".join(given["names"]), names) or (names[:2] if ddp else ("all_reduce",))
        dtypes = _words(given["datatype"], DTYPES)
        ops = _words(given["op"], OPS)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    backends = tuple(dict.fromkeys((given["backend"] or _BACKENDS[given["device"]]).split(",")))
    if ddp and not all(DTYPES[dtype].is_floating_point for dtype in dtypes):
        parser.error("gradients are of a floating type")
    if given["baseline"] not in (None, *backends):
        parser.error(f"--baseline {given['baseline']} is none of the backends")
    if not all(backends) or not dtypes or not ops:
        parser.error("a list has an empty entry")
    if given["minbytes"] > given["maxbytes"]:
        parser.error(f"-b {given['minbytes']} is more than -e {given['maxbytes']}")
    parsed: dict[str, Any] = {
        "names": chosen,
        "ddp": ddp,
        "backends": backends,
        "ops": ops,
        "dtypes": dtypes,
    }
    for item in fields(Options):
        parsed.setdefault(item.name, given.get(_FLAGS.get(item.name, item.name)))
    return Options(**parsed)
