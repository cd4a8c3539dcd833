"""Follow the values of an eager TensorFlow step that are not finite, from the operation that made them to what they reach.

TensorFlow calls back after every eager operation, with its operands and results. A result that is not finite although every operand is was
made there; any other inherits the causes of its operands. If it has 16 bits, the operation runs again in FP32 on the same operands.
In a backward pass, the tape names the forward operation whose gradient it computes.

Limits: an infinity that never leaves a fused kernel is not seen. What a ``tf.data`` pipeline computes enters the step with its batch.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop, context, execute, record
from tensorflow.python.framework import op_callbacks, op_def_registry

from mezzo.formats import FORMAT_NAMES, FP32
from mezzo.launch.patches import Patches
from mezzo.observe.nonfinite.evidence import FaultSource, SourceKind, merge_sources
from mezzo.records import Operand

_FOREIGN = (
    *(f"{Path(str(module.__file__)).parent}/" for module in (tf, keras, np)),
    f"{Path(keras.__file__).parents[1] / 'optree'}/",
    f"{Path(__file__).parents[3]}/",
)
"""The folders of TensorFlow, Keras, the libraries through which they call an operation, and Mezzo."""
_HALF = (tf.float16, tf.bfloat16)
_READS_WEIGHT = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_READS_BATCH = ("IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue", "MultiDeviceIteratorGetNextFromShard")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_PUBLIC_NAMES = {
    "real_div": "divide",
    "div": "divide",
    "mul": "multiply",
    "sub": "subtract",
    "neg": "negative",
    "inv": "reciprocal",
    "batch_mat_mul": "matmul",
    "mat_mul": "matmul",
    "conv2_d": "conv2d",
    "conv3_d": "conv3d",
    "fused_batch_norm": "batch_norm",
}
"""Operations that have another name in TensorFlow's documentation than the one spelled as its functions are."""


@dataclass(frozen=True)
class OperationInLayer:
    """Where an operation runs."""

    op: str
    layer: Any
    """The layer that was called; None for code outside all of them."""
    line: str
    operands: frozenset[int]
    results: frozenset[int]


class EagerValues:
    """Finds where values of one step stopped being finite."""

    def __init__(self, scale: Callable[[], float]) -> None:
        self._scale = scale
        self.layers: list[Any] = []
        """The layers being called, the outermost first."""
        self.in_backward = self.in_update = False
        """Whether a backward pass runs; and whether one has ended, so that an update is made until the next forward pass begins."""
        self.is_on = False
        self.narrow = False
        """Whether any operation read or returned 16-bit values."""
        self._creator: OperationInLayer | None = None
        """The forward operation whose gradient is being computed."""
        self.clear()

    def forward_begins(self) -> None:
        """Note that a forward pass begins: no update is made any more."""
        self.in_update = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run a backward pass, which an update follows."""
        self.in_update, self.in_backward = False, True
        try:
            yield
        finally:
            self.in_update, self.in_backward = True, False

    def clear(self) -> None:
        """Discard what is known of the step."""
        self.sources: list[FaultSource] = []
        self._causes: dict[int, tuple[FaultSource, ...]] = {}
        """Why a tensor is not finite, by TensorFlow's number of it, which is never used twice."""
        self._written: dict[int, tuple[FaultSource, ...]] = {}
        """Why a variable that the step has written is not finite, by the number of its handle."""
        self._known: set[int] = set()
        """The tensors that the step has computed or read."""
        self._forward: dict[str, list[OperationInLayer]] = {}
        """The forward operations, by TensorFlow's name of the operation."""
        self._index = 0

    def install(self, patches: Patches) -> None:
        """Let the tape name the forward operation of every gradient, until ``patches`` are undone."""
        original = backprop._gradient_function

        def gradient(op_name: str, attrs: Any, num: int, inputs: Any, outputs: Any, *rest: Any) -> Any:
            before, self._creator = self._creator, self._creator_of(op_name, inputs, outputs)
            try:
                return original(op_name, attrs, num, inputs, outputs, *rest)
            finally:
                self._creator = before

        pywrap_tfe.TFE_Py_RegisterGradientFunction(gradient)
        patches.on_undo(lambda: pywrap_tfe.TFE_Py_RegisterGradientFunction(original))

    def begin(self) -> None:
        """Begin to follow values."""
        if not self.is_on:
            self.is_on = True
            op_callbacks.add_op_callback(self._see)

    def end(self) -> None:
        """Stop, and discard what is known."""
        if self.is_on:
            self.is_on = False
            op_callbacks.remove_op_callback(self._see)
        self.clear()

    def causes(self, tensors: Iterable[Any]) -> list[FaultSource]:
        """Return why tensors, or TensorFlow's sparse gradients, are not finite."""
        parts = [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors if t is not None]
        known = [self._causes.get(t._id, ()) for t in parts if hasattr(t, "_id")]
        return list(dict.fromkeys(source for causes in known for source in causes))

    def of_weights(self) -> list[FaultSource]:
        """Return why the variables that the step has written are not finite."""
        return list(dict.fromkeys(source for causes in self._written.values() for source in causes))

    # --- one operation ---------------------------------------------------------------------------------------------------------

    def _see(self, kind: Any, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None) -> None:
        if graph is not None:
            return
        with record.stop_recording():
            self._finished(kind.decode() if isinstance(kind, bytes) else str(kind), inputs, attrs or (), outputs or ())

    def _finished(self, kind: str, inputs: Sequence[Any], attrs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._index += 1
        place = self._place(kind, inputs, outputs)
        self.narrow |= any(t.dtype in _HALF for t in (*inputs, *outputs))
        if _is_write(kind) and inputs and inputs[0].dtype == tf.resource:
            self._write(kind, inputs)
            return
        if kind in _READS_WEIGHT:
            self._read(place, inputs[0], outputs)
            return
        if kind in _READS_BATCH:  # the first operation that reads the batch is where its values enter
            return
        known = merge_sources(s for t in inputs for s in self._causes_of(t, place))
        for result in outputs:
            self._known.add(result._id)
            self._judge(kind, place, result, known, inputs, attrs, outputs)

    def _judge(
        self,
        kind: str,
        place: OperationInLayer,
        result: Any,
        known: tuple[FaultSource, ...],
        inputs: Sequence[Any],
        attrs: Sequence[Any],
        outputs: Sequence[Any],
    ) -> None:
        """Record why a result is not finite."""
        if result.dtype == tf.variant:  # a list of tensors, whose values cannot be read
            self._causes[result._id] = known
            return
        if not result.dtype.is_floating or not (values := _array(result)).size:
            return
        if np.isfinite(values).all():
            for source in known:
                source.swallowed[place.op] = None
            return
        passed_on = [s for s in known if s.kind != "constant" and s.backward == self._backward]
        if passed_on or (known and not (np.isnan(values).any() and not any(map(_has_nan, inputs)))):
            self._causes[result._id] = known
            return
        reads = [t for t in inputs if _is_read(t)]
        wide = None if known else _in_fp32(kind, inputs, attrs, outputs)
        because = tuple(s for s in known if s.kind == "made")
        fmt = FORMAT_NAMES.get(result.dtype.name, "")
        source = self._add(place, "made" if reads else "constant", wide, reads, fmt, because=because)
        self._causes[result._id] = (source,)

    def _causes_of(self, tensor: Any, place: OperationInLayer) -> tuple[FaultSource, ...]:
        """Return why an operand is not finite; if the step did not compute it, it came from outside."""
        number = tensor._id
        if number in self._known or number in self._causes or not _is_read(tensor):
            return self._causes.get(number, ())
        self._known.add(number)
        if tensor.dtype == tf.variant or np.isfinite(_array(tensor)).all():
            return ()
        fmt = FORMAT_NAMES.get(tensor.dtype.name, "")
        self._causes[number] = (self._add(place, "entered" if tensor.shape.rank else "constant", None, [tensor], fmt),)
        return self._causes[number]

    def _write(self, kind: str, inputs: Sequence[Any]) -> None:
        known = tuple(s for t in inputs[1:] for s in self._causes.get(t._id, ()))
        before = () if kind == "AssignVariableOp" else self._written.get(inputs[0]._id, ())
        self._written[inputs[0]._id] = merge_sources((*before, *known))

    def _read(self, place: OperationInLayer, handle: Any, outputs: Sequence[Any]) -> None:
        """Record the values that an operation reads from a variable."""
        for result in outputs:
            self._known.add(result._id)
            if not result.dtype.is_floating or np.isfinite(_array(result)).all():
                continue
            causes = self._written.get(handle._id, ())
            if not causes:
                fmt = FORMAT_NAMES.get(result.dtype.name, "")
                causes = (self._add(place, "entered", None, [result], fmt, parameter=True),)
            self._causes[result._id] = causes

    @property
    def _backward(self) -> bool:
        return self.in_backward or self._creator is not None

    # --- places ------------------------------------------------------------------------------------------------------------------

    def _place(self, kind: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> OperationInLayer:
        if self._creator is not None:
            return self._creator
        place = OperationInLayer(
            public_name(kind),
            self.layers[-1] if self.layers else None,
            script_line(sys._getframe(2)),
            frozenset(t._id for t in inputs),
            frozenset(t._id for t in outputs),
        )
        if not (self.in_backward or self.in_update):
            self._forward.setdefault(kind, []).append(place)
        return place

    def _creator_of(self, kind: str, inputs: Any, outputs: Any) -> OperationInLayer | None:
        """Return the forward operation with these operands and results, as far as the tape has kept them."""
        if not self.is_on:
            return None
        read, made = _numbers(inputs), _numbers(outputs)
        known = self._forward.get(kind, [])
        for place in reversed(known):
            if read <= place.operands and made <= place.results:
                if not (read or made):  # the tape asks in reverse order
                    known.remove(place)
                return place
        return None

    def _add(
        self,
        place: OperationInLayer,
        kind: SourceKind,
        wide: float | None,
        read: Iterable[Any],
        fmt: str,
        *,
        parameter: bool = False,
        because: tuple[FaultSource, ...] = (),
    ) -> FaultSource:
        source = FaultSource(
            index=self._index,
            kind=kind,
            op=place.op,
            module=place.layer,
            line=place.line,
            backward=self._backward,
            format=fmt or FP32.name,
            operands=[_operand(t) for t in read],
            wide=wide,
            scale=self._scale(),
            parameter=parameter,
            in_update=self.in_update,
            because=because,
        )
        self.sources.append(source)
        return source

    @contextmanager
    def layer(self, layer: Any) -> Iterator[None]:
        """Attribute the operations inside to a layer."""
        self.layers.append(layer)
        try:
            yield
        finally:
            self.layers.pop()


def public_name(kind: str) -> str:
    """Return an operation's name, spelled like TensorFlow's functions; of a gradient's own kernel, its operation's."""
    bare = re.sub(r"V\d+$", "", kind)
    bare = _CAMEL.sub("_", bare.removesuffix("Grad").removeprefix("_")).lower()
    return _PUBLIC_NAMES.get(bare, bare)


def script_line(frame: FrameType | None) -> str:
    """Return the innermost line outside TensorFlow, Keras and Mezzo as ``file:line``."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_FOREIGN, "<")) and "/contextlib.py" not in name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _in_fp32(kind: str, inputs: Sequence[Any], attrs: Sequence[Any], outputs: Sequence[Any]) -> float | None:
    """Return the largest magnitude of a 16-bit operation's result in FP32; None if that is not finite, or the result has more bits."""
    definition = op_def_registry.get(kind)
    if definition is None or definition.is_stateful or not any(t.dtype in _HALF for t in outputs):
        return None
    types = {attr.name for attr in definition.attr if attr.type == "type"}
    pairs = zip(attrs[::2], attrs[1::2], strict=True)
    wide_attrs = tuple(part for name, value in pairs for part in (name, _wide_type(value) if name in types else value))
    operands = [tf.cast(t, tf.float32) if t.dtype in _HALF else t for t in inputs]
    try:
        results = execute.quick_execute(kind, len(outputs), operands, wide_attrs, context.context())
    except (tf.errors.OpError, TypeError, ValueError):  # no kernel in FP32
        return None
    largest = max(
        (float(np.abs(_array(t)).max()) for t in results if t.dtype.is_floating and t.shape.num_elements()), default=0.0
    )
    return largest if math.isfinite(largest) else None


def _wide_type(value: Any) -> Any:
    return tf.float32.as_datatype_enum if tf.as_dtype(value) in _HALF else value


def _array(tensor: Any) -> npt.NDArray[Any]:
    values = tensor.numpy()
    return np.asarray(values, dtype=np.float32) if tensor.dtype in _HALF else np.asarray(values)


def _is_write(kind: str) -> bool:
    return kind.startswith(
        ("Assign", "ResourceScatter", "ResourceApply", "ResourceSparseApply", "ResourceStridedSliceAssign")
    )


def _is_read(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype == tf.variant)


def _has_nan(tensor: Any) -> bool:
    return tensor.dtype == tf.variant or (tensor.dtype.is_floating and bool(np.isnan(_array(tensor)).any()))


def _numbers(tensors: Any) -> frozenset[int]:
    return frozenset(t._id for t in tensors or () if hasattr(t, "_id"))


def _operand(tensor: Any) -> Operand:
    values = np.abs(_array(tensor).astype(np.float64))
    finite = values[np.isfinite(values)]
    return Operand(
        format=FORMAT_NAMES.get(tensor.dtype.name, tensor.dtype.name),
        shape=list(tensor.shape),
        largest=float(finite.max()) if finite.size else 0.0,
        smallest=float(finite.min()) if finite.size else 0.0,
        num_not_finite=int(values.size - finite.size),
    )
