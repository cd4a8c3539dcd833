"""Choose the next run of a search by a pure function of what is known so far, so that a table of cases can test every course of it.

1. Every configuration runs for a few steps, beginning with what the script does now. Configurations that fail, exceed the memory, are
   emulated or change nothing are dropped, and so are batches larger than one that did not fit, and variants of a policy that changed
   nothing. Configurations that predictions rule out are not run (``forecast``).
2. The faster half runs for twice the steps, until few are left. Configurations clearly slower than the script now are dropped.
3. The finalists, the script as it is now, and FP32 on the same batches, interleaved, seed by seed.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mezzo.commands.compare.costs import why_unlike
from mezzo.commands.tune.configurations import Configuration
from mezzo.commands.tune.speed import Speed, speed_of
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
    margin: float
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
        """Return why a trial's time cannot be compared with that of the script now in the same round and repeat; empty if it can."""
        run, now = self.runs[trial], self.runs.get(replace(trial, configuration=self.now))
        return "" if now is None else why_unlike(run, now, trial.configuration.name)

    def over_now(self, trial: Trial) -> float | None:
        """Return a trial's speed over that of the script now, in the same round and repeat."""
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


# --- what bars a configuration -------------------------------------------------------------------------------------------------


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
    """Return the bytes that a run needs: the allocator's peak on a GPU, else those of a step; None if neither was measured."""
    memory = run.memory
    return memory.cuda_reserved_bytes or memory.cuda_allocated_bytes or memory.total_bytes


def pruned(known: SearchKnowledge, configuration: Configuration) -> str:
    """Return why a configuration need not be run; empty if it is to be.

    Reasons are a prediction, a smaller batch that did not fit, a layout of images that the same script has none for, and a policy that
    changed nothing: a memory layout, torch.compile and checkpointing do not decide what is computed in which format.
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


# --- Runs that ended for lack of memory: how much they requested, and what this machine has -------------------------------------

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
