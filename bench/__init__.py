"""Benchmarks against the stock backends. Installed as fastcoll.bench."""

__all__: list[str] = []
