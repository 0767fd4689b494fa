"""The name "fastcoll": known after `import torch`, harmless where something is wrong."""

import importlib.metadata
import textwrap

import pytest
import torch.distributed as dist
from backend import since
from programs import python

from fastcoll import _register


def run_python(code: str, **environment: str) -> str:
    """Run a program in a new interpreter, outside the repository; returns what it prints."""
    variables = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment}
    process = python("-c", textwrap.dedent(code), env=variables, cwd="/")
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.fixture(scope="module", autouse=True)
def installed():
    points = importlib.metadata.entry_points(group="torch.backends", name="fastcoll")
    if not list(points):
        pytest.fail("fastcoll is not installed in this environment: run `make build`")


def test_import_torch_registers_the_name_and_nothing_heavy_is_loaded():
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
def test_the_name_is_known_without_autoload():
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
def test_import_fastcoll_before_torch_registers_once():
    names = "torch.distributed.Backend.backend_list"
    output = run_python(
        f"import fastcoll, torch; print({names}.count('fastcoll'), fastcoll.__version__)"
    )
    assert output.split() == ["1", importlib.metadata.version("fastcoll")]


def test_a_failing_registration_raises_nothing(monkeypatch, capsys):
    """As `import torch` ends with it."""

    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(_register, "_error", None)
    monkeypatch.setattr(dist.Backend, "backend_list", ["gloo"])
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    _register.register()
    assert repr(_register.registration_error()) == "RuntimeError('no room')"
    assert "not registered as requested: no room" in capsys.readouterr().err


def test_torch_without_distributed_is_left_alone(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.setattr(dist.Backend, "register_backend", None)
    _register.register()
    assert _register.registration_error() is None


def test_default_backends_of_devices_stay(monkeypatch):
    defaults = {"cpu": "gloo"}  # as in a torch that has no default for "cuda"
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", defaults)
    monkeypatch.setattr(dist.Backend, "backend_list", ["gloo"])
    _register.register()
    assert dist.Backend.backend_list == ["gloo", "fastcoll"]
    assert defaults == {"cpu": "gloo"}
