"""Every kernel compiles for three GPUs as recorded, and what flags between ranks compile to.

These are released and acquired at system scope, and data passes by the L1 cache. All is compiled in processes of their
own, as this one may interpret. No GPU is needed: what the instructions mean is taken from the PTX memory model.
"""

import json
import re

import pytest
import triton
from kernel_cases import in_a_process_that_compiles
from kernel_table import KERNELS, RECORDED

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

NO_DATA = re.compile(r"LDG\S*\.STRONG\.SYS|LDG\.E\.64 ")
EXCHANGES = {"one_shot": 1, "two_shot": 2, "bucket_all_reduce": 3, "ring": 1}
"""Places in the code of a module's kernels that post to peers."""

SCRIPT = """
import importlib, sys
import triton
from triton.backends.compiler import GPUTarget
import machine_code
from ahead_of_time import compile_for_each
from fastcoll.kernels._launch import compile_for
from kernel_table import ARCHITECTURES

triton.knobs.compilation.always_compile = True  # what is on disk may have come the other way
for name in sys.argv[1:]:
    configuration = next(iter(importlib.import_module(f"fastcoll.kernels.{name}").configurations()))
    last = compile_for_each(configuration, ARCHITECTURES[1:])[-1]
    alone = compile_for(configuration, GPUTarget("cuda", ARCHITECTURES[-1], 32))
    assert alone.metadata.hash == last.metadata.hash
    assert machine_code._code(alone.asm["cubin"]) == machine_code._code(last.asm["cubin"])
"""

Codes = dict[str, tuple[str, list[str]]]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A folder with the table, rows.json, and with files of the code of all rows."""
    folder = tmp_path_factory.mktemp("table")
    same = json.loads(RECORDED.read_text())["triton"] == triton.__version__
    check = ["--check"] if same else []  # another Triton writes other code
    written = ["--json", str(folder / "rows.json"), "--code", str(folder)]
    done = in_a_process_that_compiles("-m", "kernel_table", *check, *written)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return folder


@pytest.fixture(scope="module", params=EXCHANGES)
def compiled(request, table):
    """PTX and machine code of each kernel of a module, for each architecture."""
    lines = (line for file in table.glob("*.jsonl") for line in file.read_text().splitlines())
    rows = (json.loads(line) for line in lines if line.startswith(f'["{request.param} '))
    return {name: (ptx, code) for name, ptx, code in rows}


def test_every_configuration_compiles_as_recorded(table):
    rows = json.loads((table / "rows.json").read_text())["rows"].values()
    assert {row["architecture"] for row in rows} == {80, 90, 100}
    assert {row["name"].split()[0] for row in rows} == set(KERNELS)
    assert not any(row["spills"] for row in rows)
    assert not [row["name"] for row in rows if row["wide"] and "128" not in row["loads"]]


def test_the_table_has_what_a_launch_compiles():
    done = in_a_process_that_compiles("-c", SCRIPT, "staged", "bucket_all_reduce", "ring")
    assert done.returncode == 0, done.stderr


def test_every_row_of_the_table_between_ranks_is_read(compiled):
    module = next(iter(compiled)).split()[0]
    rows = json.loads(RECORDED.read_text())["rows"]
    assert {name for name in rows if name.startswith(f"{module} ")} == set(compiled)
    others = {name.split()[0] for name in rows} - set(EXCHANGES)
    assert others == {"flatten", "unflatten", "reduce", "norm"}  # which have no peers


def test_squares_have_one_order(table):
    """One sum serves aligned and other tensors, by the same steps on all GPUs: in a thread, a warp, and of 8 warps."""
    lines = (line for file in table.glob("*.jsonl") for line in file.read_text().splitlines())
    orders = {}
    for name, ptx, _ in map(json.loads, lines):
        if re.match(r"unflatten .* measured|norm ", name):
            steps = re.findall(r"add\.\S*f64|shfl\.sync\.bfly\.b32 .*, (\d+), \d+, -?\d+;", ptx)
            orders.setdefault(name.rsplit(" ", 1)[0], []).append(steps)
    assert len(orders) == 7
    for name, found in orders.items():
        assert len(found) == 3 and found[0] == found[1] == found[2], name
        halves = [int(mask) for mask in found[0] if mask]
        assert halves[::2] == halves[1::2] == [16, 8, 4, 2, 1, 4, 2, 1], name


def test_flags_are_released_and_acquired_at_system_scope(compiled):
    for name, (ptx, _) in compiled.items():
        atomics = [line for line in ptx.splitlines() if "atom." in line or "red." in line]
        posts = [line for line in atomics if ".exch." in line and "relaxed" not in line]
        polls = [line for line in atomics if ".add." in line and "relaxed" not in line]
        assert len(posts) == EXCHANGES[name.split()[0]], (name, posts)
        assert all(".sys.release.exch.b64" in line for line in posts), (name, posts)
        assert polls and all(".sys.acquire.add.u64" in line for line in polls), (name, polls)


def test_a_barrier_and_a_fence_precede_each_post(compiled):
    for name, (ptx, code) in compiled.items():
        posts = [at for at, text in enumerate(code) if ".EXCH.64" in text and "STRONG.SYS" in text]
        fences = [at for at, text in enumerate(code) if "MEMBAR" in text and ".SYS" in text]
        assert len(fences) == len(re.findall(r"\.sys\.release\.exch\.", ptx)), name
        for fence in fences:
            before = [text for text in code[:fence] if "BAR.SYNC" in text or "STG" in text]
            assert "BAR.SYNC" in before[-1], (name, "a store between the barrier and the fence")
            assert any(fence < post < fence + 40 for post in posts), name
        # The ring announces its launch to all ranks, in no order with anything.
        fenced = [post for post in posts if any(fence < post < fence + 40 for fence in fences)]
        assert len(posts) - len(fenced) == name.startswith("ring"), name


def test_polls_leave_the_l1_cache_alone_and_it_is_emptied_once_before_data_is_read(compiled):
    for name, (_, code) in compiled.items():
        polls = [at for at, text in enumerate(code) if ".ADD.64.STRONG.SYS" in text]
        assert polls, name
        relaxed = []
        for poll in polls:
            after = code[poll + 1 : poll + 100]
            emptied = next(at for at, text in enumerate(after) if "CCTL.IVALL" in text)
            # Not data: the host's word, at system scope, and addresses in the table, which stays the same.
            loads = (at for at, text in enumerate(after) if "LDG" in text)
            data = next((at for at in loads if not NO_DATA.search(after[at])), 100)
            assert emptied < data, name
            # All threads wait for the one that has emptied it.
            assert any("BAR.SYNC" in text for text in after[emptied:data]), name
            if any(".ADD.64.STRONG.SYS" in text for text in after[:emptied]):
                relaxed.append(poll)
        # Each loop lies between an acquire that finds what is there already and one behind it.
        assert relaxed and len(polls) >= 3 * len(relaxed), name


def test_what_peers_wrote_is_read_past_the_l1_cache(compiled):
    for name, (_, code) in compiled.items():
        data = [text for text in code if re.search(r"\bLDG", text) and not NO_DATA.search(text)]
        strong = [text for text in data if "STRONG.GPU" in text]
        assert strong, name
        wide = [text for text in data if ".128" in text]
        if name.startswith("ring"):  # it reads its own message by plain loads
            assert "1-byte" in name or set(wide) & set(strong), name
        else:
            assert wide and set(wide) <= set(strong), name


def test_the_hosts_word_is_read_in_the_loop_and_told_to_all_threads_alike(compiled):
    for name, (ptx, code) in compiled.items():
        lines = ptx.splitlines()
        looks = [at for at, line in enumerate(lines) if "ld.volatile.global" in line]
        assert looks, name
        for look in looks:
            told = next(line for line in lines[look:] if "atom.global" in line)
            assert ".gpu.relaxed.exch.b64" in told, (name, told)
        reads = [at for at, text in enumerate(code) if "LDG" in text and "STRONG.SYS" in text]
        assert len(reads) == len(looks), name
        for read in reads:  # the poll lies before it, and a way back behind
            assert any(".ADD.64.STRONG.SYS" in text for text in code[max(read - 100, 0) : read])
            assert any("BRA" in text for text in code[read : read + 100]), name
        stores = [line for line in lines if "st.global.wt" in line]
        assert len(stores) == len(looks), (name, stores)
