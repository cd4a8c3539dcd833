"""A traced step of TensorFlow as a graph of tensors (``measure.predict.step_graph``), through the functions that it calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorflow.python.framework import function_def_to_graph

from mezzo.formats import FORMAT_NAMES, STORED_BYTES
from mezzo.launch.keras import graphs
from mezzo.launch.keras.products import PRODUCTS
from mezzo.launch.keras.step_tape import StepTape, Untraceable
from mezzo.measure.predict.step_graph import NodeKind, StepGraph, StepNode, words
from mezzo.measure.predict.tape import NO_SHAPE, ProductSize, TapePhase

_ALIASES = words(
    "CheckNumerics EnsureShape ExpandDims Identity IdentityN PreventGradient Reshape Snapshot "
    "Squeeze StopGradient Transpose Bitcast ReadVariableOp"
)
"""Operations that move nothing: views, and copies that TensorFlow leaves out."""
_VIEWS = words("Slice StridedSlice Split SplitV Unpack")
"""Operations whose results are parts of what they read."""
_HOST = words("Shape ShapeN Size Rank BroadcastGradientArgs Const Placeholder VarHandleOp NoOp IteratorGetNext Assert")
"""Operations that compute nothing on a GPU."""
_KERNELS = words(
    "ConcatV2 GatherV2 GatherNd ScatterNd TensorScatterAdd TensorScatterUpdate UnsortedSegmentSum MaxPool "
    "MaxPoolGrad MaxPool3D MaxPool3DGrad AvgPool AvgPoolGrad AvgPool3D AvgPool3DGrad Pad PadV2 MirrorPad "
    "TopKV2 Cumsum Unique UniqueV2 StridedSliceGrad SparseSoftmaxCrossEntropyWithLogits "
    "SoftmaxCrossEntropyWithLogits FusedBatchNormV3 FusedBatchNormGradV3 ResizeBilinear ResizeNearestNeighbor "
    "ResizeBilinearGrad ResizeNearestNeighborGrad Pack"
)
"""Operations that no other is fused with."""
_READS_WHAT_IT_WRITES = frozenset(("GatherV2", "GatherNd"))
_NAMES = {"FusedBatchNormV3": "native_batch_norm", "FusedBatchNormGradV3": "native_batch_norm_backward"}
_ASSIGNED_AT = {"Assign": 1, "ResourceScatter": 2}
_OVERWRITES = frozenset(("AssignVariableOp", "ResourceScatterUpdate"))
_REPEATS = frozenset(("Tile", "BroadcastTo"))
_BACKWARD = graphs.BACKWARD.rstrip("/")
_LOOPS = frozenset(("While", "StatelessWhile"))


@dataclass
class _Rewritten:
    """What a definition's operations were before they became inputs or identities."""

    assigned: set[str] = field(default_factory=set)
    """Operations that write a variable."""
    added: set[str] = field(default_factory=set)
    """The ones among them that add to it."""
    gathered: set[str] = field(default_factory=set)
    """Operations that read rows of a variable."""
    variables: set[str] = field(default_factory=set)


def step_graph(graph: Any, batch: int | None, tape: StepTape) -> StepGraph:
    """Return the graph of the outermost function of a step, with the batch size filled in.

    Raises:
        Untraceable: a product is in a loop, or its size does not follow from the batch.
    """
    definition = graph.as_graph_def(add_shapes=True)
    library = {f.signature.name: f for f in definition.library.function}
    live = graphs.running(definition.node, [t.name for t in graph.outputs])
    found = StepGraph()
    walk = _Walk(library, batch, tape, found)
    inner, rewritten = walk.imported(definition)
    walk.through(inner, live, rewritten, scope="", arguments={})
    return found


@dataclass
class _Walk:
    """A walk through a graph and the functions that it calls, which writes a ``StepGraph``."""

    library: dict[str, Any]
    batch: int | None
    tape: StepTape
    found: StepGraph
    num_products: int = 0

    def imported(self, definition: Any) -> tuple[Any, _Rewritten]:
        """Return the graph of a definition, with the sizes that follow from the batch."""
        rewritten = _Rewritten()
        for node in definition.node:
            position = next((at for prefix, at in _ASSIGNED_AT.items() if node.op.startswith(prefix)), None)
            data = [name for name in node.input if not name.startswith("^")]
            if position is not None and len(data) > position and "dtype" in node.attr:
                if node.op not in _OVERWRITES:
                    rewritten.added.add(node.name)
                _become_identity(node, data[position])
                rewritten.assigned.add(node.name)
            elif node.op.startswith("ResourceGather"):
                rewritten.gathered.add(node.name)
        counts = graphs.GraphCounts()
        graph = graphs.import_again(definition, self.batch, counts)
        rewritten.variables = counts.variables
        return graph, rewritten

    def through(
        self, graph: Any, live: set[str], rewritten: _Rewritten, *, scope: str, arguments: dict[str, int | None]
    ) -> dict[str, int | None]:
        """Add the operations of a graph that run; return the number of each tensor's value, None for what is not on a GPU."""
        known: dict[str, int | None] = {}
        for op in _in_order(graph, live):
            if op.name in arguments and op.type == "Placeholder":
                known[op.outputs[0].name] = arguments[op.name]
                continue
            called = [name for name in graphs.called_by(op) if name in self.library]
            if called and op.type not in PRODUCTS:
                self._call(op, called, known, scope)
            else:
                self._add(op, known, rewritten, scope)
        return known

    def _call(self, op: Any, called: Sequence[str], known: dict[str, int | None], scope: str) -> None:
        definition = max((self.library[name] for name in called), key=lambda one: len(one.node_def))
        num = len(definition.signature.input_arg)
        arguments = list(op.inputs)[-num:] if num else []  # the first input of a branch is its condition
        shapes = [tensor.shape.as_proto() for tensor in arguments]
        inside, flat = function_def_to_graph.function_def_to_graph_def(
            definition, input_shapes=shapes, include_library_functions=True
        )
        live = graphs.running(definition.node_def, [*definition.ret.values(), *definition.control_ret.values()])
        graph, rewritten = self.imported(inside)
        numbers = {
            argument.name: known.get(tensor.name)
            for argument, tensor in zip(definition.signature.input_arg, arguments, strict=True)
        }
        before = self.num_products
        inner = self.through(graph, live, rewritten, scope=f"{scope}/{op.name}", arguments=numbers)
        if op.type in _LOOPS and self.num_products > before:
            raise Untraceable(
                "products are computed in a loop of TensorFlow, whose number of iterations is not in the graph; build the layer with "
                "unroll=True, leave out steps_per_execution, or use KERAS_BACKEND=jax"
            )
        for output, returned in zip(op.outputs, definition.signature.output_arg, strict=False):
            known[output.name] = inner.get(flat.get(definition.ret[returned.name], ""))

    def _add(self, op: Any, known: dict[str, int | None], rewritten: _Rewritten, scope: str) -> None:
        """Add one operation."""
        inputs = [number for t in op.inputs if (number := known.get(t.name)) is not None]
        of_variable = op.name in rewritten.variables and op.name not in rewritten.gathered
        if op.type in _HOST and not of_variable and op.name not in rewritten.gathered:
            known |= {
                t.name: self._constant(t) if op.type in ("Const", "IteratorGetNext") else None for t in op.outputs
            }
            return
        if op.type in _ALIASES or (op.type in _REPEATS and _elements(op.inputs[0]) == 1):
            for t, source in zip(op.outputs, op.inputs, strict=False):
                known[t.name] = known.get(source.name)
            if op.name in rewritten.assigned:
                self.found.results.update(inputs[:1])
                self.found.added.update(inputs[:1] if op.name in rewritten.added else ())
            return
        few = all(0 < _elements(t) <= _FEW for t in (*op.inputs, *op.outputs))
        whole = op.type == "Pack" or all(t.dtype.is_integer for t in (*op.inputs, *op.outputs))
        if few and whole and not of_variable:  # a size or a seed, with which TensorFlow computes on the host
            known |= dict.fromkeys((t.name for t in op.outputs), None)
            return
        outputs = [self._value(t) for t in op.outputs]
        known |= {t.name: number for t, number in zip(op.outputs, outputs, strict=True)}
        if of_variable:
            return
        parts = f"{scope}/{op.name}".split("/")
        phase: TapePhase = "backward" if _BACKWARD in parts else "forward"
        inner = parts[parts.index(_BACKWARD) + 1 :] if _BACKWARD in parts else _without_calls(parts, scope)
        name, shape, flops = self._measured(op)
        gathers = op.name in rewritten.gathered or op.type in _READS_WHAT_IT_WRITES
        read = sum(self.found.values[number].size_bytes for number in outputs)
        self.found.nodes.append(
            StepNode(
                kind=_kind(op, rewritten),
                name="embedding" if gathers else name,
                scope=self.tape.scope(inner[:-1], self.found),
                phase=phase,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                flops=flops,
                shape=shape,
                read_bytes=read if gathers else None,
                random="Random" in op.type,
            )
        )

    def _measured(self, op: Any) -> tuple[str, ProductSize, int]:
        """Return an operation's name in tapes, the size of its product, and its FLOPs.

        Raises:
            Untraceable: the size is not known.
        """
        if op.type in _NAMES:
            return _NAMES[op.type], _normalised(op), 0
        if op.type not in PRODUCTS:
            return op.type, NO_SHAPE, 0
        self.num_products += 1
        sizes, product = (*graphs.sizes_of(op), op.get_attr), PRODUCTS[op.type]
        try:
            return (*product.measured(*sizes), product.flops(*sizes))
        except (TypeError, IndexError) as error:
            raise Untraceable(f"the size of {op.type} {op.name} does not follow from the batch") from error

    def _value(self, tensor: Any) -> int:
        elements, name = _elements(tensor), str(tensor.dtype.name)
        width = 0 if name in ("resource", "variant", "string") else STORED_BYTES.get(name, int(tensor.dtype.size))
        return self.found.add_value(elements * width, FORMAT_NAMES.get(name, ""), elements)

    def _constant(self, tensor: Any) -> int | None:
        return self._value(tensor) if _elements(tensor) > _FEW else None


_FEW = 16
"""Constants with no more numbers are settings of operations."""


def _become_identity(node: Any, value: str) -> None:
    dtype = node.attr["dtype"].type
    graphs.turn_into(node, "Identity")
    node.input.append(value)
    node.attr["T"].type = dtype


def _in_order(graph: Any, live: set[str]) -> list[Any]:
    """Return the operations that run, each after those whose results it reads."""
    found: dict[str, Any] = {}
    for op in graph.get_operations():
        waiting = [op] if op.name in live else []
        while waiting:
            last = waiting[-1]
            missing = [t.op for t in last.inputs if t.op.name not in found and t.op.name != last.name]
            if missing and last.type not in ("Merge",):
                waiting += missing
            else:
                found.setdefault(last.name, last)
                waiting.pop()
    return list(found.values())


def _without_calls(parts: list[str], scope: str) -> list[str]:
    return parts[len(scope.split("/")) :] if scope else parts[1:]


def _kind(op: Any, rewritten: _Rewritten) -> NodeKind:
    if op.type in PRODUCTS:
        return "product"
    if op.type in _KERNELS or op.name in rewritten.gathered:
        return "kernel"
    return "view" if op.type in _VIEWS else "fused"


def _elements(tensor: Any) -> int:
    sizes = [] if tensor.shape.rank is None else tensor.shape.as_list()
    return 0 if tensor.shape.rank is None or None in sizes else math.prod(sizes)


def _normalised(op: Any) -> ProductSize:
    """Return the size of a normalisation over the batch, whose second operand has a number for each channel."""
    at = 1 if op.type == "FusedBatchNormGradV3" else 0
    channels = _elements(op.inputs[2])
    return ProductSize(1, channels, _elements(op.inputs[at]) // max(1, channels), 0)
