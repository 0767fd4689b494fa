"""The command lines of the benchmarks: nccl-tests' flags, and flags for comparing backends. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from fastcoll.bench.collectives import COLLECTIVES
from fastcoll.bench.sizes import parse_size, size_text

__all__ = [
    *("DTYPES", "HOST_CALLS", "MOST_ATTEMPTS", "OPS", "SCRIPTS", "WORDS"),
    *("parse", "script_parser"),
]

DTYPES = ("int8", "uint8", "int32", "int64", "half", "bfloat16", "float", "double")
"""Names of dtypes in torch."""

HOST_CALLS = (
    *("barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast"),
    *("reduce", "all_to_all", "gather", "scatter", "send", "exchange"),
)
MOST_ATTEMPTS = 20
_LEAST_COLD = 64 << 10  # bytes; smaller buffers would be too many
OPS = ("sum", "prod", "min", "max", "avg")
_BACKENDS = {
    "cpu": "fastcoll,gloo",
    "cuda": "fastcoll,nccl",
    "objects": "fastcoll,fastcoll-direct,gloo",
    "compiled": "fastcoll,fastcoll-compile,gloo",
    "cores": "fastcoll,gloo",
}
WORDS = {
    "": "Times collectives of several backends in turns, and checks their results.",
    "ddp": "What DistributedDataParallel adds to a training step.",
    "objects": "Objects by torch's calls, and by fastcoll's communicator.",
    "compiled": "Time per token of a compiled transformer with tensor parallelism.",
    "cores": "all_reduce on 2, 4 and 8 ranks with 1, 2, 4, ... cores each, as far as the cores go.",
}
"""What is measured, by the first word of the command line; "": collectives."""

SCRIPTS = {
    "clipped_step": (
        "A training step of GPT-2 with clipped gradients, by DDP and by GradientSynchronizer.",
        *(5, "turns of each way"),
    ),
    "engine": (
        "The host's time for a collective on CUDA tensors, beside torch's own nccl.",
        *(40, "batches of each"),
    ),
    "hosts": (
        "Collectives between emulated hosts, by fastcoll and gloo in turns, and the bytes sent.",
        *(20, "of a call"),
    ),
    "kernels": (
        "The kernels on one GPU beside stock DDP's launches for the same work.",
        *(4, "turns of each candidate"),
    ),
    "startup": ("The time that a command takes to start.", 15, "starts of each"),
}
"""Modules of this package that are commands of their own: what they measure, in how many rounds, and of what."""

_STATUS = "Exit status: 1 if a result is wrong, 2 if nothing could be measured."
_EPILOG = f"""examples:
  fastcoll bench all_reduce -b 4 -e 64M -f 4
  fastcoll bench all --backend fastcoll,gloo --nproc 4
  torchrun --nproc-per-node 8 -m fastcoll.bench all --device cuda --backend fastcoll,nccl

other benchmarks, each with its own --help:
  fastcoll bench ddp        what DistributedDataParallel adds to a training step
  fastcoll bench objects    objects, by torch's calls and by fastcoll's communicator
  fastcoll bench compiled   time per token of a compiled transformer
  fastcoll bench cores      all_reduce by ranks of several cores, in 10 minutes

{_STATUS}"""


def _words(known: Iterable[str], text: str) -> tuple[str, ...]:
    """Splits a list at its commas; ``all`` stands for all known words, and without these any word is allowed."""
    known, words = tuple(known), text.split(",")
    if known and words == ["all"]:
        return known
    for word in words:
        if not word:
            raise argparse.ArgumentTypeError(f"a list has an empty entry: {text!r}")
        if known and word not in known:
            raise argparse.ArgumentTypeError(
                f"expected one of {', '.join((*known, 'all'))}, got {word!r}"
            )
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


def _parser(word: str, names: tuple[str, ...]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"fastcoll bench {word}".rstrip(),
        description=WORDS[word],
        epilog=_EPILOG if not word else _STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ddp, add = word == "ddp", parser.add_argument
    natural, positive, at_least = _number(int, 0), _number(int, 1), partial(_number, float)
    # fmt: off
    if names:
        add("names", nargs="*", metavar="NAME", help=f"what to time: {', '.join((*names, 'all'))}")
        add("-d", "--datatype", dest="dtypes", type=partial(_words, DTYPES), default="float",
            help=f"comma-separated: {', '.join(DTYPES)}, all (float)")
    add("--backend", dest="backends", type=partial(_words, ()),
        help=f"comma-separated (default: {_BACKENDS.get(word) or 'fastcoll,gloo; with --device cuda fastcoll,nccl'})"
        + ("; unreduced: DDP alone, without any reduction" if ddp else ""))
    add("--json", metavar="FILE", help="write machine, versions, command and every statistic")
    if word:
        parser.set_defaults(root=0, plot=None, cold=False)
    if word == "cores":
        parser.set_defaults(device="cpu", nproc=2, cores=1)  # of the first run
        add("-e", "--end", type=parse_size, default="1G", help="largest size, from 256K (1G)")
        add("--minutes", type=at_least(0.1), default=10.0,
            help="start no run that would end later; its time is estimated from the runs before (10)")
        return parser
    add("--nproc", type=positive, default=2, help="ranks to start, unless under torchrun (2)")
    add("--cores", type=positive,
        help="bind each rank to so many cores of its own, and compute with as many threads (unbound, 1 thread)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device of the buffers (cpu)")
    add("-n", "--iters", type=positive, default=20 if ddp else 100, help="timed calls (%(default)s)")
    add("--rounds", type=positive, default=5 if ddp else 10,
        help="rounds per size, in which the backends take turns (%(default)s)")
    add("-w", "--warmup", type=natural, default=1 if ddp else 2,
        help="untimed calls at the start of each round (%(default)s)")
    add("-c", "--check", type=natural, default=1,
        help="verified calls before, and again after, the timed ones; 0: none (1)")
    add("--turn-ms", type=at_least(0), default=2.0,
        help="fast calls are made more often, to fill this time in each round (%(default)s)")
    add("--quiet", type=at_least(0), metavar="PERCENT",
        help=f"measure again, up to {MOST_ATTEMPTS} times, while other processes use more of the machine")
    add("--seed", type=natural, default=1, help="of the verified data (1)")
    add("--timeout", type=at_least(1), default=120.0, help="limit of a call, in seconds (120)")
    if ddp:
        add("--gflop", type=at_least(0), default=0.0,
            help="arithmetic of an emulated backward pass, which communication may overlap (0)")
        add("--keep-gradients", action="store_true",
            help="steps zero the gradients of the step before and add to them (zero_grad(set_to_none=False)), "
            "in DDP's buckets (gradient_as_bucket_view=True)")
        add("--profile", action="store_true",
            help="also report, by torch.profiler, what each step launches beside its collectives")
    if word:
        return parser
    add("-b", "--minbytes", type=parse_size,
        help="smallest size, with K, M or G (4; with --cold 64K)")
    add("-e", "--maxbytes", type=parse_size, default="64M", help="largest size (64M)")
    add("-f", "--stepfactor", type=at_least(1.01), default=4.0, help="from size to size (4)")
    add("-o", "--op", dest="ops", type=partial(_words, OPS), default="sum",
        help=f"comma-separated: {', '.join(OPS)}, all (sum)")
    add("-r", "--root", type=natural, default=0, help="of the rooted collectives (0)")
    add("--read", action="store_true",
        help="time a sum of the result with each call, without a floor")
    add("--cold", action="store_true",
        help="make each call on other buffers, which together have twice the size of the last-level cache")
    add("--baseline", metavar="BACKEND", help="of the ratios (gloo, or without it the slowest)")
    add("--plot", metavar="FILE.png", help="draw the median times against size")
    # fmt: on
    return parser


def parse(arguments: list[str], models: Iterable[str] = ()) -> argparse.Namespace:
    """Reads the command line; argparse ends the process if it is wrong.

    Args:
        arguments: Arguments without the program's name; the first may be one of ``WORDS``.
        models: Names of the models of ``ddp``; the first two are its default, because the others take long.

    Returns:
        The long flags, with lists as tuples ``names``, ``backends``, ``dtypes`` and ``ops``, and the first ``word``.
    """
    word = arguments[0] if arguments and arguments[0] in WORDS else ""
    names = {"": tuple(COLLECTIVES), "ddp": tuple(models)}.get(word, ())
    parser = _parser(word, names)
    options = parser.parse_args(arguments[1:] if word else arguments)
    options.word = word
    default = _BACKENDS.get(word, _BACKENDS[options.device])
    options.backends = options.backends or _words((), default)
    if not names:
        return options
    try:
        chosen = options.names or (names[:2] if word else ("all_reduce",))
        options.names = _words(names, ",".join(chosen))
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if word:
        if any("int" in dtype for dtype in options.dtypes):
            parser.error("gradients are of a floating type")
        return options
    if options.baseline not in (None, *options.backends):
        parser.error(f"expected --baseline from --backend, got {options.baseline}")
    least = _LEAST_COLD if options.cold else 4
    options.minbytes = least if options.minbytes is None else options.minbytes
    if options.cold and (options.minbytes < least or options.device != "cpu"):
        parser.error(f"--cold: expected CPU tensors, of {size_text(least)} or more")
    if options.minbytes > options.maxbytes:
        parser.error(f"-b {options.minbytes} is more than -e {options.maxbytes}")
    return options


def script_parser(name: str) -> argparse.ArgumentParser:
    """Returns the parser of one of ``SCRIPTS``."""
    what, rounds, of = SCRIPTS[name]
    parser = argparse.ArgumentParser(prog=f"python -m fastcoll.bench.{name}", description=what)
    add, positive, hosts = parser.add_argument, _number(int, 1), name == "hosts"
    # fmt: off
    add("--rounds", type=_number(int, 0) if hosts else positive, default=rounds, help=f"{of} (%(default)s)")
    add("--json", type=Path, help="write the record, with every statistic")
    if hosts:
        add("--hosts", type=int, default=2, help="(%(default)s)")
        add("--per-host", type=int, default=2, help="ranks of each (%(default)s)")
        add("--megabits", type=float, default=1000, help="of a link; 0: unshaped (%(default)s)")
        add("--bytes", type=int, nargs="+", default=[4, 1 << 16, 1 << 20, 1 << 24], help="of messages")
        add("--call", nargs="+", choices=HOST_CALLS, help="default: all")
        add("bench", nargs="*", help="arguments of python -m fastcoll.bench, behind --")
    elif name == "clipped_step":
        add("--device", choices=("cpu", "cuda"), default="cuda", help="(%(default)s)")
        add("--layers", type=positive, default=12, help="of the model (%(default)s)")
        add("--width", type=positive, default=768, help="of the model, a multiple of 64 (%(default)s)")
        add("--batch", type=positive, default=8, help="sequences of a step (%(default)s)")
        add("--length", type=positive, default=1023, help="tokens of a sequence, without the last (%(default)s)")
        add("--steps", type=positive, default=10, help="of a turn (%(default)s)")
    elif name == "engine":
        add("--only-nccl", action="store_true", help="time torch's nccl, and nothing beside it")
    elif name == "kernels":
        add("--check", action="store_true", help="verify on small tensors, time nothing")
        add("--seconds", type=float, default=200, help="start no case after that (%(default)s)")
    # fmt: on
    return parser
