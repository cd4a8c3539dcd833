"""Choose the next run of a search by a pure function of what is known so far, so that a table of cases can test every course of it.

1. Every configuration runs for a few steps, beginning with what the script does now. Configurations that fail, exceed the memory, are
   emulated or change nothing are dropped, and so are batches larger than a batch that did not fit, and variants of a policy that changed
   nothing. Configurations that predictions rule out are not run (``forecast``).
2. The faster half runs for twice the steps, until few are left. Configurations clearly slower than the script now are dropped.
3. The finalists, the script as it is now, and FP32 on the same batches, interleaved, seed by seed.
"""

from __future__ import annotations

import math
import signal
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from scipy import special

from mezzo.commands.check.plan import MARGIN
from mezzo.commands.compare.costs import why_unlike
from mezzo.formats import FP32
from mezzo.measure.checkpointing.wanted import bytes_text
from mezzo.measure.environment import host_bytes
from mezzo.records import AS_IS, ModelChange, RunRecord

FINALISTS = 3
FINAL = 100
"""The number of the last round, after any other."""
TIMES_LONGER = 4
"""How many times the steps of the first round the finalists run."""
_SLOWER = 0.9
"""Share of the present speed below which a configuration is dropped without repeats."""
_CHANGES: dict[ModelChange, str] = {
    "channels_last": "memory layout",
    "compile": "torch.compile",
    "checkpoint": "activation checkpointing",
}
_FOR_ROUNDS = 0.5
"""Share of the budget for the rounds before the finals; the rest is for repeats."""


@dataclass(frozen=True)
class Trial:
    """One run of the script."""

    configuration: Configuration
    round: int
    repeat: int = 0


@dataclass(frozen=True, kw_only=True)
class SearchKnowledge:
    """What is known in a search so far."""

    configurations: tuple[Configuration, ...]
    """What the script does now first."""
    steps: int
    """Of the first round."""
    repeats: int
    memory_bytes: int | None = None
    """The most that a configuration may take; None for no limit."""
    margin: float = MARGIN
    """Largest difference in the final loss that counts as equivalent, as a share of FP32's."""
    left_share: float = 1.0
    """What is left of the budget."""
    ruled_out: Mapping[Configuration, str] = field(default_factory=dict)
    """Configurations that predictions leave out, with the reason."""
    runs: Mapping[Trial, RunRecord] = field(default_factory=dict)

    @property
    def now(self) -> Configuration:
        """What the script does now."""
        return self.configurations[0]

    def speed(self, trial: Trial) -> Speed | None:
        """Return the speed of a trial; None without one."""
        run = self.runs.get(trial)
        return None if run is None else speed_of(run)

    def unlike_now(self, trial: Trial) -> str:
        """Return why a trial's time cannot be compared with the script's present time in the same round and repeat; empty if it can."""
        run, now = self.runs[trial], self.runs.get(replace(trial, configuration=self.now))
        return "" if now is None else why_unlike(run, now, trial.configuration.name)

    def over_now(self, trial: Trial) -> float | None:
        """Return how many times as fast as the script now a trial is, in the same round and repeat."""
        mine, now = self.speed(trial), self.speed(replace(trial, configuration=self.now))
        if mine is None or now is None or self.unlike_now(trial):
            return None
        return mine.over(now, alike=trial.configuration.settings == self.now.settings)


def steps_of(known: SearchKnowledge, round: int) -> int:
    """Return the number of steps of a round's runs."""
    return known.steps * (TIMES_LONGER if round == FINAL else min(2**round, TIMES_LONGER))


def next_trial(known: SearchKnowledge) -> Trial | None:
    """Return the next run; None if nothing is left to run, or no time."""
    if known.left_share <= 0:
        return None
    first = Trial(known.now, 0)
    if first not in known.runs:
        return first
    if fault(known, first):
        return None
    for number, configurations in enumerate(rounds(known)):
        if known.left_share < 1 - _FOR_ROUNDS:
            break
        for configuration in configurations:
            trial = Trial(configuration, number)
            if trial not in known.runs and not (number == 0 and pruned(known, configuration)):
                return trial
    return next(_missing_finals(known), None)


def expected_trials(known: SearchKnowledge) -> Iterator[Trial]:
    """Yield the runs of the same round that follow the next one if none fails; none before the first run has ended."""
    like, first = known.runs.get(Trial(known.now, 0)), next_trial(known)
    while like is not None and (trial := next_trial(known)) is not None and first is not None:
        if trial.round != first.round:
            return
        if trial != first:
            yield trial
        known = replace(known, runs={**known.runs, trial: like})


def rounds(known: SearchKnowledge) -> Iterator[list[Configuration]]:
    """Yield the configurations of each round before the finals, the script as it is now first."""
    remaining, number = [one for one in known.configurations if one not in known.ruled_out], 0
    while number == 0 or len(remaining) > FINALISTS + 1:
        yield remaining
        remaining = [known.now, *_survivors(known, remaining, number)]
        number += 1


def finalists(known: SearchKnowledge) -> list[Configuration]:
    """Return the configurations that are repeated, the fastest first."""
    *_, last = enumerate(rounds(known))
    number, remaining = last
    return _survivors(known, remaining, number)[:FINALISTS]


def _survivors(known: SearchKnowledge, remaining: Sequence[Configuration], number: int) -> list[Configuration]:
    """Return the faster half of the configurations in a round, at least as many as there are finalists."""
    speeds: dict[Configuration, float] = {}
    for configuration in remaining:
        trial = next(
            (Trial(configuration, n) for n in range(number, -1, -1) if Trial(configuration, n) in known.runs), None
        )
        if configuration == known.now or trial is None or fault(known, trial):
            continue
        times = known.over_now(trial)
        if times is not None and times >= _SLOWER:
            speeds[configuration] = times
    ranked = sorted(speeds, key=lambda one: -speeds[one])
    return ranked[: max(math.ceil(len(remaining) / 2) - 1, FINALISTS)]


def quality_baselines(known: SearchKnowledge) -> list[Configuration]:
    """Return the FP32 runs that the finalists are compared with: one for each of their settings."""
    return [
        Configuration(policy=FP32.name, settings=settings)
        for settings in dict.fromkeys(f.settings for f in finalists(known))
    ]


def _missing_finals(known: SearchKnowledge) -> Iterator[Trial]:
    chosen = finalists(known)
    if not chosen:
        return
    configurations = list(dict.fromkeys([known.now, *chosen, *quality_baselines(known)]))
    for repeat in range(known.repeats):
        start = repeat % len(configurations)
        for configuration in configurations[start:] + configurations[:start]:
            trial = Trial(configuration, FINAL, repeat)
            if trial not in known.runs:
                yield trial


def fault(known: SearchKnowledge, trial: Trial) -> str:
    """Return why a trial's configuration cannot be the answer; empty if it can."""
    run = known.runs[trial]
    if why := short_of_memory(run):
        return why
    if run.error is not None or (run.exit_code and run.first_steps is None):
        return run.error or f"it ended with exit code {run.exit_code}; what it printed is in output.log of its folder"
    if why := _above_limit(known, run):
        return why
    if run.effective.emulated:
        return "its formats are emulated here: its speed says nothing"
    if run.changed_nothing and run.policy != AS_IS:
        return f"{run.policy} {run.no_effect}"
    for change, why in run.effective.unmade_changes.items():
        return f"{_CHANGES[change]} changed nothing: {why}"
    if why := known.unlike_now(trial):
        return why
    if speed_of(run) is None:
        return f"it ran {len(run.steps)} steps, too few to be timed"
    return ""


def memory_of(run: RunRecord) -> int | None:
    """Return the bytes that a run needs: the allocator's peak on a GPU, else the bytes of a step; None if neither was measured."""
    memory = run.memory
    return memory.cuda_reserved_bytes or memory.cuda_allocated_bytes or memory.total_bytes


def pruned(known: SearchKnowledge, configuration: Configuration) -> str:
    """Return why a configuration need not be run; empty if it is to be.

    - A prediction rules it out.
    - A smaller batch did not fit.
    - It stores images channels-last, and another configuration found no images to store.
    - Its policy changed nothing before: layout, torch.compile and checkpointing do not decide which format is used.
    """
    if configuration in known.ruled_out:
        return known.ruled_out[configuration]
    for trial, run in known.runs.items():
        other = trial.configuration
        with_its_changes = replace(
            configuration, channels_last=other.channels_last, compiles=other.compiles, checkpoint=other.checkpoint
        )
        if with_its_changes == other != configuration and run.changed_nothing and run.error is None:
            return f"{other.name} {run.no_effect}: neither would its other variants"
        same_layout = configuration.channels_last and other.channels_last and configuration.settings == other.settings
        if same_layout and other != configuration and _has_no_layout(run):
            return f"{_CHANGES['channels_last']} changed nothing of {other.name}, and no policy decides that"
        did_not_fit = _above_limit(known, run) or short_of_memory(run)
        if trial.round == 0 and did_not_fit and _is_larger(configuration, other):
            return f"{other.name} did not fit, and its batch is smaller"
    return ""


def _has_no_layout(run: RunRecord) -> bool:
    """Return whether a run that was to store images channels-last trained, and found none to store."""
    return "channels_last" in run.effective.unmade_changes and run.error is None


def _above_limit(known: SearchKnowledge, run: RunRecord) -> str:
    """Return that a run needs more memory than a configuration may take; empty if it does not, or was not measured."""
    needed, limit = memory_of(run), known.memory_bytes
    if needed is None or limit is None or needed <= limit:
        return ""
    return f"it needs {bytes_text(needed)}, above the limit of {bytes_text(limit)}"


def _is_larger(configuration: Configuration, other: Configuration) -> bool:
    """Return whether two configurations differ in nothing but the batch, and the first one's is larger."""
    if replace(configuration, settings=()) != replace(other, settings=()):
        return False
    settings, other_settings = dict(configuration.settings), dict(other.settings)
    differing = [name for name in settings if settings[name] != other_settings.get(name)]
    if settings.keys() != other_settings.keys() or len(differing) != 1 or "batch" not in differing[0]:
        return False
    values = settings[differing[0]], other_settings[differing[0]]
    return all(value.isdecimal() for value in values) and int(values[0]) > int(values[1])


_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a process that the system killed, as it does when memory runs out."""


def short_of_memory(run: RunRecord) -> str:
    """Return why memory ended ``run``; empty if something else did, or nothing."""
    failed = run.out_of_memory
    if failed is not None and failed.asked_bytes is not None and run.environment.device == "cpu":
        return (
            f"it requested {bytes_text(failed.asked_bytes)} at once, which this machine, with {bytes_text(host_bytes())}, could not "
            "provide; mezzo predict traces it without memory for its weights"
        )
    if failed is not None:
        return run.error or failed.message
    if run.exit_code in _KILLED and run.first_steps is None:
        return (
            f"the system killed it (exit code {run.exit_code}), as it does when memory runs out; this machine has "
            f"{bytes_text(host_bytes())}, and mezzo predict traces it without memory for its weights"
        )
    return ""


Changes = tuple[bool, bool]
"""Whether the models are channels-last, and whether they are compiled."""
CHANGES: dict[str, Changes] = {
    "as-is": (False, False),
    "channels-last": (True, False),
    "compile": (False, True),
    "channels-last+compile": (True, True),
}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to run the script."""

    policy: str = AS_IS
    settings: tuple[tuple[str, str], ...] = ()
    """Options of the script by name, each with its value; options that are not here stay as typed."""
    channels_last: bool = False
    compiles: bool = False
    checkpoint: str = ""
    """The plan of activation checkpointing, or its budget; empty for none."""

    @property
    def name(self) -> str:
        """The configuration for people: ``bf16, batch-size 64, channels-last``."""
        parts = [self.policy, *(f"{name} {value}" for name, value in self.settings)]
        parts += ["channels-last"] * self.channels_last + ["compiled"] * self.compiles
        parts += [f"checkpointed {self.checkpoint}"] * bool(self.checkpoint)
        return ", ".join(parts)

    def arguments(self, own: Sequence[str]) -> list[str]:
        """Return the script's arguments: ``{name}`` becomes the value; without that, the option is appended."""
        arguments = list(own)
        for name, value in self.settings:
            if _has_placeholder(name, own):
                arguments = [word.replace(f"{{{name}}}", value) for word in arguments]
            else:
                arguments += [f"-{name}" if len(name) == 1 else f"--{name}", value]
        return arguments


def grid(
    policies: Sequence[str],
    vary: Mapping[str, Sequence[str]],
    changes: Sequence[Changes],
    own: Sequence[str],
    *,
    checkpoints: Sequence[str] = (),
) -> list[Configuration]:
    """Return all configurations; the first is what the script does now, then what was asked for.

    Values of the script's options come before policies, and changes to the models last: compiling takes longest, and a budget may end.

    Args:
        policies: policies besides the script's own precision.
        vary: values of the script's options by name. Where ``own`` has ``{name}``, the first value is the present one.
        changes: changes to the models besides none.
        own: the script's arguments as typed.
        checkpoints: plans of activation checkpointing besides none.
    """
    settings = list(_settings(vary, own))
    found = [
        Configuration(
            policy=policy, settings=chosen, channels_last=channels_last, compiles=compiles, checkpoint=checkpoint
        )
        for channels_last, compiles in dict.fromkeys([(False, False), *changes])
        for checkpoint in dict.fromkeys(["", *checkpoints])
        for policy in dict.fromkeys([AS_IS, *policies])
        for chosen in settings
    ]
    return list(dict.fromkeys(found))


def _settings(vary: Mapping[str, Sequence[str]], own: Sequence[str]) -> Iterator[tuple[tuple[str, str], ...]]:
    choices: list[list[tuple[tuple[str, str], ...]]] = []
    for name, values in vary.items():
        now: list[tuple[tuple[str, str], ...]] = [] if _has_placeholder(name, own) else [()]
        present = _present_value(name, own)
        choices.append([*now, *(((name, value),) for value in dict.fromkeys(values) if value != present)])
    for chosen in product(*choices):
        yield tuple(setting for part in chosen for setting in part)


def _has_placeholder(name: str, own: Sequence[str]) -> bool:
    return any(f"{{{name}}}" in word for word in own)


def _present_value(name: str, own: Sequence[str]) -> str | None:
    """Return the value that the arguments give an option, the last one; None if they do not name it."""
    option = f"-{name}" if len(name) == 1 else f"--{name}"
    value = None
    for index, word in enumerate(own):
        if word == option and index + 1 < len(own):
            value = own[index + 1]
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value


_WARM_UP = 3
"""First steps that are not timed: allocations, autotuning, compilation."""
FEWEST_TIMED = 5
_ERROR = 0.05


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of a run after its first steps."""

    step_ms: float
    """Median: an evaluation between two steps, or a step that waited for a disk, does not count."""
    input_elements: float | None = None
    """The input of a step, in elements of the model's first input."""

    def over(self, other: Speed, *, alike: bool) -> float | None:
        """Return how many times as much this one trains in a second.

        Args:
            other: the speed to compare with.
            alike: whether the steps of both do the same work; if not, they are compared by their inputs.

        Returns:
            The ratio; None if the inputs of steps are not known.
        """
        times = other.step_ms / self.step_ms
        if alike:
            return times
        if not self.input_elements or not other.input_elements:
            return None
        return times * self.input_elements / other.input_elements


def speed_of(run: RunRecord) -> Speed | None:
    """Return the speed of a run; None if it has too few steps after the first ones."""
    first = max(_WARM_UP, (run.effective.counted_on_step or 0) + 1)
    times = [ms for ms in run.steps.time_ms[first:] if math.isfinite(ms) and ms > 0]
    if len(times) < FEWEST_TIMED:
        return None
    return Speed(step_ms=statistics.median(times), input_elements=run.input_elements)


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """A speed-up over paired repeats."""

    times: float
    """Geometric mean."""
    low: float
    """Ends of the confidence interval: 95% for all compared configurations together. NaN with a single repeat."""
    high: float

    @property
    def faster(self) -> bool:
        """Whether it is faster beyond the noise of the repeats."""
        return self.low > 1.0


def speed_up(ratios: Sequence[float], *, num_compared: int) -> SpeedUp:
    """Return the speed-up that ``ratios`` of paired repeats show: Student's t on their logarithms, Bonferroni's correction.

    Args:
        ratios: one for each repeat.
        num_compared: how many configurations are compared with the same reference.
    """
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    middle = float(logs.mean())
    if len(logs) < 2:
        return SpeedUp(times=math.exp(middle), low=math.nan, high=math.nan)
    quantile = float(special.stdtrit(len(logs) - 1, 1 - _ERROR / (2 * num_compared)))
    half = quantile * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return SpeedUp(times=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half))
