"""Benchmarks against the other backends of torch.distributed. Installed as fastcoll.bench."""

__all__: list[str] = []
