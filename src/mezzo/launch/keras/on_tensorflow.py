"""Keras on TensorFlow: backward passes are ``tf.GradientTape.gradient``, and most steps run in traced functions.

A traced function runs as Python only once, so operations in its graph write each step's values into variables of
Mezzo's (``ledger``), which are read after each outermost call of a ``tf.function``. They work in loops,
branches and XLA like any variable. One call may make several steps (``steps_per_execution``), which share its time.

Operations are counted in one step: one by one in the second eager step, or from the graph of a traced function (``graphs``).
"""

from __future__ import annotations

import functools
import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import resource_variable_ops

from mezzo.errors import ScriptError
from mezzo.frameworks.keras import tf32_of
from mezzo.launch.keras import graphs
from mezzo.launch.keras.graph_tape import step_graph
from mezzo.launch.keras.products import PRODUCTS
from mezzo.launch.keras.state import Backend, CountedStep, KerasRun, by_format
from mezzo.launch.keras.updates import times
from mezzo.launch.patches import Patches


@contextmanager
def own_operations() -> Iterator[None]:
    """Keep op callbacks away from the operations inside: ``tf.debugging.enable_check_numerics`` would end the script at a NaN of Mezzo's.

    Mezzo writes NaN for a value that a step does not have, such as a loss scale.
    """
    state = context.context()
    callbacks = list(state.op_callbacks)
    for callback in callbacks:
        state.remove_op_callback(callback)
    try:
        yield
    finally:
        for callback in callbacks:
            state.add_op_callback(callback)


_EAGER = (
    "its steps run eagerly on TensorFlow, which shows the operations of traced steps only: leave out run_eagerly=True, or decorate the "
    "function of the step with tf.function"
)
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
        self._num_scaled = 0
        """How many losses the script had scaled before the latest backward pass."""
        self._counting: Counter[str] | None = None
        self._counted = False
        self.name = f"tensorflow {tf.__version__}"

    def install(self, patches: Patches) -> None:
        """Patch the tape and the calls of traced functions; set TF32 under a policy that casts nothing."""
        if self._run.audit is not None:
            self._run.audit.install(patches)
        if self._run.observed is not None:
            self._run.observed.install(patches)
        patches.around(tf.GradientTape, "gradient", self._gradient)
        for name in ("jacobian", "batch_jacobian"):
            patches.around(tf.GradientTape, name, self._jacobian)
        traced = importlib.import_module("tensorflow.python.eager.polymorphic_function.polymorphic_function")
        patches.around(traced.Function, "__call__", self._call)
        optimizer = importlib.import_module("keras.src.backend.tensorflow.optimizer").TFOptimizer
        patches.around(optimizer, "_all_reduce_sum_gradients", self._reduced)
        if self._run.scales:
            patches.around(keras.optimizers.LossScaleOptimizer, "check_finite", self._all_finite)
        on = None if self._run.policy is None else tf32_of(self._run.policy)
        if on is not None:
            before = tf.config.experimental.tensor_float_32_execution_enabled()
            patches.on_undo(lambda: tf.config.experimental.enable_tensor_float_32_execution(before))
            tf.config.experimental.enable_tensor_float_32_execution(on)

    def create(self, make: Callable[[], Any]) -> Any:
        """Return what ``make`` makes outside all graphs being traced, once for all replicas, which all call this."""
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            with tf.init_scope():
                return make()

        def make_in(strategy: Any) -> Any:
            with tf.init_scope(), strategy.scope():
                return make()

        return replica.merge_call(make_in)

    def place(self) -> Any:
        """Return the strategy whose scope this is: its variables cannot be used under another one."""
        return tf.distribute.get_strategy() if tf.distribute.has_strategy() else None

    def layer_called(self, inputs: Any) -> None:
        """Keep the first input: its first dimension is the batch size."""
        first = next((x for x in tf.nest.flatten(inputs) if isinstance(x, tf.Tensor) and x.shape.rank), None)
        self._input = self._input if first is None else first

    @own_operations()
    def norm(self, gradients: Sequence[Any], *, scale: Any) -> Any:
        """Return the norm of all gradients together; NaN where the step's operations are recorded for a prediction."""
        if self._run.tape is not None:
            return tf.constant(math.nan)
        values = [_summed(g) for g in gradients if g is not None]
        if scale is not None:
            values = [v / tf.convert_to_tensor(scale) for v in values]
        return tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(v)) for v in values]))

    def read(self, variable: Any) -> Any:
        """Return a copy of a variable's value at this point of the graph."""
        return tf.identity(tf.convert_to_tensor(variable))

    def comes_from(self, target: Any, scaled: Sequence[Any]) -> bool:
        """Return whether a loss was computed from one of these: in the graph that is traced, or eagerly since the last backward pass.

        Raises:
            ScriptError: the script scaled a loss in another traced function.
        """
        new = scaled[len(scaled) - (self._run.num_scaled - self._num_scaled) :]
        if any(graphs.of(t) is not graphs.of(target) for t in new) and self._run.scales:
            raise ScriptError(
                "the script scales a loss in one tf.function and computes its gradients outside it; allowed: both in the same function",
                hint="put scale_loss and the tape's gradient into one function, or remove scale_loss: mezzo run scales the loss then",
            )
        if graphs.of(target) is None:
            return bool(new)
        return graphs.comes_from(target, scaled)

    def is_scaled(self, optimizer: Any, gradients: Sequence[Any]) -> bool:
        """Return whether the script scaled the loss of the latest backward pass."""
        return self._run.is_scaled

    def updated(self, *, norm: Any, scale: Any, before: Any, after: Any, accumulates: int, owner: int) -> None:
        """Record an update, in the graph being traced or eagerly."""
        if (num := _num_replicas()) > 1:
            why = "losses, formats and activations cover all of them together; variables, gradients and scale only one"
            self._run.note_left_alone("replicas", f"{num} of one model", why)
            if not _is_first():
                return
            why = "each replica's own are clipped before they are added up; the norm is of their sum, as the update uses it"
            self._run.note_left_alone("gradient norm", "after the optimizer's own clipping", why)
            norm = self._ledger.norm_of_reduced(norm)
        batch = self._batch_size()
        counts = {"before": before, "after": after, "accumulates": accumulates}
        self._ledger.update(norm=norm, scale=scale, batch=batch, owner=owner, **counts)
        if tf.executing_eagerly():
            if self._run.audit is not None:
                self._run.audit.refuse_eager()
            if self._run.tape is not None:
                self._run.tape.refuse(_EAGER)
            num = self._run.steps.num_closed
            self._ledger.collect()
            if self._run.steps.num_closed > num:
                self._stop_counting()
                self._start_counting()
            if self._run.observed is not None:
                self._run.observed.judge_step()
            return
        if self._run.observed is not None:
            self._run.observed.refuse_graph()
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

    # --- replicas ----------------------------------------------------------------------------------------------------------------

    def _reduced(self, original: Callable[..., Any], optimizer: Any, pairs: Any) -> Any:
        """Record the norm of the gradients that all replicas add up."""
        pairs = original(optimizer, pairs)
        if _num_replicas() > 1 and _is_first():
            self._ledger.reduced(self.norm([gradient for gradient, _ in pairs], scale=None))
        return pairs

    def _all_finite(self, original: Callable[..., Any], scaler: Any, gradients: Any) -> Any:
        """Return whether the gradients of all replicas are finite; Keras itself asks the first one only."""
        finite = original(scaler, gradients)
        if _num_replicas() == 1:
            return finite
        replica = tf.distribute.get_replica_context()
        if tf.__internal__.distribute.strategy_supports_no_merge_call():
            return tf.equal(
                replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(tf.logical_not(finite), tf.float32)), 0.0
            )
        return replica.merge_call(
            lambda strategy, each: tf.reduce_all(strategy.experimental_local_results(each)), (finite,)
        )

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
        self._num_scaled = run.num_scaled
        for unscaled in before_scaling:
            run.backward(scaled=unscaled is not None)
        starts = [None] * len(losses) if output_gradients is None else tf.nest.flatten(output_gradients)
        true = [u if u is not None else t for u, t in zip(before_scaling, losses, strict=True)]
        passed = [_times(loss, start) for loss, start in zip(true, starts, strict=False)]
        self._ledger.loss(passed)
        compute = functools.partial(original, tape, target, sources, output_gradients, *args, **kwargs)
        if run.scales and not run.is_scaled:
            compute = functools.partial(self._scaled_gradient, original, tape, losses, starts, sources, *args, **kwargs)
        return compute() if run.observed is None else run.observed.backward(compute, true)

    def _scaled_gradient(
        self, original: Callable[..., Any], tape: Any, losses: Any, starts: Any, sources: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the gradients of losses that the script did not scale: computed with the loss scale, and divided by it."""
        scale = self.read(self._run.scale)
        scaled_starts = [_scaled_start(loss, start, scale) for loss, start in zip(losses, starts, strict=True)]
        gradients = original(tape, losses, sources, scaled_starts, *args, **kwargs)
        return tf.nest.map_structure(lambda g: None if g is None else _divided(g, scale), gradients)

    def _jacobian(self, original: Callable[..., Any], tape: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of single values, which stay as they are: the tape computes them in a loop of its own."""
        run = self._run
        if run.local.in_apply:
            return original(tape, target, *args, **kwargs)
        run.backward(scaled=run.unscaled(target) is not None)
        self._ledger.loss([target if (loss := run.unscaled(target)) is None else loss])
        run.local.in_apply = True
        try:
            return original(tape, target, *args, **kwargs)
        finally:
            run.local.in_apply = False

    # --- traced functions ------------------------------------------------------------------------------------------------------

    def _call(self, original: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._calls.append(function)
        if self._run.observed is not None:
            args = self._run.observed.function_called(args)
        try:
            result = original(function, *args, **kwargs)
        finally:
            self._calls.pop()
        if not self._calls and id(function) in self._updating:
            try:
                self._ledger.collect()
            finally:  # the step at which a limit stops the script counts too
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
        if self._run.tape is not None:
            graph_at = functools.partial(step_graph, self._graph, tape=self._run.tape)
            self._run.tape.record(graph_at, batch=self._ledger.last_batch, optimizer=lambda: self._run.optimizer_name)
            return
        try:
            see = None if self._run.audit is None else self._run.audit.see
            counts = graphs.count(self._graph, batch=self._ledger.last_batch, see=see)
        except Exception as error:  # a graph that cannot be read again must not end the script's training
            why = f"the graph of the step cannot be read: {type(error).__name__}: {error}"
            self._run.note_left_alone("operations counted", "none", why)
            return
        self.counted = CountedStep(self._by_format(counts.flops), self._run.steps.num_closed, counts.activations_bytes)
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
            flops = self._by_format(self._counting)
            self.counted = CountedStep(flops, self._run.steps.num_closed if flops else None)
            why = "what TensorFlow's tape keeps outside traced functions is not visible"
            self._run.note_left_alone("activations", "not known", why)

    def _see(self, kind: Any, inputs: Any, attrs: Any, outputs: Any, *_: Any, **__: Any) -> None:
        name = kind.decode() if isinstance(kind, bytes) else str(kind)
        if self._counting is not None and name in PRODUCTS:
            settings = dict(zip(attrs[::2], attrs[1::2], strict=False)) if attrs else {}
            shapes = [tuple(t.shape) for t in inputs], [tuple(t.shape) for t in outputs]
            flops = PRODUCTS[name].flops(*shapes, settings.get)
            floats = next((t.dtype for t in inputs if t.dtype.is_floating), None)
            if floats is not None:
                self._counting[floats.name] += flops

    def _by_format(self, by_dtype: Counter[str]) -> dict[str, int]:
        tf32 = self.device_type() == "cuda" and tf.config.experimental.tensor_float_32_execution_enabled()
        return by_format(by_dtype, tf32=tf32)


def _num_replicas() -> int:
    """Return the number of replicas of the strategy in which the code runs; 1 without one."""
    replica = tf.distribute.get_replica_context()
    return 1 if replica is None else int(replica.num_replicas_in_sync)


def _is_first() -> bool:
    """Return whether the code runs in the first replica."""
    return tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group) in (0, None)


def _is_variable(source: Any) -> bool:
    return isinstance(source, (tf.Variable, keras.Variable))


def _summed(gradient: Any) -> Any:
    """Return a gradient's values in FP32; of a sparse one, the sums of the rows that have the same index.

    Each row is added to the place of the first one with its index, so that all sizes are known to XLA and none is the table's.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.cast(gradient, tf.float32)
    order = tf.argsort(gradient.indices)
    indices, values = tf.gather(gradient.indices, order), tf.gather(tf.cast(gradient.values, tf.float32), order)
    begins = tf.concat([[0], tf.cast(indices[1:] != indices[:-1], tf.int32)], 0)
    return tf.math.unsorted_segment_sum(values, tf.cumsum(begins), tf.shape(indices)[0])


def _scaled_start(loss: Any, start: Any, scale: Any) -> Any:
    # Cast, because under the policy the loss may be FP16.
    unscaled = tf.ones_like(loss) if start is None else tf.cast(start, loss.dtype)
    return unscaled * tf.cast(scale, loss.dtype)


def _times(loss: Any, start: Any) -> Any:
    return loss if start is None else loss * tf.cast(start, loss.dtype)


def _divided(gradient: Any, scale: Any) -> Any:
    return times(gradient, tf.cast(1.0 / scale, gradient.dtype))


_CAPACITY = 65_536
"""Most steps that one call of a traced function may make before rows are overwritten."""
_NUM_COLUMNS = 6  # loss, norm, scale, skipped, batch size, optimizer


class Ledger:
    """A log of steps, written by operations that run in graphs as well as eagerly."""

    def __init__(self, run: KerasRun) -> None:
        self._run = run
        self._created = False
        self._collected = 0
        self.last_batch: int | None = None
        """The batch size of the step read last."""

    @own_operations()
    def loss(self, losses: Sequence[Any]) -> None:
        """Add losses to the open step."""
        self._create_variables()
        self._loss.assign_add(tf.add_n([tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses]))
        self._num_losses.assign_add(1)

    @own_operations()
    def reduced(self, norm: Any) -> None:
        """Keep the norm of the gradients that an update of several replicas uses."""
        self._create_variables()
        self._reduced.assign(norm)

    @own_operations()
    def norm_of_reduced(self, norm: Any) -> Any:
        """Return the norm that was kept since the last call; a first replica's ``norm`` with infinity if the update was skipped."""
        self._create_variables()
        kept = tf.identity(self._reduced)
        self._reduced.assign(math.nan)
        return tf.where(
            tf.math.is_nan(kept) & tf.math.is_finite(norm), math.inf, tf.where(tf.math.is_nan(kept), norm, kept)
        )

    @own_operations()
    def update(
        self, *, norm: Any, scale: Any, before: Any, after: Any, accumulates: int, batch: Any, owner: int
    ) -> None:
        """Write a step, unless its gradients are still accumulating, or no backward pass ran since the last step."""
        self._create_variables()
        skipped = tf.equal(before, after)
        is_update = skipped | tf.equal(after % tf.cast(accumulates, after.dtype), 0)
        if self._run.has_backward:
            is_update = is_update & (self._num_losses > 0)
        loss = tf.where(self._num_losses > 0, self._loss / accumulates, math.nan)
        values = [loss, norm, math.nan if scale is None else scale, skipped, batch, owner]
        row = tf.stack([tf.cast(value, tf.float32) for value in values])
        index = tf.cast(self._num_rows % _CAPACITY, tf.int32)
        self._rows.scatter_nd_update([[index]], [row])  # overwrites the row until the step is complete
        self._num_rows.assign_add(tf.cast(is_update, tf.int64))
        self._loss.assign(tf.where(is_update, 0.0, self._loss))
        self._num_losses.assign(tf.where(is_update, 0, self._num_losses))

    @own_operations()
    def collect(self) -> None:
        """Close the steps written since the last call."""
        num = 0 if not self._created else int(self._num_rows.numpy()) - self._collected
        if not num:
            return
        lost = max(num - _CAPACITY, 0)
        indices = [k % _CAPACITY for k in range(self._collected + lost, self._collected + num)]
        self._collected += num
        rows = [[math.nan] * _NUM_COLUMNS] * lost + tf.gather(self._rows, indices).numpy().tolist()
        losses, norms, scales, skips, batches, owners = zip(*rows, strict=True)
        last = int(batches[-1]) if math.isfinite(batches[-1]) else -1
        self.last_batch = last if last > 0 else None
        if num > 1:
            why = "one call of a traced function makes several steps; each is given an even share of its time"
            self._run.note_left_alone("time a step", "not known of each", why)
        known_owners = [int(owner) if math.isfinite(owner) else 0 for owner in owners]
        self._run.close(losses=losses, norms=norms, scales=scales, skips=[s == 1.0 for s in skips], owners=known_owners)

    def _create_variables(self) -> None:
        if self._created:
            return
        self._created = True
        # The plain class: in the scope of a distribution strategy, tf.Variable creates one variable per replica.
        variable = resource_variable_ops.ResourceVariable
        with tf.init_scope():
            self._loss = variable(0.0, trainable=False)
            self._reduced = variable(math.nan, trainable=False)
            self._num_losses = variable(0, trainable=False)
            self._num_rows = variable(0, trainable=False, dtype=tf.int64)
            self._rows = variable(tf.zeros([_CAPACITY, _NUM_COLUMNS]), trainable=False)
