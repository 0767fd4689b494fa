"""``python tools/check_pages.py``: checks that the pages and the build's files agree with the sources.

Part of ``make lint``. It prints one line for each difference, and ends with status 1 if there is one.
``--links`` checks only what the site needs, which requires no package.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from page import differences
from repository import ROOT
from table_sources import record_of

from fastcoll import env
from fastcoll.bench import options
from fastcoll.bench.record import medians, read_record
from fastcoll.command import COMMANDS

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
GLOSSARY = "docs/project/glossary.md"
MESSAGES = "docs/faults/messages.md"
REFERENCE = "docs/reference/python.md"
STALE = "tools/stale_records.txt"
BACKENDS = ("fastcoll", "gloo", "nccl", "mpi", "vllm", "fake", "unreduced")
"""Those that a benchmark can measure."""


def read(path: str) -> str:
    """Returns the text of a file."""
    return (ROOT / path).read_text()


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    documented = re.findall(r"^::: (\S+)$", text, re.MULTILINE)  # of mkdocstrings
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles} | {
        *documented
    }


def links() -> Iterator[str]:
    """Each relative link leads to a file, and each anchor to a heading."""
    for page in PAGES:
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            if not target.exists():
                yield f"{page.relative_to(ROOT)}: {link} leads to no file"
            elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
                yield f"{page.relative_to(ROOT)}: {link} leads to no heading"


def blocks() -> Iterator[str]:
    """A list or a table of the site begins after an empty line, and its nested lists are indented by 4 columns."""
    for page in PAGES:
        if page.parent == ROOT:
            continue
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for kind, begin in (("list", r"[-*] |\d+\. "), ("table", r"\|")):
            for line in re.findall(rf"^(?!{begin}|\s|#)\S.*\n((?:{begin}).*)", text, re.MULTILINE):
                yield f"{page.relative_to(ROOT)}: no empty line before the {kind} {line!r}"
        for line in re.findall(r"^ {1,3}[-*] .*", text, re.MULTILINE):
            yield f"{page.relative_to(ROOT)}: expected 4 columns before {line!r}"


def variables() -> Iterator[str]:
    """The pages name each variable of fastcoll/settings.def, and no other."""
    known = {one.name: one for one in env.VARIABLES}
    named = {name for page in PAGES for name in re.findall(r"FASTCOLL_[A-Z_]+\b", page.read_text())}
    named = {name for name in named if not name.startswith("FASTCOLL_TEST_")}
    for name in sorted(named ^ known.keys()):
        yield f"{name}: {'no page' if name in known else 'not fastcoll/settings.def, but a page'} has it"


def errors() -> Iterator[str]:
    """Errors that the page of messages quotes are in the sources."""
    files = [*ROOT.glob("csrc/**/*.[ch]pp"), *ROOT.glob("fastcoll/**/*.py")]
    # Adjacent literals are one text.
    sources = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in files))
    quoted = re.findall(r"^\| `([^`]+)` \|", read(MESSAGES), re.MULTILINE)
    for text in [*quoted, *([] if quoted else ["a quoted error"])]:
        if text not in sources:
            yield f"{MESSAGES}: no source says {text!r}"


def interface() -> Iterator[str]:
    """The reference has each public name."""
    page = read(REFERENCE)
    for name in ("__init__", "ddp/__init__", "fsdp/__init__", "info", "trace/__init__"):
        package = f"fastcoll/{name}".removesuffix("/__init__").replace("/", ".")
        tree = ast.parse(read(f"fastcoll/{name}.py"))
        (public,) = (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        for each in public:
            documented = (
                rf"^::: {package}\..*\b{each}$|^## {package}\.{each}$|^`{package}\.{each}` "
            )
            if not re.search(documented, page, re.MULTILINE):
                yield f"{REFERENCE}: it lacks {package}.{each}"


def tables() -> Iterator[str]:
    """Generated tables and pictures agree with their records."""
    for file in differences():
        yield f"{file}: not made of the records as they are. Run `python tools/page.py`."


def commands() -> Iterator[str]:
    """The command of each record exists today, except for the records in tools/stale_records.txt."""
    listed = {line for line in read(STALE).splitlines() if not line.startswith("#")}
    problems = {
        path.name: command_problem(read_record(path))
        for path in sorted((ROOT / "bench" / "results").glob("*.jsonl"))
    }
    for name, problem in problems.items():
        if problem and name not in listed:
            yield f"bench/results/{name}: its command does not work today: {problem}"
        elif name in listed and not problem:
            yield f"{STALE}: the command of {name} works today. Remove the line."
    for name in sorted(listed - problems.keys()):
        yield f"{STALE}: there is no record {name!r}"


def command_problem(record: dict[str, Any]) -> str:
    """Returns the reason why a record's command does not work today, or "". Nothing is run."""
    words = shlex.split(record["command"])
    while words and "=" in words[0]:  # a variable
        words.pop(0)
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error):
            match words:
                case ["python", "-m", "fastcoll.bench", *given]:
                    options.parse(given, models())
                case ["python", "-m", module, *given] if (
                    script := module.removeprefix("fastcoll.bench.")
                ) in options.SCRIPTS:
                    parsed = options.script_parser(script).parse_args(given)
                    options.parse(getattr(parsed, "bench", []), models())
                case ["python", file] if (ROOT / file).is_file():
                    pass
                case [".ci/run", step] if re.search(rf"^{step}\(\)", read(".ci/run"), re.MULTILINE):
                    pass
                case _:
                    return f"there is no {' '.join(words[:3])!r}"
    except SystemExit:
        return error.getvalue().splitlines()[-1]
    unknown = [name for name in record.get("backends", ()) if name.split("-")[0] not in BACKENDS]
    return f"no backend {', '.join(unknown)}" if unknown else ""


def page_commands() -> Iterator[str]:
    """The pages' blocks name their language, their verbs of ``fastcoll`` exist, and their benchmarks parse."""
    for page in PAGES:
        name = page.relative_to(ROOT)
        for word, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.DOTALL):
            if not word and block.startswith("$ "):
                yield f"{name}: expected ```console before {block.splitlines()[0]!r}"
            if word not in ("bash", "console"):
                continue
            for line in block.replace("\\\n", " ").splitlines():
                if word == "bash" or line.startswith("$ "):
                    yield from (f"{name}: {line!r}: {each}" for each in _line_problems(line))


def _line_problems(line: str) -> Iterator[str]:
    if not re.search(
        r"^fastcoll |fastcoll bench|fastcoll\.bench ", line := line.removeprefix("$ ")
    ):
        return
    words = [each for each in shlex.split(line, comments=True) if each != "..."]
    if words[:1] == ["fastcoll"] and words[1] not in (*COMMANDS, "--version"):
        yield f"no command {words[1]!r}"
    given = None
    if words[:2] == ["fastcoll", "bench"]:
        given = words[2:]
    elif "fastcoll.bench" in words:
        given = words[words.index("fastcoll.bench") + 1 :]
    if given is not None:
        problem = command_problem(
            {"command": shlex.join(["python", "-m", "fastcoll.bench", *given])}
        )
        if problem:
            yield problem


def models() -> list[str]:
    """Returns the names of the models of ``fastcoll bench ddp``, whose module needs torch."""
    (listed,) = re.findall(r"^MODELS\b.*\{$(.*?)^\}$", read("bench/gradients.py"), re.M | re.DOTALL)
    return re.findall(r'"(.+)":', listed)


def figures() -> Iterator[str]:
    """Figures in the prose of README and of the page on testing agree with the records."""
    ratios = [
        case["backends"]["gloo"]["time"]["median"] / case["backends"]["fastcoll"]["time"]["median"]
        for name in ("all_reduce", "collectives", "communicator")
        for path in (ROOT / "bench/results").glob(f"{name}_*cpu_*ranks*.jsonl")
        for case in record_of(path.name)["cases"]
        if {"gloo", "fastcoll"} <= case["backends"].keys()
    ]
    lines = [json.loads(line) for line in read("tests/peer/suite_outcomes.jsonl").splitlines()]
    suites = [line["fastcoll"] for line in lines if "suite" in line]
    passed = sum(each.get("passed", 0) for each in suites)
    failed = sum(each.get("failed", 0) for each in suites)
    only = sum(len(line.get("fastcoll_fails", ())) for line in lines)
    faults = record_of("faults_cpu.jsonl")["cases"]
    reported = [
        one["row"]
        for one in faults
        if "success was reported" in one["backends"].get("gloo", {}).get("detail", "")
    ]
    gradients = record_of("ddp_cpu_2ranks.jsonl")["cases"][0]
    (token,) = record_of("compiled_cpu_2ranks.jsonl")["cases"]
    compiled = [f"{medians(token)[by] / 1e3:.1f} ms" for by in ("fastcoll-compile", "gloo")]
    objects = next(
        medians(case)
        for case in record_of("objects_cpu_2ranks.jsonl")["cases"]
        if (case["collective"], case["object"]) == ("broadcast_object", "bytes of 1 KB")
    )
    taken = [f"{objects[by] / 1e3:.2f} ms" for by in ("fastcoll", "gloo", "fastcoll-direct")]
    expected = (
        f"at least {int(min(ratios) * 10) / 10}x",
        f"takes {compiled[0]} with `fastcoll.compile`, and {compiled[1]} with",
        f"of 1 KB takes {taken[0]}, and {taken[1]} on Gloo.",
        f"takes {taken[2]}.",
        f"{passed} pass, {failed - only} fail on Gloo too, [{only} only here]",
        f"({gradients['size'] / 1e6:.0f} MB)",
        f"[rows {reported[0]} to {reported[-1]}]",
    )
    pages = {"README.md": expected, "docs/project/testing.md": [f"| {as_specified(faults)} |"]}
    for name, texts in pages.items():
        page = " ".join(read(name).split())
        for text in texts:
            if text not in page:
                yield f"{name}: expected {text!r}, as the records have it"


def as_specified(faults: list[dict[str, Any]]) -> str:
    """Returns how many faults ended as specified, with fastcoll and with gloo."""
    counts = []
    for backend in ("fastcoll", "gloo"):
        verdicts = [one["backends"].get(backend, {}).get("verdict") for one in faults]
        played = [verdict for verdict in verdicts if verdict not in (None, "not played")]
        counts.append(f"{played.count('as wanted')} of {len(played)} as specified")
    return " | ".join(counts)


WORDS = {
    "who as a subject": r"\b[Ww]ho(?:ever)?\b|\b[Nn]obody\b",
    "a machine that talks": r"\b(?:says?|said|tells?|told|hears?|knows?|believes?|asks?|looks|votes?|g[ai]ves? up)\b",
    "a metaphor": r"\b(?:floors?|house|life word|goodbye|owes?|dear|spared?|lies?|lie)\b",
    "a chain of clauses": r"\bso that\b|^[^|]*, for (?!some)",
}


def language() -> Iterator[str]:
    """Pages and errors keep the rules of language, as far as a search can find violations."""
    lines = [(page, line) for page in PAGES for line in _prose(page).splitlines()]
    lines += [(file, text) for file in _sources() for text in _texts(file)]
    for file, line in lines:
        for kind, pattern in WORDS.items():
            for found in re.findall(pattern, line):
                yield f"{file.relative_to(ROOT)}: {kind}, {found!r}, in {line.strip()!r}"


def _prose(page: Path) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`|<[^>]*>", "", page.read_text(), flags=re.DOTALL)


def _sources() -> list[Path]:
    folders = {"csrc": ("*.cpp", "*.hpp"), "fastcoll": ("*.py",), "kernels": ("*.py",)}
    return [
        path
        for folder, names in folders.items()
        for name in names
        for path in sorted((ROOT / folder).rglob(name))
    ]


def _texts(file: Path) -> Iterator[str]:
    """Yields the literals of a source that have several words."""
    source = file.read_text()
    if file.suffix == ".py":
        tree = ast.parse(source)
        documented = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        literals = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and id(node) not in documented
        ]
    else:
        literals = re.findall(r'"((?:[^"\\\n]|\\.)*)"', re.sub(r"//.*", "", source))
    yield from (text for text in literals if isinstance(text, str) and " " in text)


def glossary() -> Iterator[str]:
    """No source has a name in the last column of the glossary."""
    names = {
        name: row.split(" | ")[0].removeprefix("| ")
        for row in re.findall(r"^\| .* \|$", read(GLOSSARY), re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row.rpartition(" | ")[2])
    }
    if not names:
        yield f"{GLOSSARY}: no name to avoid"
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    for file in _sources():
        for number, line in enumerate(file.read_text().splitlines(), 1):
            for name in pattern.findall(line):
                yield f"{file.relative_to(ROOT)}:{number}: {name}: {GLOSSARY} has {names[name]!r}"


def beginnings() -> Iterator[str]:
    """No page begins with a question to itself."""
    for page in PAGES:
        paragraphs = _prose(page).split("\n\n")
        first = next((one for one in paragraphs if one.strip() and not one.startswith("#")), "")
        if re.match(r"[^.!]*\?", first):
            yield f"{page.relative_to(ROOT)}: begins with a question: {first.split('?')[0].strip()}?"


def releases() -> Iterator[str]:
    """The workflows and the Makefile name the same releases of torch as build_backend/supported.py."""
    supported = runpy.run_path(str(ROOT / "build_backend" / "supported.py"))
    minors, pinned = supported["MINORS"], supported["PINNED"]
    made = re.findall(r"^ +torch: (\[.*\])$", read(".github/workflows/wheels.yml"), re.MULTILINE)
    if [json.loads(each) for each in made] != [list(minors)]:
        yield f".github/workflows/wheels.yml: expected torch: {list(minors)}"
    tested = set(re.findall(r'torch: "([0-9.]+)"', read(".github/workflows/test.yml")))
    if tested != {minors[0], minors[-1], pinned}:
        yield f".github/workflows/test.yml: tests the oldest, pinned and newest torch, not {tested}"
    if f"TORCH := torch=={pinned}." not in read("Makefile"):
        yield f"Makefile: expected TORCH := torch=={pinned}.*"


if __name__ == "__main__":
    everything = (
        *(links, blocks, variables, errors, interface, tables, commands, page_commands),
        *(figures, language, glossary, beginnings, releases),
    )
    checks = (links, blocks) if sys.argv[1:] == ["--links"] else everything
    problems = [problem for check in checks for problem in check()]
    print(*problems, sep="\n", end="\n" if problems else "")
    sys.exit(1 if problems else 0)
