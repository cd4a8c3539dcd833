"""Where two runs part: the answer, what is different there, how the difference grows, and what helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import PurePath

from mezzo.records import DiffBeginning, DiffRecord, ModuleGrowth, PointDifference, ValuePair, ValuePlace
from mezzo.report import formatting as fmt
from mezzo.report import pages
from mezzo.report.charts.data import Axis, Chart, Drawn, Line, Nothing, Span
from mezzo.report.colours import policy_style
from mezzo.report.commands import ScriptCommands, best_first, preset_of
from mezzo.report.log_entries import LogEntry, plain_entry
from mezzo.report.sections import (
    Charts,
    Fact,
    Grid,
    Headline,
    NextStep,
    Page,
    Paragraph,
    Section,
    SourceCode,
    facts_section,
)
from mezzo.report.source import SourceLines

_TONES = {
    "identical": "good",
    "rounding": "good",
    "beyond rounding": "warn",
    "different data": "bad",
    "different weights": "bad",
    "not repeatable": "open",
    "failed": "bad",
}
_FEW = 6
_GOOD = 0.5
"""The share of a difference that a policy has to remove to be the next step."""
_MOST_LETTERS = 60
"""Of a policy in a table; the record has all of it."""
_MOST_BITS = 24.0
"""Bits of an FP32 significand."""


def page(record: DiffRecord) -> Page:
    """Return what ``record`` says."""
    script = fmt.clean(PurePath(record.script).name)
    sentence = _sentence(record, script)
    return Page(
        title=sentence,
        script=fmt.clean(record.script),
        answer=Headline(
            tone=_TONES[record.verdict],
            word=record.verdict,
            sentence=sentence,
            detail=_detail(record),
            error=pages.first_error_and_hint([record.run, record.other]) if record.verdict == "failed" else "",
            facts=_facts(record),
        ),
        sections=[
            Section(title="What is different", blocks=[_begun(record, record.beginnings)]),
            facts_section("The first value that is not identical", _first(record)),
            Section(
                title="How far apart they end", blocks=[_outcomes(record)] if record.verdict != "identical" else []
            ),
            Section(title="Compare points", blocks=[_points(record.points)]),
            Section(title="What helps", blocks=[_trials(record), _reading(record)]),
            facts_section("Not repeatable", [Fact(what=_at(one), value=_where(one)) for one in record.unstable]),
            facts_section("Notes", pages.facts(record.notes)),
            Charts(draw=partial(_charts, record)),
            SourceCode(run=record.other, lines=_lines(record)),
        ],
        steps=best_first(_next(record)),
        environment=pages.environment_facts(record.environment),
        command=pages.command_text(record.command, record.environment),
    )


# --- the answer ----------------------------------------------------------------------------------------------------------------------


def _sentence(record: DiffRecord, script: str) -> str:
    a, b = fmt.clean(record.name_a), fmt.clean(record.name_b)
    both = f"{a} and {b}" if record.mode in ("scripts", "records") else f"{script}, {a} and {b}"
    if record.beginnings and record.verdict == "beyond rounding":
        return f"{both} part at {_at(record.beginnings[0].b)}"
    if record.verdict == "beyond rounding":
        return f"{both} do not train the same"
    return {
        "identical": f"{both} are identical",
        "rounding": f"{both} are apart by rounding alone",
        "different data": f"{both} read different data",
        "different weights": f"{both} start from different weights",
        "not repeatable": f"{script} does not repeat itself",
    }.get(record.verdict, f"{both} could not be compared")


def _detail(record: DiffRecord) -> str:
    if record.why:
        return f"{fmt.clean(record.why)}."
    if record.compiled_alone:
        alone = ", ".join(map(fmt.clean, record.compiled_alone))
        return f"It begins with {alone} compiled alone, the smallest part found."
    if record.beginnings:
        return f"{_why(record.beginnings[0])}."
    if record.verdict == "beyond rounding" and record.notes:
        note = record.notes[0]
        return f"{fmt.clean(note.what)}: {note.value}; {note.reason}.".capitalize()
    if record.verdict == "rounding" and record.first is not None:
        return f"The first value that is not identical is {_at(record.first.b)}."
    if record.verdict == "not repeatable":
        return f"The same run twice differs from {_at(record.unstable[0])} on. Seed what is random there, then compare again."
    return ""


def _why(one: DiffBeginning) -> str:
    """Return what is different at a beginning, as a sentence without its full stop."""
    more = f", and {one.num_alike} more alike" if one.num_alike else ""
    if one.by == "start":
        return f"{_at(one.b)} differs before anything is computed{more}"
    if one.by == "settings":
        pairs = ", ".join(
            f"{fmt.clean(x or 'nothing')} and {fmt.clean(y or 'nothing')}" for x, y in one.settings[:_FEW]
        )
        return f"Its settings differ: {pairs}{more}"
    if one.by == "operations" and not (one.only_a or one.only_b):
        return f"It is {fmt.clean(one.a.op)} in the first run and {fmt.clean(one.b.op)} in the second{more}"
    if one.by == "operations":
        return " ".join(_only(one)).rstrip(".") + more
    if one.by == "format":
        return f"Its result is {one.a.format} in the first run and {one.b.format} in the second{more}"
    if one.by == "part":
        return f"It reads another part of the same value{more}"
    if one.by == "random numbers":
        return f"It, or an operation before it, draws other random numbers{more}"
    return f"The same operands give another result{more}"


def _only(one: DiffBeginning) -> Iterator[str]:
    for name, places in (("first", one.only_a), ("second", one.only_b)):
        if places:
            listed = list(dict.fromkeys(fmt.clean(place.op) for place in places))
            yield f"Before it, only the {name} run has {', '.join(listed[:_FEW])}."


def _facts(record: DiffRecord) -> list[Fact]:
    if not record.num_values:
        return []
    steps = fmt.plural(len(record.steps), "step")
    rows = [
        Fact(
            what="values compared",
            value=f"{record.num_paired:,}",
            reason=f"of {record.num_values:,} in {steps}",
        ),
        Fact(what="identical", value=f"{record.num_identical:,}"),
    ]
    measured = (
        "measured, by a run with mirrored rounding errors"
        if record.has_control
        else "not measured: growth in one operation decides"
    )
    if record.verdict != "identical":
        rows.append(Fact(what="what rounding explains", value=measured))
    return rows


def _first(record: DiffRecord) -> list[Fact]:
    pair = record.first
    if pair is None or any(one.b == pair.b for one in record.beginnings):
        return []
    return [Fact(what=_at(pair.b), value=_apart(pair), reason=_where(pair.b))]


def _apart(pair: ValuePair) -> str:
    return f"{pair.distance:.1e}, and rounding explains {pair.allowed:.1e}"


def _at(place: ValuePlace) -> str:
    if place.op in ("weight", "buffer", "gradient", "state"):
        return f"{place.op} {fmt.clean(place.module)}"
    return f"{fmt.clean(place.op)} in {fmt.clean(place.module)}" if place.op != "data" else "the data"


def _where(place: ValuePlace) -> str:
    line = f", {fmt.clean(PurePath(place.line).name)}" if place.line else ""
    return f"step {place.step}, {place.phase}{line}"


# --- tables --------------------------------------------------------------------------------------------------------------------------


def _begun(record: DiffRecord, beginnings: Sequence[DiffBeginning]) -> Grid:
    rows = [
        (
            _at(one.b),
            _where(one.b),
            fmt.clean(PurePath(one.a.line).name) if record.mode in ("scripts", "checkout") else "",
            f"{one.distance:.1e}",
            f"{one.allowed:.1e}",
            *(_number(error) for error in (one.error_a, one.error_b)),
            "" if one.explains is None else fmt.share_text(one.explains),
        )
        for one in beginnings
    ]
    heads = (
        "where it begins",
        "when",
        "line before",
        "apart",
        "rounding explains",
        "own error\nfirst run",
        "own error\nsecond run",
        "explains of the\nfinal difference",
    )
    shown = [n for n in range(len(heads)) if n < 2 or any(row[n] for row in rows)]
    return Grid(
        heads=tuple(heads[n] for n in shown),
        rows=[tuple(row[n] for n in shown) for row in rows],
        reasons=[f"{_why(one)}." for one in beginnings],
        numbers=[place for place, n in enumerate(shown) if n > 2],
        sortable=False,
    )


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _outcomes(record: DiffRecord) -> Grid:
    rows = [
        (fmt.clean(one.what), str(one.step), f"{one.distance:.1e}", f"{one.allowed:.1e}") for one in record.outcomes
    ]
    return Grid(heads=("what", "step", "apart", "rounding explains"), rows=rows, numbers=(1, 2, 3), sortable=False)


def _points(points: Sequence[PointDifference]) -> Grid:
    rows = [
        (
            fmt.clean(one.name),
            one.against,
            f"{one.distance:.1e}",
            "" if one.kl is None else f"{one.kl:.1e}",
            "" if one.outside is None else fmt.share_text(one.outside),
        )
        for one in points
    ]
    heads = ("name", "compared", "apart", "KL (nats)", "ratio beyond 0.2")
    return Grid(heads=heads, rows=rows, numbers=(2, 3, 4), sortable=False)


def _trials(record: DiffRecord) -> Grid:
    rows = [
        (
            fmt.clean(one.what),
            fmt.shortened(fmt.clean(one.policy), length=_MOST_LETTERS),
            f"{one.distance:.1e}",
            fmt.share_text(one.share),
            fmt.share_text(one.flops_in_fp32),
            fmt.bytes_text(one.more_bytes),
        )
        for one in sorted(record.trials, key=lambda one: -one.share)
    ]
    heads = ("tried", "policy", "apart", "removes", "FLOPs in fp32", "more memory")
    return Grid(heads=heads, rows=rows, numbers=(2, 3, 4, 5), sortable=False)


def _reading(record: DiffRecord) -> Paragraph:
    text = "Apart: from the first run, after the first step, in its compare points or else in all gradients together."
    return Paragraph(text=text if record.trials else "", faint=True)


# --- the picture, the source, what is next ----------------------------------------------------------------------------------------------


def _charts(record: DiffRecord, source: SourceLines) -> Sequence[Drawn]:
    title = "Bits that agree, module by module"
    if len(record.growth) < 2:
        return (
            [Nothing(name="growth", title=title, description="Fewer than two modules were compared.")]
            if record.num_values
            else []
        )
    bits = [min(one.bits, _MOST_BITS) for one in record.growth]
    explained = [min(one.explained_bits, _MOST_BITS) for one in record.growth]
    low = min(range(len(bits)), key=bits.__getitem__)
    b = policy_style(record.other.policy)
    return [
        Chart(
            name="growth",
            title=title,
            description=f"The modules of {fmt.plural(len(record.steps), 'step')}, in the order of the run. Fewest bits agree at "
            f"{fmt.clean(record.growth[low].module)} ({record.growth[low].phase}, step {record.growth[low].step}): {bits[low]:.1f}.",
            note="Shaded: backward passes. 24 bits are an FP32 significand. "
            "A line below what rounding leaves is a difference that rounding does not explain.",
            x=list(range(1, len(bits) + 1)),
            last_x=len(bits),
            x_axis=Axis(title="module, in the order of the run"),
            y_axis=Axis(title="bits", low=0.0, high=_MOST_BITS),
            lines=[
                Line(name="agree", style=b, y=bits),
                Line(name="rounding leaves", style=policy_style("fp32"), y=explained),
            ],
            spans=_backward_passes(record.growth),
            layered=True,
            point_noun="module",
        )
    ]


def _backward_passes(growth: Sequence[ModuleGrowth]) -> list[Span]:
    places: dict[int, list[int]] = {}
    for place, one in enumerate(growth, start=1):
        if one.phase == "backward":
            places.setdefault(one.step, []).append(place)
    return [Span(axis="x", low=at[0], high=at[-1], text=f"backward, step {step}") for step, at in places.items()]


def _lines(record: DiffRecord) -> list[tuple[str, str]]:
    """Return the lines where differences begin, in both scripts."""
    places = [(place, run) for one in record.beginnings[:_FEW] for place, run in ((one.a, "first"), (one.b, "second"))]
    return [(place.line, f"{fmt.clean(place.op)}, {run} run") for place, run in places if place.line]


def _next(record: DiffRecord) -> Iterator[NextStep]:
    commands = ScriptCommands(record.run, record.command)
    good = [one for one in record.trials if one.share >= _GOOD]
    best = min(good, key=lambda one: (one.flops_in_fp32, -one.share), default=None)
    if record.verdict == "failed" and record.mode != "scripts":
        yield from commands.alone("see whether the script also fails without Mezzo")
    elif record.mode == "policies" and best is not None:
        yield from commands.step("train with what halves the difference at the least cost", "run", policy=best.policy)
    elif record.mode == "policies" and record.verdict in ("rounding", "beyond rounding"):
        if preset_of(record.name_b) in ("fp32", "tf32"):  # no module computes in a lower format
            policies = f"{record.name_a},{record.name_b}"
            yield from commands.step(f"see whether {record.name_b} trains as well", "compare", policies=policies)
        else:
            yield from commands.step("find the modules that have to stay in fp32", "fallback", policy=record.name_b)
    elif record.verdict in ("different data", "not repeatable"):
        yield from commands.again("after seeding what is random, compare again")


def log_entry(record: DiffRecord) -> LogEntry:
    """Return what is logged of the record."""
    return plain_entry(record)
