"""Which NCCL is used, what is said when there is none or two, and what is reached in it by name."""

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import communicator, on_stand_in
from programs import python

from fastcoll._requirements import nccl_owners, nccl_packages
from fastcoll.cuda import nccl_library
from fastcoll.cuda.nccl_library import MappedFile

LOAD = """
from fastcoll.cuda import nccl_library
try:
    nccl_library.load()
except nccl_library.UnusableNccl as error:
    print(error)
"""


def test_importing_fastcoll_imports_no_cupy(launcher, tmp_path):
    code = "import sys, fastcoll, fastcoll.cuda.nccl; assert not {'cupy', 'cupy_backends'} & {*sys.modules}"
    ended = launcher.program(code, tmp_path)
    assert ended.status == 0, ended.stderr


def test_who_brought_the_library(tmp_path, monkeypatch):
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2").touch()
    for major, version in ((12, "2.27.5"), (13, "2.29.7")):
        about = tmp_path / f"nvidia_nccl_cu{major}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: nvidia-nccl-cu{major}\nVersion: {version}\n"
        )
        (about / "RECORD").write_text("nvidia/nccl/lib/libnccl.so.2,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    both = ["nvidia-nccl-cu12 2.27.5", "nvidia-nccl-cu13 2.29.7"]
    assert nccl_owners(str(folder / "libnccl.so.2")) == both
    (tmp_path / "link.so").symlink_to(folder / "libnccl.so.2")
    assert nccl_owners(str(tmp_path / "link.so")) == both
    assert nccl_owners("/lib/libnccl.so.2") == []


def test_path_version_and_addresses(script, stand_in):
    process = script(
        """
import ctypes
from fastcoll import info
from fastcoll.cuda import nccl_library
library = nccl_library.load()
assert nccl_library.load() is library
report = info.collect()
(answer,) = [one for one in report["available"] if one["part"] == "NCCL, through CuPy"]
detail = f"2.30.7, {library.path}, of no package of NCCL"
assert answer == {"part": answer["part"], "available": True, "detail": detail, "remedy": ""}
assert report["versions"]["NCCL as loaded"] == "2.30.7"
assert report["libraries"]["libnccl"] == [library.path]
assert library.address("ncclOfNoRelease") == 0
text = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(library.address("ncclGetErrorString"))
assert text(7) == b"in progress"
print(library.path)
""",
        FAKE_NCCL_VERSION="23007",
    )
    assert process.stdout == f"{stand_in}\n", process.stderr


def test_one_that_comes_after_a_first_try_is_found(script, stand_in):
    """As in a notebook: the error says what to install, and the next try needs no new process."""
    process = script(
        f"{LOAD}\nimport ctypes\nctypes.CDLL({stand_in!r}, mode=ctypes.RTLD_GLOBAL)\n"
        "print(nccl_library.load().path)",
        library=None,
    )
    refused, path = process.stdout.splitlines()
    assert "to load NCCL, and it cannot (libnccl.so.2: cannot open" in refused, process.stderr
    assert path == stand_in


def test_two_copies_are_refused_and_both_named(script, stand_in, tmp_path):
    copy = shutil.copy(stand_in, tmp_path / "libnccl.so.2.99")
    process = script(f"import ctypes; ctypes.CDLL({str(copy)!r})\n{LOAD}")
    first, second = sorted([stand_in, str(copy)])
    assert f"found {first} and {second}, which do not share" in process.stdout, process.stderr
    assert f"Start with LD_PRELOAD={first}, or the other one" in process.stdout


@pytest.mark.full
def test_of_two_copies_the_preloaded_one_is_used(stand_in, tmp_path):
    copy = shutil.copy(stand_in, tmp_path / "libnccl.so.2")
    text = """
import ctypes, sys
import torch
ctypes.CDLL(sys.argv[1])
from fastcoll import info
from fastcoll.cuda import nccl_library
assert len(nccl_library.mapped()) >= 2
library = nccl_library.load()
assert not any("Two copies" in note for note in info.collect()["notes"])
print(library.path)
"""
    process = python("-c", text, copy, variables={"LD_PRELOAD": stand_in})
    assert process.stdout == f"{stand_in}\n", process.stderr


def test_what_was_preloaded_is_told_by_its_file(tmp_path):
    copies = [MappedFile(f"/{name}/libnccl.so.2", ("08:02", name)) for name in ("a", "b")]
    environ = tmp_path / "environ"
    for value, expected in (
        ("/b/libnccl.so.2", copies[1]),
        ("/lib/other.so:/b/../a/libnccl.so.2 /b/libnccl.so.2", copies[0]),
        ("/c/libnccl.so.2", None),
        ("", None),
    ):
        environ.write_bytes(f"NOT_LD_PRELOAD=/a/libnccl.so.2\0LD_PRELOAD={value}\0".encode())
        assert nccl_library.used(copies, str(environ)) is expected
    environ.write_bytes(b"")
    assert nccl_library.used(copies, str(environ)) is None
    assert nccl_library.used(copies[:1], str(environ)) is copies[0]


def test_two_paths_to_one_copy_are_one(script, stand_in, tmp_path):
    (tmp_path / "libnccl.so.2").symlink_to(stand_in)
    process = script(f"import ctypes; ctypes.CDLL({str(tmp_path / 'libnccl.so.2')!r})\n{LOAD}")
    assert (process.stdout, process.status) == ("", 0), process.stderr


def test_a_copy_that_was_replaced_on_disk_is_found(script, stand_in, tmp_path):
    copy = Path(shutil.copy(stand_in, tmp_path / "libnccl.so.2"))
    process = script(f"import os; os.remove({str(copy)!r})\n{LOAD}", library=str(copy))
    assert (process.stdout, process.status) == ("", 0), process.stderr


def test_without_nccl_the_error_says_what_to_install(script):
    process = script(LOAD, library=None)
    assert "fastcoll: expected CuPy 14" in process.stdout, process.stderr
    assert "to load NCCL, and it cannot (libnccl.so.2: " in process.stdout
    assert "pip install 'cupy-cuda12x>=14' nvidia-nccl-cu12" in process.stdout
    assert process.stderr == ""  # nor a warning of CuPy's


def test_without_cupy_the_error_says_what_to_install(script):
    process = script(f"import sys; sys.modules['cupy'] = None\n{LOAD}")
    assert (
        "expected CuPy, through which NCCL is reached, and it cannot be imported" in process.stdout
    )
    assert "pip install 'cupy-cuda12x>=14' nvidia-nccl-cu12" in process.stdout


def test_an_older_cupy_is_refused(script):
    process = script(f"import cupy; cupy.__version__ = '13.6.0'\n{LOAD}")
    assert "expected CuPy 14 or newer, got 13.6.0" in process.stdout
    assert "pip install 'cupy-cuda12x>=14'" in process.stdout


def test_beside_a_torch_for_cuda_no_nccl_is_to_be_installed(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert nccl_packages() == "pip install 'cupy-cuda13x>=14'"


def test_copies_are_told_apart_by_their_file(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "00400000-00452000 r-xp 00000000 08:02 11 /a dir/libnccl.so.2\n"
        "00500000-00552000 rw-p 00000000 08:02 11 /a dir/libnccl.so.2\n"
        "00600000-00652000 r-xp 00000000 08:02 12 /b/libnccl.so.2.29.7 (deleted)\n"
        "00700000-00752000 r-xp 00000000 08:02 13 /b/libnccl-net.so\n"
        "00800000-00852000 r-xp 00000000 08:02 14 /b/libnccl_static.so\n"
        "00900000-00952000 rw-p 00000000 00:00 0 \n"
    )
    found = [one.path for one in nccl_library.mapped(str(maps))]
    assert found == ["/a dir/libnccl.so.2", "/b/libnccl.so.2.29.7"]


@on_stand_in(1)
def test_what_an_old_nccl_lacks_is_named():
    with communicator() as made:
        functions = made.library._functions
        with (
            mock.patch.dict(functions, ncclCommWindowRegister=None),
            pytest.raises(
                RuntimeError, match=r"has no ncclCommWindowRegister: expected NCCL 2\.27"
            ),
        ):
            made.register(4096, 1, symmetric=True)
        with pytest.raises(dist.DistBackendError, match=r"nccl_register .*status 4"):
            made.register(4097, 1, symmetric=True)
