"""setup.py: what it installs, and what it says where it cannot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launcher import Launcher
from packaging.specifiers import SpecifierSet
from suite_rules import bound

from fastcoll import _built_for

ROOT = Path(__file__).parents[2]


def run_setup(
    *arguments: str, path: Path | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    process = subprocess.run(
        [sys.executable, "setup.py", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=bound(60),
    )
    assert not check or process.returncode == 0, process.stderr
    return process


def sentence_of(process: subprocess.CompletedProcess[str]) -> str:
    """Return what a failed run says: one line, no traceback."""
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    return line


def test_without_torch_it_stops_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    line = sentence_of(run_setup("--version", path=tmp_path, check=False))
    assert "install torch>=2.11,<2.16 first, then run `pip install --no-build-isolation .`" in line


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0a0+git1234567"])
def test_with_a_torch_out_of_range_it_stops_with_one_sentence(tmp_path: Path, version: str) -> None:
    (tmp_path / "torch" / "utils").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (tmp_path / "torch" / "utils" / "__init__.py").touch()
    (tmp_path / "torch" / "utils" / "cpp_extension.py").write_text(
        "BuildExtension = CppExtension = include_paths = None\n"
    )
    line = sentence_of(run_setup("--version", path=tmp_path, check=False))
    assert f"torch>=2.11,<2.16 and found torch {version}" in line


@pytest.mark.full
def test_the_metadata_name_the_torch_that_is_compiled_against(tmp_path: Path) -> None:
    run_setup("--quiet", "egg_info", "--egg-base", str(tmp_path))
    text = (tmp_path / "fastcoll.egg-info" / "requires.txt").read_text()
    assert text.splitlines()[0] == f"torch=={'.'.join(torch.__version__.split('.')[:2])}.*"


def test_package_and_build_agree_on_the_supported_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    import supported

    assert supported.RANGE == _built_for.SUPPORTED
    assert supported.PINNED in supported.MINORS
    admitted = SpecifierSet(supported.RANGE.removeprefix("torch"))
    minors = [f"2.{minor}" for minor in range(30) if f"2.{minor}.1" in admitted]
    assert minors == list(supported.MINORS)


def test_packages_land_below_fastcoll(launcher: Launcher, tmp_path: Path) -> None:
    library = tmp_path / "library"
    arguments = ["setup.py", "--quiet", "build_py", "--build-lib", str(library)]
    text = f"""if True:
        import os, runpy, sys
        os.chdir({str(ROOT)!r})
        sys.path.insert(0, {str(ROOT)!r})
        sys.argv = {arguments}
        runpy.run_path("setup.py", run_name="__main__")
    """
    process = launcher.program(text, tmp_path)
    assert process.status == 0, process.stderr
    assert [entry.name for entry in library.iterdir()] == ["fastcoll"]
    for name in (
        "py.typed",
        "_C.pyi",
        "trace/report.py",
        "cuda/nccl.py",
        "kernels/__init__.py",
        "bench/__init__.py",
        "examples/ddp_train.py",
        "examples/quickstart.ipynb",
        "examples/two_hosts/compose.yaml",
        "examples/container/Dockerfile",
    ):
        assert (library / "fastcoll" / name).exists(), name
