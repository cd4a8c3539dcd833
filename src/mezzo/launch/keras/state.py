"""The state of a Keras script that runs under a policy, shared by the patches of this folder."""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from mezzo.errors import ScaleFloorError, ScriptError
from mezzo.formats import FORMAT_NAMES, FP32, TF32
from mezzo.launch.patches import Patches
from mezzo.launch.training import StepLimit
from mezzo.measure.plain_steps import PlainSteps
from mezzo.policy import Policy
from mezzo.records import Effective, Note

_NUM_SCALED = 16
"""Number of scaled losses that are remembered: enough for one training step of several models."""
_NUM_SEARCHED = 256
"""How many operations are searched from a loss for a scaled one, of which it is a share, a sum or a mean."""


def mixed_scaling() -> ScriptError:
    """Return the error about an update with gradients of both a scaled and an unscaled loss."""
    return ScriptError(
        "one update uses gradients of a loss that the script scaled and of an unscaled one; allowed: all or none",
        hint="call scale_loss for every loss, or for none and let mezzo run scale them",
    )


def reaches(root: Any, sought: Container[Any], inputs: Callable[[Any], Iterable[Any]]) -> bool:
    """Return whether one of the first operations of which ``root`` was computed is among those sought.

    Args:
        root: the operation that gave a loss.
        sought: the operations that gave scaled losses.
        inputs: gives the operations that gave an operation's inputs.
    """
    waiting, seen = [root], {root}
    for found in waiting:  # grows
        if found in sought:
            return True
        new = set(inputs(found)) - seen
        seen |= new
        waiting += new
        if len(waiting) > _NUM_SEARCHED:
            break
    return False


class ThreadState(threading.local):
    """State of each thread: replicas of a distributed model are traced in threads."""

    in_apply = False
    """Whether an optimizer of Keras is making an update."""
    in_layer = False
    """Whether a layer is being called."""


class CountedStep(NamedTuple):
    """The operations of the step that was counted."""

    flops: Mapping[str, int] = MappingProxyType({})
    """By format."""
    step: int | None = None
    """Its number; None if no product was counted."""
    activations_bytes: int | None = None


class Backend(Protocol):
    """The hooks on a backend of Keras, which record its backward passes and updates."""

    name: str
    counted: CountedStep = CountedStep()
    num_inputs: int = 0
    """The elements of the models' first inputs, over all steps; 0 where the backend does not count them."""
    shares_scale: bool
    """Whether all optimizers can share one variable as the loss scale; JAX's steps read only variables of the optimizer."""

    def install(self, patches: Patches) -> None:
        """Patch the backend until ``patches`` are undone."""

    def create(self, make: Callable[[], Any]) -> Any:
        """Return what ``make`` makes, with variables that exist immediately, even while a function is traced."""
        return make()

    def place(self) -> Any:
        """Return what a variable created now belongs to, and can be used in; None for everywhere."""
        return None

    def layer_called(self, inputs: Any) -> None:
        """Record a layer called from outside any layer, with these inputs."""
        return

    def norm(self, gradients: Sequence[Any], *, scale: Any) -> Any:
        """Return the norm of all gradients together, divided by ``scale`` if that is not None."""

    def read(self, variable: Any) -> Any:
        """Return a copy of a variable's current value."""

    def scaled_loss(self, original: Callable[..., Any], optimizer: Any, loss: Any) -> tuple[Any, Any]:
        """Return what an optimizer's own ``scale_loss`` makes of a loss, and the factor; None if it multiplies nothing."""
        factor = getattr(optimizer, "loss_scale_factor", None)
        if hasattr(optimizer, "dynamic_scale") or hasattr(optimizer, "initial_scale"):
            factor = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
        return original(optimizer, loss), factor

    def comes_from(self, target: Any, scaled: Sequence[Any]) -> bool:
        """Return whether a loss was computed from one of these scaled losses, such as its share of an accumulation."""
        return False

    def is_scaled(self, optimizer: Any, gradients: Sequence[Any]) -> bool:
        """Return whether the gradients of an update include the loss scale, if the policy scales."""
        raise NotImplementedError

    def updated(self, *, norm: Any, scale: Any, before: Any, after: Any, accumulates: int, owner: int) -> None:
        """Record an update.

        Args:
            owner: the number of the optimizer.
            norm: norm of its unscaled gradients.
            scale: the loss scale after the update; None if there is none.
            before: the optimizer's count of updates before this one.
            after: the same count now, unchanged if the update was skipped.
            accumulates: number of calls over which the optimizer accumulates gradients.
        """

    def collect(self) -> None:
        """Move the steps recorded until now into ``run.steps``; a backend that closes steps immediately has nothing to do."""
        return

    def finish(self) -> None:
        """Stop recording, at the end of the script."""

    def device_type(self) -> str:
        """Return torch's name for the device type that the script runs on."""


class CallSteps(PlainSteps):
    """Steps, several of which may come from one call."""

    def share_time(self, num: int) -> None:
        """Divide the time of the last ``num`` steps evenly: all were made by one call."""
        for column in (self._time_ms, self._cpu_ms):
            column[-num:] = [math.fsum(column[-num:]) / num] * num


class KerasRun:
    """A run's policy, loss scale and steps, and what it left alone."""

    def __init__(self, policy: Policy | None) -> None:
        """Begin a run; ``policy`` is None if the script keeps its own precision."""
        self.policy = policy
        self.backend: Backend | None = None
        """None until the script has imported Keras."""
        self.steps = CallSteps()
        self.left_alone: dict[str, Note] = {}
        self.local = ThreadState()
        self.is_scaled = False
        """Whether the latest gradients include the loss scale: the script scaled their loss."""
        self.has_backward = False
        """Whether any backward pass was recorded: without one, updates have no loss."""
        self.gradients_bytes: int | None = None
        self.observed: Any = None
        """The run for observers (``launch.keras.observed.ObservedKeras``), or on TensorFlow for a diagnosis
        (``launch.keras.nonfinite_values.ObservedTensorFlow``); None if only its steps are recorded."""
        self.audit: Any = None
        """The audit of TensorFlow's graph (``launch.keras.graph_audit.GraphAudit``); None for every other command."""
        self.tape_file: Path | None = None
        """Where the tape is written."""
        self.tape: Any = None
        """The tape of the step for a prediction (``launch.keras.step_tape.StepTape``); None for every other command."""
        self.own_dtypes: WeakSet[Any] = WeakSet()
        """Layers whose dtype the script sets."""
        self.returned_formats: dict[int, Any] = {}
        """The formats to which layers' outputs are cast while an observer runs a layer on its own, by the layers' ids."""
        self.variables: dict[int, Any] = {}
        """The trained variables, by id."""
        self.optimizers: dict[int, Any] = {}
        self.names: dict[int, str] = {}
        """The name of the model that each optimizer trains, with which its variables' paths begin, by the optimizer's number."""
        self.limit: StepLimit | None = None
        """The number of steps, or the time, after which the script is stopped."""
        self.num_scaled = 0
        """How many losses an optimizer has scaled, in steps that were traced or run."""
        self._owners: dict[int, int] = {}
        self._scales: dict[Any, Any] = {}
        """The variable of the policy's loss scale, by the backend's ``place``, the latest last."""
        self._scaled: list[tuple[Any, Any, Any]] = []
        self._kinds: set[bool] = set()
        """Whether the losses of the backward passes since the last update were scaled by the script."""

    def begin(self, backend: Backend, *, observed: Any = None, audit: Any = None, tape: Any = None) -> None:
        """Begin on the backend that the script has chosen, with the observer of the command, if it has one."""
        self.backend, self.observed, self.audit, self.tape = backend, observed, audit, tape

    def begin_tape(self, path: Path) -> None:
        """Record the operations of a step for ``path``, and end the script after its second."""
        self.tape_file, self.limit = path, StepLimit(steps=2, seconds=None)

    @property
    def optimizer_name(self) -> str:
        """The class of the optimizers that have made updates, as written in records."""
        inner = (getattr(one, "inner_optimizer", one) for one in self.optimizers.values())
        return ", ".join(dict.fromkeys(type(one).__name__ for one in inner))

    @property
    def scales(self) -> bool:
        """Whether the policy scales the loss."""
        return self.policy is not None and self.policy.loss_scale != "none"

    @property
    def scale(self) -> Any:
        """The variable of the policy's loss scale, in FP32: one for the whole run, or for each place where variables live."""
        assert self.backend is not None
        place = self.backend.place()
        if place not in self._scales and (place is not None or not self._scales):
            self.backend.create(functools.partial(self._create_scale, place))
        return self._scales.get(place, self._latest_scale)

    @property
    def _latest_scale(self) -> Any:
        return next(reversed(self._scales.values()), None)

    def _create_scale(self, place: Any) -> None:
        import keras

        assert self.policy is not None
        if place not in self._scales:  # not by another replica
            earlier = self._latest_scale
            value = self.policy.init_scale if earlier is None else float(keras.ops.convert_to_numpy(earlier))
            self._scales[place] = keras.Variable(value, trainable=False, dtype=FP32.dtype_name, name="loss_scale")

    def note_left_alone(self, what: str, value: str, reason: str) -> None:
        """Record something that the policy left alone."""
        self.left_alone.setdefault(f"{what} {value}", Note(what=what, value=value, reason=reason))

    def scaled(self, result: Any, loss: Any, factor: Any) -> None:
        """Record that an optimizer of the script multiplied ``loss`` by ``factor``, to ``result``."""
        self.num_scaled += 1
        self._scaled = [*self._scaled[1 - _NUM_SCALED :], (result, loss, factor)]

    def unscaled(self, target: Any) -> Any | None:
        """Return the loss of which ``target`` is the scaled value, or was computed from it; None if it is not scaled."""
        for result, loss, _ in self._scaled:
            if result is target:
                return loss
        results = [result for result, _, _ in self._scaled]
        if self.backend is None or not results or not self.backend.comes_from(target, results):
            return None
        return target / self._scaled[-1][2]

    def backward(self, *, scaled: bool) -> None:
        """Record a backward pass that gives gradients to update with; ``scaled``: the script scaled its loss.

        Raises:
            ScriptError: since the last update, the script has scaled one loss and not another.
        """
        self.has_backward = True
        self._kinds.add(scaled)
        if self.scales and len(self._kinds) > 1:
            raise mixed_scaling()
        self.is_scaled = scaled

    def updating(self) -> None:
        """Record that an update is about to be made."""
        self._kinds = set()

    def owner(self, variables: Sequence[Any]) -> int:
        """Return the number of the optimizer that trains ``variables``; one recreated for them keeps the number."""
        number = next((self._owners[id(v)] for v in variables if id(v) in self._owners), len(self.names))
        self._owners |= {id(v): number for v in variables}
        models = {str(getattr(v, "path", "")).partition("/")[0] for v in variables}
        self.names.setdefault(number, models.pop() if len(models) == 1 else "")
        return number

    def record_bytes(self, optimizer: Any, variables: Sequence[Any], gradients_bytes: int) -> None:
        """Record the variables that an optimizer updates, and the bytes of its gradients."""
        new = [v for v in variables if id(v) not in self.variables]
        if new or not self.gradients_bytes:
            self.gradients_bytes = (self.gradients_bytes or 0) + gradients_bytes
        self.variables |= {id(v): v for v in new}
        self.optimizers[id(optimizer)] = optimizer

    def close(
        self,
        *,
        losses: Sequence[float],
        norms: Sequence[float],
        scales: Sequence[float],
        skips: Sequence[bool],
        owners: Sequence[int],
    ) -> None:
        """Close the steps that one call of the backend made, in order.

        Args:
            losses: one per step; NaN if unknown.
            norms: of the unscaled gradients.
            scales: the loss scale after each step; NaN if there is none.
            skips: whether the update was skipped.
            owners: the number of the optimizer.

        Raises:
            ScaleFloorError: the policy's scale is below its floor and the gradients still overflow.
            StopScript: the run's limit is reached.
        """
        policy = self.policy
        floor = policy.min_scale if policy is not None and policy.loss_scale == "dynamic" else -math.inf
        for loss, norm, scale, skipped, owner in zip(losses, norms, scales, skips, owners, strict=True):
            self.steps.loss(loss)
            known = None if math.isnan(scale) else scale
            self.steps.close(skipped=skipped, scale=known, norm=norm, made_by=frozenset([owner]))
            if self.observed is not None:
                self.observed.step_closed(loss=loss, norm=norm, skipped=skipped)
            if skipped and scale < floor:
                raise ScaleFloorError(
                    f"gradients overflow at the loss scale's floor of {floor:g}, update {self.steps.num_closed}",
                    hint="try --policy bf16, which has FP32's range, or keep layers in FP32 (fp32_modules=...)",
                )
        if len(losses) > 1:
            self.steps.share_time(len(losses))
        if self.limit is not None:
            self.limit.check(self.steps.num_closed)

    def effective(self) -> Effective:
        """Return the formats of the counted step, and what was left alone."""
        counted = CountedStep() if self.backend is None else self.backend.counted
        return Effective(
            flops_by_format=dict(counted.flops),
            counted_on_step=counted.step,
            left_alone=list(self.left_alone.values()),
        )


def by_format(by_dtype: Counter[str], *, tf32: bool) -> dict[str, int]:
    """Return counts by format from counts by dtype name; FP32 counts as TF32 if that is on."""
    names = FORMAT_NAMES | ({FP32.dtype_name: TF32.name} if tf32 else {})
    return {names.get(dtype, dtype): flops for dtype, flops in by_dtype.items() if flops}
