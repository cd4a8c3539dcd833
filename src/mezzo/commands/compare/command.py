"""``mezzo compare``: one script under several policies, interleaved, with a verdict on each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

import typer

from mezzo.children.signals import Stopped, stoppable
from mezzo.cli import options, results, values
from mezzo.cli.options import Jobs, On, engine_of
from mezzo.cli.progress import shown
from mezzo.cli.script import Script, changes_of, finished_before
from mezzo.cli.shown_help import HelpPage
from mezzo.cli.values import seconds_of
from mezzo.cli.words import with_value
from mezzo.commands.predict import traced
from mezzo.errors import PolicyError, ScriptError, UsageError, nearest
from mezzo.report import formatting as fmt

if TYPE_CHECKING:
    from mezzo.launch.request import Request
    from mezzo.policy import Policy
    from mezzo.records import CompareRecord, Row, RunRecord
    from mezzo.studies.loop import Finished, Study
    from mezzo.studies.side_by_side import Engine

HELP = HelpPage(
    group="measure",
    says="train under several policies, and judge whether they train as well",
    example="mezzo compare --policies fp32,bf16 train.py --epochs 3",
    shown=("--policies", "--seeds", "--metric", "--gpus", "--fail-on", "--out", "--resume", "-m"),
)


_FAILED = 1
"""Exit code if a policy gets a verdict that ``--fail-on`` lists."""


ComparePolicies: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="POLICIES",
        callback=values.policies,
        autocompletion=options.policies,
        help="Policies, separated by commas. The baseline is fp32 if listed, else the first. "
        f"Presets: {options.PRESETS_HELP}",
    ),
]
CompareSeeds: TypeAlias = Annotated[
    int, typer.Option(metavar="N", min=1, help="Runs per policy, each with its own seed.")
]
CompareMargin: TypeAlias = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        min=1e-9,
        help="Largest difference that still counts as equivalent, as a share of the baseline's final loss or metric. "
        "The baseline's own seed-to-seed spread replaces it where that is wider.",
    ),
]
CompareTimeout: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        callback=values.duration,
        help="Stop a run that takes longer; its row says so. [default: 20 times the longest run so far, at least 10m]",
    ),
]
CompareFailOn: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="VERDICTS",
        autocompletion=options.verdicts,
        help="Verdicts for exit code 1, separated by commas; different and undecided are not listed by default. "
        "not_equivalent: all five. none: never fail.",
    ),
]
CompareGpus: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="GPUS",
        callback=values.gpus_or_none,
        help="GPUs to predict speed and memory for, separated by commas, or none. "
        "[default: t4, a100-80gb, h100-sxm and rtx-4090, if this machine has no GPU]",
    ),
]


CompareBaseline: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--baseline",
        metavar="RECORD",
        autocompletion=options.record,
        help="The record.json of an earlier comparison, whose baseline runs take the place of new ones. Its script, arguments, "
        "versions and machine have to be the same. No time is compared.",
    ),
]


def compare(
    script: Script,
    policies: ComparePolicies = "fp32,bf16,fp16",
    seeds: CompareSeeds = 3,
    margin: CompareMargin = 0.02,
    timeout: CompareTimeout = None,
    fail_on: CompareFailOn = "diverged,stopped_learning,failed",
    gpus: CompareGpus = None,
    checkpoint: options.Checkpoint = None,
    metric: options.MetricOption = None,
    kept: CompareBaseline = None,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Compare a training script across precision policies: speed, memory, loss, and a verdict on each.

    Policies and seeds are interleaved, so that a change in the machine's speed affects them all alike.

    To continue a comparison that was stopped, type the same command with the same --out; --resume FOLDER also repeats runs that failed, and
    accepts more seeds or policies.

    With --baseline, an earlier comparison has the baseline's runs; their policy need not be in --policies.

    Exit code 1 if a policy gets a verdict that --fail-on lists.

    Write {run} in the script's arguments, as in --output_dir out/{run}, to give each run a path of its own.
    """
    options.check_metric(metric)
    failing, cards = _failing(fail_on), traced.named_gpus(gpus)
    timeout_s = None if timeout is None else seconds_of(timeout, option="--timeout", example="30m")
    before = None if kept is None else _kept_record(kept)
    named = policies if before is None else f"{_kept_policy(before)},{policies}"
    compared = _several(_with_checkpointed(_parse_policies(named), checkpoint))
    changes_of(script, checkpoint=checkpoint or "")
    baseline = ("fp32" if "fp32" in compared else next(iter(compared))) if before is None else before.baseline
    script.check(*(entry.policy for entry in compared.values()))

    from mezzo.commands.compare.judge import compare as judge
    from mezzo.studies.loop import with_digest  # scipy and more: only once the command line is right

    identity = script.identity(**{"--metric": metric or ""})
    kept_runs = [] if before is None else _kept_runs(before, identity, seeds=seeds, path=kept)
    engine = engine_of(jobs, on)
    folder = script.folder("compare")
    finished = begin_or_continue(script, folder, metric=metric, policies=",".join(compared), seeds=str(seeds))
    requests = _requests(script, compared, seeds, folder=folder, metric=metric, since_s=finished.since_s)
    requests = [with_digest(request, finished.identity) for request in requests]
    if kept_runs:
        requests = [request for request in requests if _compared_as(request) != baseline]
    with stoppable() as stop:
        runs = [*kept_runs, *_all_runs(requests, folder, engine, finished, timeout_s=timeout_s)]
        runs.sort(key=lambda r: ([*compared].index(r.compared_as), r.seed))
        rows: list[Row] = []
        if any(run.compared_as == baseline for run in runs):
            record = judge(runs, baseline=baseline, margin=margin, command=list(script.command))
            record = record.model_copy(update={"identity": identity})
            if not stop.stopped:
                record = record.model_copy(update={"real_gpus": traced.predicted_for(script, runs, cards)})
            script.finish(record, folder)
            rows = [row for row in record.rows if row.verdict in failing]
        if stop.stopped:
            done = f"{len(runs) - len(kept_runs)} of {len(requests)} runs"
            script.say_stopped(f"stopped by {stop.name} after {done}; their records are", folder)
        else:
            finished.end()
            _check_baseline([run for run in runs if run.compared_as == baseline], compared[baseline].name, folder)
    if rows and not stop.stopped:
        found = ", ".join(f"{row.policy_shown} {row.verdict.replace('_', ' ')}" for row in rows)
        results.note(f"exit code {_FAILED}, because of --fail-on {fail_on}: {found}")
    raise typer.Exit(stop.exit_code or (_FAILED if rows else 0))


def _kept_record(path: Path) -> CompareRecord:
    """Return the comparison whose baseline is used again.

    Raises:
        UsageError: the record is of another command, or a policy was typed.
        RecordError: it cannot be read.
    """
    from mezzo.policy import Policy
    from mezzo.records import CompareRecord, read_record

    if not path.exists():
        with suppress(PolicyError):
            policies = ",".join(dict.fromkeys((str(Policy.parse(str(path))), "bf16", "fp16")))
            raise UsageError(
                f"--baseline {str(path)!r} is a policy; allowed: the record.json of an earlier comparison",
                hint=f"type: {with_value('--baseline', policies, command='compare', renamed='--policies')}",
            )
    record = read_record(path / "record.json" if path.is_dir() else path)
    if not isinstance(record, CompareRecord):
        raise UsageError(
            f"--baseline {str(path)!r} is a record of mezzo {record.kind.replace('_', '-')}; allowed: of mezzo compare",
            hint="type: mezzo compare --policies fp32,bf16 train.py, and keep its record.json",
        )
    return record


def _kept_policy(record: CompareRecord) -> str:
    row = next(row for row in record.rows if row.compared_as == record.baseline)
    return row.policy_typed or row.policy


_ANOTHER_PATH = ("script",)
"""Parts of an identity that may differ: the same text under another path."""


def _kept_runs(record: CompareRecord, identity: dict[str, str], *, seeds: int, path: Path | None) -> list[RunRecord]:
    """Return the baseline's runs of an earlier comparison.

    Raises:
        UsageError: something is not the same, so that the runs are no baseline; it says what.
    """
    from mezzo.devices import cpu_name
    from mezzo.measure.environment import nvidia_driver

    driver = nvidia_driver()
    then = {**record.identity, "its CPU": record.environment.cpu, "its NVIDIA driver": record.environment.driver or ""}
    now = {**identity, "its CPU": cpu_name(), "its NVIDIA driver": (driver or "") if record.environment.gpu else ""}
    runs = [run for run in record.runs if run.compared_as == record.baseline and run.error is None and len(run.steps)]
    missing = sorted({*range(seeds)} - {run.seed for run in runs})
    different = [name for name in now if name not in _ANOTHER_PATH and then.get(name) != now[name]]
    if not record.identity:
        why, hint = "it was written by an older Mezzo, which did not keep what its runs depend on", "run it again"
    elif different:
        name = different[0]
        why = f"{name} changed: {_few_letters(then.get(name))} then, {_few_letters(now[name])} now"
        hint = "leave out --baseline, so that the baseline runs again"
    elif missing:
        why = f"it has no good run of {record.baseline_shown} with seed {missing[0]}"
        hint = f"type: {with_value('--seeds', str(missing[0]))}" if missing[0] > 1 else "leave out --baseline"
    else:
        return [run.model_copy(update={"kept": True}) for run in runs if run.seed is not None and run.seed < seeds]
    raise UsageError(f"--baseline {str(path)!r} cannot be used: {why}", hint=hint)


def _compared_as(request: Request) -> str:
    from mezzo.launch.request import policy_text
    from mezzo.records import varied

    return varied(policy_text(request.policy), "" if request.models is None else request.models.checkpoint)


def _few_letters(text: str | None) -> str:
    return fmt.shortened(text or "none", length=40)


def _failing(text: str) -> set[str]:
    """Return the verdicts of ``--fail-on``."""
    from mezzo.records import FAILING, NOT_EQUIVALENT

    named = [part.strip().replace("-", "_").replace(" ", "_") for part in text.split(",")]
    if named == ["none"]:
        return set()
    groups: dict[str, tuple[str, ...]] = {NOT_EQUIVALENT: FAILING, **{verdict: (verdict,) for verdict in FAILING}}
    for name in named:
        if name not in groups:
            raise UsageError(
                f"--fail-on {text!r} names {name!r}; {nearest(name, [*groups, 'none'])}",
                hint=f"type: {with_value('--fail-on', 'diverged,stopped_learning,failed')}",
            )
    return {verdict for name in named for verdict in groups[name]}


class _ComparedPolicy(NamedTuple):
    """A policy of a comparison."""

    policy: Policy | None
    name: str
    """As it was typed."""
    checkpoint: str = ""
    """The plan of activation checkpointing; empty for none."""


def _parse_policies(policies: str) -> dict[str, _ComparedPolicy]:
    """Return the policies of a comparison by the text that records have for them; two names of one policy count once."""
    from mezzo.launch.request import policy_text

    named = values.names_in(policies)
    compared: dict[str, _ComparedPolicy] = {}
    for name in named:
        policy = values.parse_policy(name)
        first = compared.setdefault(policy_text(policy), _ComparedPolicy(policy, name))
        if first.name != name:
            results.note(
                f"{name} and {first.name} are the same policy, {policy_text(policy)}: it runs once, as {first.name}"
            )
    return compared


def _several(compared: dict[str, _ComparedPolicy]) -> dict[str, _ComparedPolicy]:
    """Return the policies; refuse a comparison of a policy with nothing."""
    if len(compared) == 1:
        (entry,) = compared.values()
        named = f"--policies {entry.name!r} names nothing to compare {entry.name} with; allowed: two policies or more"
        raise UsageError(named, hint=f"type: {with_value('--policies', values.with_baseline([entry.name]))}")
    return compared


def _with_checkpointed(compared: dict[str, _ComparedPolicy], checkpoint: str | None) -> dict[str, _ComparedPolicy]:
    """Return the policies, each followed by itself with checkpointing, by the name that identifies their runs in the comparison."""
    from mezzo.records import varied

    if checkpoint is None:
        return compared
    both = [(text, entry._replace(checkpoint=plan)) for text, entry in compared.items() for plan in ("", checkpoint)]
    return {varied(text, entry.checkpoint): entry for text, entry in both}


def _folders(compared: dict[str, _ComparedPolicy]) -> dict[str, str]:
    """Return a unique prefix for each policy's run names: policies may differ only in characters that a folder's name cannot have."""
    from mezzo.studies.loop import folder_name

    folders: dict[str, str] = {}
    for text, entry in compared.items():
        plain = folder_name(f"{entry.name}-{entry.checkpoint}" if entry.checkpoint else entry.name)
        names = chain([plain], (f"{plain}_{number}" for number in count(2)))
        folders[text] = next(name for name in names if name not in folders.values())
    return folders


def _requests(
    script: Script,
    compared: dict[str, _ComparedPolicy],
    seeds: int,
    *,
    folder: Path,
    metric: str | None,
    since_s: float,
) -> list[Request]:
    """Return a request for every policy and seed, interleaved: each seed starts with a different policy."""
    from mezzo.studies.loop import named_arguments

    texts, folders = [*compared], _folders(compared)
    requests = []
    for seed in range(seeds):
        first = seed % len(texts)
        for text in texts[first:] + texts[:first]:
            run = f"{folders[text]}-seed{seed}"
            requests.append(
                script.request(
                    compared[text].policy,
                    policy_typed=options.typed_name(compared[text].name, compared[text].policy),
                    folder=folder / run,
                    arguments=named_arguments(script.arguments or (), run),
                    seed=seed,
                    metric=metric,
                    models=changes_of(script, checkpoint=compared[text].checkpoint),
                    compared_since_s=since_s,
                )
            )
    return requests


def _check_baseline(runs: list[RunRecord], name: str, folder: Path) -> None:
    if all(run.error or not len(run.steps) for run in runs):
        raise ScriptError(
            f"no run of the baseline {name} succeeded: {runs[0].error or 'it recorded no step'}",
            hint=runs[0].hint or f"run the script by itself first; what it printed is in {folder}/*/output.log",
        )


_TIMES_LONGER, _LEAST_LIMIT_S = 20.0, 600.0


def begin_or_continue(script: Script, folder: Path, *, metric: str | None, **settings: str) -> Finished:
    """Begin a comparison in the folder, or continue an interrupted one; note which options have changed.

    Raises:
        UsageError: ``--resume`` was typed, and there is nothing to continue.
    """
    finished = finished_before(script, folder, "comparison", say=results.note, metric=metric or "")
    restart = not finished.found or (finished.over and not script.resume)
    if not restart:
        for name, now in settings.items():
            then = finished.options.get(name, "")
            if then != now:
                results.note(f"--{name} was {then} and is now {now}; runs that belong to both are reused")
    finished.begin(settings, restart=restart)
    return finished


def left_to_run(requests: Sequence[Request]) -> tuple[list[RunRecord], list[Request]]:
    """Return the records of runs that are finished, and the requests of those that are not."""
    from mezzo.studies.loop import finished_run

    pairs = [(request, finished_run(request)) for request in requests]
    runs = [record for _, record in pairs if record is not None]
    left = [request for request, record in pairs if record is None]
    if runs:
        rest = f"{fmt.plural(len(left), 'run')} left" if left else "none left to run"
        results.note(f"{fmt.plural(len(runs), 'finished run')} reused, {rest}")
    return runs, left


def _all_runs(
    requests: Sequence[Request], folder: Path, engine: Engine, finished: Finished, *, timeout_s: float | None
) -> list[RunRecord]:
    from mezzo.studies.loop import Study
    from mezzo.studies.side_by_side import one_after_another

    before, left = left_to_run(requests)
    alone = len(left) < 2 and engine is one_after_another  # a single run has no other to share its imports with
    with nullcontext() if alone else engine.opened(folder):
        return run_all(left, timeout_s=timeout_s, study=Study(engine, finished), before=before)


def limit_s(runs: Sequence[RunRecord]) -> float | None:
    """Return the time limit of the next run; None until a run has ended, since nothing is known about the script before that."""
    ended = [run.duration_s for run in runs if run.error is None]
    return max(_TIMES_LONGER * max(ended), _LEAST_LIMIT_S) if ended else None


def run_all(
    requests: Sequence[Request], *, timeout_s: float | None, study: Study, before: Sequence[RunRecord] = ()
) -> list[RunRecord]:
    """Return the records of the runs ``before``, and of the ``requests`` that end before a signal arrives."""
    from mezzo.records import AnyRecord, RunRecord
    from mezzo.studies.loop import Wanted, carry_out

    runs, left = list(before), deque(requests)

    def ended(request: Request, record: AnyRecord) -> None:
        assert isinstance(record, RunRecord)
        runs.append(record)
        progress.say_ended(request, record)

    def next_run() -> Wanted | None:
        if not left:
            return None
        run = partial(study.record, left.popleft(), together=left, ended=ended)
        return Wanted(do=lambda: run(limit_s=lambda: timeout_s or limit_s(runs)))

    with stoppable(), suppress(Stopped), shown(requests) as progress:
        carry_out(next_run)
    return runs
