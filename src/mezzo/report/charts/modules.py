"""The modules of a model as a tree: what each computes in which format, and the error that each makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mezzo.records import AuditRecord, FallbackRecord, ModuleError
from mezzo.report import formatting as fmt
from mezzo.report.charts.data import Bar, BarPart, Bars, Drawn, Nothing, TreeChart, TreeNode
from mezzo.report.colours import format_style

MOST_NODES = 250  # some 500 bytes of the page each
_ALL_OPEN = 60  # nodes up to which the whole tree is unfolded
_NEAR_SHARE = 1 / 8  # of the tolerance
PHASES = ("forward", "recompute", "dgrad", "wgrad", "optimizer")


def phase_bars(record: AuditRecord) -> Drawn:
    """Return the FLOPs of each phase as one bar, divided by format."""
    phases = [phase for phase in PHASES if record.flops_by_phase.get(phase)]
    title = "FLOPs by phase and format"
    if not phases:
        return Nothing(name="flops", title=title, description="No matrix product or convolution ran.")
    longest = max(sum(record.flops_by_phase[phase].values()) for phase in phases)
    rows = []
    for phase in phases:
        flops = record.flops_by_phase[phase]
        rows.append(Bar(name=phase, parts=_format_parts(flops, longest), text=fmt.flops_text(sum(flops.values()))))
    texts = [f"{row.name} {row.text} ({', '.join(f'{p.text} in {p.name}' for p in row.parts)})" for row in rows]
    return Bars(
        name="flops",
        title=title,
        description=f"Matrix products and convolutions: {'; '.join(texts)}.",
        rows=rows,
        legend=_format_legend(record),
    )


def _format_parts(flops: Mapping[str, int], longest: int) -> list[BarPart]:
    order = sorted(flops.items(), key=lambda item: -item[1])
    return [
        BarPart(name=fmt.clean(form), share=n / longest, text=fmt.flops_text(n), style=format_style(form).name)
        for form, n in order
        if n
    ]


def _format_legend(record: AuditRecord) -> list[BarPart]:
    return [BarPart(name=fmt.clean(f), share=0.0, text="", style=format_style(f).name) for f in record.flops_by_format]


@dataclass(kw_only=True)
class _Totals:
    """The work of one module, including those inside it."""

    flops: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    casts: int = 0
    findings: list[str] = field(default_factory=list)


def module_tree(record: AuditRecord, places: Mapping[str, str]) -> Drawn:
    """Return the FLOPs, bytes and casts of each module, including those inside it, the largest first."""
    title = "Module by module"
    totals: dict[str, _Totals] = {}
    for operation in record.operations:
        for path in paths_of(operation.module):
            total = totals.setdefault(path, _Totals())
            total.bytes += operation.bytes
            if operation.flops:
                total.flops[operation.format] = total.flops.get(operation.format, 0) + operation.flops
    for cast in record.casts:
        for path in paths_of(cast.module):
            totals.setdefault(path, _Totals()).casts += cast.count
    for finding in record.findings:
        for module in finding.modules:
            if module in totals and finding.code not in totals[module].findings:
                totals[module].findings.append(finding.code)
    if not totals:
        return Nothing(name="modules", title=title, description="No operation was recorded.")
    longest = max(sum(total.flops.values()) for total in totals.values()) or 1

    def node(path: str, children: Sequence[TreeNode]) -> TreeNode:
        total = totals[path]
        flops = sum(total.flops.values())
        return TreeNode(
            name=fmt.clean(path.rpartition(".")[2]),
            path=fmt.clean(path),
            bars=_format_parts(total.flops, longest),
            text=_format_mix(total.flops),
            numbers=(fmt.flops_text(flops), fmt.bytes_text(total.bytes), str(total.casts)),
            children=children,
            badges=total.findings,
            place=places.get(path, ""),
        )

    def weight(path: str) -> tuple[int, int]:
        return -sum(totals[path].flops.values()), -totals[path].bytes

    first = sorted((path for path in totals if "." not in path), key=weight)
    all_flops = sum(sum(totals[path].flops.values()) for path in first) or 1
    top = [f"{fmt.clean(path)} {fmt.share_text(sum(totals[path].flops.values()) / all_flops)}" for path in first[:3]]
    return TreeChart(
        name="modules",
        title=title,
        description=f"{fmt.plural(len(totals), 'module')}; most of the FLOPs: {', '.join(top)}.",
        note=_shown_note(len(totals))
        + "Each row includes the modules inside it; bytes count all operands and results.",
        heads=("FLOPs", "bytes", "casts"),
        roots=nodes_of(totals, node, weight),
        legend=_format_legend(record),
    )


def _format_mix(flops: Mapping[str, int]) -> str:
    """Return the FLOPs by format, if there is more than one."""
    parts = [f"{fmt.flops_text(n)} in {fmt.clean(form)}" for form, n in flops.items() if n]
    return ", ".join(parts) if len(parts) > 1 else ""


def _shown_note(count: int) -> str:
    return f"The {MOST_NODES} largest of {count} are shown; record.json has all. " if count > MOST_NODES else ""


def paths_of(module: str) -> list[str]:
    """Return the names of the module and of the modules around it, the outermost first."""
    parts = module.split(".")
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]


def nodes_of(
    paths: Mapping[str, object], node: Callable[[str, Sequence[TreeNode]], TreeNode], weight: Callable[[str], object]
) -> list[TreeNode]:
    """Return the roots of the tree of ``paths``, each level ordered by ``weight``; only the first MOST_NODES are kept."""
    kept = sorted(paths, key=weight)[:MOST_NODES]  # type: ignore[arg-type]
    known = dict.fromkeys(path for name in kept for path in paths_of(name) if path)
    inside: dict[str, list[str]] = {}
    for path in sorted(known, key=weight):  # type: ignore[arg-type]
        inside.setdefault(path.rpartition(".")[0], []).append(path)

    def build(path: str) -> TreeNode:
        built = node(path, [build(child) for child in inside.get(path, [])])
        return replace(built, open=len(known) <= _ALL_OPEN or "." not in path)

    return [build(path) for path in inside.get("", [])]


# --- the error that each module makes ---------------------------------------------------------------


def error_tree(record: FallbackRecord) -> Drawn:
    """Return the tree of modules, each with the error that it makes when it runs alone."""
    unit, kept_in = record.searched[:-1], f"kept in {record.format_kept.upper()}"
    title = f"{unit.capitalize()} by {unit}"
    modules = {m.module: m for m in record.modules if not m.unnamed}
    if not modules:
        return Nothing(name="tree", title=title, description=f"No {unit} was run by itself.")
    paths = {path: None for name in modules for path in paths_of(name)}

    def node(path: str, children: Sequence[TreeNode]) -> TreeNode:
        module = modules.get(path)
        if module is None and len(children) == 1:
            # A container that is never called gets no row of its own if it has one child.
            return replace(children[0], name=f"{fmt.clean(path.rpartition('.')[2])}.{children[0].name}")
        tone, word = error_tone(module, record.tolerance)
        share = 0.0 if module is None else _bar_share(_largest(module), record.tolerance)
        return TreeNode(
            name=fmt.clean(path.rpartition(".")[2]),
            path=fmt.clean(path),
            bars=[BarPart(name=word, share=share, text="", style=f"tone-{tone}")] if share else [],
            text="" if module is None and unit == "product" else _error_texts(module),
            numbers=(
                "" if module is None or module.reason else fmt.error_text(_largest(module)),
                fmt.flops_text(module.flops) if module else "",
            ),
            children=children,
            tone=tone,
            badges=(kept_in,) if module is not None and module.kept else (),
        )

    def weight(path: str) -> float:
        below = [_largest(m) for name, m in modules.items() if name == path or name.startswith(f"{path}.")]
        return -max(below, default=0.0)

    kept = [fmt.clean(m.module) for m in modules.values() if m.kept]
    over = sum(_largest(m) > record.tolerance for m in modules.values())
    description = (
        f"{fmt.plural(len(modules), unit)} run by themselves in the lower precision; {over} of them make an error above the "
        f"tolerance of {fmt.error_text(record.tolerance)}; {kept_in}: {', '.join(kept) or 'none'}."
    )
    return TreeChart(
        name="tree",
        title=title,
        description=description,
        note=f"{_shown_note(len(paths))}Each {unit} ran on its FP32 inputs; the bar is the largest error of its outputs and gradients, "
        "and is full where nothing is left of the values.",
        heads=("largest error", "FLOPs"),
        roots=nodes_of(paths, node, weight),
    )


def _largest(module: ModuleError) -> float:
    errors = [e for e in (module.output, module.dgrad, module.wgrad, module.rounded) if e is not None]
    return max((math.inf if math.isnan(error) else error for error in errors), default=0.0)


def _bar_share(error: float, tolerance: float) -> float:
    """Return the bar's length on a logarithmic scale: from a thousandth of the tolerance, or 1e-5, up to an error of 1."""
    if error <= 0:
        return 0.0
    low = math.log10(max(1e-12, min(1e-5, tolerance / 1000)))
    return max(0.02, min(1.0, 1 - math.log10(min(1.0, error)) / low))


def error_tone(module: ModuleError | None, tolerance: float) -> tuple[str, str]:
    """Return the tone of a module's error, and its meaning."""
    if module is None or module.reason:
        return "quiet", "not run by itself"
    error = _largest(module)
    if error >= 1:
        return "bad", "nothing is left of the values"
    if error > tolerance:
        return "bad", "above the tolerance"
    return ("warn", "near the tolerance") if error > tolerance * _NEAR_SHARE else ("good", "small")


def _error_texts(module: ModuleError | None) -> str:
    if module is None:
        return "not called by itself"
    if module.reason:
        return fmt.clean(module.reason)
    parts = (("output", module.output), ("dgrad", module.dgrad), ("wgrad", module.wgrad), ("rounded", module.rounded))
    return fmt.clean(f"{module.type}: " + ", ".join(f"{w} {fmt.error_text(e)}" for w, e in parts if e is not None))
