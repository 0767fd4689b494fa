"""The command line of the benchmark."""

import argparse

import pytest

from fastcoll.bench.gradients import MODELS
from fastcoll.bench.options import parse
from fastcoll.bench.sizes import parse_size, size_text, sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4", 4),
        ("64K", 65536),
        ("64k", 65536),
        ("1.5M", 3 << 19),
        ("2G", 2 << 30),
        ("8MB", 8 << 20),
        ("8MiB", 8 << 20),
    ],
)
def test_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1 << 16, "64 KiB"),
        (3 << 19, "1536 KiB"),
        (1 << 20, "1 MiB"),
        (2 << 30, "2 GiB"),
    ],
)
def test_a_size_in_its_largest_unit(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize("text", ["", "K", "4X", "-4", "four", "1e400", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        parse_size(text)


def test_sizes_grow_by_the_factor_and_end_within_the_limit() -> None:
    assert list(sizes(4, 64, 4)) == [4, 16, 64]
    assert list(sizes(4, 63, 4)) == [4, 16]
    assert list(sizes(1, 4, 1.1)) == [1, 2, 3, 4]
    assert list(sizes(0, 1, 2)) == [0, 1]


def test_flags_of_nccl_tests() -> None:
    flags = "all_reduce broadcast -b 8 -e 1M -f 2 -n 7 -w 3 -o sum,max -d float,bfloat16 -c 0"
    options = parse([*flags.split(), "--backend", "gloo,fastcoll,gloo"])
    assert options.names == ("all_reduce", "broadcast")
    assert (options.minbytes, options.maxbytes, options.stepfactor) == (8, 1 << 20, 2.0)
    assert (options.iters, options.warmup, options.check) == (7, 3, 0)
    assert options.ops == ("sum", "max")
    assert options.dtypes == ("float", "bfloat16")
    assert options.backends == ("gloo", "fastcoll")


def test_defaults() -> None:
    options = parse([])
    assert options.names == ("all_reduce",)
    assert options.backends == ("fastcoll", "gloo")
    assert parse(["--device", "cuda"]).backends == ("fastcoll", "nccl")
    assert parse([]).minbytes == 4
    assert parse(["--cold"]).minbytes == 64 << 10
    assert len(parse(["all"]).names) == 10
    steps = parse(["ddp"], MODELS)
    assert steps.word == "ddp"
    assert steps.names == ("resnet50", "mlp")
    assert parse(["objects"]).backends == ("fastcoll", "fastcoll-direct", "gloo")
    assert parse(["compiled", "-n", "7"]).backends == ("fastcoll", "fastcoll-compile", "gloo")


@pytest.mark.parametrize(
    "flags",
    [
        "all_sum",
        "-d complex",
        "-o mean",
        "-n 0",
        "-f 1",
        "-b 8 -e 4",
        "--backend gloo,",
        "ddp -d int8",
        "ddp -b 4",
        "objects all_gather",
        "--cold -b 32K",
        "--cold --device cuda",
        "ddp --cold",
    ],
)
def test_wrong_flags_end_with_status_2(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(flags.split(), MODELS)
    assert end.value.code == 2
    assert "error" in capsys.readouterr().err
