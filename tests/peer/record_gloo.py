"""Writes gloo_outcomes.json: what gloo passes, skips and fails in PyTorch's suite on this torch and machine.

    python tests/peer/record_gloo.py [--rounds N]

A test counts as passed only if it passed in every round. Run it again when torch's version or
suite_cases.py has changed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torch_suite import TorchSuite

OUTCOMES = Path(__file__).with_name("gloo_outcomes.json")


def record(rounds: int) -> dict[str, object]:
    """Runs the whole suite on gloo `rounds` times and returns the record."""
    suite = TorchSuite("gloo")
    passed: dict[str, float] = {}
    failed: dict[str, str] = {}
    skipped: dict[str, list[str]] = {}
    beneath_guard: list[str] = []
    for test in suite.tests:
        replies = [suite.run(test) for _ in range(rounds)]
        worst = next((r for r in replies if r["outcome"] != "passed"), replies[0])
        print(f"{worst['outcome']:8}{worst['seconds']:7.2f} s  {test}", flush=True)
        if worst["outcome"] == "passed":
            passed[test] = round(max(r["seconds"] for r in replies), 2)
        elif worst["outcome"] == "skipped":
            skipped.setdefault(worst["detail"], []).append(test)
        else:
            errors = [line for line in worst["detail"].splitlines() if "Error" in line]
            failed[test] = errors[0] if errors else worst["detail"][-200:]
        if worst["beneath_guard"] and worst["outcome"] != "skipped":
            beneath_guard.append(test)
    suite.close()
    return {
        "torch": suite.torch_version,
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "beneath_guard": beneath_guard,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    outcomes = record(parser.parse_args().rounds)
    OUTCOMES.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")
    print({part: len(value) for part, value in outcomes.items() if part != "torch"})


if __name__ == "__main__":
    main()
