"""Mixed-precision training that people can turn on, trust and prove.

The names below are the library; everything is imported on first use, so ``import mezzo`` costs nothing and needs no
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mezzo.callables import audit, diagnose, fallback, ranges
    from mezzo.engine.checks import PrecisionWarning
    from mezzo.engine.fastpath import fast_path
    from mezzo.engine.optimizers import SGD, AdamW
    from mezzo.engine.scaling import DynamicScale, NoScale, StaticScale
    from mezzo.engine.session import Session
    from mezzo.errors import (
        MezzoError,
        NonFiniteLossError,
        PolicyError,
        RecordError,
        ScaleFloorError,
        ScriptError,
        SessionError,
        UnsupportedFormatError,
    )
    from mezzo.explain import Choice
    from mezzo.policy import Policy
    from mezzo.records import read_record

_HOMES = {
    "AdamW": "mezzo.engine.optimizers",
    "Choice": "mezzo.explain",
    "DynamicScale": "mezzo.engine.scaling",
    "MezzoError": "mezzo.errors",
    "NoScale": "mezzo.engine.scaling",
    "NonFiniteLossError": "mezzo.errors",
    "Policy": "mezzo.policy",
    "PolicyError": "mezzo.errors",
    "PrecisionWarning": "mezzo.engine.checks",
    "RecordError": "mezzo.errors",
    "SGD": "mezzo.engine.optimizers",
    "ScaleFloorError": "mezzo.errors",
    "ScriptError": "mezzo.errors",
    "Session": "mezzo.engine.session",
    "SessionError": "mezzo.errors",
    "StaticScale": "mezzo.engine.scaling",
    "UnsupportedFormatError": "mezzo.errors",
    "diagnose": "mezzo.callables",
    "fallback": "mezzo.callables",
    "fast_path": "mezzo.engine.fastpath",
    "ranges": "mezzo.callables",
    "audit": "mezzo.callables",
    "read_record": "mezzo.records",
}

__all__ = [
    "SGD",
    "AdamW",
    "Choice",
    "DynamicScale",
    "MezzoError",
    "NoScale",
    "NonFiniteLossError",
    "Policy",
    "PolicyError",
    "PrecisionWarning",
    "RecordError",
    "ScaleFloorError",
    "ScriptError",
    "Session",
    "SessionError",
    "StaticScale",
    "UnsupportedFormatError",
    "audit",
    "diagnose",
    "fallback",
    "fast_path",
    "ranges",
    "read_record",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'mezzo' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
