"""The benchmark of a clipped training step, on the CPU with a small model."""

import pytest
from programs import python

from fastcoll.bench.record import read_record

SMALL = "--layers 1 --width 64 --batch 1 --length 9 --steps 1 --rounds 1"


@pytest.mark.full
def test_both_ways_train_the_same_model(tmp_path):
    path = tmp_path / "record.jsonl"
    given = ["--device", "cpu", *SMALL.split(), "--json", path]
    done = python("-m", "fastcoll.bench.clipped_step", *given)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "# losses agree"
    ddp, ours = read_record(path)["cases"]
    assert [ddp["way"], ours["way"]] == ["ddp", "synchronizer"]
    assert ddp["loss"] == pytest.approx(ours["loss"], rel=1e-3)
    assert all(case["time"]["median"] > 0 < case["profile"]["launches"] for case in (ddp, ours))


def test_losses_that_differ_are_an_error(monkeypatch, capsys):
    from fastcoll.bench import clipped_step

    time = dict.fromkeys(("median", "lower", "upper"), 1e3)
    work = dict.fromkeys(
        ("launches", "launch_microseconds", "collectives", "collective_microseconds"), 2.0
    )
    cases = [
        {"way": way, "time": time, "profile": work, "peak_mebibytes": None, "loss": loss}
        for way, loss in (("ddp", 3.0), ("synchronizer", 3.1))
    ]
    monkeypatch.setattr(clipped_step, "_measured", lambda *_: iter(cases))
    monkeypatch.setattr(clipped_step, "_Way", lambda *_: None)
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(clipped_step.dist, name, lambda *_, **__: None)
    assert clipped_step.main(["--device", "cpu"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "# losses differ: [3.0, 3.1] FAILED"
