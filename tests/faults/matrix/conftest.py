"""Where the matrix finds the other fault tests, whose scenarios it plays."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "soak"), str(HERE)]
