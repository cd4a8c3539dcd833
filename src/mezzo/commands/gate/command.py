"""``mezzo gate``: whether a script still trains as its golden file says."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.children.signals import Stopped, stoppable
from mezzo.cli import options, results, values
from mezzo.cli.progress import shown
from mezzo.cli.script import Script, finished_before
from mezzo.cli.shown_help import HelpPage
from mezzo.cli.words import with_flag
from mezzo.errors import UsageError
from mezzo.readable import readable
from mezzo.secrets import hidden

if TYPE_CHECKING:
    from mezzo.commands.gate.judge import GateJudgement
    from mezzo.commands.gate.runs import GateRuns, StepAudit
    from mezzo.records import FormatChange, GateRecord, Golden, Note

HELP = HelpPage(
    group="keep",
    says="fail if a script no longer trains as its golden file says",
    example="mezzo gate --golden golden.json train.py",
    shown=("--golden", "--accept", "--policy", "--metric", "--out", "--json", "-m"),
)

_ACCEPT = "--accept"
_GOLDEN_RUNS = 10
_OWN = "as-is"
"""The policy that leaves a script's own precision alone, as typed."""
_REGRESSED = 1


def gate(
    script: Script,
    golden: Annotated[
        Path,
        typer.Option(metavar="GOLDEN", help="The file with what the script did when it was accepted. Commit it."),
    ],
    accept: Annotated[
        bool,
        typer.Option(_ACCEPT, help="Write the golden file anew, from 10 runs, and print what changed."),
    ] = False,
    policy: Annotated[
        str | None,
        options.policy_option(
            "Policy to accept, or as-is for the script's own precision. [default: the golden's, or as-is]"
        ),
    ] = None,
    metric: options.MetricOption = None,
) -> None:
    """Compare a script with its golden file: loss, metric, memory, formats of each module, findings and speed.

    The script runs with the seeds of five of the golden's runs; if a number is in doubt, 15 more runs decide. The golden's own noise makes
    the margins. Speed is CPU time beside a reference workload, or GPU time.

    Without --accept, policy, metric and arguments have to be the golden's; policy and metric may be left out.

    Exit code 0: passed, or accepted; 1: something is worse than in the golden, or a run failed.
    """
    began_s = time.monotonic()
    options.check_metric(metric)
    before = _golden_before(golden, accept=accept)
    policy = policy or (before.policy if before else _OWN)
    metric = metric or (before.metric if before else "") or None
    from mezzo.launch.request import policy_text

    parsed = values.parse_policy(policy)
    if before is not None and not accept:
        _check_same(before, script, policy=policy_text(parsed), metric=metric or "")
    script.check(parsed)

    from mezzo.commands.gate.runs import GateRuns
    from mezzo.studies.loop import Study  # after the command line is right
    from mezzo.studies.side_by_side import one_after_another

    folder = script.folder("gate")
    runs = GateRuns(
        script=script,
        policy=parsed,
        policy_typed=options.typed_name(policy, parsed),
        metric=metric,
        folder=folder,
        study=Study(one_after_another, finished_before(script, folder, "gate", say=results.note)),
    )
    with stoppable() as stop:
        try:
            with shown(), runs.opened(os.environ):
                record = accepted(runs, golden, before) if accept or before is None else gated(runs, golden, before)
        except Stopped as stopped:
            results.note(f"{stopped}; the records of its runs are in {folder}, and no verdict")
            raise typer.Exit(stopped.exit_code) from None
        script.finish(record.model_copy(update={"duration_s": time.monotonic() - began_s}), folder)
    raise typer.Exit(stop.exit_code or (_REGRESSED if record.verdict == "regressed" else 0))


def _golden_before(path: Path, *, accept: bool) -> Golden | None:
    """Return the golden in the file; None if there is none yet and one is to be written.

    Raises:
        UsageError: the file is missing or damaged, or cannot be a golden file.
    """
    from mezzo.commands.gate.golden import read_golden

    if path.suffix == ".py" or path.is_dir():
        raise UsageError(
            f"--golden {str(path)!r} is a {'folder' if path.is_dir() else 'script'}; allowed: a JSON file",
            hint="type: mezzo gate --golden golden.json train.py",
        )
    if accept and not path.exists():
        return None
    return read_golden(path, accept=with_flag(_ACCEPT))


def _check_same(golden: Golden, script: Script, *, policy: str, metric: str) -> None:
    """Refuse to compare what was not accepted.

    Raises:
        UsageError: script, arguments, policy or metric are not the golden's.
    """
    asked = {
        "script": (golden.script, _named(script)),
        "arguments": (" ".join(golden.arguments), " ".join(_arguments(script))),
        "--policy": (golden.policy, policy),
        "--metric": (golden.metric, metric),
    }
    for name, (then, now) in asked.items():
        if then != now:
            raise UsageError(
                f"{name} {now or 'none'!r}, and the golden file was accepted with {then or 'none'!r}; allowed: the golden's",
                hint=f"to accept the change, type: {with_flag(_ACCEPT)}",
            )


def _named(script: Script) -> str:
    """Return the script's name without its folder, which differs between machines."""
    return script.target if script.as_module else readable(Path(script.target).name)


def _arguments(script: Script) -> list[str]:
    return [*map(readable, hidden(script.arguments or ()))]


def accepted(runs: GateRuns, path: Path, before: Golden | None) -> GateRecord:
    """Write a new golden; return what changed."""
    from mezzo.commands.gate.golden import (
        GOLDEN_VERSION,
        check_runs,
        machine_of,
        modules_by_code,
        varying_modules,
        write_golden,
    )
    from mezzo.launch.request import policy_text
    from mezzo.records import Golden

    runs.train(range(_GOLDEN_RUNS))
    check_runs(runs.records)
    one, other = (runs.audit(seed) for seed in (0, 1))
    varying = varying_modules(one.formats, other.formats)
    golden = Golden(
        golden_version=GOLDEN_VERSION,
        script=_named(runs.script),
        arguments=_arguments(runs.script),
        policy=policy_text(runs.policy),
        metric=runs.metric or "",
        script_sha256=runs.script_sha256,
        machine=machine_of(runs.records[0]),
        timed_in=runs.timed_in,
        runs=runs.summaries,
        audited_step=None if one.why_not or other.why_not else runs.audited_step,
        formats={module: by_phase for module, by_phase in one.formats.items() if module not in varying},
        varying=varying,
        findings=modules_by_code([*one.findings, *other.findings]),
    )
    write_golden(golden, path)
    return _record(runs, path, before, [one], accepts=True, decided=True)


def gated(runs: GateRuns, path: Path, golden: Golden) -> GateRecord:
    """Run the script as often as needed, and judge it."""
    from mezzo.commands.gate.judge import FIRST_RUNS, MORE_RUNS

    seeds = [run.seed for run in golden.runs]
    more = [*seeds[FIRST_RUNS:], *range(max(seeds) + 1, max(seeds) + 1 + MORE_RUNS)][:MORE_RUNS]
    runs.train(seeds[:FIRST_RUNS])
    audits, decided = [runs.audit(seeds[0])], True
    if len(runs.good) == len(runs.records):
        if _fails(golden, audits):  # what a second run does not show was chance
            audits.append(runs.audit(seeds[1]))
        decided = not _fails(golden, audits)
        while decided and more and (judged := _judged(runs, golden)).doubtful:
            decided = judged.wants_more
            if decided:
                results.note(f"{' and '.join(judged.doubtful)} in doubt: up to {len(more)} more runs decide")
                runs.train(more[:FIRST_RUNS])
                more = more[FIRST_RUNS:]
    return _record(runs, path, golden, audits, accepts=False, decided=decided)


def _judged(runs: GateRuns, golden: Golden) -> GateJudgement:
    from mezzo.commands.compare.quantities import grid_of, scale_of_metric, worse_direction
    from mezzo.commands.gate.golden import machine_of
    from mezzo.commands.gate.judge import judge

    metric = next((run.metric for run in runs.records if run.metric is not None and run.metric.values), None)
    known = [run.metric for run in (*golden.runs, *runs.summaries) if run.metric is not None]
    worse, step = 0, 0.0
    if metric is not None and known:
        worse, step = worse_direction(metric), grid_of(known, scale_of_metric(metric, known)).step
    return judge(golden, runs.summaries, worse=worse, step=step, machine=machine_of(runs.records[0]))


def _seen(golden: Golden, audits: Sequence[StepAudit]) -> tuple[list[FormatChange], list[str]]:
    """Return the formats that changed and the codes of now, as far as all audits agree on what is new."""
    from mezzo.commands.gate.judge import format_changes

    changes = format_changes(golden, audits[0].formats)
    again = format_changes(golden, audits[-1].formats)
    later = {finding.code for finding in audits[-1].findings}
    codes = dict.fromkeys(finding.code for finding in audits[0].findings)
    return [one for one in changes if one in again], [
        code for code in codes if code in later or code in golden.findings
    ]


def _fails(golden: Golden, audits: Sequence[StepAudit]) -> bool:
    """Return whether formats changed or a finding is new."""
    changes, codes = _seen(golden, audits)
    return bool(changes) or any(code not in golden.findings for code in codes)


def _record(
    runs: GateRuns, path: Path, golden: Golden | None, audits: Sequence[StepAudit], *, accepts: bool, decided: bool
) -> GateRecord:
    """Return the record: each run against the golden, which is the earlier one if a new one was accepted."""
    from mezzo.commands.gate.golden import differences, machine_of, module_notes
    from mezzo.commands.gate.judge import findings_check, formats_check
    from mezzo.launch.request import policy_text
    from mezzo.records import GateCheck, GateRecord

    failed = next((run for run in runs.records if run.error is not None or not len(run.steps)), None)
    checks: list[GateCheck] = []
    changes: list[FormatChange] = []
    codes: list[str] = []
    notes: list[Note] = []
    if failed is not None:
        why = failed.error or "it recorded no training step"
        checks = [GateCheck(name="runs", status="failed", reason=f"with seed {failed.seed}: {why}")]
    elif golden is not None:
        changes, codes = _seen(golden, audits)
        judged = _judged(runs, golden)
        why_not = next((one.why_not for one in audits if one.why_not), "")
        checks = [
            *(judged.checks if decided else judged.undecided()),
            formats_check(golden, changes, why_not=why_not),
            findings_check(golden, codes, why_not=why_not),
        ]
        machine = machine_of(runs.records[0])
        notes = differences(golden, machine=machine, script_sha256=runs.script_sha256)
        notes += module_notes(golden, audits[0].formats)
    known = {} if golden is None else golden.findings
    regressed = any(check.status == "failed" for check in checks)
    return GateRecord(
        command=list(runs.script.command),
        script=runs.script.target,
        golden_file=readable(str(path)),
        verdict="accepted" if accepts else "regressed" if regressed else "passed",
        policy=policy_text(runs.policy),
        against=golden,
        checks=checks,
        format_changes=changes,
        findings=audits[0].findings,
        new_findings=[code for code in codes if code not in known],
        gone_findings=[code for code in known if code not in codes] if codes or not regressed else [],
        notes=notes,
        runs=runs.records,
        environment=runs.records[0].environment,
    )
