"""The program behind `make model`, which searches the model of the shared-memory protocol and its mutants."""

import shutil

import check_model
import pytest
from check_model import MODELS, MUTANTS, Search, check


@pytest.fixture
def spin():
    if shutil.which("spin") is None:
        pytest.skip("needs spin: apt-get install spin")


def test_model_and_mutants():
    """Every mutant of the model's source is searched, and every search names macros that are there."""
    source = check_model.MODEL.read_text()
    seeded = {word for word in source.replace("(", " ").split() if word.startswith("M_")}
    seeded = {word for word in seeded if f"ifdef {word}" in source or f"ifndef {word}" in source}
    searched = {m for search in MUTANTS for m in search.macros if m.startswith("M_")}
    assert seeded == searched
    for search in MODELS + MUTANTS:
        for macro in search.macros:
            assert macro.partition("=")[0] in source, search


@pytest.mark.full
def test_a_search_that_is_cut_short_is_no_success(monkeypatch, spin):
    check(Search("small", ("COLLECTIVES=1",)))
    monkeypatch.setattr(check_model, "MODEL", check_model.MODEL.with_name("none.pml"))
    with pytest.raises(RuntimeError, match="spin -a"):
        check(Search("none", ()))


def test_what_to_install_is_said(monkeypatch, capsys):
    monkeypatch.setattr(check_model.shutil, "which", lambda _: None)
    assert check_model.main([]) == 2
    assert "apt-get install spin" in capsys.readouterr().err
