"""Compare the gradients of a Paddle script's first steps between precisions: one run of a fallback search.

Optimizers leave the weights as they are, so that all steps use the script's initial weights: step k is then the same computation in
every run, on batch k. The gradients that are compared are those of the parameters before a step's first update: unscaled, and before
any clipping.

The four kinds of runs are those of PyTorch's search (``mezzo.observe.fallback.observer``): the ``reference`` in FP32, which also measures
every layer on its own; ``noise`` and ``rounding``, in FP32 with every layer's output moved by one unit in the last place, of FP32 and of
the policy's format; and ``check``, in lower precision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from mezzo.formats import FP32
from mezzo.launch.paddle.fallback.local_errors import FirstCall, measured
from mezzo.launch.paddle.layer_names import LayerNames
from mezzo.launch.paddle.observing import StepObserver
from mezzo.launch.paddle.state import PaddleRun, dense, mapped
from mezzo.launch.paddle.surveys import array_of, is_fp32
from mezzo.launch.paddle.tape import Listener, Tape
from mezzo.launch.patches import Patches
from mezzo.observe.fallback.evidence import Measurements
from mezzo.observe.settings import FallbackSettings
from mezzo.records import RunRecord

REFERENCE_GRADIENTS = "reference.npz"
"""Name of the file with the reference's gradients, by step and parameter."""


class Fallback(StepObserver, Listener):
    """An observer of the first steps' gradients; while it observes, weights stay as they are."""

    kind = "fallback"

    def __init__(self, settings: FallbackSettings, run: PaddleRun) -> None:
        super().__init__(run, steps=settings.steps)
        self._settings = settings
        run.withhold_updates()
        self._tape = Tape(run, self)
        self._calls: dict[int, FirstCall] = {}
        self._gradients: dict[str, Any] = {}
        self._reference: dict[int, dict[str, Any]] = defaultdict(dict)
        self._measured = Measurements(settings, norm=_norm, distance=_distance)
        self._of_step: dict[str, Any] = {}
        """The gradients of the open step, by parameter."""
        # Its own, so the script's random numbers stay the same.
        self._generator = np.random.Generator(np.random.PCG64(0))
        if settings.role != "reference":
            with np.load(Path(settings.folder) / REFERENCE_GRADIENTS) as saved:
                for key, gradient in saved.items():
                    number, _, name = key.partition(" ")
                    self._reference[int(number)][name] = gradient

    def install(self, patches: Patches) -> None:
        """Wrap layers, and record operations, until ``patches`` are undone."""
        self._tape.install(patches)
        patches.around(paddle.nn.Layer, "__call__", self._call)

    def begin(self) -> None:
        """Record the first step of the reference, to measure layers."""
        if self._settings.role == "reference" and not self._measured.steps:
            self._tape.start()

    def end(self) -> None:
        """Stop recording."""
        self._tape.stop()
        self._tape.clear()
        self._calls = {}

    def judge(self, norm: Any | None) -> None:
        """Keep the gradients of all parameters, and measure every layer of the first step on its own."""
        names = LayerNames(self._tape.roots)
        parameters = [p for root in names.outermost for p in root.parameters() if not p.stop_gradient]
        with self.run.own_work(), self._tape.paused():
            self._of_step = {names.parameter(p): array_of(dense(p.grad)) for p in parameters if p.grad is not None}
            if self._settings.role == "reference" and not self._measured.steps:
                calls = [call for call in self._calls.values() if any(g is not None for g in call.gradients)]
                self._measured.local = measured(calls, self._tape.operations, names, self._settings.policy)

    def decide(self, step: int, *, loss_finite: bool, gradients_finite: bool, skipped: bool) -> None:
        """Compare the step's gradients with the reference's; end the script if no more steps are needed."""
        gradients, self._of_step = self._of_step, {}
        if self._settings.role == "reference":
            self._gradients |= {f"{step} {name}": gradient for name, gradient in gradients.items()}
            self._measured.add_reference(step, {name: bool(np.isfinite(g).all()) for name, g in gradients.items()})
        else:
            self._measured.add(step, gradients, self._reference[step])
        if self._measured.enough:
            self._waiting = []

    def closure_met(self, optimizer: str) -> None:
        """Record that the gradients cannot be compared."""
        self._measured.closure_met(optimizer)

    # --- layers --------------------------------------------------------------------------------------------------------------------------

    def _call(self, original: Callable[..., Any], layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._settings.role in ("noise", "rounding") and paddle.is_grad_enabled():
            return mapped(original(layer, *args, **kwargs), self._moved)
        if not self._tape.on or id(layer) in self._calls or not paddle.is_grad_enabled():
            return original(layer, *args, **kwargs)
        call = self._calls[id(layer)] = FirstCall(layer, len(self._tape.operations))
        output = original(layer, *args, **kwargs)
        call.returned(output, len(self._tape.operations))
        return output

    def _moved(self, tensor: Any) -> Any:
        """Return an FP32 tensor with every element moved by about one unit in its last place; others unchanged.

        Values do not cross 1 and -1; in a coarser format, what it can represent stays as it is.
        """
        if not is_fp32(tensor):
            return tensor
        coarse = self._settings.role == "rounding"
        eps = self._settings.policy.required_formats[0].eps if coarse else FP32.eps
        signs = self._generator.integers(0, 2, tensor.shape) * 2.0 - 1.0
        with self.run.own_work():
            # Probabilities and cosines stay in their range.
            size = np.abs(tensor.numpy())
            signs = np.where((size <= 1.0) & (size * (1.0 + eps) > 1.0), -1.0, signs)
            if coarse:
                digits = np.frexp(size)[0] * (2.0 / eps)
                signs = np.where(digits == np.round(digits), 0.0, signs)
            return tensor * paddle.to_tensor((1.0 + eps * signs).astype(np.float32), place=tensor.place)

    # --- the measurements ----------------------------------------------------------------------------------------------------------------

    def too_short(self) -> bool:
        """Return whether no gradient was compared."""
        return not self._measured.steps

    def record(self, run: RunRecord) -> RunRecord:
        """Write the measurements to the folder; return the run's own record."""
        if self._settings.role == "reference":
            np.savez(Path(self._settings.folder) / REFERENCE_GRADIENTS, **self._gradients)
        self._measured.write()
        return run


def _norm(gradient: Any) -> float:
    return float(np.linalg.norm(gradient.astype(np.float64)))


def _distance(found: Any, exact: Any) -> float:
    return _norm(found.astype(np.float64) - exact)
