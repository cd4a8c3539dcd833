"""Audit a Keras script on TensorFlow from the graph of its traced step: every operation with its format, layer and phase.

TensorFlow names operations by the layers that they are traced in, and operations of the backward pass ``gradient_tape/...`` after the
forward operation that they belong to. The graph is the same in every step that runs it, so one step is recorded.

Limits: TensorFlow may still rewrite the graph when it runs it (fusion, constant folding, XLA), and does not say how. A step that
runs eagerly has no graph and is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import keras
import tensorflow as tf

from mezzo.errors import ScriptError
from mezzo.formats import FORMAT_NAMES, FP32, FP64, STORED_BYTES, TF32
from mezzo.launch.keras import graphs
from mezzo.launch.keras.products import PRODUCTS
from mezzo.launch.keras.state import KerasRun
from mezzo.launch.patches import Patches
from mezzo.observe.audit import merged
from mezzo.observe.module_names import SCRIPT
from mezzo.observe.settings import WIDE_FORMATS, AuditSettings, StopScript
from mezzo.records import AuditRecord, CastTotal, Cause, Note, PassKind, RunRecord, WideProduct

_NUMBERED = re.compile(r"_\d+$")
"""The suffix by which TensorFlow tells scopes of the same name apart."""
_BACKWARD = "gradient_tape"
_LOSS = "compile_loss"
_PASSES_ON = ("Cast", "Identity", "Reshape", "ReadVariableOp", "StopGradient", "Transpose")
"""Operations through which a variable's value reaches a product."""
_HOLDS = ("Const", "Placeholder")
"""Operations that compute nothing; a variable is read by a placeholder once its graph is imported again."""
_OF_INPUT, _OF_WEIGHT = re.compile(r"BackpropInput"), re.compile(r"BackpropFilter")


@dataclass(kw_only=True)
class _Audited(merged.AuditRow):
    cause: tuple[Cause, str] | None = None
    """Why a product ran in FP32 or wider."""


class GraphAudit:
    """The audit of one traced step (``launch.training.Watching``)."""

    compiles = False

    def __init__(self, run: KerasRun, settings: AuditSettings) -> None:
        self._run, self._steps = run, settings.steps
        self._layers: dict[str, Any] = {}
        self._roots: set[str] = set()
        self._rows: list[_Audited] = []
        self._casts: list[CastTotal] = []

    # --- what the run calls ------------------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Note every layer that is called, until ``patches`` are undone."""
        patches.wrap(keras.Layer, "__call__", self._noting)

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._run.local.in_layer:
                self._roots.add(layer.name)
            self._layers[layer.name] = layer
            return original(layer, *args, **kwargs)

        return call

    def refuse_eager(self) -> None:
        """Refuse a step without a graph.

        Raises:
            ScriptError: always.
        """
        raise ScriptError(
            "mezzo audit reads the graph of a traced step, and the script trains eagerly on TensorFlow; allowed: steps in fit() or "
            "a tf.function",
            hint="leave out run_eagerly=True, or decorate the step's function with tf.function; KERAS_BACKEND=torch audits eager "
            "steps, if the script only uses Keras",
        )

    def stop_after(self, num_steps: int) -> None:
        """End the script once its last step to record has run.

        Raises:
            StopScript: it has.
        """
        if num_steps >= self._steps[-1]:
            raise StopScript

    def see(self, op: Any, scope: str, variables: set[str]) -> None:
        """Keep an operation of the graph.

        Args:
            op: the operation, with the sizes of its operands and results.
            scope: the names of the operations around it that call functions.
            variables: the names of the operations that read a variable.
        """
        parts = [_NUMBERED.sub("", part) for part in f"{scope}/{op.name}".split("/")]
        place = self._place(parts)
        is_product = op.type in PRODUCTS
        floats = [t for t in (*op.inputs, *op.outputs) if t.dtype.is_floating]
        if not floats or op.type in _HOLDS or (place is None and not is_product):
            return
        module, phase = place or (SCRIPT, "forward")
        if _BACKWARD in parts:
            phase = _gradient_of(op, variables) if is_product else "dgrad"
        if op.type == "Cast":
            self._cast(op, module, phase, variables)
        flops, fmt, cause = 0, "", None
        if is_product:
            operand = next(t for t in op.inputs if t.dtype.is_floating)
            flops, fmt = _flops(op), self._product_format(operand)
            cause = self._cause(fmt, parts)
        row = _Audited(
            op=op.type,
            module=module,
            phase=phase,
            inputs=tuple(dict.fromkeys(_format(t) for t in op.inputs)),
            outputs=tuple(dict.fromkeys(_format(t) for t in op.outputs)),
            bytes=sum(_bytes(t) for t in (*op.inputs, *op.outputs)),
            flops=flops,
            format=fmt,
            cause=cause,
        )
        self._rows.append(row)

    # --- where an operation belongs ----------------------------------------------------------------------------------------------

    def _place(self, parts: list[str]) -> tuple[str, PassKind] | None:
        """Return the layer and the phase of an operation; None if it belongs to no layer and no loss."""
        known = [(name, self._layer(name)) for name in parts]
        layers = [layer.name for _, layer in known if layer is not None]
        if layers:
            layers = layers[len(layers) - 1 - layers[::-1].index(layers[0]) :]  # a loop's body repeats the path to it
            below = layers[1:] if layers[0] in self._roots else layers
            return ".".join(below or layers), "forward"
        return (SCRIPT, "forward") if _LOSS in parts or _BACKWARD in parts else None

    def _layer(self, name: str) -> Any:
        found = self._layers.get(name)
        if found is not None:
            return found
        same = [layer for key, layer in self._layers.items() if _NUMBERED.sub("", key) == name]
        return same[0] if len(same) == 1 else None

    # --- formats -----------------------------------------------------------------------------------------------------------------

    def _product_format(self, operand: Any) -> str:
        stored = _format(operand)
        on_gpu = bool(tf.config.list_physical_devices("GPU"))
        tf32 = on_gpu and tf.config.experimental.tensor_float_32_execution_enabled()
        return TF32.name if stored == FP32.name and tf32 else stored

    def _cause(self, fmt: str, parts: list[str]) -> tuple[Cause, str] | None:
        """Return why a product ran in FP32 or wider; None if it did not."""
        if fmt not in WIDE_FORMATS:
            return None
        if fmt == FP64.name:
            return "float64", "its operands are FP64"
        layers = [layer for layer in map(self._layer, parts) if layer is not None]
        if not layers:
            return "off", "it is computed outside of any layer, where no dtype policy casts"
        lowers = any(layer.compute_dtype != FP32.dtype_name for layer in self._layers.values())
        if lowers and layers[-1].compute_dtype == FP32.dtype_name:
            return "excluded", f"the dtype policy of the layer is {layers[-1].dtype_policy.name}"
        return "off", f"the dtype policy is {layers[-1].dtype_policy.name}"

    def _cast(self, op: Any, module: str, phase: PassKind, variables: set[str]) -> None:
        source, target = _format(op.inputs[0]), _format(op.outputs[0])
        if not (op.inputs[0].dtype.is_floating and op.outputs[0].dtype.is_floating):
            return
        weight = _reads_variable(op.inputs[0], variables)
        of: Literal["weight", "activation", "gradient"] = (
            "gradient" if phase == "dgrad" else "weight" if weight else "activation"
        )
        size = sum(map(_bytes, (op.inputs[0], op.outputs[0])))
        self._casts.append(CastTotal(module=module, phase=phase, of=of, source=source, target=target, bytes=size))

    # --- the record --------------------------------------------------------------------------------------------------------------

    def too_short(self) -> bool:
        """Return whether the script ended before the graph of a step was read."""
        return not self._rows

    def failed(self, error: BaseException) -> None:
        """Do nothing: the graph was read before."""

    def record(self, run: RunRecord) -> AuditRecord:
        """Return the record of the graph."""
        recorded = run.effective.counted_on_step
        return AuditRecord(
            run=run,
            steps=[] if recorded is None else [recorded],
            operations=merged.operations(self._rows),
            flops_by_phase=merged.flops_by_phase(self._rows),
            casts=merged.casts(self._casts),
            wide_products=self._wide_products(),
            findings=run.findings,
            notes=list(self._notes()),
        )

    def _wide_products(self) -> list[WideProduct]:
        rows = [row for row in self._rows if row.cause is not None]
        groups = merged.grouped(rows, lambda r: (r.module, r.format, r.cause))
        products = [
            WideProduct(
                op=group[0].op,
                module=group[0].module,
                format=group[0].format,
                cause=group[0].cause[0],
                reason=group[0].cause[1],
                flops=sum(row.flops for row in group),
            )
            for group in groups
            if group[0].cause is not None
        ]
        return merged.largest(products, lambda product: product.flops)

    def _notes(self) -> Iterator[Note]:
        why = "TensorFlow runs one graph in every step; it may fuse operations and fold constants when it runs it"
        yield Note(what="steps", value="one graph", reason=why)
        why = "the rules of findings read operations one by one, which TensorFlow's compiled steps do not show"
        yield Note(what="findings", value="none made", reason=why)
        why = "no profiler ran, and the operands' layouts are not in the graph"
        yield Note(what="kernels and shapes", value="not recorded", reason=why)
        why = "a graph is followed from what it returns: the weights that it writes are no result of it"
        yield Note(what="updates", value="not recorded", reason=why)


def _gradient_of(op: Any, variables: set[str]) -> PassKind:
    """Return which gradient a product of the backward pass computes."""
    if _OF_WEIGHT.search(op.type):
        return "wgrad"
    if _OF_INPUT.search(op.type) or any(_reads_variable(t, variables) for t in op.inputs):
        return "dgrad"
    named = op.name.split(f"{_BACKWARD}/")[-1]
    for forward in (named.rpartition("/")[0], _NUMBERED.sub("", named)):
        try:
            operands = op.graph.get_operation_by_name(forward).inputs
        except (KeyError, ValueError):  # another name, or in the graph of another function
            continue
        return "wgrad" if any(_reads_variable(t, variables) for t in operands) else "dgrad"
    return "wgrad" if _NUMBERED.search(named) else "dgrad"  # TensorFlow's second gradient belongs to the right operand


def _reads_variable(tensor: Any, variables: set[str]) -> bool:
    op = tensor.op
    while op.name not in variables and op.type in _PASSES_ON and op.inputs:
        op = op.inputs[0].op
    return op.name in variables


def _flops(op: Any) -> int:
    counts = graphs.GraphCounts()
    graphs.add(op, counts)
    return counts.flops.total()


def _format(tensor: Any) -> str:
    name = str(tensor.dtype.name)
    return FORMAT_NAMES.get(name, name)


def _bytes(tensor: Any) -> int:
    sizes = None if tensor.shape.rank is None else tensor.shape.as_list()
    if sizes is None or None in sizes or tensor.dtype.name in ("resource", "variant", "string"):
        return 0
    return int(math.prod(sizes)) * STORED_BYTES.get(tensor.dtype.name, int(tensor.dtype.size))
