"""Predicted time and memory of a training on GPUs that this machine does not have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mezzo.records.values import Environment, Note, Value, WholeRecord


class ModuleShare(Value):
    """One module's share of the step."""

    module: str
    share: float
    bound: str
    """What most of it waits for: ``arithmetic``, ``bandwidth`` or ``launch``."""


class Prediction(Value):
    """One GPU under one policy."""

    gpu: str
    """Its name; ``cpu`` for the CPU of the machine that predicts."""
    gpu_bytes: int | None = None
    """The GPU's memory as sold; None in records of older versions."""
    policy: str
    checkpoint: str = ""
    """The plan of activation checkpointing; empty where everything is kept."""
    possible: bool
    reason: str = ""
    """Why it is not possible, or what the policy becomes on this GPU."""
    validated: bool = False
    """Whether the constants were fitted on measurements of this architecture and precision."""
    calibrated: bool = False
    """Whether the time follows from rates measured on this machine instead of the constants."""
    step_ms: float = 0.0
    communication_ms: float = 0.0
    """Time in which the GPUs of a job exchange data in a step; most of it overlaps computation."""
    throughput: float = 0.0
    """Images or sequences a second at the record's batch size, of all GPUs of the job."""
    throughput_low: float = 0.0
    """10th percentile, from the errors on architectures left out of the fit."""
    throughput_high: float = 0.0
    """90th percentile."""
    bounds: dict[str, float] = {}
    """Share of the step by what bounds it: ``arithmetic``, ``bandwidth``, ``launch``."""
    modules: list[ModuleShare] = []
    """The largest first."""
    allocated_bytes: int = 0
    """What ``torch.cuda.max_memory_allocated`` would show."""
    reserved_bytes: int = 0
    """What ``torch.cuda.max_memory_reserved`` would show."""
    device_bytes: int = 0
    """What ``nvidia-smi`` would show: reserved, and the driver's part."""
    memory_bytes: dict[str, int] = {}
    """The allocated peak by kind."""
    no_memory: str = ""
    """Why memory is not predicted; empty where it is."""
    fits: bool | None = False
    """Whether the batch fits when the allocator is replayed under the GPU's memory; None where memory is not predicted."""
    largest_batch: int | None = None
    """The largest that fits with the record's headroom; None if batch sizes do not follow from each other."""
    largest_throughput: float | None = None
    over_fp32: float | None = None
    """Speed-up over strict FP32."""
    over_tf32: float | None = None
    verdict: str = ""
    """Whether the policy is worth it here."""
    cost_per_million: float | None = None
    """Price of a million images, sequences or samples at the record's batch size, in the currency of the price."""


class BatchCurve(Value):
    """Throughput of one policy over batch sizes, up to the largest that fits."""

    policy: str
    batches: list[Annotated[int, Field(ge=1)]]
    throughput: list[float]

    @model_validator(mode="after")
    def _one_rate_for_each(self) -> BatchCurve:
        if len(self.batches) != len(self.throughput):
            raise ValueError(f"{len(self.batches)} batches have {len(self.throughput)} rates")
        return self


class MemoryTimeline(Value):
    """Allocated bytes by kind over one step."""

    places: list[int]
    """For each entry, the number of allocations and releases earlier in the step."""
    kinds: dict[str, list[int]]
    """By kind, one entry for each place."""
    backward: int | None = None
    """Place at which the backward pass begins."""
    optimizer: int | None = None

    @model_validator(mode="after")
    def _one_size_for_each_place(self) -> MemoryTimeline:
        if any(len(sizes) != len(self.places) for sizes in self.kinds.values()):
            raise ValueError(f"{len(self.places)} places, and another number of sizes")
        return self


class ModuleTime(Value):
    """Time of one module's own operations, without the modules inside it."""

    module: str
    ms: dict[str, float]
    """By what they wait for: ``arithmetic``, ``bandwidth`` or ``launch``."""


class PredictionDetail(Value):
    """One prediction in detail."""

    gpu: str
    policy: str
    checkpoint: str = ""
    """The plan of activation checkpointing; empty where everything is kept."""
    limit_bytes: int
    """The memory that the GPU has for torch's allocator."""
    curves: list[BatchCurve] = []
    """One for every policy on this GPU whose batch sizes can be predicted."""
    timeline: MemoryTimeline
    modules: list[ModuleTime] = []


class RealGpus(Value):
    """Predictions for compared policies on GPUs that this machine does not have."""

    gpus: list[str] = []
    batch: int = 1
    unit: str = "steps"
    predictions: list[Prediction] = []
    """By GPU, then by policy; a policy is named as the comparison names it."""
    not_predicted: list[Note] = []
    reason: str = ""
    """Why nothing was predicted; empty if something was."""
    observed: bool = False
    """Whether a real step on this machine showed the operations; otherwise they were traced without numbers."""
    assumptions: list[Note] = []


class PredictRecord(WholeRecord):
    """Predictions for one model, by GPU and policy."""

    kind: Literal["predict"] = "predict"
    environment: Environment
    command: list[str] = []
    model: str
    input: str
    """The size of one input."""
    unit: str
    batch: int
    gpus_per_job: int = 1
    """GPUs that train together, each on a batch of its own."""
    shard: str = ""
    """How they share the training: ``ddp`` or ``fsdp``; empty for one GPU."""
    optimizer: str
    channels_last: bool
    headroom: float
    """Share of the GPU's memory that the largest batch leaves free."""
    predictions: list[Prediction]
    detail: PredictionDetail | None = None
    """The fastest prediction that fits, in detail."""
    slurm: list[str] = []
    """Lines of a batch script that request its GPU."""
    assumptions: list[Note] = []
    no_other_batch: str = ""
    """Why the predictions at other batch sizes do not follow from the script's own; empty if they do."""

    @property
    def best(self) -> Prediction | None:
        """The fastest of the predictions that fit; None if none does."""
        return max(
            (one for one in self.predictions if one.possible and one.fits is not False),
            key=lambda one: one.throughput,
            default=None,
        )

    @property
    def summary(self) -> str:
        """The model and the fastest GPU that it fits, in one line."""
        best = self.best
        where = "fits none" if best is None else f"{best.throughput:.4g} {self.unit}/s on {best.gpu} in {best.policy}"
        return f"{self.model}, batch {self.batch}: {where}"
