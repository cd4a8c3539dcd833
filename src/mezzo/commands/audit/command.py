"""``mezzo audit``: which operation ran in which format in chosen steps, and what is worth changing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli import options, results, values
from mezzo.cli.script import Script, observed_exit_code, run_and_finish
from mezzo.cli.shown_help import HelpPage
from mezzo.cli.words import with_value
from mezzo.errors import UsageError

if TYPE_CHECKING:
    from mezzo.observe.contracts.contract import Contract
    from mezzo.records import CheckedContract

HELP = HelpPage(
    group="understand",
    says="record what ran in which format, and what to change",
    example="mezzo audit --policy bf16 train.py",
    shown=("--policy", "--at", "--expect", "--write-expect", "--out", "--log-to", "--json", "-m"),
)


def audit(
    script: Script,
    policy: Annotated[
        str, options.policy_option("Precision policy to run the script under, or as-is for its own precision.")
    ] = "as-is",
    at: Annotated[
        str,
        typer.Option(
            metavar="STEPS", help="Training steps to record, from 1: 3, or 3,10, or 3-5. The script stops after them."
        ),
    ] = "3",
    expect: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Contract on the formats of weights, state and files. The script runs to its end; a breach is exit code 1.",
        ),
    ] = None,
    write_expect: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the contract that the script keeps now. The script runs to its end."),
    ] = None,
) -> None:
    """Record every operation of chosen training steps with its format, module and phase, and report findings.

    The script runs unedited. Under torchrun, srun or mpirun it runs in all processes, and one record has the findings of all.
    """
    from mezzo.launch.runner import observe_child
    from mezzo.observe.settings import AuditSettings

    parsed = values.parse_policy(policy)
    contract = _contract(script, expect, write_expect)
    record, stop = run_and_finish(
        script,
        observe_child,
        policy=parsed,
        policy_typed=options.typed_name(policy, parsed),
        name="audit",
        observe=AuditSettings(steps=_numbers(at), contract=contract),
    )
    checked = record.contract if record.kind == "audit" else None
    if write_expect is not None:
        _write(None if observed_exit_code(record) else checked, script, write_expect)
    raise typer.Exit(stop.exit_code or observed_exit_code(record) or int(bool(checked and checked.breaches)))


def _contract(script: Script, expect: Path | None, write_expect: Path | None) -> Contract | None:
    """Return the contract to check, without lines if the formats are only listed; None if neither was asked for."""
    from mezzo.observe.contracts.contract import Contract, read_contract

    for option, path in (("--expect", expect), ("--write-expect", write_expect)):
        if path is not None:
            script.check_supported(option)
    if write_expect is not None and not write_expect.absolute().parent.is_dir():
        raise UsageError(
            f"--write-expect {write_expect}: there is no folder {write_expect.parent}; allowed: a file in a folder that exists",
            hint=f"type: {with_value('--write-expect', write_expect.name)}",
        )
    if expect is not None:
        return read_contract(expect)
    return None if write_expect is None else Contract()


def _write(checked: CheckedContract | None, script: Script, path: Path) -> None:
    """Write the contract that was found, whole or not at all."""
    from mezzo.observe.contracts.contract import written
    from mezzo.records.files import write_whole

    if checked is None or not checked.formats:
        why = "the script failed" if checked is None else "no tensor of a training was found"
        results.note(f"{path} was not written, because {why}")
        return
    write_whole(written(checked.formats, title=f"The formats of {Path(script.target).name}"), path)
    results.note(f"wrote {path}; mezzo audit --expect {path} checks it")


def _numbers(at: str) -> tuple[int, ...]:
    """Return the steps named by a text such as ``3,10-12``, in ascending order."""
    numbers: set[int] = set()
    for part in at.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)\s*(?:-\s*([1-9]\d*)\s*)?", part)
        first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= first <= last < first + options.MOST_OBSERVED_STEPS:
            raise UsageError(
                f"--at {at!r} is not a list of steps; allowed: numbers from 1, such as 3 or 3,10 or 3-5, "
                f"and ranges of at most {options.MOST_OBSERVED_STEPS:,} steps",
                hint=f"type: {with_value('--at', '3')}",
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))
