"""`make lint` fails for a record whose command does not exist today."""

import check_pages
import pytest
from programs import python
from repository import ROOT

GOOD = [
    "python -m fastcoll.bench all_reduce -b 4 -e 64M --backend fastcoll,gloo --json a.jsonl",
    "python -m fastcoll.bench ddp resnet50 gpt2-medium --profile",
    "python -m fastcoll.bench compiled --quiet 5",
    "python -m fastcoll.bench.hosts --hosts 2 --rounds 60",
    "python -m fastcoll.bench.hosts --hosts 2 -- ddp resnet50 -n 4",
    "python -m fastcoll.bench.engine --json a.jsonl",
    "python -m fastcoll.bench.kernels --seconds 9",
    "PYTHONPATH=tools python tests/clients/client_runs.py",
    "FAULTS='--kills 200 --json a.jsonl' .ci/run faults",
]
GONE = [
    ("python -m fastcoll.bench all_sum", "all_sum"),
    ("python -m fastcoll.bench ddp resnet51", "resnet51"),
    ("python -m fastcoll.bench.hosts -- ddp --flops 3", "--flops"),
    ("python -m fastcoll.bench.hosts --speed 3", "--speed"),
    ("python -m fastcoll.bench.engine --sweep", "--sweep"),
    ("python -m fastcoll.bench.kernels --sweep", "--sweep"),
    ("python -m fastcoll.bench.scale", "fastcoll.bench.scale"),
    ("python tests/no_file.py", "no_file"),
    ("FAULTS=x .ci/run fault", "fault"),
    ("make faults", "make faults"),
    ("python -m soak --seconds 600", "soak"),
]


@pytest.mark.parametrize("command", GOOD)
def test_a_command_of_today(command):
    assert check_pages.command_problem({"command": command}) == ""


@pytest.mark.parametrize(("command", "named"), GONE)
def test_a_command_that_is_gone(command, named):
    assert named in check_pages.command_problem({"command": command})


def test_a_backend_that_is_gone():
    record = {"command": "python -m fastcoll.bench", "backends": ["fastcoll-shared", "impi", "mpi"]}
    assert check_pages.command_problem(record) == "no backend impi"


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("```bash\nfastcoll bench ddp resnet50   # a model\n```", ""),
        ("```bash\ntorchrun ... -m fastcoll.bench all \\\n    -b 1K\n```", ""),
        ("```console\n$ fastcoll info\nfastcoll bench is not a command here\n```", ""),
        ("```bash\nfastcoll bench ddp resnet51\n```", "resnet51"),
        ("```bash\ntorchrun -m fastcoll.bench all \\\n    --speed 1\n```", "--speed"),
        ("```console\n$ fastcoll benhc\n```", "no command 'benhc'"),
        ("```\n$ fastcoll info\n```", "expected ```console"),
    ],
)
def test_the_commands_of_a_page(monkeypatch, tmp_path, block, problem):
    page = tmp_path / "page.md"
    page.write_text(f"Text.\n\n{block}\n")
    monkeypatch.setattr(check_pages, "PAGES", [page])
    monkeypatch.setattr(check_pages, "ROOT", tmp_path)
    monkeypatch.setattr(check_pages, "models", lambda: ["resnet50"])
    found = list(check_pages.page_commands())
    assert len(found) == bool(problem) and problem in "".join(found)


def listing(monkeypatch, *names):
    """Return the differences if these records are listed as stale."""
    read, text = check_pages.read, "\n".join(["# a remark", *names])
    monkeypatch.setattr(
        check_pages, "read", lambda path: text if path == check_pages.STALE else read(path)
    )
    return list(check_pages.commands())


def test_a_listed_record_must_be_there_and_stale(monkeypatch):
    found = listing(monkeypatch, "engine_cuda.jsonl", "absent.jsonl")
    assert found[-1] == "tools/stale_records.txt: there is no record 'absent.jsonl'"
    assert [each for each in found if "works today" in each and "engine_cuda.jsonl" in each]


def test_a_stale_record_must_be_listed(monkeypatch):
    monkeypatch.setattr(check_pages, "command_problem", lambda record: "it is gone")
    records = [path.name for path in (ROOT / "bench" / "results").glob("*.jsonl")]
    found = listing(monkeypatch, *records[1:])
    assert found == [f"bench/results/{records[0]}: its command does not work today: it is gone"]


def test_it_needs_no_torch():
    script = "import sys; sys.modules['torch'] = None; import check_pages; print(list(check_pages.commands()))"
    done = python("-c", script, env={"PYTHONPATH": str(ROOT / "tools")})
    assert (done.stdout, done.stderr) == ("[]\n", "")
