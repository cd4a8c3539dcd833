"""What the sheets of several kinds of record share: the environment, memory, formats, a run as a row.

A sheet has no markup. Text from a script or a model passes through ``clean`` here; the views escape it for their medium.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mezzo.records import Environment, Memory, Reason, RunRecord
from mezzo.report import formatting as fmt
from mezzo.report.charts.series import quantile
from mezzo.report.colours import format_style

NOT_FOR_GPU = "emulated: says nothing about a GPU"
_LONGEST_WORD = 100_000  # of a command, which must stay whole to be pasted: a policy may name hundreds of modules
_ENVIRONMENT_LABELS = {
    "date": "Date",
    "device": "Device",
    "gpu": "GPU",
    "driver": "Driver",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "triton": "Triton",
    "cpu": "CPU",
    "threads": "Threads",
    "os": "OS",
    "torch": "PyTorch",
    "python": "Python",
    "mezzo": "Mezzo",
}


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One line of a table: a label, its value and, if there is one, the reason."""

    what: str
    value: str
    reason: str = ""
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table: column heads, rows of cells, and which columns are numbers."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """What the sheets of all kinds of record have in common: words and tables, ready for any view."""

    title: str
    headline: str
    environment: list[Fact]
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class ScriptSheet(Sheet):
    """The same for a record of a script."""

    script: str


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of one format."""

    format: str
    text: str
    percent: float
    style: str
    """Name of the format's colour."""


@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """The memory of one policy by kind."""

    policy: str
    kinds: list[Fact]
    total: str


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """One run, as a row of a table."""

    policy: str
    seed: str
    steps: str
    final_loss: str
    skipped: str
    final_scale: str
    duration: str
    outcome: str
    failed: bool


def facts(reasons: Sequence[Reason]) -> list[Fact]:
    """Return ``reasons`` as lines of a table."""
    return [Fact(what=fmt.clean(r.what), value=fmt.clean(r.value), reason=fmt.clean(r.reason)) for r in reasons]


def explained(record: RunRecord) -> list[Fact]:
    """Return what the name of a run's policy stands for, and then what the policy does."""
    return [*name_meant(record), *facts(record.explanation)]


def name_meant(record: RunRecord) -> list[Fact]:
    """Return what the typed name of a run's policy stands for; nothing if that is the policy's own name."""
    if not record.policy_typed:
        return []
    why = f"{fmt.clean(record.policy_typed)} stands for it"
    return [Fact(what="policy", value=fmt.clean(record.policy), reason=why)]


def environment_facts(environment: Environment, *, framework: str = "") -> list[Fact]:
    """Return what is known about the machine and the versions, and the framework if it is not torch."""
    known = [
        (k, fmt.date_text(environment.date) if k == "date" else getattr(environment, k)) for k in _ENVIRONMENT_LABELS
    ]
    known = [(k, v) for k, v in known if k != "triton" or environment.gpu is not None]  # no kernel of it runs on a CPU
    facts = [Fact(what=_ENVIRONMENT_LABELS[k], value=fmt.clean(str(v))) for k, v in known if v is not None]
    other = framework.partition(" ")[0] not in ("", "torch")
    return [*facts[:-1], Fact(what="Framework", value=fmt.clean(framework)), facts[-1]] if other else facts


def memory_kinds(memory: Memory) -> dict[str, int | None]:
    """Return the bytes of the four kinds by display name; None for one that was not measured."""
    return {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
    }


def memory_peaks(memory: Memory) -> dict[str, int | None]:
    """Return the allocator's peaks, if the device reports them."""
    peaks = {
        "peak allocated": memory.cuda_allocated_bytes,
        "peak reserved": memory.cuda_reserved_bytes,
    }
    return {k: v for k, v in peaks.items() if v is not None}


def memory_lines(measured: Sequence[tuple[str, Memory]]) -> list[MemoryLine]:
    """Return the memory of each policy as display strings, all with the same kinds."""
    sizes = [memory_kinds(memory) | memory_peaks(memory) for _, memory in measured]
    kinds = list(dict.fromkeys(kind for known in sizes for kind in known))
    return [
        MemoryLine(
            policy=fmt.clean(policy),
            kinds=[Fact(what=k, value=fmt.bytes_text(known.get(k))) for k in kinds],
            total=fmt.bytes_text(memory.total_bytes) + (" (emulated)" if memory.of_emulation else ""),
        )
        for (policy, memory), known in zip(measured, sizes, strict=True)
    ]


def shares(share_by_format: Mapping[str, float]) -> list[Share]:
    """Return the formats of ``share_by_format``, largest share first."""
    order = sorted(share_by_format.items(), key=lambda item: -item[1])
    return [
        Share(
            format=fmt.clean(name),
            text=fmt.share_text(share),
            percent=round(100 * share, 2),
            style=format_style(name).name,
        )
        for name, share in order
    ]


def formats_text(record: RunRecord) -> str:
    """Return the formats of a run's matrix products, the largest share first, as in ``fp16 99%, fp32 1%``."""
    parts = shares(record.effective.share_by_format)
    return ", ".join(f"{part.format} {part.text}" for part in parts) or "none counted"


def shares_note(*runs: RunRecord) -> str:
    """Return how the shares of ``runs`` were counted, and under which of their policies formats were emulated."""
    counted = [run for run in runs if run.effective.flops_by_format]
    if not counted:
        return "No matrix product or convolution was counted."
    steps = {run.effective.counted_on_step for run in counted}
    step = next(iter(steps)) if len(steps) == 1 else None
    where = "" if step is None else f" on step {step}"
    note = f"Share of the floating-point operations of matrix products and convolutions, counted{where}."
    worlds = _policies(run for run in counted if ":world=" in (run.policy or ""))
    if worlds:
        note += (
            f" Under {fmt.listed(worlds)} reductions over processes were emulated: times say nothing about a speed-up."
        )
    emulated = [
        policy for policy in _policies(run for run in counted if run.effective.emulated) if policy not in worlds
    ]
    if not emulated:
        return note
    native = _policies(run for run in counted if run.effective.lowered and not run.effective.emulated)
    under = f"Under {fmt.listed(emulated)} the" if native else "The"
    how = "emulated (rounded to the format, multiplied in a wider one): times say nothing about a speed-up"
    return f"{note} {under} lower formats were {how}."


def _policies(runs: Iterable[RunRecord]) -> list[str]:
    return list(dict.fromkeys(fmt.clean(run.policy_shown) for run in runs))


def run_line(record: RunRecord) -> RunLine:
    """Return ``record`` as a row of a table."""
    return RunLine(
        policy=fmt.clean(record.policy_shown),
        seed=fmt.MISSING if record.seed is None else str(record.seed),
        steps=str(len(record.steps)),
        final_loss=final_loss_text(record),
        skipped=str(record.steps.num_skipped),
        final_scale=fmt.scale_text(record.final_scale),
        duration=fmt.duration_text(record.duration_s),
        outcome=error_text(record) or first_steps_text(record) or "ended by itself",
        failed=bool(error_text(record)),
    )


def first_steps_text(*runs: RunRecord) -> str:
    """Return that runs were stopped after their first steps, as requested; empty if none was."""
    numbers = {run.first_steps for run in runs if run.first_steps is not None}
    return f"stopped after the {fmt.first(max(numbers), 'step')}, as requested" if numbers else ""


def final_loss_text(record: RunRecord) -> str:
    """Return the loss of the last step, or the last one of each of several losses."""
    several = [
        f"{fmt.clean(loss.name)} {fmt.number_text(loss.values[-1])}" for loss in record.steps.losses if loss.values
    ]
    return ", ".join(several) or fmt.number_text(record.steps.loss[-1] if record.steps.loss else None)


def command_text(command: Sequence[str], environment: Environment) -> str:
    """Return a command as a shell line, preceded by the environment variables that matter, if their names are names for a shell."""
    variables = [
        f"{name}={shlex.quote(fmt.clean(value))}"
        for name, value in environment.variables.items()
        if name.isascii() and name.isidentifier()
    ]
    return " ".join([*variables, shlex.join([fmt.clean(part, most=_LONGEST_WORD) for part in command])])


def median_ms(times_ms: Sequence[float]) -> float | None:
    """Return the median time; None if there is none."""
    ordered = sorted(times_ms)
    return quantile(ordered, 0.5) if ordered else None


def error_text(record: RunRecord) -> str:
    """Return the error of a run; empty if there is none."""
    if record.error is not None:
        return fmt.clean(record.error, keep_lines=True)
    return f"the script ended with exit code {record.exit_code}" if record.exit_code else ""


def error_and_hint(record: RunRecord) -> str:
    """Return the error of a run and, on a second line, what to do about it; empty if there is no error."""
    hint = f"\nhint: {fmt.clean(record.hint)}" if record.error is not None and record.hint else ""
    return error_text(record) + hint


def first_error_and_hint(runs: Iterable[RunRecord]) -> str:
    """Return the error and the hint of the first run that has a hint; empty if none has."""
    return next((error_and_hint(run) for run in runs if run.error is not None and run.hint), "")


def ran_text(record: RunRecord) -> str:
    """Return the formats that the counted operations ran in."""
    shares = [f"{share:.0%} {fmt.clean(name)}" for name, share in record.effective.share_by_format.items()]
    return f"{fmt.listed(shares)} ran" if shares else "no operation ran below 32 bits"
