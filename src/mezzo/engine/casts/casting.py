"""Apply a policy to the operations of a region of code.

``torch.autocast`` is two things: a state (on or off, in which dtype; nestable, kept by activation checkpointing for
its recompute, guarded by torch.compile) and an implementation (C++ kernels with one fixed list per device). The state
remains torch's. Where the policy differs from torch's kernels, our kernels replace them while the region is
open (``engine.casts.autocast_kernels``). So a nested ``torch.autocast(enabled=False)`` in a model works as always, and
``torch.is_autocast_enabled`` is right.

Three ways, chosen once by ``Casting.choose`` with its reason:

``kernels``  the policy equals the device's kernels: autocast's state and torch's kernels, none of ours
``overlay``  torch's kernels, and ours for the operations that the policy changes
``table``    only ours: portable lists on a device with other lists, or emulated arithmetic
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from mezzo import cuda_kernels, oplists
from mezzo.cuda_kernels import Missing
from mezzo.devices import Device, this_device
from mezzo.engine.casts.autocast_kernels import AutocastRegion, CastRule, CastTable
from mezzo.engine.casts.conversion import HALF
from mezzo.engine.casts.registration import Operator, find_op
from mezzo.engine.matrix_units.emulation import DTYPES, PRIMITIVES, Emulation, emulation, fft
from mezzo.engine.matrix_units.emulation_nodes import general
from mezzo.engine.matrix_units.refusals import note_bf16, refusal
from mezzo.explain import Choice
from mezzo.formats import BF16, FORMATS, FP16
from mezzo.policy import Policy
from mezzo.policyfields import recipe_of

CastingWay = Literal["none", "kernels", "overlay", "table"]


class Casting:
    """A policy applied on one kind of device; ``region()`` is the context in which a forward pass runs."""

    def __init__(self, policy: Policy, device: Device, *, stands_for_cuda: bool | None = None) -> None:
        """Choose how to apply the policy.

        Args:
            policy: the policy.
            device: the device.
            stands_for_cuda: whether to refuse what CUDA refuses; None if only where the arithmetic is emulated.
        """
        self.policy = policy
        self.device_type = device.kind
        self._dtype = policy.storage.dtype
        self.arithmetic, _ = policy.arithmetic_on(device)
        self._stands_for_cuda = self.emulates if stands_for_cuda is None else stands_for_cuda
        self.way, reason = self.choose()
        self.choice = Choice(what="casting", value=self.way, reason=reason)
        self.table = None if self.way in ("none", "kernels") else self._table()

    @classmethod
    def of(cls, policy: Policy, device_type: str, *, stands_for_cuda: bool | None = None) -> Casting:
        """Return the casting of ``policy`` on this machine's device of torch type ``device_type``."""
        return cls(policy, this_device(device_type), stands_for_cuda=stands_for_cuda)

    @property
    def emulates(self) -> bool:
        """Whether 16-bit or 8-bit arithmetic is emulated, so that times say nothing about a device that has it."""
        return self.arithmetic == "emulated"

    def choose(self) -> tuple[CastingWay, str]:
        """Return how the policy is applied, and why."""
        policy = self.policy
        if not policy.lowers:
            return "none", "the policy casts nothing"
        if self.emulates:
            return "table", "emulated arithmetic replaces the device's kernels"
        if policy.casting == "model":
            if self._stands_for_cuda and self.device_type != "cuda":
                return "table", "weights and inputs are cast; operations refuse what CUDA refuses"
            return "none", "weights and inputs are cast; operations run in their operands' format"
        if policy.op_lists == "device":
            if policy.lower or policy.fp32 or policy.widest:
                return "overlay", "the device's lists, changed by the policy's own"
            return "kernels", "the policy asks for the device's own lists"
        if self.device_type != "cuda":
            return "table", f"torch's lists for {self.device_type} differ from the portable ones"
        if policy.lower or policy.fp32 or policy.widest:
            return "overlay", "CUDA's kernels follow the portable lists, changed by the policy's own"
        return "kernels", "CUDA's kernels follow the portable lists"

    def _table(self) -> CastTable:
        overlay = self.way == "overlay"
        rules = rules_for(self.policy, emulate=self.emulates, overlay=overlay)
        if not overlay and self.device_type != "cuda":
            low = self.policy.storage.name
            for op, gap in gaps(low=low, refuse=self._stands_for_cuda, emulate=self.emulates).items():
                listed = rules.get(op)
                if listed is None:
                    rules[op] = gap
                elif listed.precision == "lower" and listed.emulation is None:
                    rules[op] = replace(listed, emulation=gap.emulation)
        return CastTable(
            rules,
            device_type=self.device_type,
            low=self.policy.storage,
            casts_operands=self.policy.casting == "ops",
            keeps_kernels=overlay,
        )

    def region(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass under the policy; regions nest."""
        if self.way == "none":
            return nullcontext()
        if self.table is None and torch.compiler.is_dynamo_compiling():
            return torch.autocast(self.device_type, dtype=self._dtype)  # Dynamo traces this context and not ours
        return AutocastRegion(self.table, self.device_type, self._dtype, enabled=True)

    def backward(self) -> AbstractContextManager[None]:
        """Return the context of a backward pass, in which activation checkpointing recomputes under the policy.

        Autocast itself is off, as torch requires for backward passes; checkpointing turns it on around each recompute.
        """
        if self.table is None:
            return nullcontext()
        return AutocastRegion(self.table, self.device_type, self._dtype, enabled=False)


def rules_for(policy: Policy, *, emulate: bool, overlay: bool) -> dict[Operator, CastRule]:
    """Return the rules of the operations that the policy's lists name and this torch has.

    Args:
        policy: its lists, and whether it computes every linear operation in FP8.
        emulate: whether the lower-precision operations are emulated.
        overlay: whether only the operations that the policy itself names get rules; torch's kernels cast the rest.
    """
    chosen = oplists.assign(policy.lower, policy.fp32, policy.widest)
    recipe = recipe_of(policy)
    by_operation = recipe if recipe is not None and not recipe.by_layer else None
    rules: dict[Operator, CastRule] = {}
    for family in oplists.FAMILIES:
        for name in family.ops:
            precision, op = chosen[name], find_op(name)
            if op is None:
                continue
            if precision == "follow":
                continue
            if overlay and precision == family.precision:
                continue
            if policy.casting == "model" and precision != "lower":
                continue
            rule = CastRule(precision)
            if emulate and precision == "lower" and family.precision == "lower":
                base = name.split(".")[0]
                low, accumulate = policy.storage.name, policy.accumulate
                run = emulation(op, base, low=low, family=family.name, recipe=by_operation, accumulate=accumulate)
                rule = replace(rule, emulation=run, keeps_weight=by_operation is not None and base == "linear")
            rules[op] = rule
    return rules


# A policy that is emulated on a CPU stands for a GPU. What CUDA refuses is refused, in torch's words. What CUDA computes and the CPU does
# not is computed in FP32 and rounded, forward and backward. The rules are for operands in 16 bits only: where the op lists ask for FP32,
# there are none.
def gaps(*, low: str, refuse: bool, emulate: bool) -> dict[Operator, CastRule]:
    """Return the rules of all such operations that this torch has.

    Args:
        low: name of the policy's 16-bit format.
        refuse: whether to refuse what CUDA refuses.
        emulate: whether to emulate what only CUDA computes; Fourier transforms always are.
    """
    rules = {}
    for name in (*oplists.BY_NAME["fft"].ops, *PRIMITIVES):
        op = find_op(name)
        if op is not None:
            rules[op] = _rule(name, FP16.name, fft(op, name, refuses=refuse), DTYPES)
    for name, words in _missing().items() if refuse else ():
        for op in _overloads(name, f"{name}_"):
            rules[op] = _rule(name, low, _refusing(op, words), {*words, FP16.dtype})
    for name in cuda_kernels.CPU_LACKS if emulate else ():  # other overloads call these
        draws = name in cuda_kernels.DRAWS
        for op, run in (
            (find_op(name), _emulated(name, draws=draws)),
            (find_op(f"{name}_"), _emulated_in_place(name, draws=draws)),
        ):
            if op is not None:
                rules[op] = _rule(name, low, run, HALF)
    return rules


def _rule(name: str, low: str, run: Operator, dtypes: Iterable[torch.dtype]) -> CastRule:
    return CastRule("follow", Emulation(name=name, format=low, run=run), dtypes=frozenset(dtypes))


def _missing() -> dict[str, dict[torch.dtype, Missing]]:
    """Return the rows of ``cuda_kernels.MISSING_KERNELS`` by operation and dtype."""
    found: dict[str, dict[torch.dtype, Missing]] = {}
    for row in cuda_kernels.MISSING_KERNELS:
        found.setdefault(row.op, {}).update({FORMATS[name].dtype: row for name in row.formats})
    return found


def _overloads(*names: str) -> Iterator[Operator]:
    """Yield all overloads of operations that take a tensor, of those that this torch has."""
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        for overload in () if packet is None else packet.overloads():
            op = getattr(packet, overload)
            if any("Tensor" in str(argument.type) for argument in op._schema.arguments):
                yield op


def _refusing(op: Operator, words: dict[torch.dtype, Missing]) -> Operator:
    def run(*args: Any, **kwargs: Any) -> Any:
        operands = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dtype in words and t.numel()]
        if not operands:  # CUDA runs no kernel on tensors without elements
            if BF16.dtype in words:
                _note_bf16(words[BF16.dtype], args, kwargs)
            return op(*args, **kwargs)
        row = words[operands[0].dtype]
        if row.backward_of is None:
            raise refusal(row.words, operands[0])
        result = op(*args, **kwargs)
        operand = args[row.backward_of] if len(args) > row.backward_of else None
        if isinstance(operand, Tensor) and operand.requires_grad:
            _refuse_gradient(result[0] if isinstance(result, tuple) else result, refusal(row.words, operand))
        return result

    return run


def _note_bf16(row: Missing, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Note an operation on FP16, for which CUDA has a kernel, unlike for BF16."""
    operands = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dtype is FP16.dtype and t.numel()]
    if row.backward_of is not None:
        operands = [t for t in args[row.backward_of : row.backward_of + 1] if isinstance(t, Tensor) and t.requires_grad]
    if operands:
        note_bf16(row.words, operands[0])


def _refuse_gradient(result: Tensor, error: Exception) -> None:
    def refuse(_: Tensor) -> None:
        raise error

    if result.requires_grad:
        result.register_hook(refuse)


def _emulated(name: str, *, draws: bool) -> Operator:
    op = find_op(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dtype") is not None:  # of the result, by the author's own choice
            return op(*args, **kwargs)
        return general(op, *args, draws=draws, **kwargs)

    return run


def _emulated_in_place(name: str, *, draws: bool) -> Operator:
    op = find_op(name)

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(general(op, x, *args, draws=draws, **kwargs))

    return run
