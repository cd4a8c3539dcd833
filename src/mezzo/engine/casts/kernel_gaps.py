"""Rules for operations whose 16-bit kernels differ between CUDA and a CPU, by the lists of ``cuda_kernels``.

A policy that is emulated on a CPU stands for a GPU. What CUDA refuses is refused, in torch's words. What CUDA computes and the CPU does
not is computed in FP32 and rounded, forward and backward. The rules are for operands in 16 bits only: where the op lists ask for FP32,
there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo import cuda_kernels, oplists
from mezzo.cuda_kernels import Missing
from mezzo.engine.casts.autocast_kernels import CastRule
from mezzo.engine.casts.half import HALF
from mezzo.engine.casts.registration import Op, find_op
from mezzo.engine.matrix_units.emulation import Emulation
from mezzo.engine.matrix_units.emulation_fourier import DTYPES, PRIMITIVES, fft
from mezzo.engine.matrix_units.emulation_nodes import general
from mezzo.engine.matrix_units.refusals import note_bf16, refusal
from mezzo.formats import BF16, FORMATS, FP16


def gaps(*, low: str, refuse: bool, emulate: bool) -> dict[Op, CastRule]:
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


def _rule(name: str, low: str, run: Op, dtypes: Iterable[torch.dtype]) -> CastRule:
    return CastRule("follow", Emulation(name=name, format=low, run=run), dtypes=frozenset(dtypes))


def _missing() -> dict[str, dict[torch.dtype, Missing]]:
    """Return the rows of ``cuda_kernels.MISSING`` by operation and dtype."""
    found: dict[str, dict[torch.dtype, Missing]] = {}
    for row in cuda_kernels.MISSING:
        found.setdefault(row.op, {}).update({FORMATS[name].dtype: row for name in row.formats})
    return found


def _overloads(*names: str) -> Iterator[Op]:
    """Yield all overloads of operations that take a tensor, of those that this torch has."""
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        for overload in () if packet is None else packet.overloads():
            op = getattr(packet, overload)
            if any("Tensor" in str(argument.type) for argument in op._schema.arguments):
                yield op


def _refusing(op: Op, words: dict[torch.dtype, Missing]) -> Op:
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


def _emulated(name: str, *, draws: bool) -> Op:
    op = find_op(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dtype") is not None:  # of the result, by the author's own choice
            return op(*args, **kwargs)
        return general(op, *args, draws=draws, **kwargs)

    return run


def _emulated_in_place(name: str, *, draws: bool) -> Op:
    op = find_op(name)

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(general(op, x, *args, draws=draws, **kwargs))

    return run
