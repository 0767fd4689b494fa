"""Tuning tables: how they are found, read, refused and measured; results do not depend on them."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from collective_cases import Case, Runner
from on_ranks import on_ranks
from programs import python
from world import here

import fastcoll
from fastcoll import tune, tuning
from fastcoll._load import C
from fastcoll.tune import NEVER, fastest, from_where, limits

pytestmark = beyond_gloo("fastcoll's own tuning")


def record(machine: str, **changed: object) -> str:
    table = tuning.values_of(C.Tuning())
    return json.dumps({"machine": machine, "table": {**table, **changed}})


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("FASTCOLL_TUNING", raising=False)
    path = tmp_path / "fastcoll" / "tuning.json"
    path.parent.mkdir()
    return path


def test_the_hosts_table_counts_on_its_machine(host, monkeypatch):
    assert tuning.load().source == "shipped"
    tuning._load.cache_clear()
    host.write_text(record(tuning.machine_name(), one_shot_bytes=77))
    assert tuning.load().source == str(host)
    assert tuning.load().table.one_shot_bytes == 77
    monkeypatch.setenv("FASTCOLL_TUNING", "default")
    assert tuning.load().source == "shipped"
    monkeypatch.delenv("FASTCOLL_TUNING")
    tuning._load.cache_clear()
    host.write_text(record("another machine", one_shot_bytes=77))
    assert tuning.load().source == "shipped"


def test_a_rank_that_starts_while_a_table_is_written_reads_a_whole_one(tmp_path):
    path = tmp_path / "config" / "tuning.json"
    tune._write(path, {"first": 1})
    with path.open() as opened_before:
        tune._write(path, {"second": 2})
        assert json.loads(opened_before.read()) == {"first": 1}
    assert json.loads(path.read_text()) == {"second": 2}
    assert list(path.parent.iterdir()) == [path]


def test_a_file_by_name_counts_on_any_machine(host, tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    path.write_text(record("another machine", segment_bytes=4096))
    monkeypatch.setenv("FASTCOLL_TUNING", str(path))
    assert tuning.load().table.segment_bytes == 4096
    monkeypatch.setenv("FASTCOLL_TUNING", str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match=r"missing\.json: expected a file, `default` or `auto`"):
        tuning.load()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[1]", "cannot be read"),
        ('{"machine": "m", "table": 7}', "missing or unknown: direct_all"),
        ('{"machine": "m"}', "cannot be read"),
        ('{"machine": "m", "table": {"one_shot_bytes": 1}}', "missing or unknown: direct_all"),
        (record("m", more=1), "missing or unknown: more"),
        (record("m", segment_bytes=-1), "segment_bytes is a number from 0 to 2.62, got -1"),
        (record("m", segment_bytes="64K"), "segment_bytes is a number from 0 to 2.62, got '64K'"),
        (record("m", segment_bytes=True), "segment_bytes is a number from 0 to 2.62, got True"),
    ],
)
def test_what_is_no_table_is_refused(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        tuning.parse(text, Path("some.json"))
    assert "some.json" in str(caught.value)


def test_where_to_change():
    always, never = 0, NEVER
    ways = never, always
    times = {
        1: {always: 2.0, never: 1.0},
        2: {always: 1.0, never: 1.01},  # noise
        4: {always: 2.0, never: 1.0},
        8: {always: 1.0, never: 2.0},
        16: {always: 1.0, never: 2.0},
    }
    assert from_where(times, ways) == 8
    assert limits(times, ways) == [4]
    slow = {size: {always: 2.0, never: 1.0} for size in (1, 2)}
    assert from_where(slow, ways) == NEVER and limits(slow, ways) == [2]
    fast = {size: {always: 1.0, never: 2.0} for size in (1, 2)}
    assert from_where(fast, ways) == 1 and limits(fast, ways) == [0]
    assert fastest(slow) == never and fastest(fast) == always


TABLES = [
    {},
    {"one_shot_bytes": 0},
    {"one_shot_bytes": NEVER},
    {"segment_bytes": 1, "long_segment_bytes": 1},
    {"segment_bytes": NEVER, "long_segment_bytes": NEVER},
    {"long_bytes": 0, "long_segment_bytes": 4096},
    {"streaming_bytes": 0, "direct_bytes": 0, "direct_all_reduce_bytes": 0},
]


@on_ranks(2)
def test_results_do_not_depend_on_the_table():
    for changed in TABLES:
        table = fastcoll.Options().tuning or type(tuning.load().table)()
        for name, value in changed.items():
            setattr(table, name, value)
        group = dist.new_group(backend="fastcoll", pg_options=fastcoll.Options(tuning=table))
        for count in (1, 700, 30_011, 150_003):
            for name in ("all_reduce", "all_gather"):
                case = Case(name, dtype=torch.bfloat16, shape=(count,), exact=True)
                Runner(case, group).check()
        dist.destroy_process_group(group)


@on_ranks(2, world="own_worlds")
def test_ranks_must_have_the_same_table():
    table = type(tuning.load().table)()
    table.segment_bytes = 4096 * (1 + here().rank)
    group = dist.new_group(backend="fastcoll", pg_options=fastcoll.Options(tuning=table))
    with pytest.raises(dist.DistBackendError, match=r"another tuning table.*FASTCOLL_TUNING"):
        dist.all_reduce(torch.ones(3), group=group)


@pytest.mark.full
def test_measuring_writes_a_table_that_is_used(host, tmp_path):
    quiet = {"PYTHONWARNINGS": "ignore"}
    answer = python("-m", "fastcoll.tune", "--rounds", "1", variables=quiet, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert str(host) in answer.stdout
    tuning._load.cache_clear()
    loaded = tuning.load()
    assert loaded.source == str(host) and loaded.machine == tuning.machine_name()
    written = json.loads(host.read_text())
    assert written["table"] == tuning.values_of(loaded.table)
    for item in tune.experiments(2):
        assert set(written["measured"][item.field]) == {str(size) for size in item.sizes}
        assert item.field in answer.stdout
    assert written["table"]["long_segment_bytes"] in (65536, 131072, 262144, 524288)
