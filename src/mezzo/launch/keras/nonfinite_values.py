"""Find the first value of a Keras script on TensorFlow that is not finite: what ``mezzo diagnose`` records in one run.

Every step runs eagerly. After each, two numbers are read: the loss and the norm of the gradients. Operations are inspected in chosen steps
only (``eager_values``). What follows from them is decided as for PyTorch (``mezzo.observe.nonfinite.faults``).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from tensorflow.python.eager.polymorphic_function import eager_function_run

from mezzo.errors import ScriptError
from mezzo.formats import FORMAT_NAMES, FORMATS, FP32, STORED_BYTES
from mezzo.launch.keras.eager_values import EagerValues
from mezzo.launch.keras.layers import inner_layers, keep_fp32
from mezzo.launch.keras.on_tensorflow import own_operations
from mezzo.launch.keras.state import KerasRun
from mezzo.launch.keras.updates import LayerScale, PolicyScale
from mezzo.launch.patches import Patches
from mezzo.observe.module_names import Names
from mezzo.observe.nonfinite.evidence import Evidence, FaultSource, write_evidence
from mezzo.observe.nonfinite.faults import ClosedStep, Faults, InspectedStep, SkipRule
from mezzo.observe.settings import DiagnoseSettings, StopScript
from mezzo.records import RunRecord

_CASTS = ((tf, "cast"), (tf, "constant"), (tf, "convert_to_tensor"), (keras.ops, "cast"))
"""Functions whose second argument is a dtype that the script names."""
_ON_DATASETS = "Even though the `tf.config.experimental_run_functions_eagerly`"
"""How TensorFlow's warning begins that pipelines of data still run in graphs."""


class ObservedTensorFlow:
    """A Keras run on TensorFlow with its steps inspected (``launch.training.Watching``)."""

    kind = "diagnose"
    compiles = False

    def __init__(self, run: KerasRun, settings: DiagnoseSettings) -> None:
        self._run, self._settings, self._until = run, settings, settings.steps[-1]
        self._values = EagerValues(self.loss_scale)
        self._waiting = sorted(set(settings.steps))
        self.watched: list[int] = []
        """Numbers of the steps that were inspected to their end."""
        self._faults = Faults(self, settings.suspects)
        self._scaler: LayerScale | None = None
        self._scale_is_set = False
        self._roots: dict[Any, None] = {}
        self._compiled = self._narrow = False
        self._norms: list[float] = []
        self._closed: tuple[float, float, bool] | None = None
        """The loss, the norm and whether it was skipped of a step that is over and not judged."""
        self._unfinished: InspectedStep | None = None
        self._begin_step()

    def _begin_step(self) -> None:
        self._of_losses: list[FaultSource] = []
        self._in_backward: list[FaultSource] = []
        self._in_update: list[FaultSource] = []
        self._has_loss = False
        self._by_update: FaultSource | None = None
        self._parts: dict[tuple[int, int], bool] = {}
        self._values.forward_begins()

    @property
    def observer(self) -> ObservedTensorFlow:
        """The observer of the run: this."""
        return self

    @property
    def _observing(self) -> bool:
        return self._waiting[:1] == [self._run.steps.num_closed + 1]

    # --- the script's run --------------------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Run every step eagerly, and inspect the first one if that is wanted, until ``patches`` are undone.

        Raises:
            ScriptError: a change is to be tried that cannot be made here.
        """
        changes = self._settings.changes
        if changes.fp32_line or changes.own_scale:
            raise ScriptError(
                "one line in FP32, or another static scale, cannot be tried on TensorFlow",
                hint="change the script, and diagnose it",
            )
        patches.replace(eager_function_run, "RUN_FUNCTIONS_EAGERLY", True)
        for name in ("evaluate", "predict"):  # they make no update, and take long if they run eagerly
            patches.around(TensorFlowTrainer, name, _in_graphs)
        warnings.filterwarnings("ignore", message=_ON_DATASETS)
        if changes.own_format:
            for owner, name in _CASTS:
                patches.around(owner, name, functools.partial(_with_format, FORMATS[changes.own_format].dtype_name))
        self._values.install(patches)
        patches.on_undo(self._values.end)
        if self._observing:
            self._values.begin()

    def refuse_graph(self) -> NoReturn:
        """Refuse an update that is traced.

        Raises:
            ScriptError: always.
        """
        raise ScriptError(
            "mezzo diagnose inspects eager steps on TensorFlow, and the script traces its update; allowed: steps that can run eagerly",
            hint="leave out tf.config.run_functions_eagerly(False)",
        )

    def function_called(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Record that the script calls a ``tf.function``, which runs eagerly; return its arguments, with arrays as tensors as there."""
        self._compiled = True
        return tuple(tf.convert_to_tensor(x) if isinstance(x, np.ndarray) else x for x in args)

    def calls(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``keras.Layer.__call__`` with the layer known while it runs."""

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if not tf.executing_eagerly() or any(
                isinstance(x, keras.KerasTensor) for x in tf.nest.flatten((args, kwargs))
            ):
                return original(layer, *args, **kwargs)
            if not self._values.layers:
                self._met(layer)
                self._values.forward_begins()
            with self._values.layer(layer):
                return original(layer, *args, **kwargs)

        return call

    def _met(self, layer: Any) -> None:
        if layer in self._roots:
            return
        self._roots[layer] = None
        patterns = self._settings.changes.fp32_modules
        for path, inner in [(layer.name, layer), *inner_layers(layer)]:
            if any(fnmatchcase(path, pattern) for pattern in patterns):
                keep_fp32(inner)

    def scaler_met(self, scaler: LayerScale) -> None:
        """Record that the loss is about to be scaled."""
        if self._scaler is None or self._scaler.key != scaler.key:
            self._scaler, self._scale_is_set = scaler, False
        self._set_scale()

    def backward(self, compute: Callable[[], Any], losses: Sequence[Any]) -> Any:
        """Return the gradients that ``compute`` returns.

        Args:
            compute: the backward pass.
            losses: its losses, without the loss scale.
        """
        if self._run.scales:
            self.scaler_met(PolicyScale(self._run))
        values, self._has_loss = self._values, True
        self._of_losses += values.causes(losses)
        with values.backward():
            gradients = compute()
        self._in_backward += values.causes(tf.nest.flatten(gradients))
        return gradients

    def make_update(
        self, apply: Callable[..., Any], inner: Any, grads: Sequence[Any], variables: Any, *, norm: Any
    ) -> Any:
        """Apply gradients, and find out whether that makes a weight infinite or NaN.

        Raises:
            ScriptError: the model has several replicas.
        """
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ScriptError(
                "mezzo diagnose was given for a model with several replicas on TensorFlow; allowed: one",
                hint="diagnose the script without its strategy; mezzo run and mezzo compare take it as it is",
            )
        reached = self._values.causes(grads)
        self._in_update += [source for source in reached if source.in_update]
        self._in_backward += [source for source in reached if not source.in_update]
        if self._settings.changes.eps is not None and hasattr(inner, "epsilon"):
            inner.epsilon = self._settings.changes.eps
        with own_operations():
            before = _number(inner.iterations)
        result = apply(grads, variables)
        with own_operations():
            skipped = _number(inner.iterations) == before
            trained = variables or inner._trainable_variables
            broken = (
                next((v for v in trained if not _is_finite(v)), None) if self._values.is_on and not skipped else None
            )
        self._parts[0 if self._scaler is None else self._scaler.key, id(inner)] = skipped
        if broken is not None:
            self._by_update = self._blamed(inner, broken)
        return result

    def _blamed(self, inner: Any, variable: Any) -> FaultSource:
        made = [source for source in self._values.of_weights() if source.in_update]
        eps = getattr(inner, "epsilon", None)
        fmt = FORMAT_NAMES.get(variable.dtype, FP32.name)
        zero = eps if eps is not None and 0 < eps <= FORMATS[fmt].min_subnormal / 2 else None
        layer = next((o for r in self._roots for _, o in _modules(r) if any(v is variable for v in o.variables)), None)
        first = made[0] if made else None
        return FaultSource(
            index=0 if first is None else first.index,
            kind="made",
            op=f"{type(inner).__name__}.step",
            module=layer,
            line="" if first is None else first.line,
            backward=False,
            format=fmt,
            operands=[] if first is None else first.operands,
            wide=None if first is None else first.wide,
            scale=self.loss_scale(),
            in_update=True,
            zero_eps=zero,
        )

    def step_closed(self, *, loss: float, norm: float, skipped: bool) -> None:
        """Keep what a step that is over recorded, until it is judged: its numbers are read where operations are not followed."""
        self._closed = loss, norm, skipped

    def judge_step(self) -> None:
        """Judge the step that has just closed, if any; end the script where enough is known.

        Raises:
            StopScript: enough is known.
        """
        if self._closed is None:
            return
        (loss, norm, skipped), self._closed = self._closed, None
        step, inspected = self._run.steps.num_closed, None
        if self._waiting[:1] == [step]:
            self._waiting.pop(0)
            self.watched.append(step)
            inspected = self._inspection()
        self._norms.append(norm)
        closed = ClosedStep(
            step, not self._has_loss or math.isfinite(loss), math.isfinite(norm), skipped, inspected, dict(self._parts)
        )
        again = self._faults.close(closed)
        if again:
            self._waiting = list(range(step + 1, self._until + 1))
        self._begin_step()
        self._values.end()
        if self._faults.are_enough or not self._waiting:
            self._waiting = []
            raise StopScript
        if self._waiting[0] == step + 1:
            self._values.begin()

    def _inspection(self) -> InspectedStep:
        self._narrow |= self._values.narrow
        return InspectedStep(
            sources=list(self._values.sources),
            of_loss=list(dict.fromkeys(self._of_losses)),
            in_backward=list(dict.fromkeys(self._in_backward)),
            in_update=list(dict.fromkeys(self._in_update)),
            by_update=self._by_update,
            gradient_errors=None,
            harmless=[],
        )

    def close_update(self) -> None:
        """Keep what was found in a step that never ended, or whose loss scale ended the script."""
        with suppress(StopScript):
            self.judge_step()
        if self._observing and self._values.is_on:
            self._unfinished = self._inspection()
        self._values.end()

    # --- what is known of the training (``faults.TrainingFacts``) ----------------------------------------------------------------

    def names(self) -> Names:
        """Return the names of layers and variables."""
        return Names(self._roots, _LayersByName())

    def skip_rule(self) -> SkipRule:
        """Return the settings of the loss scale in use."""
        scaler = self._scaler
        return SkipRule(dynamic=True) if scaler is None else SkipRule(scaler.dynamic, scaler.get_growth_interval())

    def loss_scale(self) -> float:
        """Return the current loss scale."""
        with own_operations():
            return 1.0 if self._scaler is None else self._scaler.get_scale()

    def largest_norm(self) -> float:
        """Return the largest gradient norm before the step that just closed, at the current loss scale."""
        scale = self.loss_scale()
        return max((norm * scale for norm in self._norms[:-1] if 0 < norm < math.inf), default=0.0)

    def _set_scale(self) -> None:
        if self._settings.changes.loss_scale is not None and self._observing and not self._scale_is_set:
            assert self._scaler is not None
            self._scale_is_set = True
            with own_operations():
                self._scaler.load_state_dict({"scale": self._settings.changes.loss_scale})

    # --- the evidence ------------------------------------------------------------------------------------------------------------

    def too_short(self) -> bool:
        """Return whether nothing was inspected."""
        return not (self.watched or self._faults.bad_steps)

    def failed(self, error: BaseException) -> None:
        """Do nothing: what raised an error is named in PyTorch only."""

    def evidence(self, run: RunRecord) -> Evidence:
        """Return the evidence of the run."""
        found = self._faults.evidence(run, watched=self.watched, unfinished=self._unfinished)
        own = self._scaler is not None and not self._run.scales
        return found.model_copy(
            update={
                "unexplained_skips": [s for s in self._faults.skips.unexplained if s not in found.faulty_steps],
                "own_scaler": own,
                "scaled": self._scaler is not None,
                "narrow": self._narrow or not self.watched,
                "forced_eager": self._compiled,
            }
        )

    def record(self, run: RunRecord) -> RunRecord:
        """Write the evidence where the settings say; return the run's own record."""
        still_narrow = self._settings.changes.own_format == "fp32" and self._narrow
        if self._settings.evidence_path and not still_narrow:
            write_evidence(self.evidence(run), self._settings.evidence_path)
        return run


class _LayersByName:
    """The layers inside a model (``mezzo.observe.module_names.NamedTree``)."""

    def title(self, root: Any) -> str:
        """Return the model's name in Keras."""
        return str(root.name)

    def modules(self, root: Any) -> Iterator[tuple[str, Any]]:
        """Yield every layer once, with its path."""
        yield from _modules(root)

    def parameters(self, module: Any) -> Iterator[tuple[str, Any]]:
        """Yield a layer's own variables."""
        for variable in [*module._trainable_variables, *module._non_trainable_variables]:
            yield variable.name, variable


def _modules(root: Any) -> Iterator[tuple[str, Any]]:
    yield from {id(layer): (path, layer) for path, layer in reversed([("", root), *inner_layers(root)])}.values()


def _in_graphs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of Keras whose own functions run in graphs."""
    eager_function_run.RUN_FUNCTIONS_EAGERLY = False
    try:
        return original(*args, **kwargs)
    finally:
        eager_function_run.RUN_FUNCTIONS_EAGERLY = True


def _is_finite(variable: Any) -> bool:
    return bool(np.isfinite(np.asarray(tf.convert_to_tensor(variable), dtype=np.float64)).all())


def _number(variable: Any) -> int:
    """Return the value of a variable, which belongs to a replica under a strategy."""
    return int(tf.convert_to_tensor(variable))


def _with_format(
    wanted: str, original: Callable[..., Any], value: Any, dtype: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Call a function with ``wanted`` in the place of a 16-bit dtype that the script names."""
    name = None if dtype is None else str(getattr(dtype, "name", dtype))
    return original(value, wanted if name is not None and STORED_BYTES.get(name) == 2 else dtype, *args, **kwargs)
