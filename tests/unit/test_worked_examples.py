"""The examples of docs/project/testing.md are the text of tests."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "project" / "testing.md"


def test_each_example_is_in_the_test_that_it_names():
    text = PAGE.read_text()
    examples = re.findall(r"\(([^()]+\.py)\)\):\n\n```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == text.count("```python") == 4
    for file, example in examples:
        source = (PAGE.parent / file).read_text()
        for definition in example.strip().split("\n\n\n"):
            assert f"\n{definition}\n" in source, f"{file} has no longer:\n{definition}"
