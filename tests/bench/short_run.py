"""Arguments of a run of the bench that takes a second, for tests of what surrounds the numbers."""

__all__ = ["SHORT"]

SHORT = [
    *("-b", "4", "-e", "64K", "-f", "16384"),
    *("-n", "4", "--rounds", "2", "-w", "1", "--turn-ms", "0"),
]
