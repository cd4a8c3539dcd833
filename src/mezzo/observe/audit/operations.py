"""Interpret the recorded operations of a step: module, phase, format, FLOPs, bytes, and the origin of their values.

Phases are ``forward``, ``recompute`` (a forward pass repeated by activation checkpointing), ``dgrad`` and ``wgrad``
(gradients with respect to activations and to weights) and ``optimizer`` (everything after the last backward pass outside
modules: unscaling, clipping, the update).

The operands show which of a product's two gradients an operation computes: the gradient of the input reads the weight, the gradient
of the weight does not. Weights, their casts and their scaled copies for FP8 are identified by their storage. Other operations of a
backward pass count as ``wgrad`` if their first result, cast or not, is added to a parameter's gradient; the rest counts as ``dgrad``,
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
from mezzo.observe.trace import CASTS, LAST_NUMBER, NOWHERE, Meta, Noted, Region, RunningCall, Trace, TracedProduct
from mezzo.records import Phase

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

    noted: Noted
    product: TracedProduct | None = None
    reads_parameter: bool = False
    cast: Cast | None = None
    promoted_in: str = ""
    """The module that mixed 16-bit and FP32 operands to make a value that this product reads."""
    promotes: bool = False
    """Whether 16-bit and FP32 operands produce an FP32 result."""


@dataclass
class Cast:
    """One change of a tensor's format."""

    source: str
    target: str
    of: Literal["weight", "activation", "gradient"]
    place: tuple[int, Region]
    """The address of the storage that the operand lies in, and the part of it."""
    back_to: TracedOperation | None = None
    """The cast that this one undoes, if the value came from this format."""
    needless: bool = False
    """Whether nothing between the two casts needs the other format."""


def understand(trace: Trace, names: Names, parameters: set[int]) -> list[TracedOperation]:
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
        self._makers: dict[int, RunningCall] = {}
        self._operations = [Noted._make(values) for values in trace.operations]
        self._to_parameters = _to_parameters(self._operations)
        backward = [i for i, noted in enumerate(self._operations) if noted.node is not None]
        self._last_backward = backward[-1] if backward else len(self._operations)

    def read(self) -> Iterator[TracedOperation]:
        for index, noted in enumerate(self._operations):
            if noted.hidden:
                self._follow_weights(noted)
                self._flow.forget(noted)
                continue
            parts = list(self._parts(index, noted))
            self._flow.follow(parts[0])
            self._follow_weights(noted)
            yield from parts

    def _parts(self, index: int, noted: Noted) -> Iterator[TracedOperation]:
        """Yield the operation, as two if it computes both gradients of a product."""
        entry = self._owner(noted)
        op, product = noted.func.overloadpacket.__name__, noted.product
        size = sum(meta[2] for meta in (*noted.ins, *noted.outs))
        for number, (phase, parts) in enumerate(self._shares(index, noted, op)):
            yield TracedOperation(
                op=op,
                module=self._module(noted, entry),
                phase=phase,
                inputs=_dtypes(noted.ins),
                outputs=_dtypes(noted.outs),
                bytes=0 if number else size,
                noted=noted,
                flops=product.flops // parts if product is not None else 0,
                format=product.format if product is not None else "",
                product=product,
                reads_parameter=any(meta[0] in self._parameters for meta in noted.ins),
                cast=None if product is not None else self._cast(noted, op, phase),
            )

    # --- module ----------------------------------------------------------------------------------------------------------------

    def _owner(self, noted: Noted) -> RunningCall:
        """Return the innermost call of a module that an operation belongs to."""
        if noted.node is None or ((noted.again or noted.entry.again) and noted.entry is not NOWHERE):
            return noted.entry
        number = noted.node.number
        if number not in self._makers:
            self._makers[number] = self._trace.maker(noted.node)
        return self._makers[number]

    def _module(self, noted: Noted, entry: RunningCall) -> str:
        node = noted.node
        if node is not None and node.number == LAST_NUMBER:
            return self._names.of_parameter(node.parameter)
        return self._names.of(entry.module)

    # --- phase -----------------------------------------------------------------------------------------------------------------

    def _shares(self, index: int, noted: Noted, op: str) -> list[tuple[Phase, int]]:
        """Return the phases of an operation, each with its number of equal shares of the FLOPs."""
        node = noted.node
        if node is None:
            # An optimizer's closure calls modules inside its step.
            updates = (noted.stepping or index > self._last_backward) and noted.entry is NOWHERE
            return [("optimizer" if updates else "forward", 1)]
        if noted.again or noted.entry.again:
            return [("recompute", 1)]
        if noted.product is None:
            return [("wgrad" if index in self._to_parameters else "dgrad", 1)]
        if op == "convolution_backward":
            mask = noted.product.arguments[-1][:2]
            return [(p, sum(mask)) for p, wanted in zip(_BOTH, mask, strict=True) if wanted] or [("wgrad", 1)]
        if "rnn" in op:
            return [(p, 2) for p in _BOTH]
        if op.endswith("_backward") or any(meta[0] in self._weights for meta in noted.ins):
            return [("dgrad", 1)]
        # Only linear layers multiply in FP8, and torchao's backward function for them does not carry the forward call's number.
        return [("wgrad" if node.number in self._weight_nodes or noted.product.format in _FP8 else "dgrad", 1)]

    def _follow_weights(self, noted: Noted) -> None:
        """Update the set of storages of weights."""
        product = noted.product
        reads = any(meta[0] in self._weights for meta in noted.ins)
        if product is not None and reads and (noted.node is None or noted.again):
            self._weight_nodes.add(product.number)
        made = {meta[0] for meta in noted.outs} - self._parameters
        if reads and (noted.func.overloadpacket.__name__ in (*CASTS, "clone") or _scales(noted, self._weights)):
            self._weights |= made
        else:
            self._weights -= made

    # --- casts -----------------------------------------------------------------------------------------------------------------

    def _cast(self, noted: Noted, op: str, phase: Phase) -> Cast | None:
        if op not in CASTS or not noted.ins or not noted.outs:
            return None
        source, target = noted.ins[1] if op.startswith("copy") and len(noted.ins) > 1 else noted.ins[0], noted.outs[0]
        if source[1] == target[1] or not (source[1].is_floating_point and target[1].is_floating_point):
            return None
        weight = source[0] in self._weights or target[0] in self._parameters
        of: Literal["weight", "activation", "gradient"] = (
            "weight" if weight else "gradient" if phase in _BOTH else "activation"
        )
        return Cast(format_name(source[1]), format_name(target[1]), of, (source[0], noted.region))


@dataclass
class _Origin:
    """The origin of a value: the cast that gave it its format."""

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

    def follow(self, seen: TracedOperation) -> None:
        """Record the origin of an operation's results."""
        noted, backward = seen.noted, seen.phase in _BOTH
        promoted = [self._promoted[m[0]] for m in noted.ins if m[0] in self._promoted]
        origins = [self._origins[m[0]] for m in noted.ins if m[0] in self._origins]
        kept: dict[int, _Origin] = {}
        if seen.cast is not None:
            kept = self._follow_cast(seen, seen.cast, origins, backward=backward)
        elif seen.product is None and noted.outs:
            kept = self._passed_on(seen, origins, backward=backward)
        promoted_in = next(iter(promoted), "")
        seen.promotes = seen.product is None and seen.cast is None and not backward and _mixes(noted)
        self.forget(noted)
        self._origins.update(kept)
        if seen.product is not None:
            seen.promoted_in = promoted_in
        elif (seen.promotes or promoted_in) and noted.outs and noted.outs[0][1].itemsize == 4:
            self._promoted[noted.outs[0][0]] = promoted_in or seen.module

    def forget(self, noted: Noted) -> None:
        """Discard what is known about the memory that an operation writes: it has a new value."""
        for meta in noted.outs:
            self._origins.pop(meta[0], None)
            self._promoted.pop(meta[0], None)

    def _follow_cast(
        self, seen: TracedOperation, cast: Cast, origins: list[_Origin], *, backward: bool
    ) -> dict[int, _Origin]:
        earlier = next((c for c in origins if c.source == cast.target and c.backward == backward), None)
        if earlier is not None:
            cast.back_to, cast.needless = earlier.cast, not earlier.needed
        elif cast.of != "weight":
            # Only the script's own casts can be dropped; a backward pass casts because its forward pass did.
            needed = backward or seen.noted.by_policy
            return {seen.noted.outs[0][0]: _Origin(cast.source, cast.target, seen, backward, needed)}
        return {}

    def _passed_on(self, seen: TracedOperation, origins: list[_Origin], *, backward: bool) -> dict[int, _Origin]:
        first = seen.noted.outs[0]
        made = format_name(first[1])
        earlier = next((c for c in origins if c.format == made and c.backward == backward), None)
        if earlier is None or not self._alone(seen.noted, earlier.cast):
            return {}
        needed = earlier.needed or listed_precision(seen.op) in ("fp32", "widest")
        return {first[0]: _Origin(earlier.source, made, earlier.cast, backward, needed)}

    def _alone(self, noted: Noted, cast: TracedOperation) -> bool:
        """Return whether all values that an operation reads, other than parameters, come from one cast."""
        others = (m for m in _floats(noted) if m[0] not in self._parameters)
        return all(m[0] in self._origins and self._origins[m[0]].cast is cast for m in others)


_BOTH: tuple[Phase, Phase] = ("dgrad", "wgrad")
_SCALING, _ONE_NUMBER_BYTES = ("mul", "div", "clamp"), 8
_FP8 = tuple(f.name for pair in FP8_PAIRS.values() for f in pair)


def _to_parameters(operations: list[Noted]) -> set[int]:
    """Return the indices of the operations of backward passes whose first result becomes a parameter's gradient.

    The trace is read backwards, from the values added to gradients to the operations that made them, through casts and copies.
    """
    gradients: set[int] = set()
    found: set[int] = set()
    for index in range(len(operations) - 1, -1, -1):
        noted = operations[index]
        if noted.node is None:
            continue
        if noted.node.number == LAST_NUMBER:
            gradients.update(meta[0] for meta in (*noted.ins, *noted.outs))
            found.add(index)
        elif noted.outs and noted.outs[0][0] in gradients:
            found.add(index)
            gradients.discard(noted.outs[0][0])
            if noted.func.overloadpacket.__name__ in (*CASTS, "clone"):
                gradients.update(meta[0] for meta in noted.ins)
    return found


def _scales(noted: Noted, weights: set[int]) -> bool:
    """Return whether an operation multiplies a weight by one number or clamps it, as FP8 does before it casts."""
    return (
        noted.func.overloadpacket.__name__ in _SCALING
        and noted.ins[0][0] in weights
        and all(size <= _ONE_NUMBER_BYTES for _, _, size in noted.ins[1:])
    )


def _dtypes(metas: list[Meta]) -> tuple[str, ...]:
    """Return the formats, each once: lists of tensors repeat the same ones."""
    return tuple(dict.fromkeys(format_name(meta[1]) for meta in metas))


def _floats(noted: Noted) -> list[Meta]:
    return [m for m in noted.ins if m[1].is_floating_point and m[2] > m[1].itemsize]


def _mixes(noted: Noted) -> bool:
    """Return whether 16-bit and FP32 tensors produce an FP32 one; numbers and tensors of one number promote nothing."""
    sizes = {m[1].itemsize for m in _floats(noted)}
    out = noted.outs[0][1] if noted.outs else torch.bool
    return sizes >= {2, 4} and out.is_floating_point and out.itemsize == 4


def weights_of(roots: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the storages of the parameters of modules and optimizers."""
    return {storage_of(p) for p in all_parameters(roots, optimizers)}
