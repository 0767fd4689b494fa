"""Arguments of a run of the bench that takes a second, for tests of what surrounds the numbers."""

__all__ = ["SHORT"]

SHORT = [
    "-b",
    "4",
    "-e",
    "64K",
    "-f",
    "128",
    "-n",
    "6",
    "--rounds",
    "3",
    "-w",
    "1",
    "--turn-ms",
    "0",
]
