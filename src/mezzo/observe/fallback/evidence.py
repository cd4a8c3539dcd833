"""The measurements that the runs of a fallback search pass on, as JSON between processes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mezzo.error_texts import leaves_range, refuses_format
from mezzo.errors import NonFiniteLossError, ScaleFloorError, ScriptError
from mezzo.observe.settings import FITTING, FallbackSettings
from mezzo.policy import Policy
from mezzo.policyfields import LAYER_PRODUCTS
from mezzo.records import ModuleError, RunRecord, Value

_OVERFLOWS = (NonFiniteLossError.exit_code, ScaleFloorError.exit_code)
_TOP_EXPONENT = 14  # a quarter of FP16's largest number, because gradients vary between batches


class LocalError(ModuleError):
    """The error that one module makes on its own, and its largest gradient."""

    largest: float = 0.0
    """The largest magnitude of a gradient at its outputs, inputs and weights."""

    @property
    def worst(self) -> float:
        """The largest of its errors: 0 if none could be measured, infinite for NaN."""
        measured = [error for error in (self.output, self.dgrad, self.wgrad) if error is not None]
        return max((math.inf if math.isnan(error) else error for error in measured), default=0.0)


class StepErrors(Value):
    """The error of every parameter's gradient in one step."""

    step: int
    errors: dict[str, float]

    @property
    def worst(self) -> tuple[float, str]:
        """The largest error and its parameter."""
        return max(((error, name) for name, error in self.errors.items()), default=(0.0, ""))


class LossyProduct(Value):
    """A matrix product whose rows differ by less than the policy's format can tell."""

    line: str
    """The script's line, as ``file:line``."""
    lost: float
    """The share of the differences between its rows that rounding makes wrong."""


class Measured(Value):
    """The measurements of one run."""

    local: list[LocalError] = []
    lossy: LossyProduct | None = None
    """In the reference, the first product of the forward pass that loses its digits under the policy."""
    products: dict[str, list[str]] = {}
    """In the reference, the products that the policy computes in blocks, by layer."""
    steps: list[StepErrors] = []
    """Errors relative to the reference; in the reference itself 0, or infinite for a non-finite gradient."""
    problem: str = ""
    """Why the gradients of this run cannot be compared."""


def product_errors(measured: Measured) -> list[LocalError]:
    """Return the errors of products in blocks, each as a module ``layer.product`` is: a product is searched for as a module is.

    A linear layer by itself makes the errors of its products, which have as many FLOPs each. A product that the first step did not compute
    is left out. The models stay, without errors, for their FLOPs.
    """
    local = {error.module: error for error in measured.local if not error.unnamed}
    found = [LocalError(module=e.module, type=e.type, unnamed=True, flops=e.flops) for e in measured.local if e.unnamed]
    for layer, products in measured.products.items():
        alone = local.get(layer) or LocalError(
            module=layer, type="Linear", reason="no gradient reached it in the first step"
        )
        errors = {"forward": alone.output, "dgrad": alone.dgrad, "wgrad": alone.wgrad}
        ran = [product for product in LAYER_PRODUCTS if alone.reason or errors[product] is not None]
        for product in (product for product in products if product in ran):
            error, name = errors[product], f"{layer}.{product}"
            one = LocalError(module=name, type=alone.type, reason=alone.reason, flops=alone.flops // len(ran))
            column = "output" if product == "forward" else product
            found.append(one.model_copy(update={column: error, "rounded": error or 0.0}))
    return found


def fitting_scale(largest: float, most: float) -> float:
    """Return the largest power of two, at most ``most``, that keeps gradients up to ``largest`` in a quarter of FP16's range."""
    if not 0 < largest < math.inf:
        return most
    return min(most, 2.0 ** (_TOP_EXPONENT - math.ceil(math.log2(largest))))


def scale_alone(policy: Policy, largest: Iterable[float]) -> float:
    """Return the loss scale for modules on their own: if it is dynamic, one at which the gradients of most of them fit.

    ``largest`` are the largest gradients of the modules, which are read only then.
    """
    if policy.loss_scale == "none":
        return 1.0
    finite = sorted(top for top in largest if 0 < top < math.inf) if policy.loss_scale == "dynamic" else []
    return fitting_scale(finite[int(FITTING * (len(finite) - 1))], policy.init_scale) if finite else policy.init_scale


class Measurements:
    """What one run measures: the errors of the gradients step by step, and of the modules on their own."""

    def __init__(
        self, settings: FallbackSettings, *, norm: Callable[[Any], float], distance: Callable[[Any, Any], float]
    ) -> None:
        """Begin without any; gradients are compared by their ``norm``, and by the norm of their difference."""
        self._settings, self._norm, self._distance = settings, norm, distance
        self.steps: list[StepErrors] = []
        self.local: list[LocalError] = []
        self.products: dict[str, list[str]] = {}
        self._problem = ""

    def add_reference(self, step: int, finite: Mapping[str, bool]) -> None:
        """Add a step of the reference itself, of whose gradients these are finite."""
        self.steps.append(StepErrors(step=step, errors={name: 0.0 if ok else math.inf for name, ok in finite.items()}))

    def add(self, step: int, found: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
        """Add the relative error of every gradient that is in the reference and not zero there."""
        errors = {}
        for name, exact in reference.items():
            if name in self._settings.ignored:
                continue
            if name not in found or found[name].shape != exact.shape:
                errors[name] = math.inf
            elif (whole := self._norm(exact)) > 0:
                error = self._distance(found[name], exact) / whole
                errors[name] = error if math.isfinite(error) else math.inf
        self.steps.append(StepErrors(step=step, errors=errors))

    def closure_met(self, optimizer: str) -> None:
        """Record that an optimizer of this class evaluates the loss itself, so that the gradients cannot be compared."""
        self._problem = f"{optimizer} moves the weights inside its step, which calls a closure"

    @property
    def enough(self) -> bool:
        """Whether a check needs no further steps: after an overflow it is repeated with a smaller scale."""
        one_suffices = self._settings.role == "check" and not self._settings.all_steps
        return one_suffices and math.isfinite(self.steps[-1].worst[0])

    def write(self, *, lossy: LossyProduct | None = None) -> None:
        """Write the measurements, and the first product that loses its digits, to the folder of the search."""
        measured = Measured(
            local=self.local, lossy=lossy, products=self.products, steps=self.steps, problem=self._problem
        )
        measured_path(self._settings).write_text(measured.model_dump_json(), encoding="utf-8")


def measured_path(settings: FallbackSettings) -> Path:
    """Return the file with the measurements of a run."""
    return Path(settings.folder) / f"{settings.name}.measured.json"


def read_measured(settings: FallbackSettings) -> Measured:
    """Return what the run of ``settings`` measured; empty if the run ended before it could."""
    path = measured_path(settings)
    return Measured.model_validate_json(path.read_text(encoding="utf-8")) if path.is_file() else Measured()


def of_all(by_rank: Sequence[Measured]) -> Measured:
    """Return the measurements of all processes of a run as one, with the largest of each error: one bad rank spoils every update."""
    first = by_rank[0]
    local: dict[str, LocalError] = {}
    for candidate in (error for measured in by_rank for error in measured.local):
        known = local.setdefault(candidate.module, candidate)
        local[candidate.module] = max(known, candidate, key=lambda error: error.worst)
    errors: dict[int, dict[str, float]] = {}
    for step in (step for measured in by_rank for step in measured.steps):
        largest = errors.setdefault(step.step, {})
        for name, error in step.errors.items():
            largest[name] = max(largest.get(name, 0.0), error)
    return Measured(
        local=list(local.values()),
        lossy=first.lossy,
        products=first.products,
        steps=[StepErrors(step=step.step, errors=errors[step.step]) for step in first.steps],
        problem=next((measured.problem for measured in by_rank if measured.problem), ""),
    )


def failed_by_format(run: RunRecord) -> bool:
    """Return whether a run ended because of the format: values left its range, or an operation does not support it."""
    if run.error is None:
        return False  # the exit code is the script's own
    return run.exit_code in _OVERFLOWS or refuses_format(run.error) or leaves_range(run.error)


def checked(measured: Measured, run: RunRecord, *, where: str, role: str) -> Measured:
    """Return ``measured``; raise if it is empty, unless lower precision made the run fail, which is a result of the search."""
    if measured.problem:
        raise ScriptError(
            f"the gradients of {run.script} cannot be compared between precisions: {measured.problem}",
            hint="train with an optimizer that needs no closure while modules are searched",
        )
    if not measured.steps and not (role == "check" and failed_by_format(run)):
        raise ScriptError(
            f"{run.script} made no training step that could be compared: {run.error or 'it ended before'}",
            hint=run.hint or f"run it by itself first; {where}",
        )
    return measured
