"""``mezzo diff``: where two runs part, what began it, and what helps."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from mezzo.children.signals import Stopped, stoppable
from mezzo.cli import options, results
from mezzo.cli.progress import shown
from mezzo.cli.script import Script, finished_before
from mezzo.cli.shown_help import HelpPage
from mezzo.cli.words import typed
from mezzo.errors import UsageError
from mezzo.temporary import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mezzo.commands.diff.sides import Mode, Side
    from mezzo.records import DiffRecord, RunRecord

HELP = HelpPage(
    group="understand",
    says="find where two runs part, what began it, and what helps",
    example="mezzo diff --policies fp32,bf16 train.py",
    shown=("--policies", "--checkout", "--compile", "--ranks", "--vary", "--steps", "--out", "-m"),
)

_SAME = ("identical", "rounding")
_COMPARED_STEPS = 2


def diff(
    script: Script,
    policies: Annotated[str | None, options.policies_option("Two policies, separated by a comma.")] = None,
    checkout: Annotated[
        str | None,
        typer.Option(metavar="COMMIT", help="Compare the script of this git commit with the script as it is."),
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compare the script with its models compiled.")] = False,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="COUNTS",
            help="Compare the script in one number of processes of this machine with another, as torchrun starts them.",
        ),
    ] = None,
    vary: Annotated[
        str | None, typer.Option(metavar="NAME=VALUES", help="Compare two values of an option of the script.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=100,
            help="Number of training steps to compare; 2 if left out. The script stops there.",
        ),
    ] = None,
) -> None:
    """Find the operation from which on two runs differ by more than rounding, and what is different there.

    Compares two policies, a commit with the script as it is, eager with compiled, one process with two, or two values of an option. A
    second script takes the same arguments: mezzo diff old.py new.py. Records of mezzo run --fingerprints can come from two machines:
    mezzo diff a/record.json b/record.json.

    Both runs get the same seed and deterministic kernels. What rounding explains is measured: the script runs once more, with its rounding
    errors mirrored at random. Two records stay as they are, and what rounding explains is estimated.

    Exit code 0: identical, or apart by rounding alone; 1: further apart. A script that fails keeps its own exit code.
    """
    if not _is_record(script.target):
        script.check_supported("mezzo diff")
    began_s = time.monotonic()
    given = {
        "--policies": policies,
        "--checkout": checkout,
        "--compile": "on" if compile else None,
        "--ranks": ranks,
        "--vary": vary,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    if _is_record(script.target):
        _finish_records(script, [*chosen, *(["--steps"] if steps is not None else [])], began_s)
    mode, text = _mode(script, chosen)
    with temporary_folder() if mode == "checkout" else nullcontext(Path()) as commit_folder:
        sides = _sides(script, mode, text, folder=Path(commit_folder))
        _finish_runs(script, mode, sides, steps=tuple(range(1, (steps or _COMPARED_STEPS) + 1)), began_s=began_s)


def _mode(script: Script, given: dict[str, str]) -> tuple[Mode, str]:
    """Return what is compared, and the value of its option.

    Raises:
        UsageError: nothing, or two things at once.
    """
    from mezzo.cli.words import with_value

    words = script.arguments or []
    if len(given) > 1:
        first, second = list(given)[:2]
        raise UsageError(
            f"{first} and {second} were given; allowed: one of them",
            hint=f"leave out {second}, and compare it on its own",
        )
    if given:
        option, value = next(iter(given.items()))
        return option.removeprefix("--"), value  # type: ignore[return-value]
    if words and words[0].endswith(".py") and Path(words[0]).is_file():
        return "scripts", ""
    raise UsageError(
        "there is nothing to compare the script with; allowed: --policies A,B, --checkout COMMIT, "
        "--compile, --ranks 1,2, --vary NAME=A,B, or a second script",
        hint=f"type: {with_value('--policies', 'fp32,bf16')}",
    )


def _is_record(name: str) -> bool:
    return name.endswith(".json") or (Path(name) / "record.json").is_file()


def _sides(script: Script, mode: Mode, text: str, *, folder: Path) -> tuple[Side, Side]:
    from mezzo.commands.diff import sides

    if mode == "policies":
        return sides.of_policies(script, text)
    if mode == "checkout":
        return sides.of_checkout(script, text, folder)
    if mode == "compile":
        return sides.of_compile(script)
    if mode == "ranks":
        return sides.of_ranks(script, text)
    if mode == "vary":
        return sides.of_values(script, text)
    first, *rest = script.arguments or []
    return sides.of_scripts(script, first, rest)


def _finish_runs(
    script: Script, mode: Mode, sides: tuple[Side, Side], *, steps: tuple[int, ...], began_s: float
) -> None:
    from mezzo.commands.diff.runs import DiffRuns
    from mezzo.studies.loop import Study
    from mezzo.studies.side_by_side import one_after_another

    for side in sides:
        side.script.check(side.policy)
    folder = script.folder("diff", leaves=("a", "b"))
    finished = finished_before(script, folder, "diff", say=results.note)
    study = Study(one_after_another, finished)
    runs = DiffRuns(a=sides[0], b=sides[1], folder=folder, study=study, steps=steps, say=results.note)
    with stoppable() as stop:
        try:
            with shown(), one_after_another.opened(folder):
                parts = runs.run()
        except Stopped as stopped:
            results.note(f"{stopped}; the records of its runs are in {folder}")
            raise typer.Exit(stopped.exit_code) from None
        record = _record(
            script,
            mode,
            (runs.a.name, runs.b.name),
            runs.records["a"],
            runs.records.get("b", runs.records["a"]),
            parts,
            began_s,
        )
        script.finish(record, folder)
    own = record.run.exit_code or record.other.exit_code
    raise typer.Exit(stop.exit_code or own or int(record.verdict not in _SAME))


def _finish_records(script: Script, given: Sequence[str], began_s: float) -> NoReturn:
    """Compare two records, and end the command.

    Args:
        script: the words that were typed: the first record, and in its arguments the second.
        given: options of the command that choose what to run.
        began_s: when the command began.

    Raises:
        UsageError: there are not two records of ``mezzo run``, or an option was given.
    """
    from mezzo.commands.diff.answer import answer
    from mezzo.commands.diff.judge import judge
    from mezzo.observe.values.log import VALUES_NAME, ValuesLog
    from mezzo.records import RunRecord, read_record

    if given:
        raise UsageError(
            f"{given[0]} was given with two records, which are over; allowed: no option that chooses what to run",
            hint=f"leave out {given[0]}, or compare scripts: mezzo diff old.py new.py",
        )
    words = script.arguments or []
    if len(words) != 1:
        raise UsageError(
            f"mezzo diff {script.target} has {len(words)} records to compare it with; allowed: one",
            hint="type: mezzo diff a/record.json b/record.json",
        )
    paths = [path / "record.json" if path.is_dir() else path for path in map(Path, (script.target, words[0]))]
    read = [read_record(path) for path in paths]
    records = [one for one in read if isinstance(one, RunRecord)]
    if len(records) < len(read):
        other = next(one for one in read if not isinstance(one, RunRecord))
        raise UsageError(
            f"the record of mezzo {other.kind.replace('_', '-')} has no fingerprints; allowed: records of mezzo run --fingerprints",
            hint="type: mezzo run --fingerprints train.py",
        )
    a, b = (ValuesLog.load(path.with_name(VALUES_NAME)) for path in paths)
    found = judge(a, b, same_formats=records[0].policy == records[1].policy)
    parts = answer(a, b, found, control=None, control_of_b=False)
    folder = replace(script, target=str(paths[0].parent)).folder("diff")
    names = str(paths[0].parent), str(paths[1].parent)
    record = _record(script, "records", names, records[0], records[1], parts, began_s)
    script.finish(record, folder)
    raise typer.Exit(int(record.verdict not in _SAME))


def _record(
    script: Script,
    mode: Mode,
    names: tuple[str, str],
    run: RunRecord,
    other: RunRecord,
    parts: dict[str, Any],
    began_s: float,
) -> DiffRecord:
    from mezzo.records import DiffRecord

    return DiffRecord(
        command=list(typed()),
        script=script.target if mode != "records" else run.script,
        mode=mode,
        name_a=names[0],
        name_b=names[1],
        run=run,
        other=other,
        environment=run.environment,
        duration_s=time.monotonic() - began_s,
        **parts,
    )
