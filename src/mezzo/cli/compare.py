"""``mezzo compare``: a script under several policies, interleaved, with a verdict on each."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli import options, results
from mezzo.cli.folders import folder_of_rank
from mezzo.cli.words import typed
from mezzo.errors import PolicyError, ScriptError

if TYPE_CHECKING:
    from mezzo.launch.request import Request
    from mezzo.records import RunRecord

RUN = "{run}"
"""In an argument of the script: the name of the run."""
_TIMES_LONGER, _LEAST_LIMIT_S = 20.0, 600.0


def compare(
    target: options.Target,
    arguments: options.Arguments = None,
    policies: Annotated[
        str,
        typer.Option(help="Policies, separated by commas; the baseline is fp32 if it is among them, else the first."),
    ] = "fp32,bf16,fp16",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each policy, each with its own seed.")] = 3,
    margin: Annotated[
        float,
        typer.Option(
            min=1e-9,
            help="Largest difference that still counts as equivalent, as a share of the baseline's final loss or metric; "
            "the baseline's own seed-to-seed spread counts where it is wider.",
        ),
    ] = 0.02,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1e-9,
            help="Stop a run that takes longer; its row says so. [default: 20 times the longest run until then, at least 600]",
        ),
    ] = None,
    as_module: options.AsModule = False,
    metric: options.Metric = None,
    out: options.Out = None,
    tensorboard: options.TensorBoard = None,
    as_json: options.Json = False,
) -> None:
    """Compare a training script across precision policies: speed, memory, loss, and a verdict on each.

    Policies and seeds are interleaved, so that a machine that drifts drifts for all of them.

    Write {run} in the script's arguments, as in --output_dir out/{run}, to give each run a path of its own.
    """
    from mezzo.launch.process.command_signals import stoppable
    from mezzo.launch.runner import several_runs
    from mezzo.measure.compare import compare as judge

    options.check_metric(metric)
    texts = _texts(policies)
    baseline = "fp32" if "fp32" in texts else texts[0]
    options.check_script(target, arguments, as_module=as_module, policies=texts)
    folder = folder_of_rank(out, f"{Path(target).stem}-compare")
    since_s = time.time()
    requests = [
        _request(target, arguments, text, seed, metric=metric, as_module=as_module, folder=folder, since_s=since_s)
        for text, seed in _interleaved(texts, seeds)
    ]
    with stoppable() as stop:
        with several_runs() if len(requests) > 1 else nullcontext():
            runs = _run_all(requests, timeout_s=timeout)
        runs.sort(key=lambda r: (texts.index(r.policy), r.seed))
        if any(run.policy == baseline for run in runs):
            record = judge(runs, baseline=baseline, margin=margin, command=list(typed()))
            results.finish(record, folder, as_json=as_json, tensorboard=tensorboard)
        if stop.stopped:
            results.note(
                f"stopped by {stop.name} after {len(runs)} of {len(requests)} runs; their records are in {folder}"
            )
        else:
            _check_baseline(runs, baseline, folder)
    raise typer.Exit(stop.exit_code)


def _texts(policies: str) -> list[str]:
    from mezzo.policy import Policy
    from mezzo.records import AS_IS

    named = [p.strip() for p in policies.split(",")]
    if not all(named):
        full = ",".join(filter(None, named)) or "fp32,bf16,fp16"
        raise PolicyError(f"--policies {policies!r} contains an empty policy name", hint=f"type: --policies {full}")
    return list(dict.fromkeys(p if p == AS_IS else str(Policy.of(p)) for p in named))


def _interleaved(texts: list[str], seeds: int) -> Iterator[tuple[str, int]]:
    """Yield every policy with every seed; each seed begins with another policy, so that none is always first."""
    for seed in range(seeds):
        first = seed % len(texts)
        for text in texts[first:] + texts[:first]:
            yield text, seed


def _request(
    target: str,
    arguments: list[str] | None,
    text: str,
    seed: int,
    *,
    metric: str | None,
    as_module: bool,
    folder: Path,
    since_s: float,
) -> Request:
    run = f"{text.replace(':', '_').replace('*', '_')[:80]}-seed{seed}"
    return options.request_for(
        target,
        [argument.replace(RUN, run) for argument in arguments or ()],
        as_module=as_module,
        policy=text,
        folder=folder / run,
        seed=seed,
        metric=metric,
        compared_since_s=since_s,
    )


def _limit_s(runs: list[RunRecord]) -> float | None:
    """Return how long the next run may take: none before a first one has ended, since nothing is known of the script."""
    ended = [run.duration_s for run in runs if run.error is None]
    return max(_TIMES_LONGER * max(ended), _LEAST_LIMIT_S) if ended else None


def _run_all(requests: list[Request], *, timeout_s: float | None) -> list[RunRecord]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from mezzo.launch.process.command_signals import Stopped, stoppable
    from mezzo.launch.runner import run_child

    runs: list[RunRecord] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # A bar that moves is for a terminal, also where colours are forced into a log.
    bar = Progress(*columns, console=results.console(stderr=True), disable=not sys.stderr.isatty())
    with stoppable() as stop, suppress(Stopped), bar as progress:
        task = progress.add_task("", total=len(requests))
        for request in requests:
            progress.update(task, description=f"{request.policy}, seed {request.seed}")
            output = Path(request.record_path).with_name("output.log")
            output.parent.mkdir(parents=True, exist_ok=True)
            record = run_child(request, output=output, limit_s=timeout_s or _limit_s(runs))
            if stop.stopped:
                break
            runs.append(record)
            progress.advance(task)
            if record.error or progress.disable:
                outcome = record.error or f"{len(record.steps)} steps"
                said = f"{request.policy}, seed {request.seed}: {outcome}"
                progress.console.print(said, markup=False, soft_wrap=True)
        progress.update(task, description="runs")
    return runs


def _check_baseline(runs: list[RunRecord], baseline: str, folder: Path) -> None:
    own = [r for r in runs if r.policy == baseline]
    if all(r.error or not len(r.steps) for r in own):
        raise ScriptError(
            f"no run of the baseline {baseline} succeeded: {own[0].error or 'it recorded no step'}",
            hint=f"run the script by itself first; what it printed is in {folder}/*/output.log",
        )
