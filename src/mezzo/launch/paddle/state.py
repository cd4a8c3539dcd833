"""The state of a Paddle script that runs under a policy, shared by the patches of this folder."""

from __future__ import annotations

import hashlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakSet

import numpy as np
import paddle

from mezzo.devices import Device, cpu_name
from mezzo.errors import NonFiniteLossError, PolicyError, ScaleFloorError, nearest
from mezzo.formats import FP32
from mezzo.frameworks import paddle as paddle_policy
from mezzo.frameworks.paddle import NO_EFFECT, arithmetic_on, check
from mezzo.launch.paddle.surveys import is_fp32, rounder
from mezzo.measure.plain_steps import PlainSteps
from mezzo.observe.module_names import Names
from mezzo.policy import Policy
from mezzo.records import Note


class RunListener:
    """What a run notifies of its events: does nothing by itself."""

    def backward_begins(self, losses: Iterable[Any]) -> None:
        """Record that a backward pass begins; the step before has closed."""

    def scaled(self, losses: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Record the gradients from which the backward pass starts."""

    def backward_ended(self) -> None:
        """Record that a backward pass ended."""

    def update_begins(self, norm: Any | None) -> None:
        """Record that an update begins, whose gradients have this norm."""

    def update_ended(self, optimizer: Any) -> None:
        """Record that an optimizer has changed the weights."""

    def step_closed(self, num_steps: int, *, loss_finite: bool, gradients_finite: bool, skipped: bool) -> None:
        """Record that a step is over."""

    def scaler_met(self, scaler: Any) -> None:
        """Record that the script's own GradScaler is about to scale a loss."""

    def closure_met(self, optimizer: str) -> None:
        """Record that an optimizer of this class evaluates the loss itself."""

    def static_graph(self, what: str) -> None:
        """Record that the script uses a static graph."""


class ThreadState(threading.local):
    """State of each thread."""

    depth = 0
    """1 inside a layer, the script's own region or a backward pass, else 0."""
    fp32_depth = 0
    """Number of open layers or regions that stay in FP32."""
    in_layer = False
    """Whether a layer runs: a region of the script may be open without one."""
    in_backward = False
    own_work = False
    """Whether Mezzo itself computes: norms, scales and records."""


class UpdateSteps(PlainSteps):
    """Steps that are timed at their last update: a step closes only at the next backward pass."""

    _updated_at: tuple[float, float] | None = None

    def updated(self) -> None:
        """Record the time of an update."""
        self._updated_at = (time.perf_counter(), time.process_time())

    def _now(self) -> tuple[float, float]:  # type: ignore[override]
        updated_at, self._updated_at = self._updated_at, None
        return updated_at or super()._now()

    def last_is_finite(self) -> tuple[bool, bool]:
        """Return whether the last step's loss is finite, and whether its gradients' norm is; waits for the device."""
        losses = [float(loss) for loss in self._loss[-1]]
        return all(map(math.isfinite, losses)), math.isfinite(float(self._norm[-1]))

    def norms(self) -> list[float]:
        """Return the norms of the gradients of all closed steps; waits for the device."""
        return [float(norm) for norm in self._norm]

    def has_loss(self) -> bool:
        """Return whether the open step has a loss."""
        return bool(self._open)


class PaddleRun:
    """A run's policy, loss scale and steps, and what it left alone."""

    def __init__(self, policy: Policy | None) -> None:
        """Begin a run; ``policy`` is None if the script keeps its own precision."""
        self.policy = policy
        self.applied = None if policy is None else paddle_policy.for_scripts(policy)
        """The policy with casts by operation: the script's parameters stay FP32, and are the masters if the policy has any."""
        self.scale = HostScale(policy)
        self.steps = UpdateSteps()
        self.local = ThreadState()
        self.left_alone: dict[str, Note] = {}
        self.roots: WeakSet[Any] = WeakSet()
        """Layers called from outside any layer."""
        self.kept_roots: list[Any] | None = None
        """The same in order, kept alive; None if nobody asks for their weights."""
        self.fp32_layers: WeakSet[Any] = WeakSet()
        """Layers that the policy keeps in FP32."""
        self.optimizers: WeakSet[Any] = WeakSet()
        self.device: Device | None = None
        self.emulates = self.casts = False
        """Whether Mezzo rounds to formats below FP32, and whether Paddle's kernels compute in them; both False before the first layer."""
        self.watchers: list[Callable[[], Any]] = []
        """Called after every update."""
        self.script_scaler: Any = None
        """The script's own GradScaler, if it is left alone and has scaled a loss since its last update."""
        self.script_scale: float | None = None
        self.in_closure = False
        """Whether an optimizer is evaluating the loss itself, of which only the first evaluation is recorded."""
        self._unmatched = set(() if policy is None else policy.fp32_modules)
        self._stepped = self._overflowed = False
        self._made_by: set[int] = set()
        self._owners: dict[int, int] = {}
        self.names: dict[int, str] = {}
        """The model that each optimizer trains, by the optimizer's number."""
        self._norms: list[Any] = []
        self.round = rounder(FP32 if policy is None else policy.storage)
        self.round_result = self.round
        """The same for the results of operations, which an observer distinguishes from their operands."""
        self.observer: RunListener | None = None
        self.withholds_updates = False
        """Whether optimizers leave the weights as they are."""
        self.fp32_patterns: tuple[str, ...] = () if policy is None else policy.fp32_modules
        """Name patterns of the layers that stay in FP32."""

    def observe(self, observer: RunListener) -> None:
        """Notify ``observer`` of the run's events."""
        self.observer = observer

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let an optimizer evaluate the loss itself."""
        self.in_closure = True
        try:
            yield
        finally:
            self.in_closure = False

    def keep_models(self) -> None:
        """Keep the models that the script drops, because ``weights`` is read afterwards."""
        self.kept_roots = []

    def weights(self) -> str:
        """Return a digest of the weights; empty unless models were kept."""
        if self.kept_roots is None:
            return ""
        digest = hashlib.sha256()
        for parameter in {id(p): p for root in self.kept_roots for p in root.parameters()}.values():
            digest.update(parameter.numpy().tobytes())
        return digest.hexdigest()[:16]

    def withhold_updates(self) -> None:
        """Let optimizers leave the weights as they are from now on."""
        self.withholds_updates = True

    def round_through(self, operand: Callable[[Any], Any], result: Callable[[Any], Any]) -> None:
        """Round operands and results of operations with these functions, which a tape hears of."""
        self.round, self.round_result = operand, result

    # --- forward ---------------------------------------------------------------------------------------------------------------

    @property
    def lowers(self) -> bool:
        """Whether the policy casts anything below FP32."""
        return self.policy is not None and self.policy.lowers

    def record_root(self, layer: Any) -> None:
        """Record a layer called from outside any layer."""
        self.begin()
        if layer in self.roots:
            return
        self.roots.add(layer)
        if self.kept_roots is not None:
            self.kept_roots.append(layer)
        self.round_weights(layer.parameters())
        names = {bare_name(name): inner for name, inner in layer.named_sublayers()}
        for pattern in self.fp32_patterns:
            matching = [inner for name, inner in names.items() if fnmatchcase(name, pattern)]
            if matching:
                self._unmatched.discard(pattern)
                self.fp32_layers.update(matching)

    def begin(self) -> None:
        """Decide how the policy is computed on the script's device, at the first layer: by then the script has chosen the device.

        Raises:
            PolicyError: Paddle has no such format.
        """
        if self.device is not None:
            return
        if self.policy is not None:
            check(self.policy)
        self.device = this_device()
        if self.policy is None or not self.policy.lowers:
            return
        arithmetic, reason = arithmetic_on(self.policy, self.device)
        self.emulates = arithmetic == "emulated"
        self.casts = not self.emulates and self.device.kind != "cpu"
        if not self.emulates and not self.casts:
            self.note_left_alone(self.policy.compute, "fp32", reason)

    def round_weights(self, parameters: Iterable[Any]) -> None:
        """Round weights to 16 bits if the policy has no FP32 masters of them."""
        policy = self.policy
        if policy is None or policy.casting != "model" or policy.master_weights:
            return
        if not self.emulates:
            self.note_left_alone(
                "weights",
                "fp32",
                "the script's parameters stay as they are, as masters: paddle.amp.decorate casts them",
            )
            return
        with paddle.no_grad(), self.own_work():
            for parameter in parameters:
                if is_fp32(parameter) and parameter.trainable:
                    paddle.assign(self.round(parameter.detach()), parameter)

    def lowered_here(self) -> bool:
        """Return whether the running code is under the policy and not in a layer or region that stays in FP32."""
        return self.local.depth > 0 and not self.local.fp32_depth

    @contextmanager
    def in_fp32(self) -> Iterator[None]:
        """Run the code inside in FP32."""
        self.local.fp32_depth += 1
        try:
            yield
        finally:
            self.local.fp32_depth -= 1

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Mark the code inside as Mezzo's own, so that observers ignore it."""
        before, self.local.own_work = self.local.own_work, True
        try:
            yield
        finally:
            self.local.own_work = before

    def note_left_alone(self, what: str, value: str, reason: str) -> None:
        """Record something that the policy left alone."""
        self.left_alone.setdefault(f"{what} {value}", Note(what=what, value=value, reason=reason))

    def code_outside(self, flops: int, total: int) -> list[Note]:
        """Return the entry for the FLOPs of forward code outside every region, out of a step's ``total``; empty if there are none."""
        if not (self.lowers and flops):
            return []
        why = "forward code outside any layer: only layers and auto_cast regions are switched"
        share = f"{flops / max(total, 1):.0%} of FLOPs and their backward pass"
        return [Note(what="FP32 code", value=share, reason=why)]

    def note_own_amp(self, what: str) -> None:
        """Record that the script's own mixed precision has no effect here."""
        if this_device().kind == "cpu":
            self.note_left_alone(what, "fp32", NO_EFFECT)

    # --- updates ---------------------------------------------------------------------------------------------------------------

    def parameters(self) -> list[Any]:
        """Return the parameters of all known layers and optimizers, each once."""
        parameters = [p for root in list(self.roots) for p in root.parameters()]
        parameters += [p for optimizer in list(self.optimizers) for p in parameters_of(optimizer)]
        return list({id(p): p for p in parameters}.values())

    @property
    def num_updates(self) -> int:
        """The number of updates, including the open one."""
        return self.steps.num_closed + self._stepped

    def backward_from(self, losses: Sequence[Any], starts: Sequence[Any]) -> None:
        """Record a backward pass: it closes the open update, and its losses belong to the next one.

        Args:
            losses: the tensors from which it starts; those with one value are recorded, times their gradient.
            starts: the gradient for each; None for one without.

        Raises:
            NonFiniteLossError: the very first loss is not finite.
        """
        self.begin()
        self.close_update()
        if self.observer is not None:
            self.observer.backward_begins(losses)
        for loss, gradient in zip(losses, starts, strict=False):  # Paddle itself refuses different lengths
            if loss.size != 1 or (self.in_closure and self.steps.has_loss()):
                continue
            value = self._loss_value(loss)
            if gradient is not None:
                with self.own_work():
                    value = value * gradient.detach().astype(FP32.dtype_name).reshape([])
            self.steps.loss(value)

    def _loss_value(self, loss: Any) -> Any:
        """Return a loss without the script's own scale.

        Raises:
            NonFiniteLossError: it is the very first loss, and not finite.
        """
        with self.own_work():
            value = loss.detach().astype(FP32.dtype_name).reshape([])
            if self.script_scaler is not None:
                return value / self.script_scaler._scale.reshape([])
            if not self.steps.num_closed and not self.steps.has_loss() and not bool(value.isfinite()):
                raise NonFiniteLossError(
                    f"the loss is {float(value)} before the first update",
                    hint="no loss scale can help: check the data and the forward pass; compare with --policy fp32",
                )
            return value

    def updated(self, norm: Any | None) -> bool:
        """Record an update with gradients of this norm; return whether to skip it.

        Raises:
            PolicyError: a pattern of the policy has matched no layer.
        """
        self._check_patterns()
        self._stepped = True
        if self.observer is not None:
            self.observer.update_begins(norm)
        if norm is None:
            return False
        self._norms.append(norm)
        with self.own_work():
            skip = self.scale.skips_overflows and not bool(norm.isfinite())
        self._overflowed |= skip
        return skip

    def owner(self, optimizer: Any) -> int:
        """Return the number of an optimizer; one recreated for the same parameters keeps the number."""
        ids = list(map(id, parameters_of(optimizer)))
        number = next((self._owners[p] for p in ids if p in self._owners), len(set(self._owners.values())))
        self._owners |= dict.fromkeys(ids, number)
        return number

    def update_made(self, optimizer: Any) -> None:
        """Record an optimizer that has stepped."""
        self._made_by.add(self.owner(optimizer))
        self.steps.updated()

    def script_scaled(self, scaler: Any) -> None:
        """Record that the script's own GradScaler scaled a loss."""
        self.script_scaler = scaler

    def script_scaler_updated(self, scale: float) -> None:
        """Record that the script's own GradScaler has made an update, after which its scale is ``scale``."""
        self.script_scaler, self.script_scale = None, scale

    def script_skipped(self) -> None:
        """Record that the script's own GradScaler skipped an optimizer's step."""
        self._stepped = self._overflowed = True

    def close_update(self) -> None:
        """Close the open update, if there is one: all optimizer steps between two backward passes are one update.

        Raises:
            ScaleFloorError: gradients overflow at the smallest scale that the policy allows.
        """
        if not self._stepped:
            return
        skipped, at_floor = self._overflowed, self._overflowed and self.scale.at_floor()
        scale, has_loss = self.script_scale, self.steps.has_loss()
        if self.scale.skips_overflows:
            self.scale.update(overflow=skipped)
            scale = self.scale.value
        norm, has_norm = _joint_norm(self._norms), bool(self._norms)
        self.steps.close(skipped=skipped, scale=scale, norm=norm, made_by=frozenset(self._made_by))
        self._stepped, self._overflowed, self._norms = False, False, []
        self._made_by.clear()
        if self.observer is not None:
            loss_finite, norm_finite = self.steps.last_is_finite()
            self.observer.step_closed(
                self.steps.num_closed,
                loss_finite=loss_finite or not has_loss,
                gradients_finite=norm_finite or not has_norm,
                skipped=skipped,
            )
        if at_floor:
            raise ScaleFloorError(
                f"gradients overflow at the loss scale's floor of {self.scale.value:g}, update {self.steps.num_closed}",
                hint="try --policy bf16, which has FP32's range, or keep modules in FP32 (fp32_modules=...)",
            )

    def _check_patterns(self) -> None:
        if self._unmatched:
            pattern, names = min(self._unmatched), LayerNames(self.roots).patterns()
            raise PolicyError(
                f"no layer is named {pattern!r}; {nearest(pattern, names[:100])}",
                hint="patterns match whole names as layer.named_sublayers() gives them, with * and ?",
            )


def this_device() -> Device:
    """Return the device on which Paddle currently puts tensors."""
    if paddle.device.get_device().startswith("gpu"):
        capability = paddle.device.cuda.get_device_capability()
        return Device(kind="cuda", name=paddle.device.cuda.get_device_name(), capability=tuple(capability))
    return Device(kind="cpu", name=cpu_name())


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    groups = getattr(optimizer, "_param_groups", None) or []
    return [p for group in groups for p in (group["params"] if isinstance(group, dict) else [group])]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with its tensors changed, also those in lists, tuples and dictionaries."""
    if isinstance(value, paddle.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return type(value)(mapped(item, change) for item in value) if type(value) in (list, tuple) else value


def dense(gradient: Any) -> Any:
    """Return a gradient as a dense tensor: rows that a sparse one contains more than once are added up."""
    if not gradient.is_selected_rows():
        return gradient
    return paddle.nn.clip.get_tensor_from_selected_rows(paddle.nn.clip.merge_selected_rows(gradient))


def _joint_norm(norms: list[Any]) -> Any:
    """Return the norm of all gradients together from the optimizers' norms; NaN if there are none."""
    if not norms:
        return float("nan")
    return norms[0] if len(norms) == 1 else sum(norm * norm for norm in norms).sqrt()


# Paddle's own GradScaler is not used, on any device: it does not work on a CPU or for BF16, has no ceiling, restarts its count
# of overflows after each backoff, and prints a line at each. Using the same logic everywhere also makes runs in two
# frameworks comparable. Cost: one flag per step is read from the device, as by any scaler that skips steps.


class HostScale:
    """The loss scale of a policy: none, static or dynamic."""

    def __init__(self, policy: Policy | None) -> None:
        self._policy = Policy() if policy is None else policy
        self.skips_overflows = self._policy.loss_scale != "none"
        """Whether an update with a non-finite gradient is skipped."""
        self.value = _fp32(self._policy.init_scale) if self.skips_overflows else 1.0
        self._growth_tracker, self._left = 0, self._policy.hysteresis

    @property
    def inverse(self) -> float:
        """1 / scale, rounded once to FP32."""
        return _fp32(1.0 / self.value)

    def at_floor(self) -> bool:
        """Return whether the scale is at its smallest value."""
        return self._policy.loss_scale == "dynamic" and self.value <= self._policy.min_scale

    def update(self, *, overflow: bool) -> None:
        """Update a dynamic scale after an update."""
        policy = self._policy
        if policy.loss_scale != "dynamic":
            return
        if overflow:
            self._growth_tracker = 0
            self._left -= 1
            if self._left <= 0:
                self._set(self.value * policy.backoff_factor)
            return
        self._left = policy.hysteresis
        self._growth_tracker += 1
        if self._growth_tracker == policy.growth_interval:
            self._growth_tracker = 0
            self._set(self.value * policy.growth_factor)

    def _set(self, value: float) -> None:
        rounded = _fp32(value)
        if math.isfinite(rounded):
            self.value = min(max(rounded, self._policy.min_scale), self._policy.max_scale)


def _fp32(value: float) -> float:
    return float(np.float32(value))


_WRAPPERS = re.compile(r"^(_layers\.)+")


def bare_name(name: str) -> str:
    """Return a sublayer's name without the prefixes that ``paddle.DataParallel`` adds."""
    return _WRAPPERS.sub("", f"{name}.").rstrip(".")


class SublayerTree:
    """The layers inside a model (``mezzo.observe.module_names.NamedTree``)."""

    def title(self, root: Any) -> str:
        """Return the name of a model."""
        return type(root).__name__

    def modules(self, root: Any) -> Iterator[tuple[str, Any]]:
        """Yield every layer with its path, which is empty for ``root`` and for wrappers around it."""
        for path, layer in root.named_sublayers(include_self=True):
            yield bare_name(path), layer

    def parameters(self, module: Any) -> Iterator[tuple[str, Any]]:
        """Yield the parameters of a layer itself with their names."""
        yield from module.named_parameters(include_sublayers=False)


class LayerNames(Names):
    """The path of every layer, and of every parameter."""

    no_path = "a weight outside any layer"

    def __init__(self, roots: Iterable[Any]) -> None:
        super().__init__(roots, SublayerTree())
