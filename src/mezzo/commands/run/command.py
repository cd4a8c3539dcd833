"""``mezzo run``: a script under a policy."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from mezzo.cli import options, results, values
from mezzo.cli.progress import live_logging
from mezzo.cli.ranks import refuse_in_several
from mezzo.cli.script import Script, changes_of, run_and_finish
from mezzo.cli.shown_help import HelpPage
from mezzo.cli.values import seconds_of
from mezzo.cli.words import RESUME, replacing, with_value
from mezzo.commands.predict.traced import with_fits
from mezzo.errors import UsageError
from mezzo.secrets import hidden

if TYPE_CHECKING:
    from mezzo.cli.script import Script
    from mezzo.launch.request import GuardRequest, Request, SnapshotRequest
    from mezzo.observe.settings import ValuesSettings
    from mezzo.policy import Policy
    from mezzo.records import AlarmKind, RunRecord


HELP = HelpPage(
    group="start",
    says="run the script under a policy",
    example="mezzo run --policy bf16 train.py --epochs 3",
    shown=("--policy", "--snapshot", "--resume", "--guard", "--metric", "--seed", "--out", "-m"),
)

SIGNALS = 128
"""Exit codes above this are of processes that a signal ended."""


RunPolicy: TypeAlias = Annotated[
    str,
    options.policy_option(f"Precision policy: a .toml file, as-is, or a preset: {options.PRESETS_HELP}"),
]
RunSnapshot: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        callback=values.duration,
        help="Save the script's state at this interval, between two batches: 30s, 5m, 1h.",
    ),
]
RunResume: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Start from the newest snapshot of an earlier run, given its folder."),
]
RunGuard: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="ACTION",
        help="When training goes wrong (skips, scale at its floor, spike, NaN, zero gradients): note, stop, or rewind[:TIMES] "
        "to a snapshot.  [default: note]",
    ),
]
RunChannelsLast: TypeAlias = Annotated[
    bool, typer.Option("--channels-last", help="Store convolution weights and images channels-last.")
]
RunCompiles: TypeAlias = Annotated[
    bool, typer.Option("--compile", help="Compile every model with torch.compile at its first call.")
]

RunFingerprints: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--fingerprints",
        help="Also keep fingerprints of all values of the first 3 steps, for mezzo diff A/record.json B/record.json.",
    ),
]
_FINGERPRINTED = (1, 2, 3)


def run(
    script: Script,
    policy: RunPolicy = "fp16",
    snapshot: RunSnapshot = None,
    resume: RunResume = None,
    guard: RunGuard = None,
    channels_last: RunChannelsLast = False,
    compiles: RunCompiles = False,
    checkpoint: options.Checkpoint = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Add this to every seed that the script sets.")] = None,
    metric: options.MetricOption = None,
    fingerprints: RunFingerprints = False,
) -> None:
    """Run an unedited training script under a precision policy.

    Output, exit code and signals pass through. The summary follows the script's output; with --json, the script's
    output goes to standard error. Under torchrun, srun or mpirun the script runs in all processes, and one record has
    the times, memory and skipped steps of each.
    """
    from mezzo.launch.runner import run_child

    options.check_metric(metric)
    options.check_seed(seed)
    check_snapshots(snapshot, resume, out=script.out)
    check_guard(guard, snapshots=snapshot is not None or resume is not None)
    if fingerprints:
        _check_fingerprints(script, snapshots=snapshot is not None or resume is not None)
    parsed = values.parse_policy(policy)
    changes = changes_of(script, channels_last=channels_last, compiles=compiles, checkpoint=checkpoint or "")

    def logged_run(request: Request) -> RunRecord:
        with live_logging(script.log_to):
            record = run_child(request)
        return with_fits(record, script, policy)

    record, stop = run_and_finish(
        script,
        logged_run,
        policy=parsed,
        policy_typed=options.typed_name(policy, parsed),
        name=policy,
        shows_progress=False,
        in_folder=lambda folder: {
            "snapshots": snapshot_request(script, folder, snapshot, resume, policy=parsed, seed=seed),
            "observe": _values_settings(folder) if fingerprints else None,
        },
        guard=guard_request(script, guard, policy=policy),
        seed=seed,
        metric=metric,
        models=changes,
    )
    if record.metric is not None and not record.metric.values:
        results.note(f"--metric {record.metric.pattern!r} matched nothing in the output of {record.script}")
    killed = stop.stopped and record.exit_code > SIGNALS  # otherwise the script handled the signal and ended by itself
    raise typer.Exit(stop.exit_code if killed else record.exit_code)


def _check_fingerprints(script: Script, *, snapshots: bool) -> None:
    """Refuse fingerprints where they cannot be taken."""
    script.check_supported("--fingerprints")
    refuse_in_several("--fingerprints", hint="leave it out: the values of each process are its own")
    if snapshots:
        raise UsageError(
            "--fingerprints with --snapshot or --resume; allowed: one of them",
            hint="leave one of them out",
        )


def _values_settings(folder: Path) -> ValuesSettings:
    from mezzo.observe.settings import ValuesSettings
    from mezzo.observe.values.log import VALUES_NAME

    return ValuesSettings(steps=_FINGERPRINTED, path=str((folder / VALUES_NAME).absolute()), ends_script=False)


USUAL_REWINDS = 3
_LEAVES_FORMATS = ("fp32", "tf32", "as-is")


def check_guard(text: str | None, *, snapshots: bool) -> None:
    """Refuse an unknown action, and a rewind without snapshots."""
    if text is None:
        return
    match = re.fullmatch(r"note|stop|rewind(:[1-9]\d?)?", text)
    if match is None:
        raise UsageError(
            f"--guard {text!r}; allowed: note, stop, rewind, and rewind:TIMES with 1 to 99",
            hint=f"type: {with_value('--guard', 'stop')}",
        )
    if text.startswith("rewind") and not snapshots:
        raise UsageError(
            f"--guard {text} without --snapshot; allowed: --guard {text} --snapshot DURATION",
            hint=f"type: {with_value('--guard', text, '--snapshot', '5m')}",
        )


def guard_request(script: Script, text: str | None, *, policy: str) -> GuardRequest | None:
    """Return the request for the run's guard; None if there is no guard for the script's framework and none was requested.

    Args:
        script: the script, as it was typed.
        text: the value of ``--guard``.
        policy: the policy as typed.
    """
    from mezzo.launch.request import GuardRequest

    if text is None and script.framework != "torch":
        return None
    script.check_supported("--guard")
    action, _, times = (text or "note").partition(":")
    rewinds = int(times or USUAL_REWINDS) if action == "rewind" else 0
    return GuardRequest.model_validate({"action": action, "rewinds": rewinds, "commands": _commands(script, policy)})


def _commands(script: Script, policy: str) -> dict[AlarmKind, str]:
    from mezzo.policy import canonical

    typed, policy = script.retyped, canonical(policy)
    diagnose = typed.under("diagnose", policy=policy)
    judged = "fp16" if policy in _LEAVES_FORMATS else policy
    lost = typed.under("ranges", policy=judged)
    if policy in _LEAVES_FORMATS:  # precision cannot be the cause of a spike
        spike = typed.under("run", policy=policy, snapshot="1m", guard="rewind")
    else:
        spike = typed.under("compare", policies=f"fp32,{policy}")
    return {
        "loss not finite": diagnose,
        "skip storm": diagnose,
        "scale at its floor": diagnose,
        "loss spike": spike,
        "gradients zero": lost,
        "stuck updates": lost,
    }


FOLDER = "snapshots"
_USUAL_S = 300.0


def check_snapshots(snapshot: str | None, resume: Path | None, *, out: Path | None) -> None:
    """Refuse an invalid time, and a run to resume that has no snapshots; a run that resumes its own folder may be its first."""
    if snapshot is not None:
        _seconds_of(snapshot)
    if resume is not None and not (resume / FOLDER).is_dir() and not _is_itself(resume, out):
        raise UsageError(
            f"--resume {str(resume)!r} has no folder {FOLDER}; allowed: the folder of a run with --snapshot",
            hint=f"type: {_instead()}",
        )


def _instead() -> str:
    """Return the command that resumes the newest run with snapshots or, if there is none, begins to save them."""
    saved = sorted(Path("runs").glob(f"*/{FOLDER}"), key=lambda folder: folder.stat().st_mtime)
    if saved:
        return replacing(RESUME, str(saved[-1].parent))
    return replacing("--snapshot", "5m", without=RESUME)


def snapshot_request(
    script: Script, folder: Path, snapshot: str | None, resume: Path | None, *, policy: Policy | None, seed: int | None
) -> SnapshotRequest | None:
    """Return the request for the run's snapshots; None if there is none. A resumed run continues in the folder of the earlier one."""
    from mezzo.launch.request import SnapshotRequest, policy_text

    if snapshot is None and resume is None:
        return None
    script.check_supported("--resume" if snapshot is None else "--snapshot")
    given = os.environ.get("PYTHONHASHSEED", "")
    hash_seed = given if given.isdecimal() else "0"  # a random one would be another one in a resumed run
    return SnapshotRequest(
        folder=str(((resume or folder) / FOLDER).absolute()),
        every_s=_USUAL_S if snapshot is None else _seconds_of(snapshot),
        resume=resume is not None,
        hash_seed=hash_seed,
        proves=True,
        may_be_first=_is_itself(resume, script.out),
        identity={
            "script": script.target,
            "arguments": json.dumps(hidden(script.arguments or ())),
            "policy": policy_text(policy),
            "seed": str(seed),
            "PYTHONHASHSEED": hash_seed,
        },
    )


def _is_itself(resume: Path | None, out: Path | None) -> bool:
    """Return whether a run resumes the folder that it writes to: a launcher may restart such a command any number of times."""
    return resume is not None and out is not None and resume.absolute() == out.absolute()


def _seconds_of(snapshot: str) -> float:
    return seconds_of(snapshot, option="--snapshot", example="5m")
