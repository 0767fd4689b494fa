"""Triton kernels: the arithmetic around a collective on CUDA tensors. Installed as fastcoll.kernels."""

__all__: list[str] = []
