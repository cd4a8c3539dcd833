"""Interpret the recorded operations of a step: module, phase, format, FLOPs, bytes, and the origin of their values.

Phases are ``forward``, ``recompute`` (a forward pass repeated by activation checkpointing), ``dgrad`` and ``wgrad``
(gradients with respect to activations and to weights) and ``optimizer`` (everything after the last backward pass outside
modules: unscaling, clipping, the update).

The operands show which of a product's two gradients an operation computes: the gradient of the input reads the weight, the gradient
of the weight does not. Weights, their casts and their scaled copies for FP8 are identified by their storage. Other operations of a
backward pass count as ``wgrad`` if their first result, cast or not, is added to a parameter's gradient. The others count as ``dgrad``,
including a norm's backward kernel, which computes both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from mezzo import oplists
from mezzo.engine.gradients import all_parameters
from mezzo.formats import FP8_PAIRS
from mezzo.observe.audit.merged import AuditRow
from mezzo.observe.module_names import Names
from mezzo.observe.tensors import format_name, storage_of
from mezzo.observe.trace import (
    CAST_NAMES,
    LAST_NUMBER,
    NOWHERE,
    CoveredElements,
    Meta,
    RawOperation,
    RunningCall,
    Trace,
    TracedProduct,
)
from mezzo.records import PassKind

_PRECISION = {oplists.python_name(op).strip("_"): f.precision for f in oplists.FAMILIES for op in f.ops}
_BEFORE = ("native_", "linalg_", "special_", "cudnn_", "miopen_", "fused_")
_AFTER = ("_backward_data", "_backward", "_forward", "_with_flatten")


def listed_precision(op: str) -> str:
    """Return the precision of the dispatcher operation ``op`` in the op lists; ``follow`` for an unlisted one."""
    name = op.strip("_")
    for before in _BEFORE:
        name = name.removeprefix(before)
    for after in _AFTER:
        name = name.removesuffix(after)
    return _PRECISION.get(name.strip("_"), "follow")


@dataclass(kw_only=True)
class TracedOperation(AuditRow):
    """A recorded operation, interpreted."""

    raw: RawOperation
    product: TracedProduct | None = None
    reads_parameter: bool = False
    cast: Cast | None = None
    promoted_in: str = ""
    """The module in which a value that this product reads became FP32, because it mixed 16-bit and FP32 operands."""
    promotes: bool = False
    """Whether 16-bit and FP32 operands produce an FP32 result."""


@dataclass
class Cast:
    """One change of a tensor's format."""

    source: str
    target: str
    of: Literal["weight", "activation", "gradient"]
    place: tuple[int, CoveredElements]
    """The address of the operand's storage, and the part of it that the operand covers."""
    back_to: TracedOperation | None = None
    """The cast that this one undoes, if the value came from this format."""
    needless: bool = False
    """Whether nothing between the two casts needs the other format."""


def interpret(trace: Trace, names: Names, parameters: set[int]) -> list[TracedOperation]:
    """Return the interpreted operations of one step; ``parameters`` are the storages of weights."""
    return list(_Reader(trace, names, parameters).read())


class _Reader:
    """A reader of a trace, from its first operation to its last."""

    def __init__(self, trace: Trace, names: Names, parameters: set[int]) -> None:
        self._trace, self._names = trace, names
        self._parameters = parameters
        self._weights = set(parameters)
        """Storages of weights, and of weights cast to another format."""
        self._weight_nodes: set[int] = set()
        self._flow = _Flow(self._parameters)
        self._creators: dict[int, RunningCall] = {}
        self._operations = [RawOperation._make(values) for values in trace.operations]
        self._parameter_gradients = _parameter_gradients(self._operations)
        backward = [i for i, raw in enumerate(self._operations) if raw.node is not None]
        self._last_backward = backward[-1] if backward else len(self._operations)

    def read(self) -> Iterator[TracedOperation]:
        for index, raw in enumerate(self._operations):
            if raw.hidden:
                self._follow_weights(raw)
                self._flow.forget(raw)
                continue
            parts = list(self._parts(index, raw))
            self._flow.follow(parts[0])
            self._follow_weights(raw)
            yield from parts

    def _parts(self, index: int, raw: RawOperation) -> Iterator[TracedOperation]:
        """Yield the operation, as two if it computes both gradients of a product."""
        entry = self._owner(raw)
        op, product = raw.func.overloadpacket.__name__, raw.product
        size = sum(meta[2] for meta in (*raw.ins, *raw.outs))
        for number, (phase, parts) in enumerate(self._shares(index, raw, op)):
            yield TracedOperation(
                op=op,
                module=self._module(raw, entry),
                phase=phase,
                inputs=_dtypes(raw.ins),
                outputs=_dtypes(raw.outs),
                bytes=0 if number else size,
                raw=raw,
                flops=product.flops // parts if product is not None else 0,
                format=product.format if product is not None else "",
                product=product,
                reads_parameter=any(meta[0] in self._parameters for meta in raw.ins),
                cast=None if product is not None else self._cast(raw, op, phase),
            )

    # --- module ----------------------------------------------------------------------------------------------------------------

    def _owner(self, raw: RawOperation) -> RunningCall:
        """Return the innermost call of a module that an operation belongs to."""
        if raw.node is None or ((raw.recomputed or raw.entry.in_backward) and raw.entry is not NOWHERE):
            return raw.entry
        number = raw.node.number
        if number not in self._creators:
            self._creators[number] = self._trace.creator(raw.node)
        return self._creators[number]

    def _module(self, raw: RawOperation, entry: RunningCall) -> str:
        node = raw.node
        if node is not None and node.number == LAST_NUMBER:
            return self._names.of_parameter(node.parameter)
        return self._names.of(entry.module)

    # --- phase -----------------------------------------------------------------------------------------------------------------

    def _shares(self, index: int, raw: RawOperation, op: str) -> list[tuple[PassKind, int]]:
        """Return the phases of an operation, each with the divisor that gives its share of the FLOPs."""
        node = raw.node
        if node is None:
            # An optimizer's closure calls modules inside its step.
            updates = (raw.stepping or index > self._last_backward) and raw.entry is NOWHERE
            return [("optimizer" if updates else "forward", 1)]
        if raw.recomputed or raw.entry.in_backward:
            return [("recompute", 1)]
        if raw.product is None:
            return [("wgrad" if index in self._parameter_gradients else "dgrad", 1)]
        if op == "convolution_backward":
            mask = raw.product.arguments[-1][:2]
            return [(p, sum(mask)) for p, wanted in zip(_BOTH, mask, strict=True) if wanted] or [("wgrad", 1)]
        if "rnn" in op:
            return [(p, 2) for p in _BOTH]
        if op.endswith("_backward") or any(meta[0] in self._weights for meta in raw.ins):
            return [("dgrad", 1)]
        # Only linear layers multiply in FP8, and torchao's backward function for them does not carry the forward call's number.
        return [("wgrad" if node.number in self._weight_nodes or raw.product.format in _FP8 else "dgrad", 1)]

    def _follow_weights(self, raw: RawOperation) -> None:
        """Update the set of storages of weights."""
        product = raw.product
        reads = any(meta[0] in self._weights for meta in raw.ins)
        if product is not None and reads and (raw.node is None or raw.recomputed):
            self._weight_nodes.add(product.number)
        written = {meta[0] for meta in raw.outs} - self._parameters
        if reads and (raw.func.overloadpacket.__name__ in (*CAST_NAMES, "clone") or _scales(raw, self._weights)):
            self._weights |= written
        else:
            self._weights -= written

    # --- casts -----------------------------------------------------------------------------------------------------------------

    def _cast(self, raw: RawOperation, op: str, phase: PassKind) -> Cast | None:
        if op not in CAST_NAMES or not raw.ins or not raw.outs:
            return None
        source, target = raw.ins[1] if op.startswith("copy") and len(raw.ins) > 1 else raw.ins[0], raw.outs[0]
        if source[1] == target[1] or not (source[1].is_floating_point and target[1].is_floating_point):
            return None
        weight = source[0] in self._weights or target[0] in self._parameters
        of: Literal["weight", "activation", "gradient"] = (
            "weight" if weight else "gradient" if phase in _BOTH else "activation"
        )
        return Cast(format_name(source[1]), format_name(target[1]), of, (source[0], raw.region))


@dataclass
class _Origin:
    """The origin of a value's format: a cast."""

    source: str
    format: str
    cast: TracedOperation
    backward: bool
    needed: bool


class _Flow:
    """The values of a step: which were cast, and which became FP32 by promotion."""

    def __init__(self, parameters: set[int]) -> None:
        self._parameters = parameters
        self._origins: dict[int, _Origin] = {}
        self._promoted: dict[int, str] = {}

    def follow(self, operation: TracedOperation) -> None:
        """Record the origin of an operation's results."""
        raw, backward = operation.raw, operation.phase in _BOTH
        promoted = [self._promoted[m[0]] for m in raw.ins if m[0] in self._promoted]
        origins = [self._origins[m[0]] for m in raw.ins if m[0] in self._origins]
        kept: dict[int, _Origin] = {}
        if operation.cast is not None:
            kept = self._follow_cast(operation, operation.cast, origins, backward=backward)
        elif operation.product is None and raw.outs:
            kept = self._passed_on(operation, origins, backward=backward)
        promoted_in = next(iter(promoted), "")
        operation.promotes = operation.product is None and operation.cast is None and not backward and _mixes(raw)
        self.forget(raw)
        self._origins.update(kept)
        if operation.product is not None:
            operation.promoted_in = promoted_in
        elif (operation.promotes or promoted_in) and raw.outs and raw.outs[0][1].itemsize == 4:
            self._promoted[raw.outs[0][0]] = promoted_in or operation.module

    def forget(self, raw: RawOperation) -> None:
        """Discard what is known about the memory that an operation writes: it has a new value."""
        for meta in raw.outs:
            self._origins.pop(meta[0], None)
            self._promoted.pop(meta[0], None)

    def _follow_cast(
        self, operation: TracedOperation, cast: Cast, origins: list[_Origin], *, backward: bool
    ) -> dict[int, _Origin]:
        earlier = next((c for c in origins if c.source == cast.target and c.backward == backward), None)
        if earlier is not None:
            cast.back_to, cast.needless = earlier.cast, not earlier.needed
        elif cast.of != "weight":
            # Only the script's own casts can be dropped; a backward pass casts because its forward pass did.
            needed = backward or operation.raw.by_policy
            return {operation.raw.outs[0][0]: _Origin(cast.source, cast.target, operation, backward, needed)}
        return {}

    def _passed_on(self, operation: TracedOperation, origins: list[_Origin], *, backward: bool) -> dict[int, _Origin]:
        first = operation.raw.outs[0]
        result_format = format_name(first[1])
        earlier = next((c for c in origins if c.format == result_format and c.backward == backward), None)
        if earlier is None or not self._reads_one_cast(operation.raw, earlier.cast):
            return {}
        needed = earlier.needed or listed_precision(operation.op) in ("fp32", "widest")
        return {first[0]: _Origin(earlier.source, result_format, earlier.cast, backward, needed)}

    def _reads_one_cast(self, raw: RawOperation, cast: TracedOperation) -> bool:
        """Return whether all values that an operation reads, other than parameters, come from one cast."""
        others = (m for m in _floats(raw) if m[0] not in self._parameters)
        return all(m[0] in self._origins and self._origins[m[0]].cast is cast for m in others)


_BOTH: tuple[PassKind, PassKind] = ("dgrad", "wgrad")
_SCALING, _ONE_NUMBER_BYTES = ("mul", "div", "clamp"), 8
_FP8 = tuple(f.name for pair in FP8_PAIRS.values() for f in pair)


def _parameter_gradients(operations: list[RawOperation]) -> set[int]:
    """Return the indices of the operations of backward passes whose first result becomes a parameter's gradient.

    The trace is read backwards, from the values added to gradients to the operations that computed them, through casts and copies.
    """
    gradients: set[int] = set()
    found: set[int] = set()
    for index in range(len(operations) - 1, -1, -1):
        raw = operations[index]
        accumulates = raw.node is not None and raw.node.number == LAST_NUMBER
        becomes_one = raw.node is not None and bool(raw.outs) and raw.outs[0][0] in gradients
        # Before this operation, the memory of all its results held other values: what read it there was no gradient of a parameter.
        gradients.difference_update(meta[0] for meta in raw.outs)
        if accumulates or becomes_one:
            found.add(index)
        if accumulates or (becomes_one and raw.func.overloadpacket.__name__ in (*CAST_NAMES, "clone")):
            gradients.update(meta[0] for meta in raw.ins)
    return found


def _scales(raw: RawOperation, weights: set[int]) -> bool:
    """Return whether an operation multiplies a weight by one number or clamps it, as FP8 does before it casts."""
    return (
        raw.func.overloadpacket.__name__ in _SCALING
        and raw.ins[0][0] in weights
        and all(size <= _ONE_NUMBER_BYTES for _, _, size in raw.ins[1:])
    )


def _dtypes(metas: list[Meta]) -> tuple[str, ...]:
    """Return the formats, each once: lists of tensors repeat the same ones."""
    return tuple(dict.fromkeys(format_name(meta[1]) for meta in metas))


def _floats(raw: RawOperation) -> list[Meta]:
    return [m for m in raw.ins if m[1].is_floating_point and m[2] > m[1].itemsize]


def _mixes(raw: RawOperation) -> bool:
    """Return whether 16-bit and FP32 tensors produce an FP32 one; numbers and tensors of one number promote nothing."""
    sizes = {m[1].itemsize for m in _floats(raw)}
    out = raw.outs[0][1] if raw.outs else torch.bool
    return sizes >= {2, 4} and out.is_floating_point and out.itemsize == 4


def weights_of(roots: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the storages of the parameters of modules and optimizers."""
    return {storage_of(p) for p in all_parameters(roots, optimizers)}
