"""What flags between ranks compile to: release and acquire at system scope, and data that passes by the L1 cache.

Every row of the compile table whose kernel works between ranks, for three GPUs, compiled as the table's are, which
must give what a launch compiles. In a process of its own that compiles, as this one may interpret. No GPU is needed,
and none has run these: what the instructions mean is taken from the PTX memory model, not tried.
"""

import json
import re

import pytest
from kernel_cases import in_a_process_that_compiles
from kernel_table import RECORDED

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

NO_DATA = re.compile(r"LDG\S*\.STRONG\.SYS|LDG\.E\.64 ")
EXCHANGES = {
    "one_shot": 1,
    "two_shot": 2,
    "bucket_all_reduce": 3,
    "ring": 1,
}
"""Places in the code of a module's kernels that post to peers."""

SCRIPT = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
import machine_code
from ahead_of_time import compile_for_each
from fastcoll.kernels._launch import compile_for
from kernel_table import ARCHITECTURES

configurations = list(importlib.import_module(f"fastcoll.kernels.{sys.argv[1]}").configurations())
compiled = [compile_for_each(each, ARCHITECTURES) for each in configurations]
answer = {}
for position, architecture in enumerate(ARCHITECTURES):
    kernels = [each[position] for each in compiled]
    codes = machine_code.disassemble([kernel.asm["cubin"] for kernel in kernels], architecture)
    for each, kernel, code in zip(configurations, kernels, codes):
        answer[f"{each.name} sm_{architecture}"] = [kernel.asm["ptx"], [text for _, text in code]]

triton.knobs.compilation.always_compile = True  # what is on disk may have come the other way
first = compile_for_each(configurations[0], ARCHITECTURES)[-1]
alone = compile_for(configurations[0], GPUTarget("cuda", architecture, 32))
assert alone.metadata.hash == first.metadata.hash
assert machine_code._code(alone.asm["cubin"]) == machine_code._code(first.asm["cubin"])
with open(sys.argv[2], "w") as file:
    json.dump(answer, file)
"""

Codes = dict[str, tuple[str, list[str]]]


@pytest.fixture(scope="module", params=EXCHANGES)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Codes:
    """PTX and machine code of each kernel of a module, for each architecture."""
    file = tmp_path_factory.mktemp("code") / "answer.json"
    done = in_a_process_that_compiles("-c", SCRIPT, request.param, str(file))
    assert done.returncode == 0, done.stderr
    answer = json.loads(file.read_text())
    return {name: (ptx, code) for name, (ptx, code) in answer.items()}


def test_every_row_of_the_table_between_ranks_is_read(compiled: Codes) -> None:
    module = next(iter(compiled)).split()[0]
    rows = json.loads(RECORDED.read_text())["rows"]
    assert {name for name in rows if name.startswith(f"{module} ")} == set(compiled)
    others = {name.split()[0] for name in rows} - set(EXCHANGES)
    assert others == {"flatten", "unflatten", "reduce"}  # which have no peers


def test_flags_are_released_and_acquired_at_system_scope(compiled: Codes) -> None:
    for name, (ptx, _) in compiled.items():
        atomics = [line for line in ptx.splitlines() if "atom." in line or "red." in line]
        posts = [line for line in atomics if ".exch." in line and "relaxed" not in line]
        polls = [line for line in atomics if ".add." in line and "relaxed" not in line]
        assert len(posts) == EXCHANGES[name.split()[0]], (name, posts)
        assert all(".sys.release.exch.b64" in line for line in posts), (name, posts)
        assert polls and all(".sys.acquire.add.u64" in line for line in polls), (name, polls)


def test_a_barrier_and_a_fence_precede_each_post(compiled: Codes) -> None:
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


def test_polls_leave_the_l1_cache_alone_and_it_is_emptied_once_before_data_is_read(
    compiled: Codes,
) -> None:
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


def test_what_peers_wrote_is_read_past_the_l1_cache(compiled: Codes) -> None:
    for name, (_, code) in compiled.items():
        data = [text for text in code if re.search(r"\bLDG", text) and not NO_DATA.search(text)]
        strong = [text for text in data if "STRONG.GPU" in text]
        assert strong, name
        wide = [text for text in data if ".128" in text]
        if name.startswith("ring"):  # it reads its own message by plain loads
            assert "1-byte" in name or set(wide) & set(strong), name
        else:
            assert wide and set(wide) <= set(strong), name


def test_the_hosts_word_is_read_in_the_loop_and_told_to_all_threads_alike(compiled: Codes) -> None:
    for name, (ptx, code) in compiled.items():
        lines = ptx.splitlines()
        looks = [at for at, line in enumerate(lines) if "ld.volatile.global" in line]
        assert looks, name
        for look in looks:
            told = next(line for line in lines[look:] if "atom.global" in line)
            assert ".gpu.relaxed.max.s64" in told, (name, told)
        reads = [at for at, text in enumerate(code) if "LDG" in text and "STRONG.SYS" in text]
        assert len(reads) == len(looks), name
        for read in reads:  # the poll lies before it, and a way back behind
            assert any(".ADD.64.STRONG.SYS" in text for text in code[max(read - 100, 0) : read])
            assert any("BRA" in text for text in code[read : read + 100]), name
        stores = [line for line in lines if "st.global.wt" in line]
        assert len(stores) == len(looks), (name, stores)
