"""The options of one process group: ``init_process_group("fastcoll", pg_options=fastcoll.Options())``.

Importing this module loads no compiled code. ``fastcoll/_C.pyi`` describes the fields, their units and
defaults. The environment variables of ``fastcoll.env`` win over the fields, as NCCL's do; only
``tuning`` wins over its variable.
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
