"""setup.py: what it installs, and what it says where it cannot."""

from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from programs import python

from fastcoll import _built_for

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "raise ModuleNotFoundError('no torch')",
            "(no torch): install torch>=2.11,<2.16 first, then run `pip ",
        ),
        ("__version__ = '2.10.1'", "torch>=2.11,<2.16 and found torch 2.10.1"),
        ("__version__ = '2.16.0a0+git1234567'", "found torch 2.16.0a0+git1234567"),
    ],
)
def test_without_a_torch_in_range_it_stops_with_one_sentence(tmp_path, text, sentence):
    (tmp_path / "torch.py").write_text(text)
    variables = {"PYTHONPATH": str(tmp_path)}
    process = python("setup.py", "--version", cwd=ROOT, variables=variables)
    (line,) = process.stderr.strip().splitlines()
    assert process.returncode == 1 and sentence in line


@pytest.mark.full
def test_the_metadata_name_the_torch_that_is_compiled_against(tmp_path):
    process = python("setup.py", "--quiet", "egg_info", "--egg-base", tmp_path, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    text = (tmp_path / "fastcoll.egg-info" / "requires.txt").read_text()
    assert text.splitlines()[0] == f"torch=={'.'.join(torch.__version__.split('.')[:2])}.*"


def test_package_and_build_agree_on_the_supported_releases(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    import supported

    assert supported.RANGE == _built_for.SUPPORTED
    assert supported.PINNED in supported.MINORS
    admitted = SpecifierSet(supported.RANGE.removeprefix("torch"))
    minors = [f"2.{minor}" for minor in range(30) if f"2.{minor}.1" in admitted]
    assert minors == list(supported.MINORS)


def test_packages_land_below_fastcoll(launcher, tmp_path):
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
