"""The command line of the benchmark."""

import argparse

import pytest

from fastcoll.bench.gradients import MODELS
from fastcoll.bench.options import parse
from fastcoll.bench.sizes import parse_size, size_text, sizes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
READ = {"0": 0, "4": 4, "64K": 64 * KIB, "64k": 64 * KIB, "1.5M": 1536 * KIB, "2G": 2 * GIB}
READ |= {"8MB": 8 * MIB, "8MiB": 8 * MIB}
WRITTEN = {0: "0 B", 1023: "1023 B", 64 * KIB: "64 KiB", 1536 * KIB: "1536 KiB", MIB: "1 MiB"}


def test_sizes_are_read_and_written():
    assert {text: parse_size(text) for text in READ} == READ
    assert {size: size_text(size) for size in WRITTEN} == WRITTEN
    for text in ("", "K", "4X", "-4", "four", "1e400", "nan"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
            parse_size(text)


def test_sizes_grow_by_the_factor_and_end_within_the_limit():
    assert list(sizes(4, 64, 4)) == [4, 16, 64]
    assert list(sizes(4, 63, 4)) == [4, 16]
    assert list(sizes(1, 4, 1.1)) == [1, 2, 3, 4]
    assert list(sizes(0, 1, 2)) == [0, 1]


def test_flags_of_nccl_tests():
    flags = "all_reduce broadcast -b 8 -e 1M -f 2 -n 7 -w 3 -o sum,max -d float,bfloat16 -c 0"
    options = parse([*flags.split(), "--backend", "gloo,fastcoll,gloo"])
    assert options.names == ("all_reduce", "broadcast")
    assert (options.minbytes, options.maxbytes, options.stepfactor) == (8, 1 << 20, 2.0)
    assert (options.iters, options.warmup, options.check) == (7, 3, 0)
    assert (options.ops, options.dtypes) == (("sum", "max"), ("float", "bfloat16"))
    assert options.backends == ("gloo", "fastcoll")


def test_defaults():
    options = parse([])
    assert (options.names, options.minbytes) == (("all_reduce",), 4)
    assert options.backends == ("fastcoll", "gloo")
    assert parse(["--device", "cuda"]).backends == ("fastcoll", "nccl")
    assert parse(["--cold"]).minbytes == 64 << 10
    steps = parse(["ddp"], MODELS)
    assert (steps.word, steps.names) == ("ddp", ("resnet50", "mlp"))
    assert parse(["objects"]).backends == ("fastcoll", "fastcoll-direct", "gloo")
    assert parse(["compiled", "-n", "7"]).backends == ("fastcoll", "fastcoll-compile", "gloo")


WRONG = ["all_sum", "-d complex", "-o mean", "-n 0", "-f 1", "-b 8 -e 4", "--backend gloo,"]
WRONG += ["ddp -d int8", "ddp -b 4", "objects all_gather", "ddp --cold"]
WRONG += ["cores --nproc 2", "cores --minutes 0", "--cores 0"]
WRONG += ["--cold -b 32K", "--cold --device cuda"]


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_flags_end_with_status_2(flags, capsys):
    with pytest.raises(SystemExit) as end:
        parse(flags.split(), MODELS)
    assert end.value.code == 2
    assert "error" in capsys.readouterr().err
