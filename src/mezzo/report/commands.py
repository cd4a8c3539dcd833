"""Mezzo's commands as text to paste: a recorded command line becomes the command to type next, on the same script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from mezzo.error_texts import leaves_range, refuses_format
from mezzo.records import RangesRecord, Row, RunRecord
from mezzo.records.run import INSPECTING, RUN_NAME, WIDE_POLICIES, inspecting
from mezzo.report import formatting as fmt
from mezzo.report.sections import NextStep
from mezzo.secrets import hidden

FLAGS = frozenset(
    (
        "-m",
        "--json",
        "--verbose",
        "--write-patch",
        "--channels-last",
        "--compile",
        "--slurm",
        "--calibrate",
        "--fingerprints",
        "--accept",
        "--per-gemm",
    )
)
"""Options without a value, of all commands on a script; every other option has one."""

CARRIED: Mapping[str, tuple[str, ...]] = {
    "--metric": ("run", "compare", "check", "gate"),
    "--checkpoint": ("run", "compare"),
    "--seeds": ("compare", "check"),
    "--jobs": ("compare", "check", "fallback", "tune"),
    "--on": ("compare", "check", "fallback", "tune"),
    "--channels-last": ("run", "predict"),
    "--log-to": (
        *("run", "compare", "check", "audit", "diagnose", "diff", "ranges", "fallback"),
        *("predict", "tune", "watch", "resume-check", "gate"),
    ),
}
"""Options that mean the same in several commands, with these commands. No other option is passed from one command to another; a
repeated command keeps all its options except ``DROPPED``."""

DROPPED: Mapping[str, str] = {
    "--out": "results go to a new folder",
    "--json": "a person types the next command",
    "--verbose": "what the next command shows is its own",
    "--write-expect": "the contract is written",
}
"""Options that even a repeated command leaves out, with the reason."""
_NAMES_RUNS = ("compare", "check", "tune", "resume-check", "diagnose", "fallback", "gate")
"""Commands that replace ``{run}`` in the script's arguments."""
_DEFAULT_EXPONENT = 16
"""Exponent of the initial loss scale of a policy that does not set one."""
_CHOOSES = ("KERAS_BACKEND", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "PYTHONPATH")
"""Environment variables that choose what runs and where: without them, a different script may run."""
_DISTRIBUTED = ("run", "compare", "audit", "diagnose", "ranges", "fallback")
"""Commands that run inside each process of a launcher."""
_LAUNCHERS = (
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE", ("torchrun", "--nproc-per-node", "{}", "--no-python")),
    (
        "PADDLE_TRAINERS_NUM",
        "PADDLE_LOCAL_SIZE",
        ("python", "-m", "paddle.distributed.launch", "--nproc_per_node", "{}"),
    ),
)
"""The variables with the numbers of processes, of all and of this machine, that a launcher sets, and its words for that number."""
_FOR_TRAINERS = ("run", "compare", "check")
"""Commands that accept scripts of every framework; the others inspect operations, which not every framework shows."""


@dataclass(frozen=True, kw_only=True)
class TypedScript:
    """A script, and the Mezzo command that was typed for it."""

    command: str
    options: Mapping[str, tuple[str, ...]]
    """The options before the script, by name, each with its values; a flag has one empty value."""
    name: str
    """A file or, with ``-m`` among the options, a module."""
    arguments: tuple[str, ...] = ()
    framework: str = "torch"
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment variables of the record."""

    @classmethod
    def typed(cls, words: Sequence[str], name: str) -> TypedScript | None:
        """Return the script ``name`` in the command ``words``; None if they are not a command on that script."""
        words = list(words)
        if words[:1] != ["mezzo"] or len(words) < 3:
            return None
        options: dict[str, tuple[str, ...]] = {}
        place = 2
        while place < len(words) and words[place].startswith("-") and words[place] != "--":
            option, equals, value = words[place].partition("=")
            place += 1
            if option not in FLAGS and not equals:
                value = words[place] if place < len(words) else ""
                place += 1
            options[option] = (*options.get(option, ()), value)
        place += words[place : place + 1] == ["--"]
        if words[place : place + 1] != [name]:
            return None
        return cls(command=words[1], options=options, name=name, arguments=tuple(words[place + 1 :]))

    def runs(self, command: str) -> bool:
        """Return whether ``command`` accepts a script of this framework."""
        taken = inspecting(self.framework)
        return command in (*_FOR_TRAINERS, *taken) or taken == INSPECTING

    def under(self, command: str, **options: str) -> str:
        """Return ``command`` on this script as a shell line.

        Args:
            command: the command's name.
            options: its options, by name without dashes, in addition to the recorded command's options that mean the same here; a
                flag has an empty value.
        """
        new = {f"--{name}": (value,) for name, value in options.items()}
        kept = {name: values for name, values in self.options.items() if name not in new and self._keeps(name, command)}
        before = [word for name, values in (new | kept).items() for value in values for word in _option(name, value)]
        arguments = self.arguments
        if command not in _NAMES_RUNS:
            arguments = tuple(word.replace(RUN_NAME, _run_name(command, options)) for word in arguments)
        return self._line(["mezzo", command, *before, *self._target(), *arguments], distributed=command in _DISTRIBUTED)

    def alone(self) -> str:
        """Return the script's own command, without Mezzo."""
        arguments = [word.replace(RUN_NAME, "alone") for word in self.arguments]
        return self._line(["python", *self._target(), *arguments], distributed=True)

    def _keeps(self, option: str, command: str) -> bool:
        if option in DROPPED or option == "-m":
            return False
        return command == self.command or {command, self.command} <= {*CARRIED.get(option, ())}

    def _target(self) -> list[str]:
        if "-m" in self.options:
            return ["-m", self.name]
        return ["--", self.name] if self.name.startswith("-") else [self.name]

    def _line(self, words: Sequence[str], *, distributed: bool) -> str:
        chosen = [
            f"{name}={shlex.quote(fmt.clean(self.variables[name]))}" for name in _CHOOSES if name in self.variables
        ]
        launcher = self._launcher() if distributed else []
        return " ".join([*chosen, shlex.join([*launcher, *(fmt.clean(word) for word in hidden(words))])])

    def _launcher(self) -> list[str]:
        """Return the launcher of a run in several processes of one machine."""
        for size, local_size, words in _LAUNCHERS:
            count = self.variables.get(size, "1")
            if count != "1" and self.variables.get(local_size) == count:
                return [word.format(count) for word in words]
        return []


def _option(name: str, value: str) -> tuple[str, ...]:
    if name in FLAGS:
        return (name,)
    return (f"{name}={value}",) if value.startswith("-") else (name, value)


def _run_name(command: str, options: Mapping[str, str]) -> str:
    return re.sub(r"[^\w.-]+", "-", f"{command}-{options.get('policy', '')}").strip("-")


def function_call(command: str, name: str, policy: str = "", *, flags: Sequence[str] = ()) -> str:
    """Return the call of Mezzo's function ``command`` for a function that was observed in its own process."""
    last = name.rpartition(".")[2]
    under = f', policy="{fmt.clean(policy)}"' if policy else ""
    switched = "".join(f", {flag.replace('-', '_')}=True" for flag in flags)
    return f"mezzo.{command}({last if last.isidentifier() else 'train'}{under}{switched})"


def typed_policy(one: Row | RunRecord) -> str:
    """Return a policy as it is typed in a command."""
    return one.policy_typed or one.policy


def row_options(row: Row) -> dict[str, str]:
    """Return the options of a command that trains as a row of a comparison did."""
    return {"policy": typed_policy(row)} | ({"checkpoint": row.checkpoint} if row.checkpoint else {})


def with_fp32(policy: str) -> str:
    """Return the policies of a comparison of ``policy`` with FP32; FP32 itself is compared with BF16."""
    return "fp32,bf16" if policy == "fp32" else f"fp32,{policy}"


def preset_of(policy: str) -> str:
    """Return the preset that a policy's text begins with."""
    return policy.partition(":")[0]


def with_scale(record: RangesRecord, exponent: int) -> str:
    """Return the judged policy with an initial loss scale of two to the ``exponent``."""
    name, *fields = record.policy.split(":")
    if not name.startswith("fp16") or exponent == 0:
        return record.policy_shown
    settings = dict(setting.split("=", 1) for setting in fields)
    before = float(settings.get("init_scale", 2.0**_DEFAULT_EXPONENT))
    pure = name == "fp16-pure" and settings.get("loss_scale", "none") == "none"
    if before == 2.0**exponent and not pure:
        return record.policy_shown
    settings |= {"loss_scale": "dynamic"} if pure else {}
    settings |= {"init_scale": f"{2.0**exponent:.0f}" if exponent >= 0 else repr(2.0**exponent)}
    return ":".join([name, *(f"{key}={value}" for key, value in settings.items())])


def resumption(record: RunRecord) -> dict[str, str]:
    """Return the options that continue a run from its last snapshot; none if it has no snapshot."""
    snapshots = record.snapshots
    if snapshots is None or not snapshots.saved:
        return {}
    run, here = PurePath(snapshots.folder).parent, PurePath(record.environment.folder)
    inside = record.environment.folder and run.is_relative_to(here)
    return {"snapshot": f"{snapshots.every_s:g}s", "resume": str(run.relative_to(here) if inside else run)}


# --- What to do next -------------------------------------------------------------------------------------------------------------

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
            flags = [name for name, value in options.items() if not value]
            yield NextStep(why=fmt.clean(why), command=function_call(command, self._function, policy, flags=flags))

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
    if preset_of(record.policy) not in WIDE_POLICIES and (known := explained([record.error or ""], policy)):
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
