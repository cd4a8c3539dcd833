"""Count the operations of graphs that Inductor compiled, as they run compiled.

A dispatch mode sees only the few operations of a compiled graph that Inductor leaves to torch's own kernels. So the operations of
each graph, forward or backward, are recorded when Inductor receives it. While a step is counted, a call of the compiled graph counts
them, and dispatch modes are off inside it.

Limits: sizes of dynamic shapes are those that the graph was compiled for. Products whose sizes depend on values, as after
``nonzero``, and those inside higher-order operators, such as flex attention, are not counted but listed. Operations that Inductor adds
or removes later are not seen: it may compute a product of one row as a sum. A graph from AOTAutograd's cache never passes through here,
so that cache is off under Mezzo; Inductor's own cache, which saves most of the time, stays on.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from mezzo.launch.patches import Patches
from mezzo.measure.flops import COUNTS, FlopCounter, is_narrow

INDUCTOR = "inductor"
COUNTED_BACKENDS = frozenset((INDUCTOR, "eager", "aot_eager"))
"""Backends whose operations are counted as they run; the two eager ones run them one by one."""

_UNKNOWN = object()
"""A placeholder for a size that depends on values, and for a tensor of such a size."""
_CUSTOM_OPERATIONS = (auto_functionalized, auto_functionalized_v2)
"""They wrap an operation of a library, whose products are not counted when it runs eagerly either."""


class GraphOperation(NamedTuple):
    """One operation of a graph, on fake tensors."""

    function: OpOverload
    args: Sequence[Any]
    result: Any


class GraphCounts(NamedTuple):
    """What one call of a graph adds to the counts."""

    operations: list[GraphOperation]
    """The operations whose sizes are known."""
    uncounted: dict[str, str]
    """Why the products of others are not counted, by the operation's name."""
    num_lowered: int
    """How many of the others read or write numbers below 32 bits."""


_UNKNOWN_GRAPH = GraphCounts([], {"compiled code": "it was not compiled in this process"}, 0)


class InductorGraphs:
    """The operations of every graph that Inductor compiled in this process."""

    def __init__(self) -> None:
        self.uncounted: dict[str, str] = {}
        """Why the FLOPs counted so far lack products, by the operation's name."""
        self._counts: dict[int, tuple[weakref.ref[Any], GraphCounts]] = {}
        """Counts by the identity of the compiled graph, which cannot be hashed."""
        self._compiled_graph: Any = None
        """Inductor's class of compiled graphs, once it has been imported."""

    def install(self, patches: Patches) -> None:
        """Record graphs from now on, until ``patches`` are undone; call it before Inductor first compiles."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports deprecated parts of torch
            import torch._functorch.config as functorch_settings  # here: Inductor takes seconds to import
            from torch._inductor import compile_fx
            from torch._inductor.output_code import CompiledFxGraph

        patches.replace(functorch_settings, "enable_autograd_cache", False)
        patches.around(compile_fx, "_compile_fx_inner", self._compile)
        self._compiled_graph = CompiledFxGraph

    @contextmanager
    def counted(self, counter: FlopCounter) -> Iterator[None]:
        """Count the operations of compiled graphs that run inside with ``counter``; elsewhere, their calls have no extra cost."""
        patches = Patches()
        if self._compiled_graph is not None:
            patches.around(self._compiled_graph, "__call__", functools.partial(self._call, counter))
        try:
            yield
        finally:
            patches.undo()

    def _compile(self, original: Callable[..., Any], graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        counts = counts_of(graph)  # before Inductor's passes change the graph in place
        compiled = original(graph, *args, **kwargs)
        key = id(compiled)
        self._counts[key] = (weakref.ref(compiled, lambda _: self._counts.pop(key, None)), counts)
        return compiled

    def _call(self, counter: FlopCounter, original: Callable[..., Any], graph: Any, inputs: Sequence[Any]) -> Any:
        _, counts = self._counts.get(id(graph), (None, _UNKNOWN_GRAPH))
        for operation in counts.operations:
            counter.count(*operation)
        counter.add_lowered(counts.num_lowered)
        self.uncounted |= counts.uncounted
        with _disable_current_modes():
            return original(graph, inputs)


def counts_of(graph: torch.fx.GraphModule) -> GraphCounts:
    """Return what to count for a graph of aten's operations that AOTAutograd traced."""
    operations: list[GraphOperation] = []
    uncounted: dict[str, str] = {}
    num_lowered = 0
    for node in graph.graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and node.target not in _CUSTOM_OPERATIONS:
            uncounted[node.target.name()] = "it is compiled as a whole"
        if not isinstance(node.target, OpOverload) or "val" not in node.meta:
            continue
        traced = map_arg(node.args, lambda n: n.meta.get("val")), node.meta["val"]
        args, result = _sized(traced)
        if not any(value is _UNKNOWN for value in tree_leaves((args, result))):
            operations.append(GraphOperation(node.target, args, result))
            continue
        num_lowered += any(map(is_narrow, tree_leaves(traced)))
        if node.target.overloadpacket in COUNTS:
            uncounted[node.target.overloadpacket.__name__] = "its sizes depend on values"
    return GraphCounts(operations, uncounted, num_lowered)


def _sized(values: Any) -> Any:
    """Return ``values`` with the sizes that symbolic ones had when they were traced."""
    return tree_map_only((Tensor, SymInt), _as_traced, values)


def _as_traced(value: Any) -> Any:
    if isinstance(value, SymInt):
        return _UNKNOWN if value.node.hint is None else value.node.hint
    if not any(isinstance(size, SymInt) for size in value.shape):
        return value
    sizes = [_as_traced(size) if isinstance(size, SymInt) else size for size in value.shape]
    if _UNKNOWN in sizes:
        return _UNKNOWN
    with value.fake_mode:
        return torch.empty(sizes, dtype=value.dtype, device=value.device)
