"""``mezzo compare``: one script under several policies, interleaved, with a verdict on each."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli import options, results
from mezzo.cli.script import Script
from mezzo.cli.words import typed
from mezzo.errors import PolicyError, ScriptError
from mezzo.launch.process.command_signals import Stopped, stoppable

if TYPE_CHECKING:
    from mezzo.launch.request import Request
    from mezzo.policy import Policy
    from mezzo.records import RunRecord

_TIMES_LONGER, _LEAST_LIMIT_S = 20.0, 600.0


def compare(
    target: options.Target,
    arguments: options.Arguments = None,
    policies: Annotated[
        str,
        typer.Option(help="Policies, separated by commas. The baseline is fp32 if listed, else the first."),
    ] = "fp32,bf16,fp16",
    seeds: Annotated[int, typer.Option(min=1, help="Runs per policy, each with its own seed.")] = 3,
    margin: Annotated[
        float,
        typer.Option(
            min=1e-9,
            help="Largest difference that still counts as equivalent, as a share of the baseline's final loss or metric. "
            "The baseline's own seed-to-seed spread replaces it where that is wider.",
        ),
    ] = 0.02,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1e-9,
            help="Stop a run that takes longer; its row says so. [default: 20 times the longest run so far, at least 600]",
        ),
    ] = None,
    as_module: options.AsModule = False,
    metric: options.Metric = None,
    out: options.Out = None,
    tensorboard: options.TensorBoard = None,
    as_json: options.Json = False,
) -> None:
    """Compare a training script across precision policies: speed, memory, loss, and a verdict on each.

    Policies and seeds are interleaved, so that a drift of the machine affects all of them alike.

    Write {run} in the script's arguments, as in --output_dir out/{run}, to give each run a path of its own.
    """
    from mezzo.launch.runner import several_runs
    from mezzo.measure.compare import compare as judge

    options.check_metric(metric)
    asked = _asked(policies)
    baseline = "fp32" if "fp32" in asked else next(iter(asked))
    script = Script(
        target=target, arguments=arguments, as_module=as_module, out=out, tensorboard=tensorboard, as_json=as_json
    )
    script.check(*asked.values())
    folder = script.folder("compare")
    requests = _requests(script, asked, seeds, folder=folder, metric=metric)
    with stoppable() as stop:
        with several_runs() if len(requests) > 1 else nullcontext():
            runs = _run_all(requests, timeout_s=timeout)
        runs.sort(key=lambda r: ([*asked].index(r.policy), r.seed))
        if any(run.policy == baseline for run in runs):
            script.finish(judge(runs, baseline=baseline, margin=margin, command=list(typed())), folder)
        if stop.stopped:
            results.note(
                f"stopped by {stop.name} after {len(runs)} of {len(requests)} runs; their records are in {folder}"
            )
        else:
            _check_baseline(runs, baseline, folder)
    raise typer.Exit(stop.exit_code)


def _asked(policies: str) -> dict[str, Policy | None]:
    """Return the policies of a comparison by the text that their records carry."""
    from mezzo.launch.request import policy_text

    named = [p.strip() for p in policies.split(",")]
    if not all(named):
        full = ",".join(filter(None, named)) or "fp32,bf16,fp16"
        raise PolicyError(f"--policies {policies!r} contains an empty policy name", hint=f"type: --policies {full}")
    return {policy_text(policy): policy for policy in map(options.asked_policy, named)}


def _requests(
    script: Script, asked: dict[str, Policy | None], seeds: int, *, folder: Path, metric: str | None
) -> list[Request]:
    """Return a request for every policy and seed, interleaved: each seed starts with a different policy."""
    from mezzo.launch.several.compared_runs import named_arguments, run_name

    since_s, texts = time.time(), [*asked]
    requests = []
    for seed in range(seeds):
        first = seed % len(texts)
        for text in texts[first:] + texts[:first]:
            run = run_name(text, seed)
            requests.append(
                script.request(
                    asked[text],
                    folder=folder / run,
                    arguments=named_arguments(script.arguments or (), run),
                    seed=seed,
                    metric=metric,
                    compared_since_s=since_s,
                )
            )
    return requests


def _limit_s(runs: list[RunRecord]) -> float | None:
    """Return the time limit of the next run; None until a run has ended, because nothing is known of the script before."""
    ended = [run.duration_s for run in runs if run.error is None]
    return max(_TIMES_LONGER * max(ended), _LEAST_LIMIT_S) if ended else None


def _run_all(requests: list[Request], *, timeout_s: float | None) -> list[RunRecord]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from mezzo.launch.request import policy_text
    from mezzo.launch.runner import run_child

    runs: list[RunRecord] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # A moving bar belongs in a terminal only, even if colours are forced into a log.
    bar = Progress(*columns, console=results.console(stderr=True), disable=not sys.stderr.isatty())
    with stoppable() as stop, suppress(Stopped), bar as progress:
        task = progress.add_task("", total=len(requests))
        for request in requests:
            name = f"{policy_text(request.policy)}, seed {request.seed}"
            progress.update(task, description=name)
            output = Path(request.record_path).with_name("output.log")
            output.parent.mkdir(parents=True, exist_ok=True)
            record = run_child(request, output=output, limit_s=timeout_s or _limit_s(runs))
            if stop.stopped:
                break
            runs.append(record)
            progress.advance(task)
            if record.error or progress.disable:
                outcome = record.error or f"{len(record.steps)} steps"
                progress.console.print(f"{name}: {outcome}", markup=False, soft_wrap=True)
        progress.update(task, description="runs")
    return runs


def _check_baseline(runs: list[RunRecord], baseline: str, folder: Path) -> None:
    own = [r for r in runs if r.policy == baseline]
    if all(r.error or not len(r.steps) for r in own):
        raise ScriptError(
            f"no run of the baseline {baseline} succeeded: {own[0].error or 'it recorded no step'}",
            hint=f"run the script by itself first; what it printed is in {folder}/*/output.log",
        )
