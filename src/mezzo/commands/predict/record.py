"""Predicted time and memory of a training on GPUs that this machine does not have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mezzo.records.values import Environment, Note, Value, WholeRecord

WORTH_SWITCHING = 1.15
"""A predicted speed-up from which a policy counts as faster: predictions of measured trainings were off by less in most cases."""


class ModuleShare(Value):
    """One module's share of the step."""

    module: str
    share: float
    bound: str
    """What most of it waits for: ``arithmetic``, ``bandwidth`` or ``launch``."""


class DataSet(Value):
    """The data that a script trains on."""

    samples: int | None = None
    """What one pass draws in all processes; None where it is not known."""
    reason: str = ""
    """Why it is not known."""
    processes: int = 1
    """Processes among which the script's sampler shares it."""
    loaders: int = 1
    """Loaders from which a step draws; this is the one with the smallest data set."""


class LoaderRate(Value):
    """What a script's loader delivers on the machine that predicts, without the model."""

    samples_per_s: float | None = None
    """In one process; None where it was not timed."""
    is_bound: bool = False
    """Whether it delivers less: no more than this was seen in the time for it."""
    workers: int = 0
    batches: int = 0
    """How many batches were timed."""
    reason: str = ""
    """Why it was not timed."""


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
    """Whether the constants were fitted on measurements like it: of its architecture and precision, and bound by the GPU."""
    not_validated: Literal["", "measurements", "host", "batch"] = ""
    """Why not: nothing like it was measured, no measured step is bound by the host as this one, or no measured convolutional network
    has so small a batch; empty in older records."""
    calibrated: bool = False
    """Whether the time follows from rates measured on this machine instead of the constants."""
    step_ms: float = 0.0
    captured_ms: float = 0.0
    """The same without the host, as a CUDA graph would run it."""
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
    """The largest that fits with the record's headroom, within ``largest_limit``; None if other sizes do not follow."""
    largest_limit: Literal["memory", "data set", "measured"] = "memory"
    """What ends it: memory, the samples of the data set, or the largest batch of a measurement."""
    copy_ms: float = 0.0
    """Time in which the link to the host moves a step's inputs, if none of them is on the GPU already."""
    slower: Literal["", "loader", "copies"] = ""
    """What delivers fewer samples than the GPU would train on: the script's loader on this machine, or the link to the host."""
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
    own_gpu: str = ""
    """The GPU of the runs, if it is one of ``gpus``."""
    here: Prediction | None = None
    """FP32 on the CPU of the runs, from its calibration; None unless the runs were on a calibrated CPU."""


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
    data: DataSet | None = None
    """None for a model by name, and for a script without a loader."""
    loader: LoaderRate | None = None

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
        if best is not None and best.slower == "loader" and self.loader is not None:
            less = "less than " if self.loader.is_bound else ""
            where += f" if its loader keeps up ({less}{self.loader.samples_per_s:.4g} here)"
        return f"{self.model}, batch {self.batch}: {where}"
