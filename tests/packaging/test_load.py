"""A build for another torch, or none at all, is a sentence that says what to do."""

import importlib
import sys
import sysconfig
from types import ModuleType, SimpleNamespace

import pytest
import torch

import fastcoll
from fastcoll import _built_for

REBUILD = r"`pip install --no-build-isolation --force-reinstall --no-deps \.`"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Import fastcoll._load anew."""
    monkeypatch.delitem(sys.modules, "fastcoll._load", raising=False)
    monkeypatch.delattr(fastcoll, "_load", raising=False)

    def load() -> ModuleType:
        try:
            return importlib.import_module("fastcoll._load")
        finally:
            sys.modules.pop("fastcoll._load", None)

    return load


@pytest.mark.parametrize(
    ("built", "running", "fits"),
    [
        ("2.13", "2.13.0+cpu", True),
        ("2.13", "2.13.1", True),
        ("2.14", "2.14.0a0+git1234567", True),
        (None, "2.13.0", True),
        ("2.11", "2.13.0", False),
        ("2.1", "2.13.0", False),
    ],
)
def test_versions_fit_within_a_minor_release(built: str | None, running: str, fits: bool) -> None:
    assert (_built_for.mismatch(built, running) is None) == fits


def test_another_recorded_torch_is_named_before_anything_is_loaded(load, monkeypatch) -> None:
    monkeypatch.setattr(_built_for, "recorded_torch", lambda: "2.1")
    monkeypatch.setattr(fastcoll, "_C", None, raising=False)  # an access would give AttributeError
    expected = rf"built for torch 2\.1 and runs with torch {torch.__version__[:4]}.*{REBUILD}"
    with pytest.raises(ImportError, match=expected):
        load()


def test_another_compiled_in_torch_is_named(load, monkeypatch) -> None:
    compiled = SimpleNamespace(build_info=lambda: {"torch": "2.12"})
    monkeypatch.setattr(_built_for, "recorded_torch", lambda: None)
    monkeypatch.setattr(fastcoll, "_C", compiled, raising=False)
    with pytest.raises(ImportError, match=rf"built for torch 2\.12 and runs with .*{REBUILD}"):
        load()


def test_an_undefined_symbol_names_both_versions(load, monkeypatch) -> None:
    monkeypatch.setattr(_built_for, "recorded_torch", lambda: torch.__version__[:4])
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: ".pyi")
    monkeypatch.setitem(sys.modules, "fastcoll._C", None)
    monkeypatch.delattr(fastcoll, "_C", raising=False)
    with pytest.raises(
        ImportError, match=rf"built for torch .*does not load with torch .*{REBUILD}"
    ):
        load()


def test_a_missing_build_is_named(load, monkeypatch) -> None:
    monkeypatch.setattr(_built_for, "recorded_torch", lambda: None)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: ".of-no-python.so")
    monkeypatch.setitem(sys.modules, "fastcoll._C", None)
    monkeypatch.delattr(fastcoll, "_C", raising=False)
    with pytest.raises(ImportError, match=rf"no compiled module for this Python.*{REBUILD}"):
        load()
    assert not fastcoll.is_available()
