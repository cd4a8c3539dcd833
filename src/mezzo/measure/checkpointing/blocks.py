"""The blocks of a model: the modules that ``full``, ``every-k`` and ``selective`` plans checkpoint.

A model's blocks are its modules of one class that runs several times in a pass: the class whose checkpointing gives the lowest
peak. So blocks win over a stage of several blocks, which saves too much when it runs again, and over their own parts, which keep
more inputs. Costs decide, not names.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from mezzo.measure.checkpointing.costs import costs_of
from mezzo.measure.checkpointing.optimum import candidates_of
from mezzo.measure.checkpointing.trace import ForwardTrace


def blocks_of(trace: ForwardTrace) -> list[str]:
    """Return the names of the blocks, in the order in which they run; the outermost modules if no class runs several times."""
    checkpointable = list(
        dict.fromkeys(c.call.module for c in candidates_of(trace, smallest_share=0.0) if "inputs" in c.regions)
    )
    by_class: dict[str, list[str]] = defaultdict(list)
    for name in checkpointable:
        if name:
            by_class[trace.classes[name]].append(name)
    calls = Counter(call.module for call in trace.calls)
    levels = [level for level in map(outermost, by_class.values()) if sum(calls[name] for name in level) > 1]
    if not levels:
        return outermost([name for name in checkpointable if name]) or checkpointable
    return min(levels, key=lambda level: costs_of(trace, dict.fromkeys(level, "inputs")).peak_bytes)


def outermost(names: list[str]) -> list[str]:
    """Return the names that lie in none of the others."""
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
