"""The launch path as far as no GPU is needed: what is handed to Triton, in which order, and when not."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import triton
from kernel_cases import in_a_process_that_compiles

from fastcoll.buckets import BucketLayout
from fastcoll.kernels import _launch, flatten
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._prepared import PreparedLaunch


def any_configuration() -> Configuration:
    return next(flatten.configurations())


def fake_launcher(monkeypatch: pytest.MonkeyPatch, calls: list[tuple]) -> _launch.Launcher:
    """Returns a launcher as it is after loading on device 3, whose launches are recorded."""
    current = SimpleNamespace(device=3)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current.device, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False
    )

    class Guard:
        def __init__(self, device: int) -> None:
            self.device = device

        def __enter__(self) -> None:
            self.before, current.device = current.device, self.device

        def __exit__(self, *_: object) -> None:
            current.device = self.before

    monkeypatch.setattr(torch.cuda, "device", Guard)
    run = object.__new__(_launch.Launcher)
    run.configuration = any_configuration()
    run.device = torch.device("cuda", 3)
    run.is_fast = True
    run._constants = tuple(run.configuration.constexprs.values())
    run._index = 3
    run._function, run._metadata = "function", "metadata"
    run._compiled = SimpleNamespace(launch_metadata=lambda *_: "launch metadata")
    run._run = lambda *arguments: calls.append((current.device, *arguments))
    run.current = current
    return run


def test_a_launch_hands_over_what_compiled_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the launcher's device, whichever is current, and with a profiler's hooks where there are any."""
    calls: list[tuple] = []
    run = fake_launcher(monkeypatch, calls)
    run.current.device = 0
    launch = run.pack(73, 5, (11, 12))
    launch()
    hook = triton.knobs.runtime.launch_enter_hook

    def listener(_: object) -> None: ...

    hook.add(listener)
    try:
        launch()
    finally:
        hook.remove(listener)
    common = (3, 5, 1, 1, 73, "function", "metadata")
    hooks = "launch metadata", hook, triton.knobs.runtime.launch_exit_hook
    given = (11, 12, *run._constants)
    assert calls == [(*common, None, None, None, *given), (*common, *hooks, *given)]
    assert run.current.device == 0


def test_this_triton_takes_launch_arguments_in_that_order() -> None:
    from triton.compiler import CompiledKernel

    assert _launch.fallback_reason() == ""
    source = inspect.getsource(CompiledKernel.__getitem__)
    arguments = "".join(source[source.index("self.run(") :].split())
    assert arguments.startswith(
        "self.run(grid[0],grid[1],grid[2],stream,self.function,self.packed_metadata,launch_metadata,"
        "knobs.runtime.launch_enter_hook,knobs.runtime.launch_exit_hook,*args)"
    )


def test_an_unknown_triton_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "9.1.0")
    reason = _launch.fallback_reason.__wrapped__()
    assert "Triton 9.1.0 have not been checked, only those of 3.6, 3.7, 3.8, 3.9" in reason


def test_a_changed_triton_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed:
        def __call__(self, stream, *rest) -> None: ...

    monkeypatch.setattr(_launch, "CudaLauncher", Changed)
    assert "its launcher takes ['stream', 'rest']" in _launch.fallback_reason.__wrapped__()


def test_a_configuration_must_name_every_argument_in_order() -> None:
    good = any_configuration()
    fewer = {name: kind for name, kind in good.signature.items() if name != "sizes"}
    for signature in (fewer, dict(reversed(good.signature.items()))):
        bad = Configuration("bad", good.kernel, signature, good.constexprs)
        with pytest.raises(ValueError, match="bad"):
            _launch.compile_for(bad, None)


def test_attributes_name_arguments_by_position() -> None:
    good = any_configuration()
    names = frozenset({"sizes", "scale_bits"})
    hinted = Configuration("hinted", good.kernel, good.signature, good.constexprs, names)
    last = good.kernel.arg_names.index("scale_bits")
    assert hinted.attributes() == {
        (1,): [["tt.divisibility", 16]],
        (last,): [["tt.divisibility", 16]],
    }
    wrong = Configuration(
        "wrong", good.kernel, good.signature, good.constexprs, frozenset({"BLOCK"})
    )
    with pytest.raises(ValueError, match="divisible_by_16"):
        wrong.attributes()


def test_launchers_are_made_once() -> None:
    configuration = any_configuration()
    cpu = torch.device("cpu")
    assert _launch.launcher(configuration, cpu) is _launch.launcher(configuration, cpu)


def test_a_prepared_launch_refuses_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []
    run = fake_launcher(monkeypatch, calls)
    prepared = PreparedLaunch(run, 1, (5,), None)
    prepared()
    assert calls[0][1:6] == (1, 1, 1, 73, "function")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 99, raising=False)
    with pytest.raises(RuntimeError, match="expected the stream on which this launch was prepared"):
        prepared()
    assert len(calls) == 1


def test_no_argument_becomes_a_constant_and_cpu_tensors_are_refused_where_kernels_compile() -> None:
    """``kernel[grid](...)`` makes a constant of an integer that is 1, and constants have no dtype."""
    done = in_a_process_that_compiles(
        "-c",
        "import importlib, torch\n"
        "from fastcoll.buckets import BucketLayout\n"
        "from fastcoll.kernels.flatten import Flatten\n"
        "from kernel_table import KERNEL_MODULES\n"
        "for name in KERNEL_MODULES:\n"
        "    for one in importlib.import_module(f'fastcoll.kernels.{name}').configurations():\n"
        "        for each in one.kernel.params:\n"
        "            print(each.is_constexpr or each.do_not_specialize, one.name, each.name)\n"
        "Flatten(BucketLayout([1]), torch.float32, torch.float32, 'cpu')",
    )
    lines = done.stdout.splitlines()
    assert len(lines) > 800, done.stderr
    assert [line for line in lines if not line.startswith("True ")] == []
    assert done.returncode == 1
    assert "ValueError: expected CUDA tensors, got cpu. Move the tensors to a GPU" in done.stderr


def test_interpreted_kernels_take_no_other_devices_tensors() -> None:
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        flatten.Flatten(BucketLayout([1]), torch.float32, torch.float32, "meta")


def test_imports_need_no_triton() -> None:
    code = (
        "import sys, fastcoll, fastcoll.kernels, fastcoll.buckets; print('triton' in sys.modules)"
    )
    done = in_a_process_that_compiles("-c", code)
    assert done.stdout.strip() == "False", done.stderr
