"""The options of one process group: ``init_process_group("fastcoll", pg_options=fastcoll.Options())``.

Kept apart from the compiled module so that importing it loads nothing. The fields, their units and
defaults are described in ``fastcoll/_C.pyi``; the environment variables of ``fastcoll.env`` win over
them, as NCCL's do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastcoll._C import Options

__all__ = ["Options"]


def __getattr__(name: str) -> Any:
    if name == "Options":
        from fastcoll._load import C

        return C.Options
    raise AttributeError(f"module 'fastcoll.options' has no attribute {name!r}")
