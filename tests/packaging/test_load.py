"""A build for another torch, or none at all, is a sentence that says what to do."""

import importlib
import json
import os
import re
import shlex
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fastcoll
from fastcoll import _built_for

ROOT = Path(__file__).parents[2]
FOLDER = shlex.quote(str(ROOT))
REBUILD = re.escape(f"rebuild it, `pip install --no-build-isolation --no-deps --editable {FOLDER}`")


@pytest.mark.parametrize(
    ("built", "running", "fits"),
    [
        ("2.13", "2.13.0+cpu", True),
        ("2.14", "2.14.0a0+git1234567", True),
        (None, "2.13.0", True),
        ("2.11", "2.13.0", False),
        ("2.1", "2.13.0", False),
    ],
)
def test_versions_fit_within_a_minor_release(built, running, fits):
    assert (_built_for.mismatch(built, running) is None) == fits


RUNNING = torch.__version__[:4]


@pytest.mark.parametrize(
    ("recorded", "compiled", "suffix", "problem"),
    [
        ("2.1", None, "", rf"built for torch 2\.1 and runs with torch {RUNNING}"),
        (None, "2.12", "", r"built for torch 2\.12 and runs with "),
        (RUNNING, None, ".pyi", "built for torch .*does not load with torch "),
        (None, None, ".of-no-python.so", "no compiled module for this Python"),
    ],
    ids=["by its record", "by itself", "undefined symbol", "no build"],
)
def test_a_module_that_does_not_fit_is_named(monkeypatch, recorded, compiled, suffix, problem):
    """The record is read first: the module of the first case has nothing to ask."""
    module = compiled and SimpleNamespace(build_info=lambda: {"torch": compiled})
    monkeypatch.delitem(sys.modules, "fastcoll._load", raising=False)
    monkeypatch.delattr(fastcoll, "_load", raising=False)
    monkeypatch.setattr(_built_for, "recorded_torch", lambda: recorded)
    monkeypatch.setattr(fastcoll, "_C", module, raising=False)
    if suffix:
        monkeypatch.setattr(sysconfig, "get_config_var", lambda name: suffix)
        monkeypatch.setitem(sys.modules, "fastcoll._C", None)
        monkeypatch.delattr(fastcoll, "_C")
    with pytest.raises(ImportError, match=rf"{problem}.*{REBUILD}"):
        importlib.import_module("fastcoll._load")
    assert not fastcoll.is_available()


def test_without_the_half_of_device_tensors_their_first_one_says_what_to_do(monkeypatch):
    """As for a torch without CUDA, whose fastcoll has no ``_cuda``."""
    monkeypatch.setitem(sys.modules, "fastcoll._cuda", None)
    monkeypatch.delattr(fastcoll, "_cuda", raising=False)
    monkeypatch.delitem(sys.modules, "fastcoll._load_cuda", raising=False)
    monkeypatch.delattr(fastcoll, "_load_cuda", raising=False)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    with pytest.raises(
        ImportError, match=r"built without the part that moves device.*USE_CUDA=1 pip inst"
    ):
        importlib.import_module("fastcoll._load_cuda")


def test_without_it_a_machine_with_gpus_still_has_groups_of_cpu_tensors(monkeypatch):
    from fastcoll import _backend, env

    monkeypatch.setitem(sys.modules, "fastcoll._cuda", None)
    monkeypatch.delattr(fastcoll, "_cuda", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in env.SYMMETRIC_SWITCHES:
        monkeypatch.delenv(name, raising=False)
    _backend._set_variables()
    assert [os.environ[name] for name in env.SYMMETRIC_SWITCHES] == ["0", "0"]


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Let fastcoll look installed, with a record of where it came from or without."""

    def installed(origin: dict | None, built: str = "2.12") -> None:
        site = tmp_path / "site-packages" / "fastcoll"
        site.mkdir(parents=True)
        (site / "_built_for.json").write_text(json.dumps({"torch": built}))
        text = None if origin is None else json.dumps(origin)
        found = SimpleNamespace(read_text={"direct_url.json": text}.get)
        monkeypatch.setattr(_built_for, "__file__", str(site / "_built_for.py"))
        monkeypatch.setattr(metadata, "distribution", {"fastcoll": found}.get)

    return installed


@pytest.mark.parametrize(
    "origin",
    [
        None,
        {"url": "file:///tmp/f.whl", "archive_info": {}},
        {"url": "file:///no/such/folder", "dir_info": {}},
    ],
    ids=["from an index", "from a file", "from a folder now gone"],
)
def test_who_has_a_wheel_is_told_of_a_wheel_and_of_a_torch(installed, origin):
    installed(origin)
    sentence = _built_for.remedy("2.14.1+cu130")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert sentence == (
        f"install the wheel of fastcoll {fastcoll.__version__}+torch2.14 for Python {python} from the source "
        "of this one, or the torch that this one was built for, `pip install 'torch==2.12.*'`"
    )


def test_who_installed_a_folder_is_told_of_that_folder(installed):
    installed({"url": ROOT.as_uri(), "dir_info": {}})
    assert _built_for.remedy("2.14.1") == (
        f"rebuild it, `pip install --no-build-isolation --no-deps --force-reinstall {FOLDER}`"
    )


def test_who_runs_in_the_sources_and_has_one_installed_is_told_to_leave_them(monkeypatch, tmp_path):
    site = tmp_path / "fastcoll"
    site.mkdir()
    found = SimpleNamespace(locate_file=tmp_path.joinpath)
    monkeypatch.setattr(metadata, "distributions", lambda name: [found])
    # What is beside has no compiled module.
    assert _built_for.remedy("2.14.1").startswith("rebuild it, ")
    (site / "_C.cpython-311-x86_64-linux-gnu.so").touch()
    sentence = _built_for.remedy("2.14.1")
    assert sentence.startswith(f"leave the folder {ROOT}, ")
    assert (
        f"or rebuild it, `pip install --no-build-isolation --no-deps --editable {FOLDER}`"
        in sentence
    )
