"""Plots with one row per policy: memory by kind, and step times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mezzo.records import Memory
from mezzo.report import formatting as fmt
from mezzo.report import sampling, sheets
from mezzo.report.plotting import Figure, base_layout, json_number, label

_MEMORY_COLOURS = ("#4f6bd8", "#6fa8f5", "#58bda4", "#efb55f")


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The step times of one policy."""

    policy: str
    times_ms: list[float]
    emulated: bool


def memory_figure(memory: Mapping[str, Memory]) -> Figure | None:
    """Return the bytes of each kind as one stacked bar per policy; None if nothing was measured."""
    sizes = {policy: _known_bytes(m) for policy, m in memory.items()}
    shown = {policy: m for policy, m in memory.items() if sizes[policy] or sheets.memory_peaks(m)}
    if not shown:
        return None
    largest = max(max(sizes[policy], m.cuda_allocated_bytes or 0) for policy, m in shown.items())
    exponent = fmt.byte_scale(largest)[1]
    kinds = [*sheets.memory_kinds(Memory())]
    traces = [
        _memory_bar(kind, shown, exponent=exponent, colour=colour)
        for kind, colour in zip(kinds, _MEMORY_COLOURS, strict=True)
    ]
    traces += _peak_marks(shown, exponent=exponent)
    layout = _policy_layout([*shown], unit=fmt.byte_unit(exponent))
    return {"data": traces, "layout": layout | {"barmode": "stack", "bargap": 0.45}}


def _known_bytes(memory: Memory) -> int:
    return sum(size or 0 for size in sheets.memory_kinds(memory).values())


def _memory_bar(kind: str, memory: Mapping[str, Memory], *, exponent: int, colour: str) -> Figure:
    sizes = [sheets.memory_kinds(m)[kind] for m in memory.values()]
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "y": list(range(len(memory))),
        "x": [None if size is None else json_number(size / 1024**exponent) for size in sizes],
        "text": [fmt.bytes_text(size) for size in sizes],
        "textposition": "none",
        "marker": {"color": colour},
        "hovertemplate": f"{kind} %{{text}}<extra></extra>",
    }


def _peak_marks(memory: Mapping[str, Memory], *, exponent: int) -> list[Figure]:
    peaks = [(i, m.cuda_allocated_bytes) for i, m in enumerate(memory.values())]
    known = [(i, peak) for i, peak in peaks if peak is not None]
    if not known:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "peak allocated",
            "y": [i for i, _ in known],
            "x": [json_number(peak / 1024**exponent) for _, peak in known],
            "text": [fmt.bytes_text(peak) for _, peak in known],
            "marker": {"symbol": "diamond", "size": 9, "color": "#d95f6e"},
            "hovertemplate": "peak allocated %{text}<extra></extra>",
        }
    ]


def time_figure(timed: Sequence[Timed], *, colours: Mapping[str, str]) -> Figure | None:
    """Return the spread of the step times, one box per policy; an emulated policy gets a note instead of a box.

    None where no policy has a time that says something.
    """
    rows = [t for t in timed if t.emulated or _finite(t.times_ms)]
    if not any(_finite(t.times_ms) for t in rows if not t.emulated):
        return None
    boxes = [_time_box(t, place=i, colour=colours[t.policy]) for i, t in enumerate(rows) if not t.emulated]
    layout = _policy_layout([t.policy for t in rows], unit="ms") | {"showlegend": False}
    layout["xaxis"] |= {"rangemode": "tozero"}
    layout["annotations"] = [_emulated_note(i) for i, t in enumerate(rows) if t.emulated]
    return {"data": boxes, "layout": layout}


def _time_box(timed: Timed, *, place: int, colour: str) -> Figure:
    ordered = sorted(_finite(timed.times_ms))
    ends = {"lowerfence": 0.05, "q1": 0.25, "median": 0.5, "q3": 0.75, "upperfence": 0.95}
    return {
        "type": "box",
        "orientation": "h",
        "name": label(timed.policy),
        "y": [place],
        **{key: [json_number(sampling.quantile(ordered, share))] for key, share in ends.items()},
        "width": 0.4,
        "line": {"color": colour, "width": 1.6},
        "hoverinfo": "x",
    }


def _emulated_note(place: int) -> Figure:
    return {
        "xref": "paper",
        "x": 0.01,
        "xanchor": "left",
        "y": place,
        "text": sheets.NOT_FOR_GPU,
        "showarrow": False,
    }


def _policy_layout(policies: Sequence[str], *, unit: str) -> Figure:
    num = len(policies)
    rows = {
        "tickvals": list(range(num)),
        "ticktext": [label(policy) for policy in policies],
        "range": [num - 0.5, -0.5],  # the first policy on top
        "showgrid": False,
        "fixedrange": True,
    }
    across = {"title": {"text": unit}, "zeroline": True, "fixedrange": True}
    return base_layout(height=120 + 44 * num, xaxis=across, yaxis=rows)


def _finite(values: Sequence[float]) -> list[float]:
    return [v for v in values if math.isfinite(v)]
