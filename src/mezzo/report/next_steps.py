"""What to do after a command: commands to paste, on the script or function of a record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from mezzo.error_texts import leaves_range, refuses_format
from mezzo.records import RunRecord
from mezzo.records.run import WIDE
from mezzo.report import formatting as fmt
from mezzo.report.commands import TypedScript, function_call, preset_of, resumption
from mezzo.report.sections import NextStep

MOST = 3
_MANY_SKIPS = 0.05
_BY_SIGNAL = (129, 130, 143)
_CANNOT, _FLOOR, _NOT_FINITE, _NOT_A_TRAINING, _SNAPSHOT, _GUARD = 3, 5, 6, 7, 9, 10
"""Exit codes of Mezzo's own errors: a format that the device lacks, a loss scale at its floor, a first loss that is not finite, a
script that never trained, a refused snapshot, and an alarm that stopped the run."""


def best_first(steps: Iterable[NextStep]) -> list[NextStep]:
    """Return at most ``MOST`` different steps that have a command; the last of the same ones explains it."""
    unique = {step.command: step for step in reversed([*steps]) if step.command}
    return [*reversed(unique.values())][:MOST]


class ScriptCommands:
    """The commands on the script or function of a record."""

    def __init__(self, run: RunRecord, words: Sequence[str] | None = None) -> None:
        words = run.command if words is None else words
        script = TypedScript.typed(words, run.script)
        self.script = script and replace(script, framework=run.framework, variables=run.environment.variables)
        self._function = "" if words[:1] == ["mezzo"] else run.script

    def step(self, why: str, command: str, **options: str) -> Iterator[NextStep]:
        """Yield a command on the script or function with ``options``; nothing if it does not accept such a script."""
        if self.script is not None and self.script.runs(command):
            yield NextStep(why=fmt.clean(why), command=self.script.under(command, **options))
        elif self._function and command in ("audit", "diagnose", "ranges", "fallback"):
            policy = "" if command == "audit" else options.get("policy", "")
            yield NextStep(why=fmt.clean(why), command=function_call(command, self._function, policy))

    def again(self, why: str) -> Iterator[NextStep]:
        """Yield the recorded command."""
        if self.script is not None:
            yield NextStep(why=fmt.clean(why), command=self.script.under(self.script.command))

    def alone(self, why: str) -> Iterator[NextStep]:
        """Yield the script's own command."""
        if self.script is not None:
            yield NextStep(why=why, command=self.script.alone())


def after_failure(record: RunRecord, commands: ScriptCommands, policy: str) -> Iterator[NextStep]:
    """Yield what to do after a run that failed, or that a signal ended."""
    if record.exit_code in _BY_SIGNAL:
        if options := resumption(record):
            yield from commands.step("continue from its last snapshot", "run", policy=policy, **options)
        return
    # Without an error the exit code is the script's own, and may be any.
    code = record.exit_code if record.error is not None else None
    if preset_of(record.policy) not in WIDE and (known := explained([record.error or ""], policy)):
        yield from commands.step(*known, policy=policy)
    elif code == _CANNOT:
        yield NextStep(why="see which formats each device of this machine computes in", command="mezzo doctor")
    elif code in (_FLOOR, _NOT_FINITE):
        yield from commands.step("find the first value that is not finite", "diagnose", policy=policy)
    elif code not in (_NOT_A_TRAINING, _SNAPSHOT, _GUARD):
        yield from commands.alone("see whether the script also fails without Mezzo")


def skips_many(num_skipped: float, num_steps: int) -> bool:
    """Return whether so many updates were skipped that somebody should see why."""
    return num_steps > 0 and num_skipped >= _MANY_SKIPS * num_steps and num_skipped >= 3


def explained(errors: Iterable[str], policy: str) -> tuple[str, str] | None:
    """Return the reason for a command and its name, given the ``errors`` of runs under ``policy``; None if the format is not the cause."""
    errors = tuple(errors)
    if any(map(refuses_format, errors)):
        return (
            f"an operation does not accept the format of {policy}; find the modules that must stay in FP32",
            "fallback",
        )
    if any(map(leaves_range, errors)):
        return f"a number in the script is beyond the range of {policy}; find its line", "diagnose"
    return None
