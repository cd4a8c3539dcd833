"""Count the products in a traced TensorFlow function from its graph: forward, backward, branches and called functions.

A function is traced with unknown sizes, above all the batch size. Its graph is imported again with the batch size
filled in, and TensorFlow's own shape inference propagates it. Both sides of a branch are counted, and one iteration of a loop's body.

The activations are the forward tensors that are read by operations of the backward pass, named ``gradient_tape/...``: an upper
bound of what the runtime keeps, because it may still simplify the graph.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph, op_def_registry
from tensorflow.python.framework.ops import EagerTensor

from mezzo.formats import STORED_BYTES
from mezzo.launch.keras.products import PRODUCTS
from mezzo.launch.keras.state import reaches

See = Callable[[Any, str, set[str]], None]
BACKWARD = "gradient_tape/"
_SOURCES = {"Const", "ReadVariableOp", "VarHandleOp", "Shape", "ShapeN", "BroadcastGradientArgs"}
_LOOPS = {"While", "StatelessWhile"}
_SHAPE_ATTRIBUTES = {"Placeholder": "shape"} | dict.fromkeys(
    ("IteratorGetNext", "OptionalGetValue", "If", "StatelessIf", "While", "StatelessWhile"), "output_shapes"
)
"""The attribute of each operation that contains the shapes of its results."""
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}
_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")
"""Operations on variables that have a result, and the name prefixes of those that have none."""
_TRACED_SHAPES = "_output_shapes"
"""Attribute in which ``as_graph_def(add_shapes=True)`` stores the shapes that were known when the function was traced."""


@dataclass
class GraphCounts:
    """The counts of a graph."""

    flops: Counter[str] = field(default_factory=Counter)
    """FLOPs by the name of the operands' dtype."""
    activations_bytes: int = 0
    loops: int = 0
    unknown: int = 0
    """Products with unknown sizes."""
    variables: set[str] = field(default_factory=set)
    """Names of the operations that read a variable."""


def outermost(graph: Any) -> Any:
    """Return the graph of the outermost function around ``graph``."""
    while getattr(graph, "outer_graph", None) is not None and not tf.executing_eagerly():
        outer = graph.outer_graph
        if not getattr(outer, "building_function", False):
            break
        graph = outer
    return graph


def is_within(graph: Any, ancestor: Any) -> bool:
    """Return whether ``graph`` is ``ancestor`` or is traced inside it."""
    while graph is not None:
        if graph is ancestor:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def of(tensor: Any) -> Any:
    """Return the graph of a tensor; None if it was computed eagerly."""
    return None if isinstance(tensor, EagerTensor) else tensor.graph


def comes_from(tensor: Any, others: Iterable[Any]) -> bool:
    """Return whether ``tensor`` was computed from one of ``others``, a few operations before it in the same graph."""
    graph = of(tensor)

    def inputs(name: str) -> Iterator[str]:
        return (t.op.name for t in graph.get_operation_by_name(name).inputs)

    return reaches(tensor.op.name, {t.op.name for t in others if of(t) is graph}, inputs)


def count(graph: Any, *, batch: int | None, see: See | None = None) -> GraphCounts:
    """Return the products in a function's graph.

    Args:
        graph: of the function.
        batch: the batch size; None if that is unknown.
        see: called with each operation that runs, the operations around it that call functions, and the names of those that read variables.
    """
    counts = GraphCounts()
    definition = graph.as_graph_def(add_shapes=True)
    library = {f.signature.name: f for f in definition.library.function}
    live = running(definition.node, [t.name for t in graph.outputs])
    _Walk(library, batch, counts, see).through(import_again(definition, batch, counts), live, scope="")
    return counts


def import_again(definition: Any, batch: int | None, counts: GraphCounts) -> Any:
    """Return the graph of a definition, with all sizes that follow from the batch size."""
    _fill(definition.node, batch, counts.variables)
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    return graph


def _fill(nodes: Any, batch: int | None, variables: set[str]) -> None:
    """Fill in the batch size for unknown first dimensions; turn variables, whose shapes are not in the graph, into inputs."""
    for node in nodes:
        if node.op in _READS and _TRACED_SHAPES in node.attr:
            shape, dtype = node.attr[_TRACED_SHAPES].list.shape[0], node.attr["dtype"].type
            turn_into(node, "Placeholder")
            variables.add(node.name)
            node.attr["shape"].shape.CopyFrom(shape)
            node.attr["dtype"].type = dtype
        elif node.op.startswith(_WRITES):
            turn_into(node, "NoOp")
        for name in (_TRACED_SHAPES, "_class"):  # the second refers to the device of a node that may be gone
            node.attr.pop(name, None)
        attribute = _SHAPE_ATTRIBUTES.get(node.op)
        if batch is None or attribute is None or attribute not in node.attr:
            continue
        value = node.attr[attribute]
        for shape in [value.shape] if attribute == "shape" else value.list.shape:
            if len(shape.dim) and shape.dim[0].size == -1:
                shape.dim[0].size = batch


def turn_into(node: Any, op: str) -> None:
    """Turn a node of a definition into another operation, without inputs."""
    node.op = op
    del node.input[:]
    node.attr.clear()


def running(nodes: Any, results: Iterable[str]) -> set[str]:
    """Return the names of the nodes that a result or a side effect needs: these run.

    The tape adds the gradient of a convolution's input even if nothing uses it.
    """
    by_name = {node.name: node for node in nodes}
    definitions = {node.op: op_def_registry.get(node.op) for node in nodes}
    waiting = [_node_of(name) for name in results]
    waiting += [node.name for node in nodes if definitions[node.op] is None or definitions[node.op].is_stateful]
    live: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in by_name and name not in live:
            live.add(name)
            waiting += map(_node_of, by_name[name].input)
    return live


def _node_of(tensor: str) -> str:
    return tensor.lstrip("^").split(":")[0]


@dataclass(frozen=True)
class _Walk:
    """A walk through a graph and the functions that it calls."""

    library: dict[str, Any]
    batch: int | None
    counts: GraphCounts
    see: See | None

    def through(self, graph: Any, live: set[str], *, scope: str) -> None:
        """Count the operations of a graph that run; ``scope`` names the operations that call it."""
        counts = self.counts
        operations = [op for op in graph.get_operations() if op.name in live]
        for op in operations:
            if self.see is not None:
                self.see(op, scope, counts.variables)
            if op.type in PRODUCTS:
                add(op, counts)
            counts.loops += op.type in _LOOPS
            for name in called_by(op):
                if name in self.library:
                    called = self.library[name]
                    inside = running(called.node_def, [*called.ret.values(), *called.control_ret.values()])
                    self.through(_body(called, op, self.batch, counts), inside, scope=f"{scope}/{op.name}")
        counts.activations_bytes += sum(map(_bytes, _activations(operations, counts.variables)))


def add(op: Any, counts: GraphCounts) -> None:
    """Add the FLOPs of a product to ``counts``."""
    inputs, outputs = sizes_of(op)
    operand = next((t.dtype.name for t in op.inputs if t.dtype.is_floating), None)
    if operand is None:
        return
    try:
        counts.flops[operand] += PRODUCTS[op.type].flops(inputs, outputs, op.get_attr)
    except (TypeError, IndexError):  # an unknown size or rank
        counts.unknown += 1


def sizes_of(op: Any) -> tuple[list[Any], list[Any]]:
    """Return the sizes of an operation's inputs and results."""
    inputs, outputs = ([_sizes(t) for t in tensors] for tensors in (op.inputs, op.outputs))
    return inputs, outputs


def called_by(op: Any) -> Iterator[str]:
    """Yield the names of the functions that an operation runs."""
    for name, value in op.node_def.attr.items():
        if name.startswith("_") or name == "cond":
            continue
        for function in [value.func, *value.list.func]:
            if function.name:
                yield function.name


def _body(definition: Any, op: Any, batch: int | None, counts: GraphCounts) -> Any:
    """Return the graph of a function that an operation calls, with the sizes of its arguments."""
    num = len(definition.signature.input_arg)
    arguments = list(op.inputs)[-num:] if num else []  # the first input of a branch is its condition
    shapes = [tensor.shape.as_proto() for tensor in arguments]
    graph, _ = function_def_to_graph.function_def_to_graph_def(
        definition, input_shapes=shapes, include_library_functions=True
    )
    return import_again(graph, batch, counts)


def _activations(operations: Iterable[Any], variables: set[str]) -> Iterator[Any]:
    """Yield the tensors computed in the forward pass that the backward pass reads, each once."""
    seen: set[str] = set()
    for op in operations:
        if BACKWARD not in op.name:
            continue
        for tensor in op.inputs:
            producer = tensor.op
            is_computed = producer.type not in _SOURCES and producer.name not in variables
            if is_computed and BACKWARD not in producer.name and tensor.name not in seen:
                seen.add(tensor.name)
                yield tensor


def _bytes(tensor: Any) -> int:
    known = [size for size in _sizes(tensor) or [None] if size is not None]
    if len(known) != tensor.shape.rank:
        return 0
    return math.prod(known) * STORED_BYTES.get(tensor.dtype.name, int(tensor.dtype.size))


def _sizes(tensor: Any) -> tuple[int | None, ...] | None:
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
