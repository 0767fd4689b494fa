"""``python -m fastcoll.kernels``: the table of everything the kernels compile to."""

import sys

from fastcoll.kernels.report import main

__all__: list[str] = []

if __name__ == "__main__":  # else the report's own processes would start reports
    sys.exit(main())
