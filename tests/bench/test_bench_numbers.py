"""What the benchmark computes: sizes, bandwidths, statistics, floors, the oracle and the table."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from oracle import reduced

from fastcoll import _measure
from fastcoll._measure import Call, Plan, summarise, take_turn
from fastcoll.bench import oracle, report
from fastcoll.bench.collectives import COLLECTIVES, Case, bandwidths, build_case
from fastcoll.bench.derived import added
from fastcoll.bench.gradients import MODELS, EmulatedModel
from fastcoll.bench.options import DTYPES, OPS
from fastcoll.bench.record import read_record, write_record
from fastcoll.bench.sweep import bind_floor

CPU = torch.device("cpu")


def case_of(name: str, size: int = 1 << 16, rank: int = 0, ranks: int = 4, **other: object) -> Case:
    arguments = {"dtype": torch.float32, "op": "sum", "root": 0, "device": CPU, **other}
    return build_case(name, size, rank=rank, world_size=ranks, **arguments)


def test_bandwidths_are_in_gigabytes_per_second():
    for name, bus in (("all_reduce", 1.5), ("all_gather", 0.75), ("broadcast", 1.0)):
        assert bandwidths(name, 10**9, 4, 1e6) == pytest.approx((1.0, bus))
    assert bandwidths("barrier", 0, 4, 1e6) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_timed_data_stay_finite_and_no_zeros(ranks, op, dtype):
    """Of calls in place, whose results are the next call's data."""
    case = case_of("all_reduce", 64, 0, ranks, dtype=getattr(torch, dtype), op=op)

    def call() -> None:
        case.receive.copy_(reduced([case.send] * ranks, {"prod": "PRODUCT"}.get(op, op.upper())))
        assert case.receive.double().isfinite().all()
        assert case.receive.all()

    data: dict[str, Any] = {"refresh": case.reset, "lifetime": case.lifetime}
    assert len(take_turn(call, CPU, lambda: None, 2, 60, **data)) == 60


@pytest.mark.parametrize(
    ("lifetime", "warmup", "expected"),
    [
        (None, 2, "RMcc(ccccc)"),
        (4, 2, "RMcc(cc)Rcc(cc)Rcc(c)"),
        (4, 0, "RM(cccc)Rc(c)"),
        (2, 2, "RMc(c)Rc(c)Rc(c)Rc(c)Rc(c)"),
    ],
)
def test_data_are_refreshed_outside_of_the_timed_calls(lifetime, warmup, expected, monkeypatch):
    done: list[str] = []

    def timed(call: Call, calls: int) -> list[float]:
        done.append("(")
        for _ in range(calls):
            call()
        done.append(")")
        return [1.0] * calls

    monkeypatch.setattr(_measure, "_time_on_cpu", timed)
    call, meet, refresh = (partial(done.append, letter) for letter in "cMR")
    data: dict[str, Any] = {"refresh": refresh, "lifetime": lifetime}
    assert take_turn(call, CPU, meet, warmup, 5, **data) == [1.0] * 5
    assert "".join(done) == expected


@pytest.mark.parametrize("name", sorted(COLLECTIVES.keys() - {"barrier", "all_reduce"}))
def test_the_floor_copies_no_zeros(name):
    case = case_of(name, rank=int(name in ("broadcast", "scatter")))
    case.reset()
    case.receive.zero_()
    floor = bind_floor(case)
    assert floor is not None
    floor()
    lines = case.receive.view(torch.uint8).view(-1, 64)
    assert lines.any(dim=1).all()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_buffers_have_the_size_and_no_zeros(name):
    """The larger one has the size."""
    case = case_of(name, 1000)
    case.reset()
    assert case.send.all() and case.receive.all()
    assert case.size == max(case.send.nbytes, case.receive.nbytes)
    assert case.size == (
        0 if name == "barrier" else 1000 // 16 * 16 if COLLECTIVES[name].chunked else 1000
    )
    assert case_of(name, 1).count == (name != "barrier")


def test_quartiles():
    summary = summarise([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (summary.minimum, summary.lower, summary.median) == (1, 2, 3)
    assert (summary.upper, summary.maximum, summary.mean, summary.count) == (4, 5, 3, 5)
    assert summarise([7.0]).median == summarise([7.0]).upper == 7


def test_every_round_has_as_many_calls():
    assert (Plan(100, 10, 2).turns, Plan(100, 10, 2).calls) == (10, 10)
    assert (Plan(7, 3, 2).turns, Plan(7, 3, 2).calls) == (3, 3)
    assert (Plan(2, 5, 2).turns, Plan(2, 5, 2).calls) == (2, 1)


def test_fast_calls_fill_the_turn():
    plan = Plan(100, 10, 2, turn_milliseconds=2.0)
    assert [plan.calls_of(time) for time in (5.0, 150.0, 1000.0, 0.0)] == [400, 13, 10, 1000]


def test_oracle_sees_a_shift_and_a_result_that_was_never_written():
    case = case_of("all_gather", 1 << 20)
    oracle.fill(case, 1)
    assert oracle.count_wrong(case, 1) == case.receive.numel()
    chunks = [
        oracle.pattern(1, rank, case.dtype, "none").repeat(9)[: case.count] for rank in range(4)
    ]
    case.receive.copy_(torch.cat(chunks))
    assert oracle.count_wrong(case, 1) == 0
    case.receive.copy_(case.receive.roll(32768))
    assert oracle.count_wrong(case, 1) > case.receive.numel() // 2


def statistics(median: float, minimum: float) -> dict:
    time = {"median": median, "lower": median, "upper": median, "minimum": minimum}
    return {"time": time, "wrong": 0}


def test_rows_of_the_table_and_averages():
    case = {
        "collective": "all_reduce", "size": 65536, "count": 16384, "dtype": "float", "op": "sum",
        "other_processes_percent": 3.4,
        "floor": statistics(5.0, 4.0),
        "backends": {"fastcoll": statistics(10.0, 8.0), "gloo": statistics(4000.0, 80.0),
                     "fake": {**statistics(9000.0, 1.0), "wrong": None}},
        "unsupported": {"nccl": "no device"},
    }  # fmt: skip
    table = report.SweepTable(4, ["fastcoll", "gloo"], {})
    first, second, third, last = table.rows(case)
    assert first.split() == ["65536", "float", "sum", "fastcoll", "10.00", "8.00",
                             "6.55", "9.83", "0", "400x", "400x", "5.00"]  # fmt: skip
    assert second.split()[4] == "4000.0"
    assert second.split()[9:11] == ["1.00x", "0.00x"]
    assert "N/A" in third.split()
    assert last == "# 65536 B: nccl cannot do this: no device"
    assert table.averages() == [
        "# average bus bandwidth (GB/s): fastcoll 9.83, gloo 0.02, fake 0.01"
    ]
    assert report.SweepTable(4, [], {}).averages() == []
    small = table.rows({**case, "size": 65535})
    assert [line.split()[-1] for line in small[:3]] == ["-"] * 3  # the floor


def test_ratios_are_over_the_baseline_and_the_lead_is_over_the_fastest_other_library():
    backends = {"a": statistics(10.0, 9.0), "b": statistics(20.0, 6.0), "c": statistics(40.0, 36.0)}
    case = {"backends": backends}

    def ratios(name: str, **changed: Any) -> tuple[float | None, ...]:
        given = {"among": backends, "libraries": {}, "baseline": "b"} | changed
        return report.SweepTable(2, **given).compare(case, name)

    assert ratios("a") == (2.0, 2.0)
    assert ratios("b") == (1.0, 0.5)
    assert ratios("a", baseline="absent") == (None, 2.0)
    assert ratios("a", baseline=None) == (4.0, 2.0)
    backends["gloo"] = statistics(30.0, 1.0)
    assert ratios("a", baseline=None) == (3.0, 2.0)  # gloo, not the slowest
    del backends["gloo"]
    own = {"a": "ours 1.0", "b": "ours 1.0", "c": "theirs"}
    assert ratios("a", libraries=own) == (2.0, 4.0)
    assert ratios("c", libraries=own) == (0.5, 0.25)
    case = {"backends": {"a": statistics(10.0, 9.0)}}
    assert ratios("a") == (None, None)
    legends = [report.SweepTable(2, ["a", *more], {}).legend for more in ([], ["gloo"])]
    assert ["faster than gloo, or where" in legend for legend in legends] == [False, True]


def test_the_last_line_tells_where_fastcoll_is_faster_and_where_it_is_behind():
    mpi = "Intel(R) MPI Library 2021.18.1 for Linux* OS"
    times = {
        4: {"fastcoll": 4.0, "gloo": 568.0, "mpi": 1.0, "ccl": 9.0},
        1024: {"fastcoll": 5.0, "gloo": 20.0, "mpi": 4.0, "ccl": 9.0},
        65536: {"fastcoll": 10.0, "gloo": 28.0, "mpi": 12.0, "ccl": 20.0},
    }

    def answers(
        cases: dict[int, dict[str, float]], name: str = "all_reduce", busy: float = 0.0
    ) -> list[str]:
        among = list(dict.fromkeys(backend for case in cases.values() for backend in case))
        table = report.SweepTable(2, among, {"mpi": mpi, "ccl": "oneCCL 1"})
        for size, case in cases.items():
            backends = {backend: statistics(time, time) for backend, time in case.items()}
            kind = {"collective": name, "size": size, "dtype": "float", "op": "sum"}
            of_others = {"other_processes_percent": busy}
            table.rows(
                {**kind, **of_others, "floor": None, "backends": backends, "unsupported": {}}
            )
        return table.answers()

    assert answers(times) == [
        "# all_reduce: fastcoll is faster than gloo at 3 of 3 sizes, 2.80x to 142x; "
        "behind Intel MPI below 64 KiB; faster than ccl at 3 of 3 sizes, 1.80x to 2.25x"
    ]
    slow = {4: {"fastcoll": 2.0, "gloo": 4.0}, 64: {"fastcoll": 4.0, "gloo": 2.0}}
    assert answers(slow) == [
        "# all_reduce: fastcoll is faster than gloo at 1 of 2 sizes, 0.50x to 2.00x; "
        "behind gloo from 64 B"
    ]
    barrier = {0: {"fastcoll": 2.0, "gloo": 4.0, "mpi": 1.0, "fastcoll-plan": 1.0}}
    assert answers(barrier, "barrier") == [
        "# barrier: fastcoll is faster than gloo, 2.00x; behind Intel MPI",
        "# barrier: fastcoll-plan is faster than gloo, 4.00x",
    ]
    assert answers(slow, busy=62.0)[1:] == [
        "# other processes used up to 62% of the machine: run it when it is idle, or add --quiet 5"
    ]
    alone = {4: {"fastcoll": 2.0, "nccl": 1.0}, 64: {"fastcoll": 2.0, "nccl": 3.0}}
    assert answers(alone) == [
        "# all_reduce: fastcoll is faster than nccl at 1 of 2 sizes, 0.50x to 1.50x; "
        "behind nccl below 64 B"
    ]
    assert answers({4: {"gloo": 1.0}}) == answers({4: {"fastcoll": 1.0}}) == []


def test_what_ddp_adds():
    times = [("one", 20.0, 14.0), ("one", 50.0, 44.0), ("many", 9.0, 9.0)]
    row = {
        "alone": {"time": {"median": 10.0, "minimum": 9.0}},
        "cases": [
            {"buckets": buckets, "time": {"median": median, "minimum": minimum}}
            for buckets, median, minimum in times
        ],
    }
    expected = [(10.0, 5.0, 4.0), (40.0, 35.0, 1.0), (-1.0, 0.0, None)]
    assert added(row) == list(zip(row["cases"], expected, strict=True))


def test_a_record_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "deep" / "record.jsonl"
    record = {
        "date": "today",
        "load": [1.23456789],
        "cases": [{"size": 1 << 30, "time": 12345.678}, {}],
    }
    write_record(path, record)
    assert len(path.read_text().splitlines()) == 3
    expected = {
        "date": "today",
        "load": [1.2346],
        "cases": [{"size": 1 << 30, "time": 12346.0}, {}],
    }
    assert read_record(path) == expected
    for text in ("", "[1]\n", "{}\n{"):
        path.write_text(text)
        with pytest.raises(ValueError):
            read_record(path)


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [("resnet50", 161, 25_557_032), ("mlp", 12, 25_178_112), ("gpt2-medium", 292, 354_823_168)],
)
def test_models_have_the_published_number_of_parameters(name, tensors, parameters):
    shapes = MODELS[name]()
    assert len(shapes) == tensors
    assert sum(map(math.prod, shapes)) == parameters


def test_gradients_become_ready_from_the_last_parameter_to_the_first():
    model = EmulatedModel([(3, 4), (5,), (2,)], torch.zeros(19), 3.0, gflop=0.1)
    ready: list[int] = []
    for index, weight in enumerate(model.parameters()):
        weight.register_post_accumulate_grad_hook(lambda _, index=index: ready.append(index))
    model().backward()
    assert ready == [2, 1, 0]
    assert all((weight.grad == 3).all() for weight in model.parameters())
    assert sum(model.products) == round(0.1e9 / (2 * 256**3))
