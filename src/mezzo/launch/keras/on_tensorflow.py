"""Keras on TensorFlow: backward passes are ``tf.GradientTape.gradient``, and most steps run in traced functions.

A traced function runs as Python only once, so operations in its graph write each step's values into variables of
Mezzo's (``ledger``), which are read after each outermost call of a ``tf.function``. They work in loops,
branches and XLA like any variable. One call may make several steps (``steps_per_execution``), which share its time.

Operations are counted in one step: one by one in the second eager step, or from the graph of a traced function (``graphs``).
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from mezzo.frameworks.keras import tf32_of
from mezzo.launch.keras import graphs
from mezzo.launch.keras.counts import by_format
from mezzo.launch.keras.ledger import Ledger
from mezzo.launch.keras.own_operations import own_operations
from mezzo.launch.keras.state import Backend, KerasRun
from mezzo.launch.keras.updates import times
from mezzo.launch.patches import Patches

_op_callbacks: Any = importlib.import_module("tensorflow.python.framework.op_callbacks")


class TensorFlowBackend(Backend):
    """The hooks on TensorFlow as a backend of Keras (``launch.keras.state.Backend``)."""

    shares_scale = True

    def __init__(self, run: KerasRun) -> None:
        self._run = run
        self._ledger = Ledger(run)
        self._calls: list[Any] = []
        """The tf.functions being called or traced, the outermost first."""
        self._updating: dict[int, Any] = {}
        """The tf.functions in which an update was traced, by id."""
        self._input: Any = None
        """The first input of the layer that was last called from outside any layer."""
        self._graph: Any = None
        """The graph of the outermost tf.function in which an update was traced last."""
        self._counting: Counter[str] | None = None
        self._counted = False
        self.name = f"tensorflow {tf.__version__}"

    def install(self, patches: Patches) -> None:
        """Patch the tape and the calls of traced functions; set TF32 under a policy that casts nothing."""
        if self._run.audit is not None:
            self._run.audit.install(patches)
        patches.around(tf.GradientTape, "gradient", self._gradient)
        traced = importlib.import_module("tensorflow.python.eager.polymorphic_function.polymorphic_function")
        patches.around(traced.Function, "__call__", self._call)
        on = None if self._run.policy is None else tf32_of(self._run.policy)
        if on is not None:
            before = tf.config.experimental.tensor_float_32_execution_enabled()
            patches.on_undo(lambda: tf.config.experimental.enable_tensor_float_32_execution(before))
            tf.config.experimental.enable_tensor_float_32_execution(on)

    def outside_graph(self) -> AbstractContextManager[Any]:
        """Return a context outside all graphs being traced."""
        scope: AbstractContextManager[Any] = tf.init_scope()
        return scope

    def layer_called(self, inputs: Any) -> None:
        """Keep the first input: its first dimension is the batch size."""
        first = next((x for x in tf.nest.flatten(inputs) if isinstance(x, tf.Tensor) and x.shape.rank), None)
        self._input = self._input if first is None else first

    @own_operations()
    def norm(self, gradients: Sequence[Any], *, scale: Any) -> Any:
        """Return the norm of all gradients together."""
        values = [tf.cast(getattr(g, "values", g), tf.float32) for g in gradients if g is not None]
        if scale is not None:
            values = [v / tf.convert_to_tensor(scale) for v in values]
        return tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(v)) for v in values]))

    def read(self, variable: Any) -> Any:
        """Return a copy of a variable's value at this point of the graph."""
        return tf.identity(tf.convert_to_tensor(variable))

    def updated(self, *, norm: Any, scale: Any, before: Any, after: Any, accumulates: int, owner: int) -> None:
        """Record an update, in the graph being traced or eagerly."""
        replica = tf.distribute.get_replica_context()
        if replica is not None and replica.num_replicas_in_sync > 1:
            self._run.note_left_alone(
                "replicas", f"{replica.num_replicas_in_sync} of one model", "the steps are those of the first one"
            )
            if tf.get_static_value(replica.replica_id_in_sync_group) not in (0, None):
                return
        batch = self._batch_size()
        counts = {"before": before, "after": after, "accumulates": accumulates}
        self._ledger.update(norm=norm, scale=scale, batch=batch, owner=owner, **counts)
        if tf.executing_eagerly():
            if self._run.audit is not None:
                self._run.audit.refuse_eager()
            num = self._run.steps.num_closed
            self._ledger.collect()
            if self._run.steps.num_closed > num:
                self._stop_counting()
                self._start_counting()
            return
        self._updating |= {id(function): function for function in self._calls}
        self._graph = graphs.outermost(tf.compat.v1.get_default_graph())

    def collect(self) -> None:
        """Read what traced functions have written."""
        self._ledger.collect()

    def finish(self) -> None:
        """Stop counting."""
        if self._counting is not None and not self._counted:
            self._counted = True
            _op_callbacks.remove_op_callback(self._see)

    def device_type(self) -> str:
        """Return the type of the device on which TensorFlow places operations."""
        return "cuda" if tf.config.list_physical_devices("GPU") else "cpu"

    # --- backward passes -------------------------------------------------------------------------------------------------------

    def _gradient(
        self,
        original: Callable[..., Any],
        tape: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        run = self._run
        if run.local.in_apply or not any(map(_is_variable, tf.nest.flatten(sources))):
            return original(tape, target, sources, output_gradients, *args, **kwargs)
        losses = tf.nest.flatten(target)
        before_scaling = [run.unscaled(loss) for loss in losses]
        run.has_backward = True
        starts = [None] * len(losses) if output_gradients is None else tf.nest.flatten(output_gradients)
        true = [u if u is not None else t for u, t in zip(before_scaling, losses, strict=True)]
        self._ledger.loss([_times(loss, start) for loss, start in zip(true, starts, strict=False)])
        run.is_unscaled = run.scales and all(u is None for u in before_scaling)
        if not run.is_unscaled:
            return original(tape, target, sources, output_gradients, *args, **kwargs)
        scale = self.read(run.scale)
        scaled_starts = [_scaled_start(loss, start, scale) for loss, start in zip(losses, starts, strict=True)]
        gradients = original(tape, losses, sources, scaled_starts, *args, **kwargs)
        return tf.nest.map_structure(lambda g: None if g is None else _divided(g, scale), gradients)

    # --- traced functions ------------------------------------------------------------------------------------------------------

    def _call(self, original: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._calls.append(function)
        try:
            result = original(function, *args, **kwargs)
        finally:
            self._calls.pop()
        if not self._calls and id(function) in self._updating:
            self._ledger.collect()
            self._count_graph()
            if self._run.audit is not None:
                self._run.audit.stop_after(self._run.steps.num_closed)
        return result

    def _batch_size(self) -> Any:
        first, self._input = self._input, None
        if first is None:
            return -1
        if not tf.executing_eagerly() and not graphs.is_within(
            tf.compat.v1.get_default_graph(), getattr(first, "graph", None)
        ):
            return -1
        return tf.shape(first)[0]

    # --- operations by format --------------------------------------------------------------------------------------------------

    def _count_graph(self) -> None:
        if self._counted or self._graph is None or not self._run.steps.num_closed:
            return
        self._counted = True
        try:
            see = None if self._run.audit is None else self._run.audit.see
            counts = graphs.count(self._graph, batch=self._ledger.last_batch, see=see)
        except Exception as error:  # a graph that cannot be read again must not end the script's training
            why = f"the graph of the step cannot be read: {type(error).__name__}: {error}"
            self._run.note_left_alone("operations counted", "none", why)
            return
        self._run.flops, self._run.counted_on_step = self._by_format(counts.flops), self._run.steps.num_closed
        self._run.activations_bytes = counts.activations_bytes
        if counts.loops:
            why = "the number of iterations is not in the graph: the body counts once"
            self._run.note_left_alone("operations counted", f"{counts.loops} loops", why)
        if counts.unknown:
            why = "their sizes are not in the graph"
            self._run.note_left_alone("operations counted", f"without {counts.unknown} products", why)
        self._graph = None

    def _start_counting(self) -> None:
        if not self._counted and self._counting is None and not self._calls:
            self._counting = Counter()
            _op_callbacks.add_op_callback(self._see)

    def _stop_counting(self) -> None:
        if self._counting is not None and not self._counted:
            self.finish()
            self._run.flops = self._by_format(self._counting)
            self._run.counted_on_step = self._run.steps.num_closed if self._run.flops else None
            why = "what TensorFlow's tape keeps outside traced functions is not visible"
            self._run.note_left_alone("activations", "not known", why)

    def _see(self, kind: Any, inputs: Any, attrs: Any, outputs: Any, *_: Any, **__: Any) -> None:
        name = kind.decode() if isinstance(kind, bytes) else str(kind)
        if self._counting is not None and name in graphs.PRODUCTS:
            settings = dict(zip(attrs[::2], attrs[1::2], strict=False)) if attrs else {}
            shapes = [tuple(t.shape) for t in inputs], [tuple(t.shape) for t in outputs]
            flops = graphs.PRODUCTS[name](*shapes, settings.get)
            floats = next((t.dtype for t in inputs if t.dtype.is_floating), None)
            if floats is not None:
                self._counting[floats.name] += flops

    def _by_format(self, by_dtype: Counter[str]) -> dict[str, int]:
        tf32 = self.device_type() == "cuda" and tf.config.experimental.tensor_float_32_execution_enabled()
        return by_format(by_dtype, tf32=tf32)


def _is_variable(source: Any) -> bool:
    return isinstance(source, (tf.Variable, keras.Variable))


def _scaled_start(loss: Any, start: Any, scale: Any) -> Any:
    # Cast, because under the policy the loss may be FP16.
    unscaled = tf.ones_like(loss) if start is None else tf.cast(start, loss.dtype)
    return unscaled * tf.cast(scale, loss.dtype)


def _times(loss: Any, start: Any) -> Any:
    return loss if start is None else loss * tf.cast(start, loss.dtype)


def _divided(gradient: Any, scale: Any) -> Any:
    return times(gradient, tf.cast(1.0 / scale, gradient.dtype))
