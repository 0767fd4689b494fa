"""``python -m fastcoll``: the command ``fastcoll``."""

import sys

from fastcoll.command import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
