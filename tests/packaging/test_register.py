"""The name "fastcoll": known after `import torch`, harmless where something is wrong."""

import importlib.metadata
import subprocess
import sys
import textwrap

import pytest
from backend import since
from suite_rules import bound


def run_python(code: str, **environment: str) -> str:
    """Run a program in a new interpreter, outside the repository; returns what it prints."""
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=bound(40),
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    points = importlib.metadata.entry_points(group="torch.backends", name="fastcoll")
    if not list(points):
        pytest.fail("fastcoll is not installed in this environment: run `make build`")


def test_import_torch_registers_the_name_and_nothing_heavy_is_loaded() -> None:
    """Nor for devices, by a group of CPU ranks."""
    output = run_python(
        """
        import sys, torch
        import torch.distributed as dist
        assert "fastcoll" in dist.Backend.backend_list
        assert dist.Backend.FASTCOLL == "fastcoll"
        assert dist.Backend.backend_capability["fastcoll"] == ["cpu", "cuda"]
        heavy = {"fastcoll._C", "fastcoll._load", "fastcoll._backend", "cupy", "triton"}
        print(sorted(heavy & sys.modules.keys()))
        dist.init_process_group("fastcoll", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(3))
        loaded = {name for name in sys.modules if name.startswith("fastcoll.cuda.")}
        print(sorted(loaded | {"cupy", "triton"} & sys.modules.keys()))
        dist.destroy_process_group()
        """
    )
    assert output.splitlines() == ["[]", "['fastcoll.cuda.thresholds']"]


@since(14, "entry points of backends")
def test_the_name_is_known_without_autoload() -> None:
    output = run_python(
        """
        import torch
        import torch.distributed as dist
        known = "fastcoll" in dist.Backend.backend_list
        print(known, dist.is_backend_available("fastcoll"), dist.is_backend_available("fastcol"))
        dist.init_process_group("fastcoll", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(3))
        print(dist.get_backend())
        dist.destroy_process_group()
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert output.split() == ["False", "True", "False", "fastcoll"]


@pytest.mark.full
def test_import_fastcoll_before_torch_registers_once() -> None:
    output = run_python(
        """
        import fastcoll, sys, torch
        print(torch.distributed.Backend.backend_list.count("fastcoll"), fastcoll.__version__)
        print("fastcoll._C" in sys.modules)
        """
    )
    count, version, loaded = output.split()
    assert (count, loaded) == ("1", "False")
    assert version == importlib.metadata.version("fastcoll")


@pytest.mark.full
def test_a_failing_registration_never_breaks_import_torch() -> None:
    output = run_python(
        """
        import torch
        def refuse(*arguments, **options):
            raise RuntimeError("no room")
        torch.distributed.Backend.register_backend = refuse
        torch._import_device_backends()  # what `import torch` ends with
        assert "fastcoll" not in torch.distributed.Backend.backend_list
        import fastcoll._register
        print(repr(fastcoll._register.registration_error()))
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert output == "RuntimeError('no room')"


def test_torch_without_distributed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from fastcoll import _register

    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.setattr(dist.Backend, "register_backend", None)
    _register.register()
    assert _register.registration_error() is None


def test_default_backends_of_devices_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from fastcoll import _register

    defaults = {"cpu": "gloo"}  # as in a torch that has no default for "cuda"
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", defaults)
    monkeypatch.setattr(dist.Backend, "backend_list", ["gloo"])
    _register.register()
    assert dist.Backend.backend_list == ["gloo", "fastcoll"]
    assert defaults == {"cpu": "gloo"}
