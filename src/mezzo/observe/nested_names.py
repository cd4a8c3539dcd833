"""Names of modules that lie inside one another, as ``body`` and ``body.0``. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

SCRIPT = "(script)"
"""Stands for a module's name in code outside any module."""


def covered(name: str, kept: Iterable[str]) -> bool:
    """Return whether ``name`` is one of ``kept`` or lies inside one."""
    return any(name == other or name.startswith(f"{other}.") for other in kept)


def outermost(names: Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` sorted, each once, without those that lie inside another."""
    unique = sorted(set(names))
    return tuple(name for name in unique if not covered(name, [other for other in unique if other != name]))
