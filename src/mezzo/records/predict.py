"""Time and memory of a training on GPUs that are not here, predicted."""

from __future__ import annotations

from typing import Literal

from mezzo.records.values import SCHEMA_VERSION, Environment, Reason, Value, WholeRecord


class ModuleShare(Value):
    """One module's share of the step."""

    module: str
    share: float
    bound: str
    """What most of it waits for: ``arithmetic``, ``bandwidth`` or ``launch``."""


class Prediction(Value):
    """One GPU under one policy."""

    gpu: str
    policy: str
    checkpoint: str = ""
    """The plan of activation checkpointing; empty where everything is kept."""
    possible: bool
    reason: str = ""
    """Why it is not possible, or what the policy becomes on this GPU."""
    validated: bool = False
    """Whether measured rows of this architecture and precision stand behind the constants."""
    step_ms: float = 0.0
    throughput: float = 0.0
    """Images or sequences a second at the record's batch size."""
    throughput_low: float = 0.0
    """10th percentile, from the errors on architectures that were left out of the fit."""
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
    fits: bool = False
    """Whether the batch fits when the allocator is replayed under the GPU's memory."""
    largest_batch: int | None = None
    """The largest that fits with the record's headroom; None if batch sizes do not follow from each other."""
    largest_throughput: float | None = None
    over_fp32: float | None = None
    """Speed-up over strict FP32."""
    over_tf32: float | None = None
    verdict: str = ""
    """Whether the policy is worth it here."""


class PredictRecord(WholeRecord):
    """Predictions for one model, by GPU and policy."""

    kind: Literal["predict"] = "predict"
    schema_version: int = SCHEMA_VERSION
    environment: Environment
    command: list[str] = []
    model: str
    input: str
    """The size of one input."""
    unit: str
    batch: int
    optimizer: str
    channels_last: bool
    headroom: float
    """Share of the GPU's memory that the largest batch leaves free."""
    predictions: list[Prediction]
    assumptions: list[Reason] = []

    @property
    def best(self) -> Prediction | None:
        """The fastest of the predictions that fit; None if none does."""
        return max(
            (one for one in self.predictions if one.possible and one.fits), key=lambda one: one.throughput, default=None
        )

    @property
    def summary(self) -> str:
        """The model and the fastest GPU that it fits, in one line."""
        best = self.best
        where = "fits none" if best is None else f"{best.throughput:.4g} {self.unit}/s on {best.gpu} in {best.policy}"
        return f"{self.model}, batch {self.batch}: {where}"
