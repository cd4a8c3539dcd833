"""Follow the values of a Paddle script that leave their format's range, from the first: what ``mezzo diagnose`` records in one run.

After every step two numbers are read: the loss and the norm of the gradients. Operations are recorded in chosen steps only
(``ValueFollower``). What follows from them is decided as for PyTorch (``mezzo.observe.nonfinite.faults``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

from mezzo.formats import FORMATS, FP16, FP32, Format
from mezzo.launch.paddle.backward import observe_gradient
from mezzo.launch.paddle.replay import KEPT, NO_UPPER, NONE, Limits, NotRepeated, ReplayedPass, gradients
from mezzo.launch.paddle.state import LayerNames, PaddleRun, mapped
from mezzo.launch.paddle.surveys import Survey, array_of, finite, format_name, is_half, operand, survey
from mezzo.launch.paddle.tape import StepObserver, Tape, TapedOperation, tensors
from mezzo.launch.patches import Patches
from mezzo.observe.nonfinite.evidence import (
    Evidence,
    FaultSource,
    GradientErrors,
    Harmless,
    SourceKind,
    WrongGradient,
    write_evidence,
)
from mezzo.observe.nonfinite.faults import ClosedStep, Faults, InspectedStep, SkipRule
from mezzo.observe.settings import LOST_BELOW, ROUNDOFFS, SHARE_BELOW, DiagnoseSettings
from mezzo.records import RunRecord


class NonFinite(StepObserver):
    """An observer of non-finite values, and of those that became finite again."""

    kind = "diagnose"

    def __init__(self, settings: DiagnoseSettings, run: PaddleRun) -> None:
        super().__init__(run, steps=settings.steps)
        self._settings, self._until = settings, settings.steps[-1]
        self._followed = ValueFollower(run, self.loss_scale)
        self._passes: list[ReplayedPass] = []
        self._losses: list[Any] = []
        self._inspected: InspectedStep | None = None
        self._unfinished: InspectedStep | None = None
        """What was found in a step that never ended."""
        self._faults = Faults(self, settings.suspects)
        self._problems: dict[str, str] = {}
        self._scale_is_set = False
        run.fp32_patterns = (*run.fp32_patterns, *settings.changes.fp32_modules)

    # --- recording ---------------------------------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Record Paddle's operations until ``patches`` are undone."""
        self._followed.tape.install(patches)

    def begin(self) -> None:
        """Begin to record operations."""
        self._followed.tape.start()

    def end(self) -> None:
        """Stop recording, and discard the operations."""
        self._followed.tape.stop()
        self._followed.clear()
        self._passes, self._losses = [], []

    def close(self) -> None:
        """Stop, wherever the script ended; keep what was found in a step that never ended."""
        if self.observing and self._followed.tape.on:
            self._unfinished = self._inspect(bad=True)
        self.end()

    def backward_begins(self, losses: Iterable[Any]) -> None:
        """Record the losses of a backward pass; set the policy's loss scale if the settings say so."""
        super().backward_begins(losses)
        self._losses += list(losses)
        if self._settings.changes.loss_scale is not None and self.observing and not self._scale_is_set:
            self._scale_is_set = True
            self.run.scale.value = self._settings.changes.loss_scale

    def scaled(self, losses: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Keep the gradients from which the backward pass starts."""
        if self._followed.tape.on:
            self._passes.append(ReplayedPass(list(losses), list(gradients)))

    def scaler_met(self, scaler: Any) -> None:
        """Set the scale of the script's own scaler if the settings say so."""
        if self._settings.changes.loss_scale is not None and self.observing and not self._scale_is_set:
            self._scale_is_set = True
            scaler.set_init_loss_scaling(self._settings.changes.loss_scale)

    def judge(self, norm: Any | None) -> None:
        """Inspect the step's records before its weights change."""
        bad = not all(map(finite, self._losses)) or (norm is not None and not math.isfinite(float(norm)))
        self._inspected = self._inspect(bad=bad)

    def _inspect(self, *, bad: bool) -> InspectedStep:
        followed, errors = self._followed, None
        with followed.tape.paused():
            if not bad and any(source.kind in ("made", "vanished") for source in followed.sources):
                errors = self._gradient_errors()
        of_losses = followed.of_losses(self._losses)
        harmless = [
            Harmless(op=s.op, line=s.line, format=s.format, largest=s.wide, absorbed_by=list(s.swallowed))
            for s in followed.sources
            if s.kind == "made" and s.wide and s.swallowed
        ]
        return InspectedStep(
            sources=list(followed.sources),
            of_loss=of_losses,
            in_backward=followed.in_backward,
            gradient_errors=errors,
            harmless=harmless,
        )

    def _gradient_errors(self) -> GradientErrors | None:
        if self.run.casts:
            self._problems["backward"] = (
                "values in the GPU's own 16-bit formats are not recomputed: silent saturation is not judged"
            )
            return None
        weights = [p for p in self.run.parameters() if not p.stop_gradient]
        try:
            sources = tuple(self._followed.sources)
            return gradient_errors(
                self._followed.tape.operations, self._passes, weights, self._followed.format, sources
            )
        except NotRepeated as why:
            self._problems["step"] = f"silent saturation was not judged, because {why}"
            return None

    # --- steps -------------------------------------------------------------------------------------------------------------------------

    def decide(self, step: int, *, loss_finite: bool, gradients_finite: bool, skipped: bool) -> None:
        """Judge the step that is over; end the script where enough is known."""
        inspected, self._inspected = self._inspected, None
        if self._faults.close(ClosedStep(step, loss_finite, gradients_finite, skipped, inspected)):
            self._waiting = list(range(step + 1, self._until + 1))
        if self._faults.are_enough:
            self._waiting = []

    # --- what is known of the training (``faults.TrainingFacts``) -------------------------------------------------------------------

    def skip_rule(self) -> SkipRule:
        """Return the settings of the loss scale in use."""
        if self.run.script_scale is not None or self.run.script_scaler is not None:
            return SkipRule(dynamic=True)
        policy = self.run.policy
        if policy is None or policy.loss_scale == "none":
            return SkipRule(dynamic=True)
        dynamic = policy.loss_scale == "dynamic"
        return SkipRule(dynamic=dynamic, growth_interval=policy.growth_interval, hysteresis=policy.hysteresis)

    def loss_scale(self) -> float:
        """Return the current loss scale."""
        scaler = self.run.script_scaler
        return float(scaler._scale) if scaler is not None else self.run.scale.value

    def names(self) -> LayerNames:
        """Return the names of layers and parameters."""
        return LayerNames(self._followed.tape.roots)

    def largest_norm(self) -> float:
        """Return the largest gradient norm before the step that just closed, at the current loss scale."""
        norms = self.run.steps.norms()[:-1]
        return max((norm * self.run.scale.value for norm in norms if 0 < norm < math.inf), default=0.0)

    # --- the evidence --------------------------------------------------------------------------------------------------------------------

    def too_short(self) -> bool:
        """Return whether nothing was inspected."""
        return not (self.watched or self._faults.bad_steps)

    def evidence(self, run: RunRecord) -> Evidence:
        """Return the evidence of the run."""
        found = self._faults.evidence(run, watched=self.watched, unfinished=self._unfinished)
        return found.model_copy(
            update={
                "own_scaler": self.run.script_scale is not None,
                "scaled": self.run.scale.skips_overflows or self.run.script_scale is not None,
                "narrow": self.run.policy is None or self.run.policy.lowers,
                "problems": self._problems,
            }
        )

    def record(self, run: RunRecord) -> RunRecord:
        """Write the evidence where the settings say; return the run's own record."""
        if self._settings.evidence_path:
            write_evidence(self.evidence(run), self._settings.evidence_path)
        return run


# The thresholds are the same as in PyTorch's diagnosis (``mezzo.observe.nonfinite.shadows``): gradients are judged tensor by tensor, and
# a gradient of nothing but rounding noise (a bias before a norm) is not judged.


def gradient_errors(
    operations: Sequence[TapedOperation],
    passes: Sequence[ReplayedPass],
    weights: Sequence[Any],
    fmt: Format,
    sources: tuple[FaultSource, ...],
) -> GradientErrors | None:
    """Return which gradients of ``weights`` the range of ``fmt`` made wrong; None if the step has no finite gradients.

    Args:
        operations: the operations of the step.
        passes: its backward passes.
        weights: its trained parameters.
        fmt: the format that the policy rounds to.
        sources: where the step lost values; a replay of the whole step does not show which of them a gradient depends on.

    Raises:
        NotRepeated: the step cannot be computed again.
    """

    def replayed(limits: Limits) -> dict[int, Any]:
        return gradients(operations, passes, weights, fmt, limits)

    actual = {key: g for key, g in replayed(KEPT).items() if np.isfinite(g).all()}
    if not actual:
        return None
    true = replayed(NONE)
    if not all(np.isfinite(true[key]).all() for key in actual):
        raise NotRepeated("without the format's limits its gradients are beyond FP32")
    by_id = {id(weight): weight for weight in weights}
    below, zeros, norm = _compared(actual, true, by_id, fmt, sources)
    above = _compared(actual, replayed(NO_UPPER), by_id, fmt, sources)[0] if below else []
    noise = FP16.eps * max((_root_mean_square(g) for g in true.values()), default=0.0)
    above = [wrong for wrong in above if wrong.error * _root_mean_square(true[id(wrong.parameter)]) > noise]
    lost = [wrong for wrong in below if wrong.error > LOST_BELOW]
    size = sum(g.size for g in actual.values())
    enough = sum(true[id(wrong.parameter)].size for wrong in lost) > SHARE_BELOW * size
    return GradientErrors(tuple(above), tuple(lost) if enough else (), len(actual), zeros, norm)


def _compared(
    actual: dict[int, Any], true: dict[int, Any], weights: dict[int, Any], fmt: Format, sources: tuple[FaultSource, ...]
) -> tuple[list[WrongGradient], float, float]:
    """Return the gradients that are wrong, the share of elements that became 0, and the norm of the true gradients."""
    wrong, num_zeros, num_nonzero, norms = [], 0, 0, [0.0]
    for key, gradient in actual.items():
        norm, nonzero = _norm(true[key]), true[key] != 0
        norms.append(norm)
        num_nonzero += int(nonzero.sum())
        num_zeros += int(((gradient == 0) & nonzero).sum())
        difference = _norm(gradient.astype(np.float64) - true[key])
        if norm > 0 and difference > ROUNDOFFS * fmt.eps / 2 * norm:
            wrong.append(WrongGradient(weights[key], difference / norm, sources))
    return wrong, num_zeros / num_nonzero if num_nonzero else 0.0, math.hypot(*norms)


def _root_mean_square(gradient: Any) -> float:
    return _norm(gradient) / math.sqrt(gradient.size) if gradient.size else 0.0


def _norm(values: Any) -> float:
    return float(np.linalg.norm(values.astype(np.float64).ravel()))


# Where the policy rounds an operand or a result, the value before rounding is the FP32 value: one that is finite before and infinite after
# left the format's range there, and one that is zero only after vanished there. The backward pass is followed by hooks on tensors: if a
# tensor's gradient is not finite, but the gradients of all results computed from the tensor are, the operation that reads the tensor
# produced it.

_CAST = "cast"
_PUBLIC_NAMES = {
    "elementwise_pow": "pow",
    "linear_v2": "linear",
    "cross_entropy_with_softmax": "cross_entropy",
    "sigmoid_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
    "bce_loss": "binary_cross_entropy",
    "p_norm": "norm",
    "frobenius_norm": "norm",
    "mean_all": "mean",
    "getitem": "__getitem__",
    "setitem": "__setitem__",
    "kldiv_loss": "kl_div",
    "huber_loss": "smooth_l1_loss",
    "depthwise_conv2d": "conv2d",
}
"""Operations of ``paddle._C_ops`` that have another name in Paddle's documentation."""


class ValueFollower:
    """Finds where values of one step were lost (``launch.paddle.tape.Listener``)."""

    def __init__(self, run: PaddleRun, scale: Callable[[], float]) -> None:
        self._run, self._scale = run, scale
        self.tape = Tape(run, self)
        self._reset()

    def _reset(self) -> None:
        self.sources: list[FaultSource] = []
        self.causes: dict[int, tuple[FaultSource, ...]] = {}
        """Why a tensor is not finite, by its id; the tape keeps all tensors alive."""
        self._computed: set[int] = set()
        """Ids of the tensors that the step has computed."""
        self._checked: dict[int, Any] = {}
        """Other tensors that were checked, by id."""
        self._roundings: list[tuple[Any, Any, Survey, bool]] = []
        """The roundings of the running operation: the value before and after, what was lost, and whether it is a result."""
        self._readers: dict[int, list[TapedOperation]] = {}
        """The operations that read a tensor, by its id."""
        self._rounded_operands: dict[int, list[Any]] = {}
        """The operands that were obtained by rounding a tensor, by its id."""
        self._bad: dict[int, bool] = {}
        """Whether a tensor's gradient is not finite after rounding, by the tensor's id."""
        self._gradients: dict[int, Any] = {}
        """Gradients of results and weights, by the id of their tensor."""
        self._hooks: list[Any] = []
        self._hooked: set[int] = set()

    def clear(self) -> None:
        """Discard what is known of the step."""
        for hook in self._hooks:
            hook.remove()
        self.tape.clear()
        self._reset()

    @property
    def format(self) -> Format:
        """The format that the policy rounds to."""
        return FP32 if self._run.policy is None else self._run.policy.storage

    def of_losses(self, losses: Iterable[Any]) -> list[FaultSource]:
        """Return what made the losses infinite or NaN."""
        return list(dict.fromkeys(source for loss in losses for source in self.causes.get(id(loss), ())))

    @property
    def in_backward(self) -> list[FaultSource]:
        """What made gradients infinite or NaN."""
        return [source for source in self.sources if source.backward and source.kind != "vanished"]

    # --- the forward pass ------------------------------------------------------------------------------------------------------------

    def rounded(self, operation: TapedOperation, before: Any, after: Any, *, result: bool) -> None:
        """Record what a rounding lost."""
        lost = survey(before, self.format)
        self._roundings.append((before, after, lost, result))
        if not result and not after.stop_gradient:
            self._rounded_operands.setdefault(id(before), []).append(after)
            observe_gradient(after, functools.partial(self._operand_gradient, operation, after))

    def finished(self, operation: TapedOperation) -> None:
        """Record what an operation computed from its operands."""
        roundings, self._roundings = self._roundings, []
        known = [source for t in operation.operands for source in self._causes_of(operation, t)]
        for before, _, lost, is_result in roundings:
            if not is_result and lost.overflows and id(before) not in self.causes:
                known.append(self._overflow(operation, lost, name=_CAST, read=[before]))
            if lost.share and math.isfinite(lost.largest):
                self._vanished(operation, lost, name=public_name(operation.name) if is_result else _CAST)
        for result in operation.results:
            self._computed.add(id(result))
            raw = next((lost for _, after, lost, is_result in roundings if is_result and after is result), None)
            self._judge(operation, result, raw, known)
            if not result.stop_gradient and result.is_floating_point():
                observe_gradient(result, functools.partial(self._result_gradient, operation, result))
        for tensor in operation.operands:
            self._readers.setdefault(id(tensor), []).append(operation)
            self._hook_leaf(tensor)

    def _causes_of(self, operation: TapedOperation, tensor: Any) -> tuple[FaultSource, ...]:
        """Return why an operand is not finite; if the step did not compute it, it came from outside."""
        if id(tensor) in self.causes or id(tensor) in self._computed or id(tensor) in self._checked:
            return self.causes.get(id(tensor), ())
        self._checked[id(tensor)] = tensor
        if finite(tensor):
            return ()
        is_weight = isinstance(tensor, paddle.base.framework.EagerParamBase)
        source = self._add(operation, "entered", None, read=[tensor], parameter=is_weight)
        self.causes[id(tensor)] = (source,)
        return self.causes[id(tensor)]

    def _judge(self, operation: TapedOperation, result: Any, raw: Survey | None, known: list[FaultSource]) -> None:
        if not result.is_floating_point() or operation.name.startswith("empty"):  # uninitialised memory
            return
        if raw is not None and raw.overflows and not known:
            self.causes[id(result)] = (self._overflow(operation, raw, read=operation.operands),)
            return
        if finite(result) if raw is None else math.isfinite(raw.largest):
            self.causes.pop(id(result), None)
            for source in known:
                source.swallowed[public_name(operation.name)] = None
            return
        if known:
            self.causes[id(result)] = tuple(dict.fromkeys(known))
            return
        reads = [t for t in operation.operands if t.is_floating_point()]
        numbers = [v for v in (*operation.args, *operation.kwargs.values()) if isinstance(v, float)]
        if not reads or not all(map(math.isfinite, numbers)):
            source = self._add(operation, "constant", None)
        else:
            fmt = self.format.name if operation.rounds else format_name(result)
            source = self._add(operation, "made", self._in_fp32(operation, result), read=reads, fmt=fmt)
        self.causes[id(result)] = (source,)

    def _in_fp32(self, operation: TapedOperation, result: Any) -> float | None:
        """Return the largest magnitude of a 16-bit operation's result in FP32; None if that is not finite either."""
        if result.element_size() > 2 or operation.name.endswith("_"):
            return None
        if operation.name == _CAST:
            return float(abs(array_of(operation.operands[0])).max())
        with paddle.no_grad(), self._run.in_fp32():
            args, kwargs = mapped(operation.args, _widened), mapped(operation.kwargs, _widened)
            wide = tensors([operation.function(*args, **kwargs)])
        largest = max((float(abs(array_of(t)).max()) for t in wide if t.is_floating_point() and t.size), default=0.0)
        return largest if math.isfinite(largest) else None

    # --- the backward pass -----------------------------------------------------------------------------------------------------------

    def _hook_leaf(self, tensor: Any) -> None:
        hooked = id(tensor) in self._computed or id(tensor) in self._hooked
        if hooked or tensor.stop_gradient or not tensor.is_floating_point():
            return
        self._hooked.add(id(tensor))
        self._hooks.append(observe_gradient(tensor, functools.partial(self._result_gradient, None, tensor)))

    def _operand_gradient(self, operation: TapedOperation, rounded: Any, gradient: Any) -> None:
        """Record the gradient of a rounded operand, which is rounded next."""
        if gradient is None:  # nothing flows back here
            return
        with self._surveyed(gradient) as lost:
            arose_here = self._finite_after(operation)
            self._bad[id(rounded)] = not math.isfinite(lost.largest) or lost.overflows
            if not math.isfinite(lost.largest) and arose_here:
                self._backward(operation, None)
            elif math.isfinite(lost.largest) and lost.overflows:
                self._backward(operation, lost)
            elif lost.share:
                self._vanished(operation, lost, backward=True)

    def _result_gradient(self, operation: TapedOperation | None, result: Any, gradient: Any) -> None:
        """Record the gradient of a result or of a weight; a rounded result's gradient is rounded next."""
        if gradient is None:
            return
        with self._surveyed(gradient) as lost:
            rounds = operation is not None and operation.rounds
            bad = not math.isfinite(lost.largest)
            self._bad[id(result)] = bad or (rounds and lost.overflows)
            self._gradients[id(result)] = gradient
            producer = self._producer_of(result) if bad or (rounds and (lost.overflows or lost.share)) else None
            if producer is None:
                return
            if bad:
                self._backward(producer, None)
            elif lost.overflows:
                self._backward(producer, lost)
            else:
                self._vanished(producer, lost, backward=True)

    @contextmanager
    def _surveyed(self, gradient: Any) -> Iterator[Survey]:
        """Yield the survey of a gradient, and record no operation inside."""
        with self.tape.paused():
            if gradient.is_selected_rows():
                gradient = paddle.nn.clip.get_tensor_from_selected_rows(gradient)
            yield survey(gradient, self.format)

    def _finite_after(self, operation: TapedOperation) -> bool:
        return not any(self._bad.get(id(result)) for result in operation.results)

    def _producer_of(self, tensor: Any) -> TapedOperation | None:
        """Return the operation whose backward pass produced a tensor's gradient; None if the gradients it received were not finite."""
        readers = self._readers.get(id(tensor), [])
        rounded = self._rounded_operands.get(id(tensor), [])
        if any(self._bad.get(id(operand)) for operand in rounded) or not all(map(self._finite_after, readers)):
            return None
        reached = [r for r in readers if any(id(result) in self._gradients for result in r.results)]
        failing = [r for r in reached if self._fails(r, tensor)] if len(reached) > 1 else []
        return next(iter(failing or reached), None)

    def _fails(self, operation: TapedOperation, tensor: Any) -> bool:
        """Return whether the operation's backward pass, computed again, gives ``tensor`` a gradient that is not finite."""
        if operation.name.endswith("_"):
            return False
        leaf = tensor.detach()
        leaf.stop_gradient = False
        try:
            with paddle.enable_grad():
                args = [leaf if a is tensor else a for a in operation.args]
                results = tensors([operation.function(*args, **operation.kwargs)])
                pairs = [(r, self._gradients.get(id(o))) for r, o in zip(results, operation.results, strict=True)]
                known = [(r, g) for r, g in pairs if g is not None]
                (gradient,) = paddle.grad([r for r, _ in known], [leaf], [g for _, g in known], allow_unused=True)
        except Exception:  # the operation cannot run by itself, which says nothing about its gradient
            return False
        return gradient is not None and not finite(gradient)

    # --- sources ---------------------------------------------------------------------------------------------------------------------

    def _overflow(self, operation: TapedOperation, lost: Survey, *, name: str = "", read: list[Any]) -> FaultSource:
        return self._add(operation, "made", lost.largest, name=name, read=read, fmt=self.format.name)

    def _backward(self, operation: TapedOperation, lost: Survey | None) -> None:
        """Add the backward pass of an operation as a source: of an overflow in rounding, or (None) of a value that is not finite."""
        received = [self._gradients[id(r)] for r in operation.results if id(r) in self._gradients]
        read = [*received, *(t for t in operation.operands if t.is_floating_point())] if lost is None else received
        wide = None if lost is None else lost.largest
        fmt = self.format.name if lost is not None or operation.rounds else FP32.name
        passed = () if lost is not None else (*operation.operands, *operation.results)
        because = tuple(dict.fromkeys(s for t in passed for s in self.causes.get(id(t), ()) if s.kind == "made"))
        self._add(operation, "made", wide, read=read, backward=True, fmt=fmt, because=because)

    def _vanished(self, operation: TapedOperation, lost: Survey, *, name: str = "", backward: bool = False) -> None:
        fmt = self.format.name
        self._add(operation, "vanished", lost.vanished, name=name, backward=backward, fmt=fmt, share=lost.share)

    def _add(
        self,
        operation: TapedOperation,
        kind: SourceKind,
        wide: float | None,
        *,
        name: str = "",
        read: Iterable[Any] = (),
        fmt: str = FP32.name,
        backward: bool = False,
        parameter: bool = False,
        because: tuple[FaultSource, ...] = (),
        share: float = 0.0,
    ) -> FaultSource:
        source = FaultSource(
            index=self.tape.next_index(),
            kind=kind,
            op=name or public_name(operation.name),
            module=operation.layer,
            line=operation.line,
            backward=backward or operation.backward,
            format=fmt,
            operands=[operand(t) for t in read],
            wide=wide,
            scale=self._scale(),
            parameter=parameter,
            because=because,
            share=share,
        )
        self.sources.append(source)
        return source


def public_name(name: str) -> str:
    """Return the name under which Paddle documents an operation of ``paddle._C_ops``."""
    bare = name.removesuffix("_") if name not in FORMATS else name
    return _PUBLIC_NAMES.get(bare, bare)


def _widened(tensor: Any) -> Any:
    return tensor.detach().astype(FP32.dtype_name) if is_half(tensor) else tensor
