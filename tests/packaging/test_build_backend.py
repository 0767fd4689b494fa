"""build_backend: what an isolated build finds and asks for, and what it says where it cannot build."""

import importlib.util
import os
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from programs import python

ROOT = Path(__file__).parents[2]

# What pip does for an isolated build: the same Python, without the environment's packages.
ISOLATION = """
import sys, sysconfig
hidden = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
sys.path = [entry for entry in sys.path if entry not in hidden]
sys.meta_path = [finder for finder in sys.meta_path if not hasattr(finder, "MAPPING")]
"""


@pytest.fixture
def isolated(tmp_path):
    """Variables that start Python as in an isolated build: setuptools is there, torch is not."""
    site = tmp_path / "isolated"
    site.mkdir()
    (site / "sitecustomize.py").write_text(ISOLATION)
    import setuptools

    packages = Path(setuptools.__file__).parents[1]
    for pattern in ("setuptools*", "_distutils_hack", "pkg_resources", "wheel*"):
        for path in packages.glob(pattern):
            (site / path.name).symlink_to(path)
    return {**os.environ, "PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1"}


def run_hook(code: str, environment: dict[str, str], folder: Path = ROOT) -> list[str]:
    """Run code in which `backend` is the build backend; returns the lines printed."""
    code = f"import sys; sys.path.insert(0, 'build_backend'); import backend; {code}"
    process = python("-c", code, cwd=folder, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


@pytest.fixture
def hooks(monkeypatch):
    """The build backend in this process, as if torch was not installed."""
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    # Not by its name, which is also a module's of the tests.
    spec = importlib.util.spec_from_file_location("_hooks", ROOT / "build_backend" / "backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_installed", lambda: "")
    return module


@pytest.fixture
def sources(tmp_path):
    """What a source distribution is made of, in a folder of its own; of tests/ a part."""
    target = tmp_path / "sources"
    target.mkdir()
    for name in ("build_backend", "csrc", "docs", "examples", "fastcoll", "bench", "kernels"):
        shutil.copytree(
            ROOT / name, target / name, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, target)
    return target


@pytest.mark.full
def test_a_source_distribution_needs_no_torch(isolated, sources, tmp_path):
    lines = run_hook(
        "print(backend.get_requires_for_build_sdist()); "
        f"assert not backend._installed(); backend.build_sdist({str(tmp_path)!r})",
        isolated,
        sources,
    )
    assert lines[0] == "[]"
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        (info,) = (
            name for name in archive.getnames() if name.count("/") == 1 and "PKG-INFO" in name
        )
        metadata = archive.extractfile(info).read().decode()
    assert {"setup.py", "build_backend/backend.py", "csrc/bindings/module.cpp", "Makefile"} <= names
    assert "bench/results/collectives_cpu_2ranks.jsonl" in names
    assert {str(path.relative_to(sources)) for path in (sources / "examples").rglob("*")} <= names
    assert "Requires-Dist: torch<2.16,>=2.11\n" in metadata
    assert "Dynamic: requires-dist\n" in metadata


@pytest.mark.full
def test_an_isolated_build_takes_the_torch_of_the_environment(isolated, tmp_path):
    lines = run_hook(
        "print(backend.get_requires_for_build_wheel()); assert not backend._installed(); backend._prepare({}); "
        "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; import torch; print(torch.__version__)",
        isolated,
    )
    assert (lines[0], lines[-1]) == ("[]", torch.__version__)


@pytest.mark.parametrize(
    ("settings", "asked"), [({}, "torch==2.13.*"), ({"torch": "2.14"}, "torch==2.14.*")]
)
def test_without_torch_a_build_asks_for_one_release(hooks, monkeypatch, settings, asked):
    monkeypatch.setattr(hooks, "_outside", lambda: ("", []))
    assert hooks.get_requires_for_build_wheel(settings) == [asked]


def test_a_torch_that_is_too_old_is_named(hooks, monkeypatch):
    monkeypatch.setattr(hooks, "_outside", lambda: ("2.10.1", []))
    with pytest.raises(SystemExit, match=r"made for torch>=2\.11,<2\.16 and found torch 2\.10\.1"):
        hooks.get_requires_for_build_wheel()


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "build_wheel", "build_editable"])
def test_without_a_compiler_the_error_says_so(hooks, monkeypatch, tmp_path, hook):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CXX", "")
    given = () if hook.startswith("get") else (str(tmp_path),)
    text = r"there is no compiler `c\+\+` here: install one .*apt-get install g\+\+"
    with pytest.raises(SystemExit, match=text):
        getattr(hooks, hook)(*given)


def test_without_pythons_headers_the_error_says_so(hooks, monkeypatch):
    monkeypatch.setattr(hooks.toolchain.sysconfig, "get_path", lambda name: "/nonexistent")
    with pytest.raises(SystemExit, match=r"/nonexistent has no Python\.h"):
        hooks.get_requires_for_build_wheel()


@pytest.mark.full
def test_after_a_failed_compilation_one_sentence_comes_last(sources, tmp_path):
    for path in (sources / "csrc").rglob("*.cpp"):
        path.unlink()
    (sources / "csrc" / "bindings" / "module.cpp").write_text("#error no\n")
    (sources / "csrc" / "torch_headers.hpp").write_text("#pragma once\n")  # compiled first
    process = python("setup.py", "build_ext", "--build-lib", tmp_path / "lib", cwd=sources)
    assert process.returncode == 1
    assert "#error no" in process.stdout
    last = process.stderr.splitlines()[-1]
    assert last.startswith("fastcoll did not compile with ")
    assert "the first line above with `error:` says why" in last
    assert "Traceback" not in process.stderr


def test_without_torch_the_package_can_be_imported_and_its_commands_say_so(isolated, tmp_path):
    (tmp_path / "isolated" / "fastcoll").symlink_to(ROOT / "fastcoll")
    code = "import fastcoll; assert not fastcoll.is_available(); import fastcoll.trace"
    imported = python("-c", code, cwd=tmp_path, env=isolated)
    assert imported.returncode == 0, imported.stderr
    process = python("-m", "fastcoll.info", cwd=tmp_path, env=isolated)
    (line,) = process.stderr.splitlines()
    assert (process.returncode, process.stdout) == (1, "")
    assert line.startswith(
        f"fastcoll.info: fastcoll needs torch, and {sys.executable} has none: pip "
    )
