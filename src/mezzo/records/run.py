"""One run of a script under one policy."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Literal, TypeAlias

from mezzo.records.values import (
    Bottleneck,
    Environment,
    Finding,
    Guardrails,
    NamedByPolicy,
    Note,
    OutOfMemory,
    Value,
    WholeRecord,
)

AS_IS = "as-is"
"""Takes the place of a policy if the script keeps its own precision."""
ModelChange: TypeAlias = Literal["channels_last", "compile", "checkpoint"]
"""A change to a script's models that a run may be asked for."""


class Loss(Value):
    """One of several losses of a script, with the step of each value, counted from 1."""

    name: str
    """Name of the module that its optimizer trains, or of the loss itself, if the script has one; else ``loss 1``, ``loss 2``."""
    steps: list[int] = []
    values: list[float] = []


_COLD_STEPS = 3
"""First steps whose times do not count: allocations, autotuning, compilation."""


class Steps(Value):
    """One number for each training step, column by column. A step ends with an optimizer's update."""

    loss: list[float] = []
    losses: list[Loss] = []
    """Each loss, if a script has several with an optimizer each, as a GAN does; empty if it has one."""
    loss_scale: list[float] = []
    skipped: list[bool] = []
    grad_norm: list[float] = []
    """Norm of the unscaled gradients at the update, after the script's own clipping; NaN or infinite in a skipped step.

    After the first hundred only every 32nd step is measured, unless a check of the loss scale needs it; NaN for the others.
    """
    time_ms: list[float] = []
    """Wall time since the previous step."""
    cpu_ms: list[float] = []
    """CPU time of the process since the previous step; the mean of ten steps where nothing else had to be recorded."""

    def __len__(self) -> int:
        return len(self.loss)

    def __repr__(self) -> str:
        return f"<Steps {self.summary}>"

    @property
    def summary(self) -> str:
        """How many steps, the first and the last loss, and the skipped updates, in one line."""
        words = ["1 step" if len(self) == 1 else f"{len(self)} steps"]
        words += [f"loss {self.loss[0]:.4g} to {self.loss[-1]:.4g}"] if self.loss else []
        return ", ".join(words + ([f"{self.num_skipped} skipped"] if self.num_skipped else []))

    @property
    def num_skipped(self) -> int:
        """How many updates were skipped."""
        return sum(self.skipped)

    @property
    def warm_ms(self) -> list[float]:
        """The known times of the steps after the first tenth, and after the first three; of all steps if there are no others."""
        return _warm(self.time_ms)

    @property
    def warm_cpu_ms(self) -> list[float]:
        """The known CPU times of the same steps."""
        return _warm(self.cpu_ms)


def _warm(times: list[float]) -> list[float]:
    return [ms for ms in times[max(_COLD_STEPS, len(times) // 10) :] or times if math.isfinite(ms)]


class Memory(Value):
    """Bytes of one training step by kind, and the allocator's peaks on devices that report them. None: not measured."""

    parameters_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    activations_bytes: int | None = None
    """Bytes that the forward pass keeps for the backward pass (copies of weights in a lower format included)."""
    cuda_allocated_bytes: int | None = None
    """Sum of the peaks of all devices; if compiled code ran eagerly in the inspected step, without that step."""
    cuda_reserved_bytes: int | None = None
    cuda_allocated_bytes_by_device: list[int] = []
    """The peak of each device, by its number; empty if at most one device was used."""
    of_emulation: bool = False
    """Whether 16-bit values were kept in FP32 tensors, so that the bytes say nothing about a device that supports the format."""

    @property
    def total_bytes(self) -> int | None:
        """Bytes of the four kinds together; None if one was not measured."""
        kinds = (self.parameters_bytes, self.gradients_bytes, self.optimizer_bytes, self.activations_bytes)
        known = [size for size in kinds if size is not None]
        return sum(known) if len(known) == len(kinds) else None


_LOWER_NOTHING = ("fp32", "tf32")
OWN_SHARE = 0.05
"""A smaller share of the FLOPs does not count as the script's own precision."""
_FP8_FORMATS = frozenset(("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"))
_FORMATS_OF_LAYERS = {
    **dict.fromkeys(("fp8", "fp8-block"), _FP8_FORMATS),
    **{name: frozenset((name,)) for name in ("mxfp8", "mxfp4", "nvfp4")},
}
"""What products count as in the linear layers of a policy whose other operations are in 16 bits."""
WIDE_POLICIES = ("fp32", "tf32", "fp64", "complex64", "complex128")


class Effective(Value):
    """The formats that really ran, counted on one step."""

    flops_by_format: dict[str, int] = {}
    """Floating-point operations of matrix products and convolutions, forward and backward, by the format of their operands."""
    update_flops_by_format: dict[str, int] = {}
    """The part of these that optimizers computed in their updates, as Muon does."""
    emulated: bool = False
    """Whether the formats below FP32 were emulated, so that times say nothing about a device that supports them."""
    num_lowered: int | None = None
    """How many operations of that step, products or not, read or wrote numbers below 32 bits; None where they were not counted."""
    counted_on_step: int | None = None
    left_alone: list[Note] = []
    """What could not be switched, and why."""
    uncounted: list[str] = []
    """Compiled operations whose FLOPs are missing."""
    num_replays: int = 0
    """How often the script replayed a graph of its training steps, which are not in the record."""
    own_16_bits: str = ""
    """A module whose weights the script itself keeps in 16 bits; empty if there is none."""
    unmade_changes: dict[ModelChange, str] = {}
    """Requested changes that were not made to any model, and why."""

    @property
    def lowered(self) -> bool:
        """Whether anything that was counted ran below 32 bits."""
        return any(name not in WIDE_POLICIES for name in self.flops_by_format)

    @property
    def share_by_format(self) -> dict[str, float]:
        """Share of the operations of forward and backward passes by format, the largest first; updates are left out."""
        counts = {k: v - self.update_flops_by_format.get(k, 0) for k, v in self.flops_by_format.items()}
        total = sum(counts.values())
        return {k: v / total for k, v in sorted(counts.items(), key=lambda one: -one[1]) if v} if total else {}


class Metric(Value):
    """A metric that a script printed, with the number of updates before each value."""

    name: str
    """The words of its pattern."""
    pattern: str
    steps: list[int] = []
    values: list[float] = []
    percent: bool = False
    """Whether a percent sign follows the numbers."""
    text: str | None = None
    """The pattern's last match, if that is not a number."""


BATCH = "{batch}"
"""Placeholder for the batch size in the arguments of a script that creates its batches itself."""
RUN_NAME = "{run}"
"""Placeholder for the name of each run in the arguments of a script that runs several times."""

FILE_CLOCK_TICK_S = 0.02
"""How far a file's timestamp may lag behind the clock."""


class FileRead(Value):
    """A file that a run read, written before the run but after the comparison began."""

    path: str
    written_at_s: float
    """Unix time."""


class SnapshotProof(Value):
    """Whether a second process that resumed the first snapshot came to the same state as the run."""

    verdict: Literal["proven", "unproven", "unrepeatable", "disproven"]
    """Unrepeatable: the values that differ also differ between two processes that resume it."""
    reason: str = ""
    """Why it is unproven."""
    values: int = 0
    """How many values were compared."""
    updates: int = 0
    """How many updates after the snapshot."""
    took_s: float = 0.0
    """From the start of the first process to the verdict, beside the run."""
    names: list[str] = []
    """The first values that differ."""


class SnapshotsTaken(Value):
    """The snapshots of a run: what they contain, what they lack, and which of them it was resumed from."""

    folder: str
    every_s: float
    saved: int = 0
    """How many were written whole."""
    last: str | None = None
    """File name of the newest."""
    loop: str = ""
    """The loop that a resumed run enters again: file and line."""
    found: list[str] = []
    """Models, optimizers, schedulers, scalers and generators in the last one: variable and class."""
    proof: SnapshotProof | None = None
    """None in a resumed run, and in one without a snapshot."""
    problems: list[Note] = []
    """Saves that failed, and snapshots that could not be loaded, and why."""
    resumed_from: str | None = None
    resumed_updates: int | None = None
    """Updates made before that snapshot; the record's steps begin after it."""


INSPECTING = ("audit", "diagnose", "ranges", "fallback")
"""The commands that inspect single operations."""


def inspecting(framework: str) -> tuple[str, ...]:
    """Return which of ``INSPECTING`` inspect trainings of a framework: all in PyTorch, Keras on PyTorch, and Paddle.

    Args:
        framework: the framework's name in the record of a run.
    """
    library, backend = library_and_backend(framework)
    if "torch" in (library, backend) or library == "paddle":
        return INSPECTING
    return ("audit", "diagnose") if backend == "tensorflow" else ()


def library_and_backend(framework: str) -> tuple[str, str]:
    """Return the parts of a framework's name in the record of a run: ``("keras", "tensorflow")``; no backend is empty."""
    name, backend, *_ = [*framework.split()[::3], "", ""]
    return name or "torch", backend


class Placement(Value):
    """Where one of several runs ran, and how many others ran at the same time."""

    jobs: int
    """The most runs at a time: ``--jobs``, or what the cluster allows (0: not known)."""
    through: Literal["", "slurm", "ray"] = ""
    """The engine that placed the run; empty for the command itself."""
    host: str = ""
    gpus: str | None = None
    """The run's own GPUs, as ``CUDA_VISIBLE_DEVICES`` names them; None without one."""
    threads: int | None = None
    """The run's share of CPU threads; None where the engine sets none."""
    attempts: int = 1
    """2 if the first attempt was lost with its worker."""


class RunRecord(WholeRecord, NamedByPolicy):
    """One run of a script under one policy: its steps, memory, formats and findings."""

    kind: Literal["run"] = "run"
    command: list[str]
    script: str
    script_sha256: str
    framework: str = "torch"
    """What the script trains in, with versions: ``torch 2.13.0``, ``keras 3.15.1 on tensorflow 2.21.0``."""
    policy: str
    """A policy text, or ``as-is``."""
    policy_typed: str = ""
    """The policy as typed, if that was another name for it, such as ``O1`` or ``kept.toml``."""
    checkpoint: str = ""
    """The requested plan of activation checkpointing, or its budget; empty without one."""
    explanation: list[Note] = []
    seed: int | None = None
    environment: Environment
    steps: Steps = Steps()
    memory: Memory = Memory()
    effective: Effective = Effective()
    metric: Metric | None = None
    findings: list[Finding] = []
    """Misuse of the script's own mixed precision (codes A6xx), the most severe first."""
    bottleneck: Bottleneck | None = None
    """What held the run back; None where it was not measured, as under an observer and outside PyTorch."""
    watched: bool = False
    """Whether ``mezzo watch`` made the run, to find out what holds it back."""
    input_elements: float | None = None
    """Elements of the first tensor passed to the models in a step (the median); None where they were not counted."""
    files_read: list[FileRead] = []
    """Files that this run read and an earlier run of the same comparison may have written."""
    snapshots: SnapshotsTaken | None = None
    """None without ``--snapshot`` and ``--resume``."""
    guardrails: Guardrails | None = None
    """What went wrong while it ran; None where no guard watched, as in runs of a comparison and outside PyTorch."""
    out_of_memory: OutOfMemory | None = None
    """What occupied the memory of a script that ran out of it; None for all others."""
    ranks: list[RankRun] = []
    """Every process of a run in several, rank 0 first; empty for one process. Losses above are then the mean of all ranks."""
    between_ranks: list[Note] = []
    """What should be the same in all ranks and is not."""
    first_steps: int | None = None
    """The number of steps after which the run was stopped, as requested; None for a run that ended by itself."""
    earlier_update_s: float | None = None
    """Unix time of the first update of an earlier attempt at this run, which was stopped; None without one."""
    request_sha256: str = ""
    """Digest of the request: the script with the files it imports, arguments, policy, seed, versions. Empty for a single run."""
    kept: bool = False
    """Whether an earlier command made it, and a comparison used it again as its baseline."""
    placement: Placement | None = None
    """None for a run that had the machine to itself."""
    started_at_s: float | None = None
    """Unix time at which the script began."""
    duration_s: float = 0.0
    exit_code: int = 0
    error: str | None = None
    """What went wrong, in a sentence; None for a run that ended by itself."""
    stopped_at_limit: bool = False
    """Whether the command stopped it because it took longer than the time that it had."""
    trained_nothing: bool = False
    """Whether the script ended by itself and never began to train, which is no error in a process that starts others."""
    hint: str = ""
    """What to do about the error; empty where that is not known."""

    @property
    def library(self) -> str:
        """What the script trains in, without versions: ``torch``, ``keras`` or ``paddle``."""
        return library_and_backend(self.framework)[0]

    @property
    def backend(self) -> str:
        """The backend of Keras: ``tensorflow``, ``torch`` or ``jax``; empty for other libraries."""
        return library_and_backend(self.framework)[1]

    @property
    def where(self) -> str:
        """The script's file and the policy."""
        return f"{PurePath(self.script).name} under {self.compared_as}"

    @property
    def summary(self) -> str:
        """The script, the policy, the losses and any error, in one line."""
        return f"{self.where}: {self.steps.summary}" + (f"; {self.error}" if self.error else "")

    @property
    def final_scale(self) -> float | None:
        """Loss scale after the last step; None if none was used."""
        scales = self.steps.loss_scale
        return scales[-1] if scales and not math.isnan(scales[-1]) else None

    @property
    def replays(self) -> str:
        """How often the script replayed a graph of its training steps, which are not in the record; empty if it did not."""
        count = self.effective.num_replays
        return f"{count} replay{'s' * (count > 1)}" if count else ""

    @property
    def own_16_bits(self) -> str:
        """The model whose weights the script itself keeps in 16 bits though the policy asks for FP32; empty if there is none."""
        if self.policy.split(":")[0] not in _LOWER_NOTHING or not self.effective.lowered:
            return ""
        return self.effective.own_16_bits

    @property
    def own_formats(self) -> dict[str, float]:
        """The formats that the script's own casts leave its passes in, under a policy that lowers nothing, each with its share.

        Empty if less than 5% ran below 32 bits.
        """
        shares = self.effective.share_by_format
        narrow = sum(share for name, share in shares.items() if name not in WIDE_POLICIES)
        if self.policy.split(":")[0] not in _LOWER_NOTHING or narrow < OWN_SHARE:
            return {}
        return {name: share for name, share in shares.items() if share >= OWN_SHARE}

    @property
    def changed_nothing(self) -> bool:
        """Whether the run says nothing about its policy, because the policy had no effect."""
        return bool(self.no_effect)

    @property
    def no_effect(self) -> str:
        """What the policy failed to do, as the end of a sentence about it; empty if it took effect.

        It lowered nothing if no counted matrix product ran below 32 bits (in a step without products: no operation at all). A policy
        of linear layers may lower all products to 16 bits and none further.
        """
        name, effective = self.policy.split(":")[0], self.effective
        if name in (AS_IS, *_LOWER_NOTHING):
            return ""
        if effective.uncounted:
            return ""  # what was not counted may have been lowered
        if not effective.lowered and (effective.flops_by_format or effective.num_lowered == 0):
            return "changed nothing"
        of_layers = _FORMATS_OF_LAYERS.get(name)
        if of_layers is not None and effective.flops_by_format and not of_layers & set(effective.flops_by_format):
            return f"computed nothing in {name.upper()}"
        return ""


# --- Ranks -----------------------------------------------------------------------------------------------------------------------


class RankRun(Value):
    """One process of a run in several."""

    rank: int
    host: str = ""
    device: str = ""
    """The GPU's name, or torch's device type."""
    num_steps: int = 0
    skipped_steps: list[int] = []
    """Numbers of the steps whose updates were skipped, from 1."""
    final_loss: float | None = None
    """The loss of the last step in this process, on its own part of the data."""
    final_scale: float | None = None
    step_ms: float | None = None
    """Median wall time of a step after the first; None if there was none."""
    cpu_ms: float | None = None
    """Median CPU time of a step after the first."""
    total_bytes: int | None = None
    """Bytes of a step: parameters, gradients, optimizer state and activations of this process."""
    cuda_allocated_bytes: int | None = None
    weights: str = ""
    """A digest of the weights at the end, without sharded ones; empty if they were gone by then."""
    duration_s: float = 0.0
    exit_code: int = 0
    error: str | None = None
