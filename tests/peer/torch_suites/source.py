"""PyTorch's test files, from Debian's source package `pytorch`, unpacked into build/.

apt fetches and verifies the package with lists of its own below build/: the system's sources,
lists and packages stay as they are. Of the releases that Debian has, the one nearest to the torch
in use is taken.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from torch_suites import cpu_text
from torch_suites.runs import BUILD

APT = BUILD / "apt"
ARCHIVES = BUILD / "archives"
_DEBIAN_SUITES = ("unstable", "testing", "stable", "oldstable")
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_WANTED = re.compile(r"[^/]+/test/(distributed/.*|inductor/[^/]+\.py|[^/]+\.py)")
_OPTIONS = {
    "Dir::Etc::SourceList": APT / "sources.list",
    "Dir::Etc::SourceParts": "/dev/null",
    "Dir::State": APT / "state",
    "Dir::State::status": "/dev/null",
    "Dir::Cache": APT / "cache",
    "APT::Sandbox::User": "",
}
OWN_LISTS = [f"-o{name}={value}" for name, value in _OPTIONS.items()]


class SourceError(RuntimeError):
    """Debian's source package cannot be had; `--source` names a PyTorch tree in its place."""


def _say(*command: str, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SourceError(f"expected {command[0]}, found none: use --source") from None
    if done.returncode:
        raise SourceError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def _versions() -> list[str]:
    told = _say("apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)")
    mirrors = sorted(re.findall(r"^Debian (?!.*security)(\S+)$", told, re.MULTILINE))
    if not mirrors:
        raise SourceError(
            "expected a Debian mirror in apt's sources, found none: run apt-get update on Debian, "
            "or use --source"
        )
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (APT / folder).mkdir(parents=True, exist_ok=True)
    option = f"[signed-by={_KEYRING}] " if _KEYRING.exists() else ""
    lines = [f"deb-src {option}{mirrors[0]} {suite} main\n" for suite in _DEBIAN_SUITES]
    (APT / "sources.list").write_text("".join(lines))
    _say("apt-get", *OWN_LISTS, "update")
    told = _say("apt-cache", *OWN_LISTS, "showsrc", "pytorch")
    return re.findall(r"^Version: (\S+)$", told, re.MULTILINE)


def _nearest_first(versions: list[str], torch_version: str) -> list[str]:
    def distance(version: str) -> tuple[int, ...]:
        releases = [re.findall(r"\d+", each)[:2] for each in (version, torch_version)]
        return tuple(abs(int(a) - int(b)) for a, b in zip(*releases, strict=False))

    return sorted(set(versions), key=distance)


def _download(versions: list[str]) -> None:
    refusals = []
    for version in versions:
        folder = ARCHIVES / version
        folder.mkdir(parents=True, exist_ok=True)
        package = f"pytorch={version}"
        try:
            _say("apt-get", *OWN_LISTS, "source", "--download-only", package, folder=folder)
            return
        except SourceError as error:
            refusals.append(f"{version}: {error}")
            print(f"Debian's {package} cannot be fetched: trying the next one", flush=True)
            shutil.rmtree(folder)
    raise SourceError("no version of Debian's source package came: " + "; ".join(refusals))


def _unpack(archive: Path, folder: Path) -> None:
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and _WANTED.fullmatch(member.name):
                member.name = member.name.split("/", 1)[1]
                tar.extract(member, part, filter="data")
    part.rename(folder)


def fetch(torch_version: str, source: str | None = None) -> tuple[str, Path]:
    """Returns the version of the test files and the folder `test` with them, made for CPU.

    Args:
        torch_version: release of the torch in use, such as "2.13.0".
        source: folder of a PyTorch source tree to take the files from; by default Debian's package.
    """
    if source is not None:
        return f"folder {Path(source).name}", _made_for_cpu(Path(source) / "test")
    if not list(ARCHIVES.glob("*/*.orig.tar.*")):
        _download(_nearest_first(_versions(), torch_version))
    known = {path.parent.name: path for path in ARCHIVES.glob("*/*.orig.tar.*")}
    version = _nearest_first(list(known), torch_version)[0]
    unpacked = BUILD / "original" / re.split(r"[+-]", version)[0]
    if not unpacked.exists():
        _unpack(known[version], unpacked)
    return version, _made_for_cpu(unpacked / "test")


def _made_for_cpu(original: Path) -> Path:
    of_what = hashlib.sha256(Path(cpu_text.__file__).read_bytes() + bytes(original.resolve()))
    made = BUILD / "made" / of_what.hexdigest()[:12]
    if not made.exists():
        part = made.with_suffix(f".{os.getpid()}")
        shutil.copytree(original, part / "test")
        cpu_text.convert(part / "test" / "distributed")
        part.rename(made)
    return made / "test"
