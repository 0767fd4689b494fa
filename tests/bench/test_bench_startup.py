"""The benchmark of how long a command takes to start."""

import pytest

from fastcoll.bench import startup
from fastcoll.bench.record import read_record


@pytest.mark.full
def test_each_command_is_timed(tmp_path):
    path = tmp_path / "record.jsonl"
    assert startup.main(["--rounds", "2", "--json", str(path)]) == 0
    times = {case["command"]: case["time"] for case in read_record(path)["cases"]}
    assert list(times) == list(startup.CASES)
    assert all(time["count"] == 2 and time["minimum"] > 0 for time in times.values())
