"""The launch path as far as no GPU is needed: what a driver is given, which is not there, and its errors."""

from pathlib import Path

import pytest
import recording_device
import torch
from kernel_cases import in_a_process_that_compiles
from kernel_table import KERNEL_MODULES, KERNELS

from fastcoll.buckets import BucketLayout
from fastcoll.kernels import _launch, flatten
from fastcoll.kernels._configuration import Configuration

LAUNCHES = """
import sys
sys.path.insert(0, sys.argv[1])
import fake_cuda, recording_device, torch
driver = fake_cuda.Driver()
recording_device.load()
from fastcoll._load_cuda import CUDA
device = torch.device("recording", 1)
def kernel(compiled, name="k", **changes):
    given = {"code": compiled.asm["cubin"], "entry": compiled.metadata.name,
             "threads": 32 * compiled.metadata.num_warps, "shared_bytes": compiled.metadata.shared}
    return CUDA.Kernel(device, name, **{**given, **changes})
"""

EACH_KIND = """
import kernel_table
first = list(fake_cuda.first_of_each(sys.argv[2:]))
for row in kernel_table.analyse([configuration for configuration, _ in first], [90]):
    assert not row.faults(), row.faults()
for configuration, compiled in first:
    driver.reset(configuration)
    stream = torch.Stream(device)
    launch = CUDA.Launch(kernel(compiled), 5, fake_cuda.arguments_of(configuration), None)
    before = torch.accelerator.current_device_index()
    with stream:
        torch.accelerator.set_device_index(0)
        launch()
    assert torch.accelerator.current_device_index() == before == 0
    expected = fake_cuda.described(configuration, compiled, 5, stream.native_handle, 101)
    assert driver.log() == expected, (driver.log(), expected)
    driver.reset(configuration)
    CUDA.Launch(kernel(compiled), 0, fake_cuda.arguments_of(configuration), None)()
    assert not driver.log()
    print(configuration.name)
"""

ERRORS = """
configuration, compiled = next(fake_cuda.first_of_each(["flatten"]))
def error(body):
    try:
        body()
    except torch.distributed.DistBackendError as error:
        print(error)
driver.reset()
error(lambda: kernel(compiled, code=b"no code"))
driver.allow_threads(128)
error(lambda: kernel(compiled))
driver.reset(configuration)
launch = CUDA.Launch(kernel(compiled, shared_bytes=100_000), 1, fake_cuda.arguments_of(configuration), None)
print(driver.log())
driver.fail("cuLaunchKernel", 719)
error(launch)
"""


def output_of(program: str, *arguments: str) -> list[str]:
    recording_device.build()
    folders = str(Path(__file__).parents[1])
    done = in_a_process_that_compiles("-c", LAUNCHES + program, folders, *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout.splitlines()


def test_the_driver_gets_each_kind_of_kernel_as_described():
    """On the kernel's device and its current stream, whichever device is current; none spills registers."""
    assert len(output_of(EACH_KIND, *KERNEL_MODULES)) == len(KERNELS)


def test_tritons_own_launcher_gives_the_driver_the_same():
    done = in_a_process_that_compiles("-m", "fake_cuda")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(KERNELS)


def test_errors_of_the_driver_name_kernel_device_and_remedy():
    loading, threads, attributes, launching = output_of(ERRORS)
    head = "the kernel k on recording:1: "
    why = "reports CUDA_ERROR_FAKE (status"
    assert loading.startswith(f"{head}cuModuleLoadData {why} 200): a fake error. If an earlier")
    assert threads.startswith(f"{head}expected a GPU that runs 256 threads of it in a block")
    assert attributes == "['flatten_kernel attribute 8 is 100000']"
    assert launching.startswith(f"{head}cuLaunchKernel {why} 719): a fake error.")
    assert launching.endswith("Else set FASTCOLL_ALGO=nccl.")


def test_other_parameters_of_the_machine_code_are_refused():
    program = """
from types import SimpleNamespace
from fastcoll.kernels import _launch
(configuration, compiled), = fake_cuda.first_of_each(["reduce"])
text = compiled.asm["ptx"]
last = ".param .u64 .ptr .global .align 1 reduce_kernel_param_8"
assert text.count(last) == 1, text[:2000]
for ptx, changes in ((text.replace(last, last + ", .param .u64 more"), {}), (text, {"launch_pdl": True})):
    metadata = SimpleNamespace(**{**compiled.metadata._asdict(), **changes})
    try:
        _launch.require_parameters(configuration, SimpleNamespace(asm={"ptx": ptx}, metadata=metadata))
    except RuntimeError as error:
        print(error)
"""
    more, attribute = output_of(program)
    widths = "64, 64, 64, 64, 64, 32, 64, 64, 64"
    head = f"expected machine code that takes parameters of {widths} bits, got {widths}"
    assert f"{head}, 64. Install a release of Triton" in more
    assert f"{head} and launch_pdl. Install" in attribute


def test_without_a_driver_the_error_says_so():
    from fastcoll._load_cuda import CUDA

    with pytest.raises(
        torch.distributed.DistBackendError, match="expected a CUDA driver with cuCtxGetCurrent"
    ):
        CUDA.Kernel(torch.device("cpu"), "k", b"", "entry", 1, 0)


def any_configuration() -> Configuration:
    return next(flatten.configurations())


def test_a_configuration_must_name_every_argument_in_order():
    good = any_configuration()
    fewer = {name: kind for name, kind in good.signature.items() if name != "sizes"}
    for signature in (fewer, dict(reversed(good.signature.items()))):
        bad = Configuration("bad", good.kernel, signature, good.constexprs)
        with pytest.raises(ValueError, match="bad"):
            _launch.compile_for(bad, None)


def test_attributes_name_arguments_by_position():
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


def test_kernels_are_loaded_once():
    configuration = any_configuration()
    cpu = torch.device("cpu")
    assert _launch.kernel_on(configuration, cpu) is _launch.kernel_on(configuration, cpu)


def test_cpu_tensors_are_refused_where_kernels_compile():
    done = in_a_process_that_compiles(
        "-c",
        "import torch\n"
        "from fastcoll.buckets import BucketLayout\n"
        "from fastcoll.kernels.flatten import Flatten\n"
        "Flatten(BucketLayout([1]), torch.float32, torch.float32, 'cpu')",
    )
    assert done.returncode == 1
    assert "ValueError: expected CUDA tensors, got cpu. Move the tensors to a GPU" in done.stderr


def test_interpreted_kernels_take_no_other_devices_tensors():
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        flatten.Flatten(BucketLayout([1]), torch.float32, torch.float32, "meta")


def test_imports_need_no_triton():
    code = (
        "import sys, fastcoll, fastcoll.kernels, fastcoll.buckets; print('triton' in sys.modules)"
    )
    done = in_a_process_that_compiles("-c", code)
    assert done.stdout.strip() == "False", done.stderr
