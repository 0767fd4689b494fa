"""What flags between ranks compile to: release and acquire at system scope, and data that passes by the L1 cache.

Compiled as the report does it, for three GPUs at once, which must give what a launch compiles. In a process of its own
that compiles, as this one may interpret. No GPU is needed.
"""

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.full

NO_DATA = re.compile(r"LDG\S*\.STRONG\.SYS|LDG\.E\.64 ")

SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from fastcoll.kernels import _machine_code, one_shot, ring, two_shot
from fastcoll.kernels._ahead_of_time import compile_for_each
from fastcoll.kernels._launch import compile_for

triton.knobs.compilation.always_compile = True  # what is on disk may have come the other way

NAMES = {
    "one_shot bfloat16 staged": one_shot,
    "two_shot float32 direct": two_shot,
    "ring bfloat16 partials float32": ring,
}
answer = {}
for name, module in NAMES.items():
    (configuration,) = [each for each in module.configurations() if each.name == name]
    architectures = [int(each) for each in sys.argv[1:]]
    for architecture, compiled in zip(architectures, compile_for_each(configuration, architectures)):
        (code,) = _machine_code.disassemble([compiled.asm["cubin"]], architecture)
        answer[f"{name} sm_{architecture}"] = [compiled.asm["ptx"], [text for _, text in code]]
    alone = compile_for(configuration, GPUTarget("cuda", architecture, 32))
    assert alone.metadata.hash == compiled.metadata.hash
    assert _machine_code._code(alone.asm["cubin"]) == _machine_code._code(compiled.asm["cubin"]), name
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[str, list[str]]]:
    """PTX and machine code of a kernel of each kind, for each architecture."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "80", "90", "100"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(answer) == 9
    return {name: (ptx, code) for name, (ptx, code) in answer.items()}


def test_flags_are_released_and_acquired_at_system_scope(
    compiled: dict[str, tuple[str, list[str]]],
) -> None:
    for name, (ptx, _) in compiled.items():
        atomics = [line for line in ptx.splitlines() if "atom." in line or "red." in line]
        posts = [line for line in atomics if ".exch." in line and "relaxed" not in line]
        polls = [line for line in atomics if ".add." in line and "relaxed" not in line]
        assert posts and all(".sys.release.exch.b64" in line for line in posts), (name, posts)
        assert polls and all(".sys.acquire.add.u64" in line for line in polls), (name, polls)


def test_a_barrier_and_a_fence_precede_each_post(
    compiled: dict[str, tuple[str, list[str]]],
) -> None:
    for name, (_, code) in compiled.items():
        posts = [at for at, text in enumerate(code) if ".EXCH.64" in text and "STRONG.SYS" in text]
        fences = [at for at, text in enumerate(code) if "MEMBAR" in text and ".SYS" in text]
        assert fences, name
        for fence in fences:
            before = [text for text in code[:fence] if "BAR.SYNC" in text or "STG" in text]
            assert "BAR.SYNC" in before[-1], (name, "a store between the barrier and the fence")
            assert any(fence < post < fence + 40 for post in posts), name


def test_polls_leave_the_l1_cache_alone_and_it_is_emptied_once_before_data_is_read(
    compiled: dict[str, tuple[str, list[str]]],
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


def test_what_peers_wrote_is_read_past_the_l1_cache_in_128_bits(
    compiled: dict[str, tuple[str, list[str]]],
) -> None:
    for name, (_, code) in compiled.items():
        wide = [text for text in code if "LDG" in text and ".128" in text]
        strong = [text for text in wide if "STRONG.GPU" in text]
        assert strong, name
        if "ring" not in name:  # the ring reads its own message by plain loads
            assert strong == wide, name


def test_the_hosts_word_is_read_in_the_loop_and_told_to_all_threads_alike(
    compiled: dict[str, tuple[str, list[str]]],
) -> None:
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
