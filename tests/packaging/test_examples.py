"""Each example is short, is listed, runs, and prints what its docstring has."""

import ast
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import Launcher
from suite_rules import full
from torchrun import torchrun

import fastcoll.trace.__main__ as trace

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LONG = ("__init__", "ddp_train", "tensor_parallel_generate")
SHORT = [path for path in sorted(EXAMPLES.glob("*.py")) if path.stem not in LONG]
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def head(name: str) -> str:
    """What an example says of itself: its docstring, or the comments that begin it."""
    text = (EXAMPLES / name).read_text()
    if name.endswith(".py"):
        return ast.get_docstring(ast.parse(text)) or ""
    comments = re.findall(r"(?:^#(?!!).*\n)+", text, re.MULTILINE)
    return re.sub(r"^# ?", "", comments[0], flags=re.MULTILINE)


def expected(name: str) -> list[str]:
    """The lines that the head has as the output."""
    (block,) = re.findall(r"^Expected output.*:\n\n((?: {4}.*\n?|\n)+)", head(name), re.MULTILINE)
    return [line[4:] for line in block.rstrip().splitlines()]


def shapes(lines: list[str]) -> list[str]:
    """The lines with # for each number, and one space for some."""
    return [re.sub(r" +", " ", NUMBER.sub("#", line)) for line in lines]


def run(*command: str, folder: Path) -> str:
    """Runs a command in a folder; returns its standard output."""
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # Unbuffered, Python writes the end of a line by itself, and lines of several ranks mix.
    environment = {**os.environ, "PATH": scripts, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def started(name: str, *arguments: str) -> str:
    """Returns the program of an example that gets these arguments."""
    return f"import sys; sys.argv = {[name, *arguments]!r}\n{(EXAMPLES / name).read_text()}"


def ranks(launcher: Launcher, folder: Path, name: str, *arguments: str, size: int = 2) -> list[str]:
    """Runs an example on some ranks, as torchrun does; returns the lines of all ranks."""
    program = started(name, *arguments)
    ended = launcher.ranks(program, size, folder, limit=240, OMP_NUM_THREADS="1")
    for rank in ended:
        assert rank.status == 0, rank.stderr
    return "".join(rank.stdout for rank in ended).splitlines()


@pytest.mark.parametrize("path", SHORT, ids=lambda path: path.name)
def test_an_example_has_at_most_40_lines_of_code(path):
    text = path.read_text()
    documented = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    code = [
        line
        for number, line in enumerate(text.splitlines(), 1)
        if number not in documented and not re.match(r"\s*(#|$)", line)
    ]
    assert len(code) <= 40, len(code)
    assert not [line for line in code if "import" in line and "examples" in line]


def test_the_page_lists_each_example():
    page = (ROOT / "docs" / "start" / "examples.md").read_text()
    linked = set(re.findall(r"\]\(\.\./\.\./examples/([^)]+)\)", page))
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*") if path.is_file()}
    assert linked == {name for name in files if "__" not in name}


@pytest.mark.parametrize("name", ["hello.py", full("gpu_job.py")])
def test_each_line_is_as_expected(launcher, tmp_path, name):
    assert ranks(launcher, tmp_path, name) == expected(name)


@pytest.mark.full
def test_hello_starts_its_own_ranks(tmp_path):
    printed = run(sys.executable, str(EXAMPLES / "hello.py"), folder=tmp_path)
    assert sorted(printed.splitlines()) == expected("hello.py")


def test_ddp(launcher, tmp_path):
    printed = ranks(launcher, tmp_path, "ddp.py", "--backend", "fastcoll")
    assert shapes(printed) == shapes(expected("ddp.py"))
    first, *_, last = (float(re.findall(r"loss (\S+),", line)[0]) for line in printed)
    assert last < first / 2


def test_fsdp2(launcher, tmp_path):
    printed = ranks(launcher, tmp_path, "fsdp2.py", str(tmp_path / "checkpoint"))
    assert shapes(printed) == shapes(expected("fsdp2.py"))
    assert printed[-2:] == printed[-4:-2], "the steps after the load differ"


def test_shared_gpu(launcher, tmp_path):
    printed = ranks(launcher, tmp_path, "shared_gpu.py", size=4)
    assert shapes(printed) == shapes(expected("shared_gpu.py"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "arguments"),
    # The second compares the texts of all ways itself. One layer: it compiles the model three times.
    [("faster_gradients.py", []), ("tensor_parallel_generate.py", ["1"])],
)
def test_each_line_is_as_expected_but_for_numbers(launcher, tmp_path, name, arguments):
    printed = ranks(launcher, tmp_path, name, *arguments)
    assert shapes(printed) == shapes(expected(name))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("same_bits_any_ranks.py", (1, 2, 3, 4, 6, 8)), ("same_bits_tensor_parallel.py", (1, 2, 4))],
)
def test_same_bits(launcher, tmp_path, name, sizes):
    hashes = set()
    for size in sizes:
        folder = tmp_path / str(size)
        folder.mkdir()
        (line,) = ranks(launcher, folder, name, size=size)
        what, number = line.split(": ")
        assert what == re.sub(r"\d+(?= ranks)", str(size), expected(name)[0].split(": ")[0])
        hashes.add(number)
    assert len(hashes) == 1


@pytest.mark.full
def test_cuda_gradients(tmp_path):
    printed = run(sys.executable, str(EXAMPLES / "cuda_gradients.py"), folder=tmp_path).splitlines()
    assert shapes(printed) == shapes(expected("cuda_gradients.py"))
    stock, ours = (int(line.split()[0]) for line in printed)
    assert ours < stock


@pytest.mark.full
def test_rollout(tmp_path):
    printed = run(sys.executable, str(EXAMPLES / "rollout.py"), folder=tmp_path).splitlines()
    assert sorted(printed) == sorted(expected("rollout.py"))
    assert [line for line in printed if "round" in line] == sorted(printed)[2:]


@pytest.mark.full
def test_which_rank_hangs(tmp_path):
    """The script starts its ranks, and compares their traces."""
    name = "which_rank_hangs.py"
    printed = run(sys.executable, str(EXAMPLES / name), "missing", folder=tmp_path)
    above, _, below = "\n".join(expected(name)).partition("\n...\n")
    assert printed.startswith(above)
    assert printed.endswith(f"\n{below}\n")


@pytest.mark.full
def test_which_rank_is_slow(tmp_path):
    """The first row is the slow rank's, and it costs the others more than all other ranks together."""
    name = "which_rank_is_slow.py"
    head, *rows = run(sys.executable, str(EXAMPLES / name), folder=tmp_path).splitlines()
    assert head == expected(name)[0]
    ranks, _, lost = zip(*(row.split()[:3] for row in rows), strict=True)
    assert ranks[0] == expected(name)[1].split()[0] and sorted(ranks) == ["0", "1", "2", "3"]
    first, *others = (float(share.rstrip("%")) for share in lost)
    assert first > sum(others)


@pytest.mark.full
def test_two_runs_that_differ(tmp_path):
    script = EXAMPLES / "two_runs_that_differ.py"
    printed = run(sys.executable, str(script), folder=tmp_path).replace(f"{EXAMPLES}/", "")
    assert printed.splitlines() == expected(script.name)
    page = (ROOT / "docs" / "faults" / "compare-runs.md").read_text()
    assert printed.replace(script.name, f"examples/{script.name}") in page


# A third rank that was late leaves no majority in "mismatch", and no name.
@pytest.mark.parametrize(
    ("fault", "named"), [("mismatch", "float32[1001]"), ("died", "\nLook at rank 1 first.\n")]
)
def test_another_fault_of_a_rank(launcher, tmp_path, capsys, fault, named):
    text = started("which_rank_hangs.py", fault)
    traces = {"FASTCOLL_TRACE_DUMP": f"{tmp_path}/rank_", "FASTCOLL_TRACE_STACKS": "1"}
    launcher.ranks(text, 3, tmp_path, **traces)
    trace.main([f"{tmp_path}/rank_"])
    printed = capsys.readouterr().out
    assert "group '0' (default_pg)\n" in printed
    assert named in printed


def test_lines_that_find_the_rank_quotes_are_those_of_the_example():
    page = (ROOT / "docs" / "faults" / "find-the-rank.md").read_text()
    lines = (EXAMPLES / "which_rank_hangs.py").read_text().splitlines()
    calls = {"step": "dist.all_reduce(", "main": "step(", "<module>": "main("}
    quoted = re.findall(r"which_rank_hangs\.py:(\d+) in ([\w<>]+)", page)
    assert {function for _, function in quoted} == calls.keys()
    for line, function in quoted:
        assert calls[function] in lines[int(line) - 1]


def test_the_picture_of_a_hang_has_the_text_of_its_page():
    page = (ROOT / "docs" / "faults" / "find-the-rank.md").read_text()
    svg = (ROOT / "docs" / "pictures" / "hang.svg").read_text()
    shown = html.unescape(" ".join(re.findall(r"<text[^>]*>([^<]*)", svg))).split()
    printed = next(block for block in page.split("```\n") if "ranks 0-2, now" in block)
    assert shown == ["$", "fastcoll", "trace", "--pid", "4711", *printed.split()]


def commands(text: str) -> list[str]:
    """The torchrun commands of a text on one line, without ranks, job and script."""
    joined = re.sub(r"\s*\\?\n\s*", " ", text)
    found = re.findall(r"torchrun --nnodes=.*?--rdzv-endpoint=\S+", joined)
    return [re.sub(r"--nproc-per-node=\d+", "", command) for command in found]


@pytest.mark.parametrize("name", ["compose.yaml", "slurm.sh"])
def test_two_hosts_are_started_as_the_guide_does(name):
    guide = (ROOT / "docs" / "guides" / "several-hosts.md").read_text()
    (command,) = commands((EXAMPLES / "two_hosts" / name).read_text())
    assert command in commands(guide)
    assert "What was not run:" in head(f"two_hosts/{name}")


@pytest.mark.full
def test_ddp_on_two_hosts(tmp_path):
    printed = torchrun(
        str(EXAMPLES / "ddp.py"), ranks=1, hosts=2, environment={"FASTCOLL_DEBUG": "INFO"}
    )
    (begin,) = re.findall(r"^ {4}(\[fastcoll\] group .*)", head("two_hosts/compose.yaml"), re.M)
    assert begin in printed
    assert shapes(re.findall("^epoch .*", printed, re.M)) == shapes(expected("ddp.py"))


@pytest.mark.parametrize("name", ["two_hosts/slurm.sh"])
def test_bash_parses(name):
    subprocess.run(["bash", "-n", str(EXAMPLES / name)], check=True)


def test_the_image_has_the_torch_that_a_clone_installs():
    (torch,) = re.findall(r"^TORCH := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    image = (EXAMPLES / "container" / "Dockerfile").read_text()
    assert set(re.findall(r"torch==\S+", image)) == {torch}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_plain_python_with_the_outputs_of_one_run(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join("".join(output.get("text", "")) for output in outputs)
    assert text and not re.search(r"/(?:tmp|root|home|work)/", text)
    for cell in cells:
        ast.parse("".join(cell["source"]))


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_draws(tmp_path, path):
    import nbclient
    import nbformat

    shorter = path.read_text().replace(r"\"64M\"", r"\"16K\"")
    notebook = nbformat.reads(shorter, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs), printed
    assert re.search("losses equal, bit for bit: True|all results are right", printed), printed
