"""One prediction in detail: throughput over batch sizes, memory over the step, and the time of each module."""

from __future__ import annotations

import math

from mezzo.records import BatchCurve, Prediction, PredictionDetail, PredictRecord
from mezzo.report import formatting as fmt
from mezzo.report.charts.data import NAN, Axis, BarPart, Chart, Drawn, Line, Mark, Nothing, Span, TreeChart, TreeNode
from mezzo.report.charts.modules import MOST_NODES, nodes_of, paths_of
from mezzo.report.colours import Style, kind_style, policy_styles

_KINDS = ("parameters", "gradients", "optimizer", "activations", "temporaries")
_BOUNDS = ("arithmetic", "bandwidth", "launch")


def predict_charts(record: PredictRecord) -> list[Drawn]:
    """Return the charts of the fastest prediction that fits."""
    detail = record.detail
    if detail is None:
        return []
    return [batch_chart(record, detail), timeline_chart(record, detail), time_tree(record, detail)]


def _name(detail: PredictionDetail) -> str:
    plan = f", {fmt.clean(detail.checkpoint)}" if detail.checkpoint else ""
    return f"{fmt.clean(detail.gpu)}, {fmt.clean(detail.policy)}{plan}"


# --- throughput over batch sizes -----------------------------------------------------------------------------------------------


def batch_chart(record: PredictRecord, detail: PredictionDetail) -> Drawn:
    """Return the throughput of each policy up to the largest batch that fits, on a scale of doublings."""
    title = f"Throughput and the largest batch on {fmt.clean(detail.gpu)}"
    curves = [curve for curve in detail.curves if curve.batches]
    if not curves:
        why = record.no_other_batch
        description = f"Other batch sizes cannot be derived from this one{': ' if why else ''}{fmt.clean(why)}."
        return Nothing(name="batches", title=title, description=description)
    unit = fmt.clean(record.unit)
    sizes = sorted({size for curve in curves for size in curve.batches})
    styles = policy_styles([curve.policy for curve in curves])
    lines = [_rate_line(curve, sizes, styles[curve.policy]) for curve in curves]
    loader, note = record.loader, ""
    if loader is not None and loader.samples_per_s is not None:
        rate = loader.samples_per_s * record.gpus_per_job
        lines.append(Line(name="loader here", style=Style(family="other"), y=[rate] * len(sizes)))
        note = f" The script's loader delivers {fmt.rate_text(rate)} {unit}/s on this machine."
    ends = [
        f"{fmt.clean(curve.policy)} {curve.batches[-1]} with {fmt.rate_text(curve.throughput[-1])} {unit}/s"
        for curve in curves
    ]
    return Chart(
        name="batches",
        title=title,
        description=f"The largest batch that {_largest(record, detail)}: {'; '.join(ends)}.",
        note=f"Predicted. A cross marks the largest batch, which fits into {1 - record.headroom:.0%} of the memory. "
        f"This record is of batch {record.batch}.{note}",
        x=[math.log2(size) for size in sizes],
        last_x=math.log2(sizes[-1]),
        x_axis=Axis(title="batch", kind="doubling"),
        y_axis=Axis(title=f"{unit}/s", low=0.0),
        lines=lines,
        layered=True,
        point_noun="batch",
    )


def _largest(record: PredictRecord, detail: PredictionDetail) -> str:
    """Return what the largest batches have in common."""
    kinds = {one.largest_limit for one in record.predictions if one.gpu == detail.gpu and one.largest_batch}
    limits = [
        {"data set": "the data set has", "measured": "measurements cover"}.get(kind, "fits") for kind in sorted(kinds)
    ]
    return " or that ".join(limits)


def _rate_line(curve: BatchCurve, sizes: list[int], style: Style) -> Line:
    rates = dict(zip(curve.batches, curve.throughput, strict=True))
    largest = curve.batches[-1]
    end = Mark(x=math.log2(largest), y=rates[largest], shape="cross", text=f"{largest}: the largest")
    return Line(name=fmt.clean(curve.policy), style=style, y=_between(sizes, rates), marks=[end])


def _between(sizes: list[int], rates: dict[int, float]) -> list[float]:
    """Return a rate for each size; an unknown rate is interpolated between its neighbours."""
    known = sorted(rates)
    filled = []
    for size in sizes:
        if size in rates or size > known[-1]:
            filled.append(rates.get(size, NAN))
            continue
        below, above = max((k for k in known if k < size), default=0), min(k for k in known if k > size)
        if not below:  # no smaller batch was predicted
            filled.append(NAN)
            continue
        share = math.log2(size / below) / math.log2(above / below)
        filled.append(rates[below] + share * (rates[above] - rates[below]))
    return filled


# --- memory over the step --------------------------------------------------------------------------------------------------------


def timeline_chart(record: PredictRecord, detail: PredictionDetail) -> Drawn:
    """Return the allocated bytes by kind over one step."""
    line, title = detail.timeline, f"Memory over one step, by kind ({_name(detail)})"
    totals = [sum(values) for values in zip(*line.kinds.values(), strict=True)]
    if not totals:
        return Nothing(name="timeline", title=title, description="No tensor was allocated.")
    _, power = fmt.byte_scale(max(totals))
    scale, unit = 1024.0**power, fmt.BYTE_UNITS[power]
    lines = [Line(name="all", style=Style(family="fp32", shade=0), y=[total / scale for total in totals])]
    for kind, values in line.kinds.items():
        style = kind_style(_KINDS.index(kind)) if kind in _KINDS else Style(family="other")
        lines.append(Line(name=fmt.clean(kind), style=style, y=[value / scale for value in values]))
    peak = max(range(len(totals)), key=totals.__getitem__)
    parts = sorted(((values[peak], kind) for kind, values in line.kinds.items() if values[peak]), reverse=True)
    listed = ", ".join(f"{fmt.clean(kind)} {fmt.bytes_text(size)}" for size, kind in parts)
    spans = []
    if line.backward is not None:
        end = line.optimizer if line.optimizer is not None else line.places[-1]
        spans.append(Span(axis="x", low=line.backward, high=end, text="backward pass"))
    return Chart(
        name="timeline",
        title=title,
        description=f"The memory of tensors peaks at {fmt.bytes_text(totals[peak])} {_phase(record, line.places[peak])}: {listed}.",
        note="Predicted. From left to right: the forward pass, the backward pass (shaded) and the optimizer's step; each position is "
        "one tensor that is allocated or freed. The GPU shows more, because torch's allocator reserves memory and the driver needs some: "
        f"{fmt.bytes_text(_device_bytes(record, detail))} of {fmt.bytes_text(detail.limit_bytes)}.",
        x=line.places,
        last_x=line.places[-1],
        x_axis=Axis(title="tensors allocated and freed"),
        y_axis=Axis(title=unit, low=0.0),
        lines=lines,
        spans=spans,
        layered=True,
        point_noun="event",
    )


def _phase(record: PredictRecord, place: int) -> str:
    line = record.detail.timeline if record.detail is not None else None
    if line is None or line.backward is None or place < line.backward:
        return "in the forward pass"
    return "in the backward pass" if line.optimizer is None or place < line.optimizer else "in the optimizer's step"


def _is_detailed(prediction: Prediction, detail: PredictionDetail) -> bool:
    return (prediction.gpu, prediction.policy, prediction.checkpoint) == (detail.gpu, detail.policy, detail.checkpoint)


def _device_bytes(record: PredictRecord, detail: PredictionDetail) -> int:
    return next((p.device_bytes for p in record.predictions if _is_detailed(p, detail)), 0)


# --- the time of each module -------------------------------------------------------------------------------------------------------


def time_tree(record: PredictRecord, detail: PredictionDetail) -> Drawn:
    """Return the time of each module, including those inside it, by what it waits for."""
    title = f"Time by module ({_name(detail)})"
    totals: dict[str, dict[str, float]] = {}
    for module in detail.modules:
        for path in paths_of(module.module):
            total = totals.setdefault(path, {})
            for kind, ms in module.ms.items():
                total[kind] = total.get(kind, 0.0) + ms
    if not totals:
        return Nothing(name="times", title=title, description="No operation was traced.")
    step = sum(sum(module.ms.values()) for module in detail.modules)
    longest = max(sum(total.values()) for total in totals.values())

    def node(path: str, children: object) -> TreeNode:
        total = totals[path]
        ms = sum(total.values())
        bars = [
            BarPart(name=kind, share=total[kind] / longest, text=fmt.ms_text(total[kind]), style=kind_style(n).name)
            for n, kind in enumerate(_BOUNDS)
            if total.get(kind)
        ]
        return TreeNode(
            name=fmt.clean(path.rpartition(".")[2]),
            path=fmt.clean(path),
            bars=bars,
            text="",
            numbers=(
                fmt.ms_text(ms),
                fmt.share_text(ms / step),
                max(total, key=lambda kind: total[kind], default=fmt.MISSING),
            ),
            children=list(children),  # type: ignore[call-overload]
        )

    def weight(path: str) -> float:
        return -sum(totals[path].values())

    first = sorted((path for path in totals if "." not in path), key=weight)[:3]
    top = [f"{fmt.clean(path)} {fmt.share_text(-weight(path) / step)}" for path in first]
    shown = f"The {MOST_NODES} longest of {len(totals)} are shown. " if len(totals) > MOST_NODES else ""
    return TreeChart(
        name="times",
        title=title,
        description=f"Most of the step's {fmt.ms_text(step)} on the GPU: {', '.join(top)}.",
        note=f"{shown}Predicted. Each row includes the modules inside it, forward and backward.{_host_note(record, detail, step)}",
        heads=("time", "share", "bound by"),
        roots=nodes_of(totals, node, weight),
        legend=[
            BarPart(name=_legend_text(kind), share=0.0, text="", style=kind_style(n).name)
            for n, kind in enumerate(_BOUNDS)
        ],
    )


def _legend_text(kind: str) -> str:
    return {"launch": "launch: too small to fill the GPU"}.get(kind, kind)


def _host_note(record: PredictRecord, detail: PredictionDetail, gpu_ms: float) -> str:
    """Return a note if the host cannot launch operations as fast as the GPU computes them."""
    step_ms = next((p.step_ms for p in record.predictions if _is_detailed(p, detail)), 0.0)
    return (
        f" The step takes {fmt.ms_text(step_ms)}: the host launches operations more slowly than the GPU computes them."
        if step_ms > 1.1 * gpu_ms
        else ""
    )
