"""What the pages of several kinds of record share: the environment, memory, formats, results of a run.

Text from a script or a model passes through ``clean`` here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import PurePath
from types import MappingProxyType

from mezzo.records import AnyRecord, Environment, Finding, Memory, Note, RankRun, RunRecord
from mezzo.report import formatting as fmt
from mezzo.report.charts.data import Bar, BarPart, Bars, Drawn, Nothing
from mezzo.report.colours import Style, format_style, policy_style
from mezzo.report.sections import Cell, Fact, FactTable, Grid, JudgedCase, Page, Section, Share

_LONGEST_WORD = 100_000  # of a command, which must stay whole to be pasted: a policy may name hundreds of modules
_ENVIRONMENT_LABELS = {
    "date": "Date",
    "device": "Device",
    "gpu": "GPU",
    "driver": "Driver",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "triton": "Triton",
    "cpu": "CPU",
    "threads": "Threads",
    "os": "OS",
    "torch": "PyTorch",
    "python": "Python",
    "mezzo": "Mezzo",
}


def page_of(record: AnyRecord) -> Page:
    """Return what ``record`` says; only the page of its command is imported."""
    page: Page = import_module(f"mezzo.commands.{record.kind}.page").page(record)
    return page


def command_name(record: AnyRecord) -> str:
    """Return the command that made a record, as it is typed."""
    if isinstance(record, RunRecord) and record.watched:
        return "watch"
    return record.kind.replace("_", "-")


def facts(reasons: Sequence[Note]) -> list[Fact]:
    """Return ``reasons`` as lines of a table."""
    return [Fact(what=fmt.clean(r.what), value=fmt.clean(r.value), reason=fmt.clean(r.reason)) for r in reasons]


def explained(record: RunRecord) -> list[Fact]:
    """Return what the name of a run's policy stands for, and then what the policy does."""
    return [*name_meant(record), *facts(record.explanation)]


def name_meant(record: RunRecord) -> list[Fact]:
    """Return what the typed name of a run's policy stands for; nothing if that is the policy's own name."""
    if not record.policy_typed:
        return []
    why = f"{fmt.clean(record.policy_typed)} stands for it"
    return [Fact(what="policy", value=fmt.clean(record.policy), reason=why)]


def environment_facts(environment: Environment, *, framework: str = "") -> list[Fact]:
    """Return what is known about the machine and the versions, and the framework if it is not torch."""
    known = [
        (k, fmt.date_text(environment.date) if k == "date" else getattr(environment, k)) for k in _ENVIRONMENT_LABELS
    ]
    known = [(k, v) for k, v in known if k != "triton" or environment.gpu is not None]  # no kernel of it runs on a CPU
    facts = [Fact(what=_ENVIRONMENT_LABELS[k], value=fmt.clean(str(v))) for k, v in known if v is not None]
    other = framework.partition(" ")[0] not in ("", "torch")
    return [*facts[:-1], Fact(what="Framework", value=fmt.clean(framework)), facts[-1]] if other else facts


def memory_section(measured: Sequence[tuple[str, Memory]]) -> Section:
    """Return the memory of each policy by kind, for the terminal: a page has a chart of it."""
    sizes = [memory_kinds(memory) | memory_peaks(memory) for _, memory in measured]
    kinds = list(dict.fromkeys(kind for known in sizes for kind in known))
    rows: list[tuple[str | Cell, ...]] = [
        (
            policy_cell(policy),
            *(fmt.bytes_text(known.get(kind)) for kind in kinds),
            fmt.bytes_text(memory.total_bytes) + (" (emulated)" if memory.of_emulation else ""),
        )
        for (policy, memory), known in zip(measured, sizes, strict=True)
    ]
    heads = ("policy", *kinds, "total")
    table = Grid(heads=heads, rows=rows, numbers=range(1, len(heads)))
    return Section(title="Memory of a step", blocks=[table], shown_in="terminal", details=True)


def policy_cell(policy: str, style: Style | None = None) -> Cell:
    """Return a policy's name in the colour of its format, or in ``style`` beside others of this format."""
    return Cell(text=fmt.clean(policy), style=style or policy_style(policy))


def shares(share_by_format: Mapping[str, float]) -> list[Share]:
    """Return the formats of ``share_by_format``, largest share first."""
    order = sorted(share_by_format.items(), key=lambda item: -item[1])
    return [
        Share(
            format=fmt.clean(name),
            text=fmt.share_text(share),
            percent=round(100 * share, 2),
            style=format_style(name).name,
        )
        for name, share in order
    ]


def formats_text(record: RunRecord) -> str:
    """Return the formats of a run's matrix products, the largest share first, as in ``fp16 99%, fp32 1%``."""
    parts = shares(record.effective.share_by_format)
    return ", ".join(f"{part.format} {part.text}" for part in parts) or "none counted"


def shares_note(*runs: RunRecord) -> str:
    """Return how the shares of ``runs`` were counted, and under which of their policies formats were emulated."""
    counted = [run for run in runs if run.effective.flops_by_format]
    if not counted:
        return "No matrix product or convolution was counted."
    steps = {run.effective.counted_on_step for run in counted}
    step = next(iter(steps)) if len(steps) == 1 else None
    where = "" if step is None else f" on step {step}"
    note = f"Share of the floating-point operations of matrix products and convolutions, counted{where}."
    worlds = _policies(run for run in counted if ":world=" in (run.policy or ""))
    if worlds:
        note += (
            f" Under {fmt.listed(worlds)} reductions over processes were emulated: times say nothing about a speed-up."
        )
    sums = [
        one for one in _policies(run for run in counted if ":gradients=" in (run.policy or "")) if one not in worlds
    ]
    if sums:
        note += f" Under {fmt.listed(sums)} sums of gradients were emulated: times say nothing about a speed-up."
    emulated = [
        policy
        for policy in _policies(run for run in counted if run.effective.emulated)
        if policy not in (*worlds, *sums)
    ]
    if not emulated:
        return note
    native = _policies(run for run in counted if run.effective.lowered and not run.effective.emulated)
    under = f"Under {fmt.listed(emulated)} the" if native else "The"
    how = "emulated (rounded to the format, multiplied in a wider one): times say nothing about a speed-up"
    return f"{note} {under} lower formats were {how}."


def _policies(runs: Iterable[RunRecord]) -> list[str]:
    return list(dict.fromkeys(fmt.clean(run.policy_shown) for run in runs))


def first_steps_text(*runs: RunRecord) -> str:
    """Return that runs were stopped after their first steps, as requested; empty if none was."""
    numbers = {run.first_steps for run in runs if run.first_steps is not None}
    return f"stopped after the {fmt.first(max(numbers), 'step')}, as requested" if numbers else ""


def final_loss_text(record: RunRecord) -> str:
    """Return the loss of the last step, or the last one of each of several losses."""
    several = [
        f"{fmt.clean(loss.name)} {fmt.number_text(loss.values[-1])}" for loss in record.steps.losses if loss.values
    ]
    return ", ".join(several) or fmt.number_text(record.steps.loss[-1] if record.steps.loss else None)


def command_text(command: Sequence[str], environment: Environment) -> str:
    """Return a command as a shell line, preceded by the environment variables that matter, if their names are names for a shell."""
    variables = [
        f"{name}={shlex.quote(fmt.clean(value))}"
        for name, value in environment.variables.items()
        if name.isascii() and name.isidentifier()
    ]
    return " ".join([*variables, shlex.join([fmt.clean(part, most=_LONGEST_WORD) for part in command])])


def error_text(record: RunRecord) -> str:
    """Return the error of a run; empty if there is none."""
    if record.error is not None:
        return fmt.clean(record.error, keep_lines=True)
    return f"the script ended with exit code {record.exit_code}" if record.exit_code else ""


def error_and_hint(record: RunRecord) -> str:
    """Return the error of a run and, on a second line, what to do about it; empty if there is no error."""
    hint = f"\nhint: {fmt.clean(record.hint)}" if record.error is not None and record.hint else ""
    return error_text(record) + hint


def first_error_and_hint(runs: Iterable[RunRecord]) -> str:
    """Return the error and the hint of the first run that has a hint; empty if none has."""
    return next((error_and_hint(run) for run in runs if run.error is not None and run.hint), "")


def ran_text(record: RunRecord) -> str:
    """Return the formats that the counted operations ran in."""
    shares = [f"{share:.0%} {fmt.clean(name)}" for name, share in record.effective.share_by_format.items()]
    return f"{fmt.listed(shares)} ran" if shares else "no operation ran below 32 bits"


# --- Ranks -----------------------------------------------------------------------------------------------------------------------

_SHOWN = 64


def rank_facts(record: RunRecord) -> list[Fact]:
    """Return one line for each process of a run; empty for a run in one process."""
    lines = [_rank(rank) for rank in record.ranks[:_SHOWN]]
    left = len(record.ranks) - len(lines)
    return [*lines, Fact(what="more", value=f"{left} ranks", reason="record.json has all")] if left else lines


def difference_facts(*runs: RunRecord) -> list[Fact]:
    """Return what should be the same in all processes and is not; for several runs, with the run that shows it."""
    differences = []
    for run in runs:
        where = f"{fmt.clean(run.policy_shown)}, seed {run.seed}: " if len(runs) > 1 else ""
        differences += [
            Fact(what=f"{where}{fact.what}", value=fact.value, reason=fact.reason, tone="warn")
            for fact in facts(run.between_ranks)
        ]
    return differences


def _rank(rank: RankRun) -> Fact:
    parts = [fmt.plural(rank.num_steps, "step")]
    if rank.step_ms is not None:
        parts.append(f"{fmt.ms_text(rank.step_ms)} a step")
    memory = rank.cuda_allocated_bytes or rank.total_bytes
    if memory is not None:
        parts.append(fmt.bytes_text(memory))
    if rank.final_loss is not None:
        parts.append(f"final loss {fmt.number_text(rank.final_loss)}")
    if rank.skipped_steps:
        parts.append(f"{len(rank.skipped_steps)} skipped")
    failed = fmt.clean(rank.error or "")
    where = [fmt.clean(rank.host), fmt.clean(rank.device), failed]
    return Fact(
        what=f"rank {rank.rank}",
        value=", ".join(parts),
        reason=", ".join(filter(None, where)),
        tone="bad" if failed else "",
    )


# --- Findings --------------------------------------------------------------------------------------------------------------------

_TONES = {"error": "bad", "warning": "warn", "info": "open", "": "warn"}


def finding_section(finding: Finding, lines: Mapping[str, str] = MappingProxyType({})) -> Section:
    """Return what a finding says; ``lines`` maps modules to the lines of code that call them."""
    rows = [
        ("where", ", ".join(_place(module, lines.get(module, "")) for module in finding.modules)),
        ("what", finding.detail),
        ("harm" if finding.severity else "gain", finding.gain),
        ("fix", finding.fix),
        ("lines", ", ".join(PurePath(line).name for line in finding.lines)),
        ("page", f"docs/findings/{finding.code}.md"),
    ]
    facts = [
        Fact(what=word, value=fmt.clean(text), lines=tuple(finding.lines) if word == "lines" else ())
        for word, text in rows
        if text
    ]
    return Section(
        title=fmt.clean(finding.title),
        blocks=[FactTable(rows=facts)],
        code=finding.code,
        weight=_weight(finding),
        tone=_TONES[finding.severity],
    )


def lines_of(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Return the lines of code that findings name, each with the finding."""
    return [(line, f"{one.code}: {fmt.clean(one.title)}") for one in findings for line in one.lines]


def cases_of(findings: Iterable[Finding]) -> list[JudgedCase]:
    """Return each finding as a case that failed; one that may be as meant is left out."""
    return [
        JudgedCase(
            name=f"{one.code} {fmt.clean(one.title)}",
            outcome="skipped" if one.severity == "info" else "failed",
            message=fmt.clean(f"{one.detail}. Fix: {one.fix}"),
            line=next(iter(one.lines), ""),
        )
        for one in findings
    ]


def _place(module: str, line: str) -> str:
    """Return a module's name, with its line if the name alone says little: a bare index, or the class of a whole model."""
    bare = module.isdecimal() or ("." not in module and module[:1].isupper())
    return f"{module} ({PurePath(line).name})" if line and bare else module


def _weight(finding: Finding) -> str:
    if not finding.severity:
        return f"{fmt.share_text(finding.share)} of {'FLOPs' if finding.flops else 'bytes'}"
    times = f", {finding.count} times" if finding.count > 1 else ""
    return f"{finding.severity}, first in step {finding.step}{times}"


# --- Memory ----------------------------------------------------------------------------------------------------------------------


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
    """Return the bytes of the four kinds by display name; None if it was not measured."""
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
