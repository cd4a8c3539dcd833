"""Records as display strings: all words of a view, built once for the terminal and the page.

A sheet holds no markup. Text that came from a script or a model passes ``clean`` here; the views escape it for their
medium.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from mezzo.records import DeviceReport, DoctorRecord, Environment, Memory, Reason, RunRecord
from mezzo.report import formatting as fmt
from mezzo.report.charts.series import quantile
from mezzo.report.colours import format_style
from mezzo.report.findings import FindingLine, finding_line

NOT_FOR_GPU = "emulated: says nothing about a GPU"
_LEVEL_TONES = {"native": "good", "emulated": "warn", "impossible": "bad"}
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
    """One line of a table: what, its value and, if there is one, the reason."""

    what: str
    value: str
    reason: str = ""
    tone: str = ""


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


@dataclass(frozen=True, kw_only=True)
class RunSheet:
    """The words and tables of one run, ready for any view."""

    title: str
    script: str
    policy: str
    headline: str
    error: str
    facts: list[Fact]
    explanation: list[Fact]
    memory: list[MemoryLine]
    shares: list[Share]
    shares_note: str
    left_alone: list[Fact]
    findings: list[FindingLine]
    environment: list[Fact]
    command: str


@dataclass(frozen=True, kw_only=True)
class DeviceSheet:
    """The words and tables of one device, ready for any view."""

    name: str
    details: str
    formats: list[Fact]


@dataclass(frozen=True, kw_only=True)
class DoctorSheet:
    """The words and tables of a machine, ready for any view."""

    title: str
    headline: str
    devices: list[DeviceSheet]
    tf32: list[Fact] = field(default_factory=list)
    advice: list[Fact] = field(default_factory=list)
    environment: list[Fact] = field(default_factory=list)
    command: str = ""


def run_sheet(record: RunRecord) -> RunSheet:
    """Return the sheet of ``record``."""
    script = fmt.clean(PurePath(record.script).name)
    policy = fmt.clean(record.policy_shown)
    return RunSheet(
        title=f"{script} under {policy}",
        script=fmt.clean(record.script),
        policy=policy,
        headline=_run_headline(record, script=script, policy=policy),
        error=error_text(record),
        facts=run_facts(record),
        explanation=explained(record),
        memory=memory_lines([(record.policy_shown, record.memory)]),
        shares=shares(record.effective.share_by_format),
        shares_note=shares_note(record),
        left_alone=facts(record.effective.left_alone),
        findings=[finding_line(finding) for finding in record.findings],
        environment=environment_facts(record.environment, framework=record.framework),
        command=command_text(record.command, record.environment),
    )


def doctor_sheet(record: DoctorRecord) -> DoctorSheet:
    """Return the sheet of ``record``."""
    return DoctorSheet(
        title="What this machine can do",
        headline=_doctor_headline(record.devices),
        devices=[_device_sheet(device) for device in record.devices],
        tf32=facts(record.tf32),
        advice=facts(record.advice),
        environment=environment_facts(record.environment),
    )


def facts(reasons: Sequence[Reason]) -> list[Fact]:
    """Return reasons as lines of a table."""
    return [Fact(what=fmt.clean(r.what), value=fmt.clean(r.value), reason=fmt.clean(r.reason)) for r in reasons]


def explained(record: RunRecord) -> list[Fact]:
    """Return what the policy of a run does, and first what its name stands for."""
    return [*name_meant(record), *facts(record.explanation)]


def name_meant(record: RunRecord) -> list[Fact]:
    """Return what the name stands for that was typed for a run's policy; nothing if it was the policy's own."""
    if not record.policy_typed:
        return []
    why = f"{fmt.clean(record.policy_typed)} stands for it"
    return [Fact(what="policy", value=fmt.clean(record.policy), reason=why)]


def environment_facts(environment: Environment, *, framework: str = "") -> list[Fact]:
    """Return what is known of the machine and the versions, and the framework if it is not torch."""
    known = [
        (k, fmt.date_text(environment.date) if k == "date" else getattr(environment, k)) for k in _ENVIRONMENT_LABELS
    ]
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
            total=fmt.bytes_text(memory.total_bytes),
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


def shares_note(*runs: RunRecord) -> str:
    """Return where the shares of ``runs`` come from, and under which of their policies formats were emulated."""
    counted = [run for run in runs if run.effective.flops_by_format]
    if not counted:
        return "No matrix product or convolution was counted."
    steps = {run.effective.counted_on_step for run in counted}
    step = next(iter(steps)) if len(steps) == 1 else None
    where = "" if step is None else f" on step {step}"
    note = f"Share of the floating-point operations of matrix products and convolutions, counted{where}."
    emulated = _policies(run for run in counted if run.effective.emulated)
    if not emulated:
        return note
    some = _policies(run for run in counted if run.effective.lowered and not run.effective.emulated)
    under = f"Under {fmt.listed(emulated)} the" if some else "The"
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
    """Return that runs were stopped after their first steps, as asked; empty if none was."""
    numbers = {run.first_steps for run in runs if run.first_steps is not None}
    return f"stopped after the first {fmt.plural(max(numbers), 'step')}, as asked" if numbers else ""


def final_loss_text(record: RunRecord) -> str:
    """Return the loss of the last step, or the last one of each of several losses."""
    several = [
        f"{fmt.clean(loss.name)} {fmt.number_text(loss.values[-1])}" for loss in record.steps.losses if loss.values
    ]
    return ", ".join(several) or fmt.number_text(record.steps.loss[-1] if record.steps.loss else None)


def command_text(command: Sequence[str], environment: Environment) -> str:
    """Return a command as a shell line, preceded by the environment variables that matter."""
    variables = [f"{fmt.clean(name)}={shlex.quote(fmt.clean(value))}" for name, value in environment.variables.items()]
    return " ".join([*variables, shlex.join([fmt.clean(part, most=_LONGEST_WORD) for part in command])])


def median_ms(times_ms: Sequence[float]) -> float | None:
    """Return the median of the finite times, or None without any."""
    ordered = sorted(t for t in times_ms if t == t and abs(t) != float("inf"))
    return quantile(ordered, 0.5) if ordered else None


def error_text(record: RunRecord) -> str:
    """Return the error of a run; empty if there is none."""
    if record.error is not None:
        return fmt.clean(record.error, keep_lines=True)
    return f"the script ended with exit code {record.exit_code}" if record.exit_code else ""


def ran_text(record: RunRecord) -> str:
    """Return what the operations that were counted ran in."""
    shares = [f"{share:.0%} {fmt.clean(name)}" for name, share in record.effective.share_by_format.items()]
    return f"{fmt.listed(shares)} ran" if shares else "no operation ran below 32 bits"


def _run_headline(record: RunRecord, *, script: str, policy: str) -> str:
    steps = fmt.plural(len(record.steps), "step")
    if record.first_steps is not None:
        steps = f"its first {steps}"
    if error_text(record):
        return f"{script} failed under {policy} after {steps}"
    if not record.steps.loss:
        return f"{script} ran under {policy}; no training step was seen"
    if record.changed_nothing:
        return f"{script} trained {steps}; {policy} changed nothing: {ran_text(record)}, to a loss of {final_loss_text(record)}"
    return f"{script} trained {steps} under {policy}, to a loss of {final_loss_text(record)}"


def run_facts(record: RunRecord) -> list[Fact]:
    """Return the results of a run, one line each."""
    line, steps = run_line(record), record.steps
    broken = any(word in line.final_loss.split() for word in ("NaN", "Infinity", "-Infinity"))
    emulated = NOT_FOR_GPU if record.effective.emulated else ""
    rows = [
        Fact(what="steps", value=line.steps),
        Fact(what="final loss", value=line.final_loss, tone="bad" if broken else ""),
        Fact(what="skipped steps", value=line.skipped, tone="warn" if steps.num_skipped else ""),
        Fact(what="final loss scale", value=line.final_scale),
        Fact(what="time a step", value=fmt.ms_text(median_ms(steps.time_ms)), reason=emulated),
        Fact(what="memory", value=fmt.bytes_text(record.memory.total_bytes)),
        Fact(what="duration", value=line.duration),
    ]
    if record.metric is not None and record.metric.values:
        value = fmt.number_text(record.metric.values[-1])
        rows.insert(2, Fact(what=fmt.clean(record.metric.name), value=value))
    return rows


def _doctor_headline(devices: Sequence[DeviceReport]) -> str:
    if not devices:
        return "No device was found"
    # The headline is about the accelerator if there is one; the table lists the processor too.
    best = next((d for d in devices if d.kind != "cpu"), devices[0])
    native = [fmt.clean(f.format) for f in best.formats if f.level == "native"]
    name = fmt.clean(best.name)
    return f"{name} computes natively in {fmt.listed(native or ['no known format'])}"


def _device_sheet(device: DeviceReport) -> DeviceSheet:
    details = [device.kind]
    if device.compute_capability is not None:
        details.append(f"compute capability {device.compute_capability}")
    if device.memory_bytes is not None:
        details.append(fmt.bytes_text(device.memory_bytes))
    return DeviceSheet(
        name=fmt.clean(device.name),
        details=fmt.clean(", ".join(details)),
        formats=[
            Fact(
                what=fmt.clean(f.format),
                value=f.level,
                reason=fmt.clean(f.reason),
                tone=_LEVEL_TONES[f.level],
            )
            for f in device.formats
        ],
    )
