"""What an audit says: the findings first, then the tables behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from mezzo.records import AS_IS, AuditRecord, Breach, CastTotal, CheckedContract, RoundTrip, TensorFormat, WideProduct
from mezzo.records.run import WIDE_POLICIES
from mezzo.report import formatting as fmt
from mezzo.report import pages
from mezzo.report.charts import modules
from mezzo.report.commands import ScriptCommands, after_failure, best_first, typed_policy, with_fp32
from mezzo.report.log_entries import LogEntry, Table, codes_of, run_entry
from mezzo.report.log_entries import TableValue as Entry
from mezzo.report.pages import finding_section, lines_of
from mezzo.report.sections import (
    FEW_ROWS,
    Charts,
    Fact,
    Grid,
    Headline,
    NextStep,
    Page,
    Section,
    SourceCode,
    facts_section,
)
from mezzo.report.source import SourceLines

_TINY = 0.01
"""Below this share of the FLOPs, mixed precision is practically unused."""
_UNDER_AUTOCAST = ("excluded", "list", "no rule")
"""Causes of wide products that occur only under autocast."""
_BREACHES_SHOWN = 20
_NOT_KEPT = "Not as expected"
_NOTHING_LOWERED = ("A101", "A108")
"""Findings that mixed precision is missing or off: the fix is a policy."""


def page(record: AuditRecord) -> Page:
    """Return what ``record`` says."""
    script = fmt.clean(PurePath(record.run.script).name)
    lines = dict(reversed(_lines_of_modules(record)))
    tables = {
        "Product FLOPs by phase and format": _phases(record),
        "Products in FP32 or wider": _wide(record),
        "Casts": _casts(record),
        "Round-trip casts": _trips(record),
        "Shapes that do not suit Tensor Cores": _problems(record),
        "Kernels of products": _kernels(record),
    }
    notes = [
        *pages.name_meant(record.run),
        *_lowered(record),
        *pages.facts(record.run.effective.left_alone),
        *pages.facts(record.notes),
    ]
    return Page(
        title=f"Audit of {script}",
        script=fmt.clean(record.run.script),
        answer=_answer(record, script),
        sections=[
            *([] if record.contract is None else _contract(record.contract)),
            *(finding_section(finding, lines) for finding in record.findings),
            Charts(
                draw=lambda source: [
                    modules.phase_bars(record),
                    modules.module_tree(record, _places(record, source)),
                ]
            ),
            SourceCode(run=record.run, lines=_lines(record)),
            *(Section(title=title, blocks=[table], details=True, folded=True) for title, table in tables.items()),
            Section(title="Every operation", blocks=[_operations(record)], shown_in="page", folded=True),
            facts_section("Notes", notes, details=True),
        ],
        cases=pages.cases_of(record.located_findings),
        steps=best_first(_next(record)),
        environment=pages.environment_facts(record.run.environment),
        command=pages.command_text(record.run.command, record.run.environment),
    )


def _answer(record: AuditRecord, script: str) -> Headline:
    """Return the formats of the products, and the number of findings."""
    total = sum(record.flops_by_format.values())
    shares = sorted(record.flops_by_format.items(), key=lambda item: -item[1])
    facts = [
        Fact(what=f"FLOPs in {fmt.clean(form)}", value=fmt.share_text(flops / total)) for form, flops in shares[:3]
    ]
    casts = fmt.bytes_text(sum(c.bytes for c in record.casts))
    facts.append(Fact(what="casts", value=str(sum(c.count for c in record.casts)), reason=casts))
    traffic = "operands and results, no cache"
    facts.append(Fact(what="memory traffic", value=fmt.bytes_text(record.bytes), reason=traffic))
    count, failed = len(record.findings), bool(pages.error_text(record.run))
    severe = any(finding.severity == "error" for finding in record.findings)
    contract = record.contract
    if failed or (not record.steps and contract is None):
        tone, word = "bad", "failed" if failed else "no step"
    elif contract is not None and contract.file:
        tone, word = ("bad", _breaches(contract)) if contract.breaches else ("good", "as expected")
    else:
        tone = "bad" if severe else "warn" if count else "good"
        word = fmt.plural(count, "finding") if count else "nothing found"
    return Headline(
        tone=tone,
        word=word,
        sentence=_headline(record, script),
        error=pages.error_and_hint(record.run) if record.run.error else "",
        facts=facts if record.steps else [],
    )


def _lines(record: AuditRecord) -> list[tuple[str, str]]:
    """Return the lines of code that the audit names."""
    products = [(one.line, f"{one.op} in {one.format}: {fmt.clean(one.reason)}") for one in record.wide_products]
    trips = [(one.line, f"cast and cast back: {one.formats}") for one in record.round_trips]
    broken = [] if record.contract is None else [one for one in record.contract.breaches if one.line]
    formats = [(one.line, f"{_name(one)} is in {_or(one.found)}, expected {_or(one.expected)}") for one in broken]
    return [*formats, *lines_of([*record.findings, *record.run.findings]), *products, *trips]


def _kept(contract: CheckedContract, script: str) -> str:
    """Return whether a script keeps its contract; empty if the formats are only listed."""
    if not contract.file:
        return ""
    file, num_found = fmt.clean(PurePath(contract.file).name), len({(one.role, one.name) for one in contract.formats})
    if not contract.breaches:
        return f"{script} keeps {file}: {fmt.plural(num_found, 'tensor')}"
    return f"{script} does not keep {file}: {_breaches(contract)} in {fmt.plural(num_found, 'tensor')}"


def _breaches(contract: CheckedContract) -> str:
    count = len(contract.breaches)
    return f"{count} breach{'es' * (count > 1)}"


def _contract(contract: CheckedContract) -> list[Section]:
    """Return what breaks a contract, and which formats were found."""
    rows = [_broken_row(one) for one in contract.breaches]
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        alike.setdefault(tuple(rest), []).append(name)
    grouped = [(_first_and_more(names), *rest) for rest, names in alike.items()]
    heads = ("tensor", "role", "expected", "found", "when", "line")
    roles: dict[tuple[str, str], list[TensorFormat]] = {}
    for one in contract.formats:
        roles.setdefault((one.role, _or(one.formats)), []).append(one)
    found = [(role, formats, str(len(some)), fmt.clean(some[0].name)) for (role, formats), some in roles.items()]
    return [
        Section(title=_NOT_KEPT, blocks=[Grid(heads=heads, rows=grouped, shown=_BREACHES_SHOWN)], shown_in="terminal"),
        Section(title=_NOT_KEPT, blocks=[Grid(heads=heads, rows=rows)], shown_in="page"),
        Section(
            title="Formats found",
            blocks=[Grid(heads=("role", "format", "tensors", "first"), rows=found, numbers=(2,), shown=FEW_ROWS)],
            details=True,
            folded=True,
        ),
    ]


def _broken_row(one: Breach) -> tuple[str, ...]:
    ranks = f", rank {', '.join(map(str, one.ranks))}" if one.ranks else ""
    when = "" if one.moment is None else f"{one.moment}, step {one.step}"
    found = {"format": _or(one.found), "nothing": "nothing has this name", "unknown": f"unknown: {one.why}"}[
        one.problem
    ]
    line = PurePath(one.line).name if one.line or one.problem != "format" else "not seen"
    return _name(one), one.role, _or(one.expected), found, f"{when}{ranks}".removeprefix(", "), fmt.clean(line)


def _first_and_more(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _name(one: Breach) -> str:
    """Return the tensor of a breach, or the pattern that matches none."""
    return fmt.clean(".".join(filter(None, (one.module, one.tensor))) or f'"{one.pattern}"')


def _or(formats: Sequence[str]) -> str:
    return " or ".join(map(fmt.clean, formats))


def _lines_of_modules(record: AuditRecord) -> list[tuple[str, str]]:
    """Return modules with the lines of code that call them; for a module with several, the first line counts."""
    named: list[WideProduct | RoundTrip | CastTotal] = [*record.wide_products, *record.round_trips, *record.casts]
    return [(one.module, one.line) for one in named if one.line]


def _places(record: AuditRecord, source: SourceLines) -> dict[str, str]:
    """Return the anchor of a source line for each module that has one."""
    known = [(module, source.keys[line]) for module, line in _lines_of_modules(record) if line in source.keys]
    return dict(reversed(known))


def _headline(record: AuditRecord, script: str) -> str:
    contract = "" if record.contract is None else _kept(record.contract, script)
    if not record.steps:
        return contract or f"No step of {script} was audited"
    which = f"{'step' if len(record.steps) == 1 else 'steps'} {fmt.listed([str(step) for step in record.steps])}"
    total = sum(record.flops_by_format.values())
    shares = sorted(record.flops_by_format.items(), key=lambda item: -item[1])
    words = [f"{fmt.share_text(flops / total)} {fmt.clean(form)}" for form, flops in shares] or ["no matrix product"]
    policy, found = fmt.clean(record.run.policy_shown), fmt.plural(len(record.findings), "finding")
    nothing = f"; {policy} {record.run.no_effect}" if record.run.changed_nothing else ""
    summary = f"{which[0].upper()}{which[1:]} of {script} under {policy}: {', '.join(words)}{nothing}; {found}"
    return f"{contract}{'. ' if contract else ''}{_hardly_used(record)}{summary}"


def _hardly_used(record: AuditRecord) -> str:
    """Return a sentence if the script's own mixed precision is off or affects next to nothing; empty otherwise."""
    total = sum(record.flops_by_format.values())
    narrow = sum(flops for form, flops in record.flops_by_format.items() if form not in WIDE_POLICIES)
    is_on = narrow > 0 or any(product.cause in _UNDER_AUTOCAST for product in record.wide_products)
    if record.run.policy != AS_IS or not total or narrow >= _TINY * total:
        return ""
    if not is_on:
        return "" if record.run.effective.num_lowered else "Mixed precision is off. "
    share = f"only {fmt.share_text(narrow / total)}" if narrow else "none"
    return f"Mixed precision is on, but {share} of the FLOPs use it. "


def _lowered(record: AuditRecord) -> list[Fact]:
    """Return how many operations ran below 32 bits, whether matrix products or not; empty if they were not counted."""
    count = record.run.effective.num_lowered
    if count is None or not record.steps:
        return []
    why = f"operations of the audited {'step' if len(record.steps) == 1 else 'steps'} that read or wrote such numbers"
    return [Fact(what="below 32 bits", value=fmt.plural(count, "operation") if count else "no operation", reason=why)]


def _phases(record: AuditRecord) -> Grid:
    formats = list(record.flops_by_format)
    whole = sum(record.flops_by_format.values())
    rows = []
    for phase in modules.PHASES:
        flops = record.flops_by_phase.get(phase)
        if flops:
            share = fmt.share_text(sum(flops.values()) / whole)
            rows.append((phase, *(fmt.flops_text(flops.get(form, 0)) for form in formats), share))
    heads = ("phase", *map(fmt.clean, formats), "share")
    return Grid(heads=heads, rows=rows, numbers=tuple(range(1, len(heads))), shown=FEW_ROWS)


def _wide(record: AuditRecord) -> Grid:
    rows = [
        (fmt.clean(p.module), p.op, p.format, p.cause, fmt.clean(p.reason), fmt.flops_text(p.flops))
        for p in record.wide_products
    ]
    return Grid(
        heads=("module", "operation", "format", "cause", "reason", "FLOPs"), rows=rows, numbers=(5,), shown=FEW_ROWS
    )


def _casts(record: AuditRecord) -> Grid:
    rows = [
        (fmt.clean(c.module), c.phase, c.of, f"{c.source} > {c.target}", str(c.count), fmt.bytes_text(c.bytes))
        for c in record.casts
    ]
    return Grid(heads=("module", "phase", "of", "formats", "count", "bytes"), rows=rows, numbers=(4, 5), shown=FEW_ROWS)


def _trips(record: AuditRecord) -> Grid:
    rows = [
        (
            fmt.clean(t.module),
            t.phase,
            t.formats,
            "needless" if t.needless else "needed, or due to the policy",
            str(t.count),
            fmt.bytes_text(t.bytes),
        )
        for t in record.round_trips
    ]
    return Grid(heads=("module", "phase", "formats", "", "count", "bytes"), rows=rows, numbers=(4, 5), shown=FEW_ROWS)


def _problems(record: AuditRecord) -> Grid:
    rows = [
        (
            fmt.clean(p.module),
            p.phase,
            p.op,
            p.format,
            f"{f'{p.batch} x ' if p.batch > 1 else ''}{p.m} x {p.n} x {p.k}",
            "; ".join(p.problems) or f"ran {', '.join(map(fmt.clean, p.kernels))}",
            fmt.flops_text(p.flops),
        )
        for p in record.products
        if not p.eligible or p.on_tensor_cores is False
    ]
    return Grid(
        heads=("module", "phase", "operation", "format", "m x n x k", "problem", "FLOPs"),
        rows=rows,
        numbers=(6,),
        shown=FEW_ROWS,
    )


def _kernels(record: AuditRecord) -> Grid:
    rows = [
        (fmt.clean(k.name), "Tensor Cores" if k.tensor_cores else "none", str(k.count), fmt.ms_text(k.time_ms))
        for k in record.kernels
    ]
    return Grid(heads=("kernel", "Tensor Cores", "count", "time"), rows=rows, numbers=(2, 3), shown=FEW_ROWS)


def _operations(record: AuditRecord) -> Grid:
    rows = [
        (
            fmt.clean(o.module),
            o.phase,
            fmt.clean(o.op),
            ", ".join(o.inputs),
            ", ".join(o.outputs),
            str(o.count),
            fmt.flops_text(o.flops) if o.flops else "",
            fmt.bytes_text(o.bytes),
        )
        for o in record.operations
    ]
    heads = ("module", "phase", "operation", "in", "out", "count", "FLOPs", "bytes")
    return Grid(heads=heads, rows=rows, numbers=(5, 6, 7))


def _next(record: AuditRecord) -> Iterator[NextStep]:
    commands, policy = ScriptCommands(record.run), typed_policy(record.run)
    if record.run.error is not None or record.run.exit_code:
        yield from after_failure(record.run, commands, policy)
        return
    if len(record.steps) == 1 and not any(record.flops_by_format.values()) and commands.script:
        why = "that step had no matrix product; if optimizers take turns, audit a whole round"
        yield from commands.step(why, "audit", at=f"{record.steps[0]}-{record.steps[0] + 3}")
    wide = record.run.policy == AS_IS and set(record.flops_by_format) <= set(WIDE_POLICIES)
    if wide:
        yield from commands.step(
            "see whether 16 bits train as well, and what they save", "compare", policies="fp32,bf16,fp16"
        )
    if record.findings and record.findings[0].code not in _NOTHING_LOWERED:
        why = f"after fixing {record.findings[0].code}, see what is left"
        yield from commands.again(why) if commands.script else commands.step(why, "audit")
    if not wide:
        yield from commands.step(f"see whether {policy} trains like fp32", "compare", policies=with_fp32(policy))


def log_entry(record: AuditRecord) -> LogEntry:
    """Return what is logged of an audit."""
    rows: list[list[Entry]] = [[f.code, f.title, f.share, " ".join(f.modules), f.fix] for f in record.findings]
    total = sum(record.flops_by_format.values()) or 1
    numbers = {f"share_of_flops/{name}": flops / total for name, flops in record.flops_by_format.items()}
    if record.contract is not None and record.contract.file:
        numbers["breaches"] = len(record.contract.breaches)
    table = Table(name="findings", columns=["code", "title", "share", "modules", "fix"], rows=rows)
    return run_entry(record.run, record, tags=codes_of(record.findings), numbers=numbers, tables=[table])
