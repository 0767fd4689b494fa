"""All that parses bytes from sockets, the store and peers' memory, fuzzed for a moment; `make fuzz` takes longer."""

import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "cpp" / "fuzz.sh"


@pytest.mark.full
@pytest.mark.timeout(400)
def test_no_input_breaks_a_parser(tmp_path):
    done = subprocess.run(
        ["bash", str(SCRIPT), "1.5"], capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [int(count) for count in re.findall(r"(\d+) inputs from", done.stdout)]
    assert len(runs) == 3 and min(runs) > 50, done.stdout
    assert "== no reports" in done.stdout
