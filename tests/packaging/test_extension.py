"""build_backend/extension.py: the units of the extension, and what makes ninja compile one again."""

import itertools
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import extension
import pytest
import toolchain

ROOT = Path(__file__).parents[2]
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))


@pytest.mark.parametrize("join", [True, False])
def test_each_source_is_in_one_unit(join):
    found = extension.units(ROOT, join)
    assert sorted(source for unit in found for source in unit.sources) == SOURCES
    assert len({unit.name for unit in found}) == len(found)
    if not join:
        assert all(len(unit.sources) == 1 and unit.header for unit in found)


def test_kernels_are_joined_to_nothing():
    """The pragmas of one would set the instruction set of the others."""
    alone = [u.sources[0] for u in extension.units(ROOT, join=True) if len(u.sources) == 1]
    assert [one for one in SOURCES if "/kernels_" in one] == [x for x in alone if "kernels_" in x]


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """A function that returns the lines of the ninja file, made in an empty folder."""
    monkeypatch.delenv("CXXFLAGS", raising=False)
    asked = {
        tmp_path / f"{module}.so": SimpleNamespace(
            name=f"fastcoll.{module}",
            module=module,
            torch_headers=["/torch/include"],
            define_macros=[("FASTCOLL_TORCH_VERSION", "2.99")],
            library_dirs=[],
            libraries=["c10"],
            extra_link_args=[],
        )
        for module in ("_C", "_cuda")
    }
    return lambda *modules: list(
        extension.ninja_file({t: e for t, e in asked.items() if e.module in modules}, tmp_path)
    )


@pytest.mark.parametrize("unity", ["1", "0"])
def test_a_unit_depends_on_torch_only_if_it_may_include_it(lines, monkeypatch, unity):
    """So another torch does not compile the layers below it again."""
    monkeypatch.setenv("UNITY", unity)
    made = lines("_C", "_cuda")
    variables = dict(
        line.split(" = ", 1) for line in made if line.startswith(("plain =", "torch ="))
    )
    assert "torch" not in variables["plain"] and "2.99" not in variables["plain"]
    assert "/torch/include" in variables["torch"] and "2.99" in variables["torch"]
    builds = [
        (line.partition(" | ")[2].split(), flags.split()[2])
        for line, flags in itertools.pairwise(made)
        if line.startswith("build ") and flags.startswith("  flags")
    ]
    assert {flags for _, flags in builds} == {"$plain", "$torch"}
    for needs, flags in builds:
        assert "compiler" in needs
        assert ("torch" in needs) == (flags == "$torch")


@pytest.mark.parametrize("unity", ["1", "0"])
def test_the_half_of_device_tensors_is_left_out(lines, monkeypatch, unity):
    """Without it no file of it is compiled; with it ``_cuda`` alone takes them, and is linked against ``_C``."""
    monkeypatch.setenv("UNITY", unity)
    assert not any("cuda" in line for line in lines("_C"))
    whole = lines("_C", "_cuda")
    links = [line.split() for line in whole if line.startswith("build ") and ": link " in line]
    (core, *of_core), (_, *of_cuda) = [[line[1], *line[3:]] for line in links]
    assert not any("cuda" in one for one in of_core)
    assert of_cuda.pop() == core.rstrip(":")
    assert of_cuda and all("/csrc/cuda" in one for one in of_cuda)
    assert any(line.startswith("  libraries") and "-soname,fastcoll._C" in line for line in whole)


def test_it_is_built_for_a_torch_with_cuda_or_where_asked_for(monkeypatch):
    import torch

    for version, asked, expected in [
        ("13.0", None, True),
        (None, None, False),
        (None, "1", True),
        ("13.0", "0", False),
        ("13.0", "off", False),
        ("13.0", "", True),
        (None, "ON", True),
    ]:
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.delenv("USE_CUDA", raising=False)
        if asked is not None:
            monkeypatch.setenv("USE_CUDA", asked)
        assert extension.with_cuda() is expected
    monkeypatch.setenv("USE_CUDA", "maybe")
    with pytest.raises(SystemExit, match=r"expected USE_CUDA to be one of 1, ON.*got 'maybe'"):
        extension.with_cuda()


def test_another_compiler_or_torch_in_the_same_place_is_noticed(lines, tmp_path, monkeypatch):
    lines("_C")
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in ("compiler", "torch")}
    lines("_C")
    assert before == {name: (tmp_path / name).stat().st_mtime_ns for name in before}
    monkeypatch.setattr(toolchain, "compiler_version", lambda: "g++ 99")
    monkeypatch.setattr(extension.metadata, "version", lambda name: "2.99.1")
    lines("_C")
    assert (tmp_path / "compiler").read_text() == "g++ 99"
    assert (tmp_path / "torch").read_text() == "2.99.1"


def test_the_version_is_that_of_the_compiler_behind_ccache(tmp_path, monkeypatch):
    launcher = tmp_path / "ccache"  # as ccache does with a compiler's arguments
    launcher.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo "ccache 4"; exit; }\nexec "$@"\n'
    )
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"{shlex.quote(str(launcher))} c++")
    expected = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True)
    assert toolchain.compiler_version() == expected.stdout.splitlines()[0]
    assert toolchain.problem() == ""
