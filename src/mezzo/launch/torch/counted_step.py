"""Inspect the second step of a run: which formats its operations ran in, and the bytes of each kind.

The second step, because in the first the optimizer has no state yet; and only one step, because counting costs time (the
first tenth of the steps is left out of all timing). Code that Inductor compiled runs compiled in that step, too
(``InductorGraphs``). Compiled code runs eagerly in it if the policy is emulated, because its graph shows only FP32 operations, or if
the backend's graphs cannot be read.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import SymInt, Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from mezzo.engine.checkpointing import KeptProducts
from mezzo.engine.gradients import trained_leaves
from mezzo.launch.patches import Patches
from mezzo.launch.torch.state import TorchRun
from mezzo.measure import memory
from mezzo.measure.bottleneck import OperationTimes, OperationWork
from mezzo.measure.flops import FLOP_COUNTS, Counted, FlopCounter, effective, is_narrow
from mezzo.measure.memory import CudaPeaks
from mezzo.records import Effective, Memory

_UPDATES_MEASURED = 2  # the first successful update creates the optimizer's state


class CountedStep:
    """The counts of one step's operations and bytes."""

    def __init__(self, run: TorchRun, *, in_region: Callable[[], bool]) -> None:
        self._run, self._in_region = run, in_region
        self._saved = memory.SavedTensors()
        self._peaks = CudaPeaks()
        self._flops: FlopCounter | None = None
        self._graphs = InductorGraphs()
        self._backends: set[str] = set()
        """Backends that the script has compiled with; "" for one without a name."""
        self._times = OperationTimes()
        self._num_timed = 0
        """Number of timed operations in the counted step; later ones belong to the next."""
        self._stack: contextlib.ExitStack | None = None
        self._due = self._over = self._compiled = self._forced_eager = False
        self._counted_step: int | None = None
        """Number of the counted step."""
        self._num_measured: Counter[int] = Counter()
        """Number of updates at which bytes were measured, by the identity of the optimizer; skipped updates do not count."""
        self._when_over: list[Callable[[], Any]] = []
        self._counted = Counted()
        self._bytes: dict[str, int] = {}
        """Bytes by kind; empty until the first update."""

    def install(self, patches: Patches) -> None:
        """Set the hooks until ``patches`` are undone."""
        self._run.listeners.all.append(self)
        patches.around(torch.utils.checkpoint, "checkpoint", self._checkpoint)
        patches.on_undo(self._end)
        patches.around(torch, "compile", functools.partial(self._compile, patches))

    def steps_discarded(self) -> None:
        """Forget the counts: they were of no training step."""
        self._end()
        self._saved, self._times, self._flops = memory.SavedTensors(), OperationTimes(), None
        self._due = self._over = self._compiled = self._forced_eager = False
        self._counted_step, self._num_timed, self._bytes = None, 0, {}
        self._num_measured.clear()
        self._counted = Counted()

    def when_over(self, action: Callable[[], Any]) -> None:
        """Call ``action`` once nothing more is to be counted in this run."""
        self._when_over.append(action)

    def done(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether nothing more is to be counted in this run, which has only this optimizer."""
        counted = self._flops is not None and self._stack is None
        return counted and not self._when_over and self._num_measured[id(optimizer)] >= _UPDATES_MEASURED

    def step_closed(self, num_steps: int) -> None:
        """End the count after the counted step."""
        self._over = self._counted_step is not None and num_steps >= self._counted_step
        self._begin_or_end()

    def backward_begins(self, *_: object) -> None:
        """Count the tensors that the forward pass saved."""
        if self._stack is not None:
            self._saved.backward_begins()

    def backward_ended(self) -> None:
        """Drop the tensors that the backward pass freed; begin to count if the first update was made inside it.

        The current counts are kept: if the script's own GradScaler skips the step, no update follows.
        """
        if self._stack is not None:
            self._saved.backward_ended()
            self._keep_counts()
        self._begin_or_end()

    def compiled_ended(self) -> None:
        """Begin or end the count if that became due inside a compiled function."""
        self._begin_or_end()

    def updated(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Begin to count after the first update; keep the counts at the following ones until the step closes.

        A step closes at the next backward pass: what runs until then is the next step's forward pass, or an evaluation.
        """
        self._measure_bytes(id(optimizer))
        if self._flops is None:
            self._due = True
            self._begin_or_end()
        else:
            self._keep_counts()

    def _keep_counts(self) -> None:
        if self._flops is not None and self._stack is not None and not self._over:
            self._counted = Counted(
                by_format=dict(self._flops.by_format),
                in_updates=dict(self._flops.in_updates),
                num_lowered=self._flops.num_lowered,
                outside=self._flops.outside_region,
                switched_off=self._flops.switched_off,
                step=self._counted_step,
                uncounted=dict(self._graphs.uncounted),
            )
            self._num_timed = len(self._times.operations)

    def operations(self) -> list[OperationWork]:
        """Return the operations of the counted step with their times; none if the script compiles code."""
        return [] if self._compiled else self._times.operations[: self._num_timed]

    @property
    def was_compiled(self) -> bool:
        """Whether the script compiles code, so that not every operation of the counted step was timed."""
        return self._compiled

    def memory(self) -> Memory:
        """Return the bytes of the inspected step, and the allocator's peaks over the run, all devices together."""
        peaks = self._peaks.read(self._run.update.num_updates)
        several = sum(size > 0 for size in peaks.allocated) > 1
        return Memory(
            parameters_bytes=self._bytes.get("parameters"),
            gradients_bytes=self._bytes.get("gradients"),
            optimizer_bytes=self._bytes.get("optimizer"),
            activations_bytes=self._saved.peak_bytes,
            cuda_allocated_bytes=sum(peaks.allocated) if peaks.allocated else None,
            cuda_reserved_bytes=sum(peaks.reserved) if peaks.reserved else None,
            cuda_allocated_bytes_by_device=list(peaks.allocated) if several else [],
        )

    def effective(self) -> Effective:
        """Return the formats of the counted step, and what was left alone."""
        policy, emulates = self._run.precision.at_start or (self._run.precision.effective, self._run.precision.emulates)
        changed = self._run.objects.changed_models
        uncounted = Effective(
            left_alone=[*self._run.notes.left_alone.values(), *self._run.graphs.notes()],
            num_replays=self._run.graphs.replays,
            own_16_bits=self._run.notes.own_16_bits,
            unmade_changes={} if changed is None else changed.unmade(),
        )
        return effective(self._counted, policy, emulates=emulates, uncounted=uncounted)

    def _parameters(self) -> Iterable[Tensor]:
        for root in list(self._run.objects.roots):
            yield from root.parameters()
        for optimizer in list(self._run.objects.optimizers):
            yield from trained_leaves(optimizer)

    def _measure_bytes(self, stepped: int) -> None:
        """Measure the bytes of parameters, gradients and optimizer state at the first updates of each optimizer.

        Of each, because an optimizer whose first updates are skipped gets its state later than the others.
        """
        counted = self._flops is not None and self._stack is None
        if counted and self._num_measured[stepped] >= _UPDATES_MEASURED:
            while self._when_over:
                self._when_over.pop()()
            return
        self._num_measured[stepped] += not self._run.update.skips
        parameters = list(self._parameters())
        optimizers = list(self._run.objects.optimizers)
        sizes = {
            "parameters": memory.total_bytes(parameters),
            "gradients": memory.total_bytes(p.grad for p in parameters if p.grad is not None),
            "optimizer": sum(memory.optimizer_bytes(optimizer) for optimizer in optimizers),
        }
        self._bytes = {kind: max(size, self._bytes.get(kind, 0)) for kind, size in sizes.items()}

    def _begin_or_end(self) -> None:
        """Begin or end the count if that is due and possible here."""
        # Autograd and compiled code restore the modes that were on before; compiled code cannot switch to eager half-way either.
        if self._run.phase.in_backward or self._run.phase.in_compiled:
            return
        if self._over:
            self._end()
        elif self._due:
            self._begin()

    def _begin(self) -> None:
        self._due, self._counted_step = False, self._run.update.num_updates + 1
        run = self._run
        self._flops = FlopCounter(
            in_region=self._in_region, in_step=lambda: run.phase.local.stepping, inside=lambda: run.phase.inside
        )
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._graphs.counted(self._flops))
        self._compiled = run.phase.compiles
        countable = run.phase.compiles and self._backends <= COUNTED_BACKENDS and not run.precision.emulates
        self._forced_eager = run.phase.compiles and not countable
        if "torch._dynamo" in sys.modules and not countable:
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._stack.enter_context(self._times)
        self._stack.enter_context(self._flops)
        checks = run.lint.operations.mode(step=self._counted_step, in_step=lambda: run.phase.local.stepping)
        self._stack.enter_context(checks)
        self._saved.start(self._parameters())
        self._stack.callback(self._saved.stop)

    def _end(self) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None
            if self._forced_eager:
                self._peaks.reset(self._run.update.num_updates)

    def _compile(self, patches: Patches, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend", INDUCTOR)
        if backend == INDUCTOR and INDUCTOR not in self._backends:
            self._graphs.install(patches)
        self._backends.add(backend if isinstance(backend, str) else "")
        return original(*args, **kwargs)

    def _contexts(self, context_fn: Callable[[], Any]) -> Any:
        """Return the contexts of a checkpointed call's forward pass and recomputation, and count the products that it keeps."""
        forward, recomputation = context_fn()
        if isinstance(forward, KeptProducts):
            self._saved.keep_later(forward.tensors)
        return forward, recomputation

    def _checkpoint(self, original: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._stack is not None and torch.is_grad_enabled():
            self._saved.keep([args, getattr(function, "keywords", None)])
            if "context_fn" in kwargs:
                kwargs["context_fn"] = functools.partial(self._contexts, kwargs["context_fn"])
        return original(function, *args, **kwargs)


# A dispatch mode sees only the few operations of a compiled graph that Inductor leaves to torch's own kernels. So the operations of
# each graph, forward or backward, are recorded when Inductor receives it. While a step is counted, a call of the compiled graph counts
# them, and dispatch modes are off inside it.
#
# Limits: sizes of dynamic shapes are those that the graph was compiled for. Products whose sizes depend on values, as after
# ``nonzero``, and those inside higher-order operators, such as flex attention, are not counted but listed. Operations that Inductor adds
# or removes later are not seen: it may compute a product of one row as a sum. A graph from AOTAutograd's cache never passes through here,
# so that cache is off under Mezzo; Inductor's own cache, which saves most of the time, stays on.

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
        if node.target.overloadpacket in FLOP_COUNTS:
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
