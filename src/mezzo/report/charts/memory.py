"""The memory of a step by kind, one bar for each policy."""

from __future__ import annotations

from collections.abc import Mapping

from mezzo.records import Memory
from mezzo.report import formatting as fmt
from mezzo.report.charts.data import Bar, BarPart, Bars, Drawn, Nothing
from mezzo.report.colours import Style


def memory_bars(memory: Mapping[str, Memory], *, styles: Mapping[str, Style]) -> Drawn:
    """Return the bytes of each kind, one bar for each policy."""
    title = "Memory of a step, by kind"
    measured = {p: m for p, m in memory.items() if any(memory_kinds(m).values()) or memory_peaks(m)}
    known = {p: m for p, m in measured.items() if not m.of_emulation}
    if not known:
        why = f"Not drawn; {fmt.NOT_FOR_GPU}." if measured else "Memory was not measured."
        return Nothing(name="memory", title=title, description=why)
    longest = max(max(_known_bytes(m), m.cuda_allocated_bytes or 0) for m in known.values()) or 1
    rows = [_bar(policy, m, longest=longest, style=styles.get(policy)) for policy, m in known.items()]
    kinds = [*memory_kinds(Memory())]
    parts = [f"{row.name} {row.text}{_largest_kind(m)}" for row, m in zip(rows, known.values(), strict=True)]
    return Bars(
        name="memory",
        title=title,
        description=f"Bytes of one step: {'; '.join(parts)}.",
        note="Activations are what the forward pass saves for the backward pass, including cast copies of weights.",
        rows=rows,
        legend=[BarPart(name=kind, share=0.0, text="", style=f"kind-{n}") for n, kind in enumerate(kinds)],
        mark_text="peak reported by the allocator" if any(row.mark is not None for row in rows) else "",
    )


def _largest_kind(memory: Memory) -> str:
    size, kind = max((size or 0, kind) for kind, size in memory_kinds(memory).items())
    return f", most of it {kind}" if size else ""


def _known_bytes(memory: Memory) -> int:
    return sum(size or 0 for size in memory_kinds(memory).values())


def _bar(policy: str, memory: Memory, *, longest: int, style: Style | None) -> Bar:
    parts = [
        BarPart(name=kind, share=size / longest, text=fmt.bytes_text(size), style=f"kind-{number}")
        for number, (kind, size) in enumerate(memory_kinds(memory).items())
        if size
    ]
    peak = memory.cuda_allocated_bytes
    total = fmt.bytes_text(memory.total_bytes)
    text = total if peak is None else f"{total}, peak {fmt.bytes_text(peak)}"
    return Bar(
        name=fmt.clean(policy), parts=parts, text=text, style=style, mark=None if peak is None else peak / longest
    )


def memory_kinds(memory: Memory) -> dict[str, int | None]:
    """Return the bytes of the four kinds by display name; None for one that was not measured."""
    return {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
    }


def memory_peaks(memory: Memory) -> dict[str, int | None]:
    """Return the allocator's peaks, if the device reports them."""
    peaks = {
        "peak allocated": memory.cuda_allocated_bytes,
        "peak reserved": memory.cuda_reserved_bytes,
    }
    return {k: v for k, v in peaks.items() if v is not None}
