"""Everything that Mezzo learns from a run, as typed values that are written whole or not at all.

Records are the waist of the program: commands write them, views read them, and nothing else passes between the two. A
record is JSON with a ``kind`` and a ``schema_version``; a reader refuses a version above its own. Numbers that are
not finite are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, because JSON has no such numbers
and a lost NaN is what this tool exists to show.

Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mezzo.errors import RecordError

SCHEMA_VERSION = 1

Verdict = Literal["baseline", "equivalent", "different", "diverged", "undecided", "failed"]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", allow_inf_nan=True)


class Reason(_Value):
    """Say what happens in one respect, and why."""

    what: str
    value: str
    reason: str


class Environment(_Value):
    """State the machine and the versions that a number was measured with."""

    date: str
    mezzo: str
    python: str
    torch: str
    os: str
    cpu: str
    threads: int
    device: str
    """torch's device type that the model ran on."""
    gpu: str | None = None
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    triton: str | None = None


class Steps(_Value):
    """Hold one number a training step, column by column; a step is what happens up to an optimizer's update."""

    loss: list[float] = []
    loss_scale: list[float] = []
    skipped: list[bool] = []
    grad_norm: list[float] = []
    """Norm of the unscaled gradients at the update, after the script's own clipping; NaN or infinite in a skipped step."""
    time_ms: list[float] = []
    """Wall time since the step before."""
    cpu_ms: list[float] = []
    """CPU time of the process since the step before."""

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def num_skipped(self) -> int:
        """Return how many updates were skipped."""
        return sum(self.skipped)


class Memory(_Value):
    """Hold the bytes of one training step by kind; peaks of the allocator where the device has them."""

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    """Bytes that the forward pass keeps for the backward pass (copies of weights in a lower format included)."""
    cuda_allocated_bytes: int | None = None
    cuda_reserved_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Return the bytes of the four kinds together."""
        kinds = (self.parameters_bytes, self.gradients_bytes, self.optimizer_bytes)
        return sum(kinds) + self.activations_bytes


class Effective(_Value):
    """State what really ran in which format, counted on one step."""

    flops_by_format: dict[str, int] = {}
    """Floating-point operations of matrix products and convolutions, forward and backward, by the format of their operands."""
    emulated: bool = False
    """Whether the formats below FP32 were emulated, so that times say nothing about a device that has them."""
    counted_on_step: int | None = None
    left_alone: list[Reason] = []
    """What could not be switched, and why."""

    @property
    def share_by_format(self) -> dict[str, float]:
        """Return the share of all counted operations by format."""
        total = sum(self.flops_by_format.values())
        return {k: v / total for k, v in self.flops_by_format.items()} if total else {}


class Metric(_Value):
    """Hold the values of one metric that a script printed, with the number of updates before each."""

    name: str
    pattern: str
    steps: list[int] = []
    values: list[float] = []


class RunRecord(_Value):
    """Hold what one run of a script under one policy showed."""

    kind: Literal["run"] = "run"
    schema_version: int = SCHEMA_VERSION
    command: list[str]
    script: str
    script_sha256: str
    policy: str
    """A policy text, or ``as-is``."""
    explanation: list[Reason] = []
    seed: int | None = None
    environment: Environment
    steps: Steps = Steps()
    memory: Memory = Memory()
    effective: Effective = Effective()
    metric: Metric | None = None
    duration_s: float = 0.0
    exit_code: int = 0
    error: str | None = None
    """What went wrong, in a sentence; None for a run that ended by itself."""

    @property
    def final_scale(self) -> float | None:
        """Return the loss scale after the last step, or None where none was used."""
        scales = self.steps.loss_scale
        return scales[-1] if scales and not math.isnan(scales[-1]) else None


class Difference(_Value):
    """Compare a quantity with the baseline's over paired seeds."""

    value: float
    baseline: float
    difference: float
    low: float
    """Lower end of the 95% confidence interval of the difference; NaN with a single seed."""
    high: float
    margin: float
    """The difference, in the same unit, up to which the two count as equivalent."""


class Row(_Value):
    """Hold what a comparison says of one policy."""

    policy: str
    num_runs: int
    num_failed: int = 0
    emulated: bool = False
    step_ms: float | None = None
    """Median wall time of a step over all runs; None where no run recorded one."""
    speedup: float | None = None
    """Median over seeds of the baseline's time over this policy's; None for emulated rows, which claim no speed."""
    speedup_low: float | None = None
    speedup_high: float | None = None
    memory: Memory = Memory()
    memory_ratio: float | None = None
    """Bytes of the four kinds over the baseline's."""
    share_by_format: dict[str, float] = {}
    loss: Difference | None = None
    metric: Difference | None = None
    num_skipped: float = 0.0
    """Mean over runs."""
    final_scale: float | None = None
    verdict: Verdict
    reason: str
    seeds_needed: int | None = None
    """For an undecided row: the number of seeds that would decide at the spread seen."""


class CompareRecord(_Value):
    """Hold a comparison of policies on one script, with every run it rests on."""

    kind: Literal["compare"] = "compare"
    schema_version: int = SCHEMA_VERSION
    command: list[str]
    baseline: str
    margin: float
    """Equivalence margin: share of the loss that training took off, share of the baseline's metric."""
    rows: list[Row]
    runs: list[RunRecord]
    environment: Environment


class FormatSupport(_Value):
    """Say how a device computes in a format, and why."""

    format: str
    level: Literal["native", "emulated", "impossible"]
    reason: str


class DeviceReport(_Value):
    """Hold one device and its formats."""

    kind: str
    name: str
    compute_capability: str | None = None
    memory_bytes: int | None = None
    formats: list[FormatSupport]


class DoctorRecord(_Value):
    """Hold what this machine can do."""

    kind: Literal["doctor"] = "doctor"
    schema_version: int = SCHEMA_VERSION
    environment: Environment
    devices: list[DeviceReport]
    tf32: list[Reason] = []
    """State of TF32 for matrix products and convolutions."""
    advice: list[Reason] = []
    """What to change, and what it would give."""


Record = Annotated[RunRecord | CompareRecord | DoctorRecord, Field(discriminator="kind")]
_ADAPTER: TypeAdapter[RunRecord | CompareRecord | DoctorRecord] = TypeAdapter(Record)


def write_record(record: RunRecord | CompareRecord | DoctorRecord, path: Path) -> None:
    """Write ``record`` to ``path`` whole or not at all: to a temporary file beside it, then moved into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(record.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())  # a crash of the machine must not leave an empty file under the final name
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_record(path: Path | str) -> RunRecord | CompareRecord | DoctorRecord:
    """Return the record in the JSON file at ``path``.

    Raises:
        RecordError: the file is missing, is not a record, or was written by a newer Mezzo.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = json.loads(text)
    except OSError as error:
        raise RecordError(
            f"cannot read the record {str(path)!r}: {error.strerror}",
            hint="records are written by mezzo run and mezzo compare as record.json",
        ) from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise RecordError(
            f"{str(path)!r} is not a record: {error}",
            hint="pass the record.json that a mezzo command wrote",
        ) from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RecordError(
            f"{str(path)!r} has schema version {version}; this Mezzo reads up to {SCHEMA_VERSION}",
            hint="update mezzo: pip install --upgrade mezzo",
        )
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise RecordError(
            f"{str(path)!r} is not a record: {place}: {first['msg']}",
            hint="pass the record.json that a mezzo command wrote",
        ) from None
