"""Count the floating-point operations that really ran, by the format of their operands.

A dispatch mode sees every operation below autograd and autocast: what reaches it is what the device computes. It counts
matrix products, convolutions and attention, forward and backward, at two operations (multiply and add) per product::

    (m, k) x (k, n)                                    2 m k n
    convolution, weight (out, in / groups, *kernel)    2 * batch * out * in / groups * kernel * positions
    its gradients                                      the same for the input, the same for the weight
    recurrent layer                                    2 per weight and position; backward the same for each of the two
    attention, lengths L and S, widths E and V         2 L S E + 2 L S V per head; backward 2.5 times that
    bilinear form, distances (cdist)                   2 per term of the sum
    sparse matrix with n entries, times k columns      2 n k

A convolution's positions are its output's, a transposed convolution's are its input's. torch 2.13's own counter leaves
``groups`` out of the backward count, which makes a depthwise convolution 65 times too expensive. Causal attention is
counted in full.

What an emulated operation multiplies in FP32 counts for the format that it emulates. What it recomputes for its backward pass
does not count, because the emulated device would not recompute it. Operations inside compiled kernels are not seen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mezzo.engine.casts.autocast_kernels import is_off_inside
from mezzo.engine.matrix_units.accumulation import OPERATION
from mezzo.engine.matrix_units.emulation import Emulation, running
from mezzo.engine.matrix_units.emulation_nodes import is_recomputed, stands_for
from mezzo.engine.matrix_units.native_units import runs_in_tf32
from mezzo.formats import E4M3, FORMATS, FP8_PAIRS, FP32, FP64, TF32
from mezzo.policy import Policy
from mezzo.records import Effective, Note

CountFlops: TypeAlias = Callable[..., int]
_FP8_DTYPES = frozenset(fmt.dtype for pair in FP8_PAIRS.values() for fmt in pair)
_NAMES = {fmt.dtype: fmt.name for fmt in FORMATS.values() if fmt is not TF32}
_FP32_BYTES = FP32.dtype.itemsize
_WIDE = frozenset((FP32.name, TF32.name, FP64.name, "complex64", "complex128"))
aten: Any = torch.ops.aten


class FlopCounter(TorchDispatchMode):
    """A dispatch mode that counts operations by format."""

    def __init__(
        self,
        *,
        in_region: Callable[[], bool],
        in_step: Callable[[], bool] = lambda: False,
        inside: Callable[[], Any] = lambda: None,
    ) -> None:
        """Start at zero.

        Args:
            in_region: returns whether the running code is under a policy.
            in_step: returns whether an optimizer is making its step.
            inside: returns the autograd node that is running a backward pass of its own, if any.
        """
        super().__init__()
        self.by_format: Counter[str] = Counter()
        self.outside_region = 0
        """FLOPs of forward code outside every region, in FP32 or wider."""
        self.switched_off = 0
        """FLOPs of forward code inside a region in which autocast had been turned off again."""
        self.in_updates: Counter[str] = Counter()
        """FLOPs of optimizers' own products (Muon's), by format; ``by_format`` includes them."""
        self.num_lowered = 0
        """Operations, products or not, that read or wrote numbers below 32 bits."""
        self._in_region, self._in_step, self._formats = in_region, in_step, OperandFormats(inside=inside)

    def add_lowered(self, count: int) -> None:
        """Add operations that were counted when their code was compiled."""
        self.num_lowered += count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and count it."""
        result = func(*args, **(kwargs or {}))
        self.count(func, args, result)
        return result

    def count(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Count one operation with these arguments and result, which may be fake tensors."""
        self.num_lowered += any(map(is_narrow, tree_leaves((args, result))))
        count = FLOP_COUNTS.get(func.overloadpacket)
        if count is not None and not self._formats.is_recomputation():
            flops = count(result, *args) * num_real_products(args)
            form = self._formats.of(args, op=func.overloadpacket.__name__)
            self.by_format[form] += flops
            if self._in_step():
                self.in_updates[form] += flops
            elif form in _WIDE and torch._C._current_autograd_node() is None:
                if not self._in_region():
                    self.outside_region += flops
                elif is_off_inside():
                    self.switched_off += flops

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow torch.compile under this mode."""
        return True


class OperandFormats:
    """The formats of running operations: the one an operation computes in, or the one it emulates."""

    def __init__(self, *, inside: Callable[[], Any] = lambda: None) -> None:
        """Create the formats; ``inside`` returns the graph node that is running a backward pass of its own."""
        self._inside = inside

    def of(self, args: Sequence[Any], *, op: str) -> str:
        """Return the name of the format of the operation ``op`` (aten's name) with these operands."""
        emulates = self.emulated()
        if emulates is not None:
            return emulates
        operand = _operand(args)
        if _is_8_bit(operand):
            return E4M3.name
        name = _NAMES.get(operand.dtype)
        if name == FP32.name and runs_in_tf32(op, operand):
            return TF32.name
        return name or str(operand.dtype).removeprefix("torch.")

    def is_recomputation(self) -> bool:
        """Return whether the running operation is a recomputation, which the emulated device would not need."""
        if not Emulation.ran:
            return False
        node = torch._C._current_autograd_node()
        return is_recomputed(node) and self._inside() is None

    def recomputing(self) -> Any:
        """Return the emulated operation's graph node, if its backward pass is running a graph of its own; else None."""
        node = self._inside() if Emulation.ran else None
        return node if is_recomputed(node) else None

    def emulated(self) -> str | None:
        """Return the format that the running operation emulates, or None."""
        if not Emulation.ran:
            return None
        found = stands_for(self._inside() or torch._C._current_autograd_node())
        if found is not None:
            return found
        emulation = running()
        return None if emulation is None else emulation.format


def is_narrow(value: Any) -> bool:
    """Return whether a value is a tensor of floating-point numbers below 32 bits."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < _FP32_BYTES


def lowered(by_format: Mapping[str, int]) -> bool:
    """Return whether any counted operation ran below 32 bits."""
    return any(name not in _WIDE for name in by_format)


def num_real_products(args: Sequence[Any]) -> int:
    """Return the number of real products in one product of these operands: 4 for complex numbers."""
    return 4 if _operand(args).is_complex() else 1


def _operand(args: Sequence[Any]) -> Tensor:
    flat = [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, Tensor)]
    return next((t for t in flat if t.is_floating_point() or t.is_complex()), flat[0])


def _is_8_bit(operand: Tensor) -> bool:
    # torchao's operands report BF16 and store 8-bit values: E4M3, or E5M2 for gradients, which count as E4M3 here as they do
    # under emulation.
    data = getattr(operand, "_data", None)
    return isinstance(data, Tensor) and data.dtype in _FP8_DTYPES


def _matmul(result: Tensor, a: Tensor, b: Tensor, *_: Any) -> int:
    if a.layout is not torch.strided and b.layout is not torch.strided:
        return _sparse_product(result, a, b)
    if a.layout is not torch.strided:
        return int(2 * a._nnz() * (b.shape[-1] if b.dim() > 1 else 1))
    if b.layout is not torch.strided:
        return int(2 * b._nnz() * a.shape[-2])
    flops: int = 2 * result.numel() * a.shape[-1]
    return flops


def _addmm(result: Tensor, _bias: Tensor, a: Tensor, b: Tensor, *rest: Any) -> int:
    return _matmul(result, a, b)


def _addbmm(result: Tensor, _bias: Tensor, a: Tensor, b: Tensor, *_: Any) -> int:
    return 2 * a.numel() * b.shape[-1]  # one result, summed over the batch


def _dot(result: Tensor, a: Tensor, b: Tensor, *_: Any) -> int:
    return 2 * a.numel()


def _outer(result: Tensor, *_: Any) -> int:
    return 2 * result.numel()


def _grouped(result: Tensor, a: Tensor, b: Tensor, *_: Any) -> int:
    if a.dim() == b.dim() == 2:  # groups along the summed dimension: one product each, over a part of it
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    return 2 * result.numel() * a.shape[-1]


def _sparse_product(result: Tensor, a: Tensor, b: Tensor, *_: Any) -> int:
    columns, rows = (t.to_sparse_coo().coalesce().indices()[i] for t, i in ((a, 1), (b, 0)))
    counts = [torch.bincount(index, minlength=a.shape[1]) for index in (columns, rows)]
    return 2 * int((counts[0] * counts[1]).sum())


def _trilinear(
    result: Tensor, a: Tensor, b: Tensor, c: Tensor, expand_a: Any, expand_b: Any, expand_c: Any, *_: Any
) -> int:
    def expanded(tensor: Tensor, new_dims: Sequence[int]) -> list[int]:
        sizes = iter(tensor.shape)
        return [1 if d in new_dims else next(sizes) for d in range(tensor.dim() + len(new_dims))]

    shapes = [expanded(t, new_dims) for t, new_dims in ((a, expand_a), (b, expand_b), (c, expand_c))]
    return 2 * int(math.prod(max(sizes) for sizes in zip(*shapes, strict=True)))


def _distances(result: Tensor, a: Tensor, b: Tensor, *_: Any) -> int:
    return int(2 * math.prod(a.shape[:-2]) * a.shape[-2] * b.shape[-2] * a.shape[-1])


def _distances_backward(result: Tensor, grad: Tensor, a: Tensor, b: Tensor, *_: Any) -> int:
    return _distances(result, a, b)


def _convolution(
    result: Tensor, x: Tensor, weight: Tensor, _bias: Any, _s: Any, _p: Any, _d: Any, transposed: bool, *_: Any
) -> int:
    return _convolved(x.shape, weight.shape, result.shape, transposed)


def _convolved(x: Sequence[int], weight: Sequence[int], y: Sequence[int], transposed: bool) -> int:
    # Every element of the weight is used at every position, once per batch entry; the weight's shape already accounts for groups.
    positions = math.prod((x if transposed else y)[2:])
    return 2 * x[0] * math.prod(weight) * positions


def _convolution_backward(
    result: Sequence[Tensor | None], grad: Tensor, x: Tensor, weight: Tensor, _b: Any, *settings: Any
) -> int:
    transposed, mask = settings[3], settings[-1]
    return int(sum(mask[:2])) * _convolved(x.shape, weight.shape, grad.shape, transposed)


def _recurrent(result: Any, x: Tensor, *rest: Any) -> int:
    # Every matrix is used once per position: cuDNN takes a list of weights, oneDNN two matrices and two biases.
    weights = rest[0] if isinstance(rest[0], (list, tuple)) else rest[:2]
    positions = math.prod(x.shape[:-1])
    return 2 * positions * int(sum(w.numel() for w in weights if w.dim() == 2))


def _recurrent_backward(result: Any, *args: Any) -> int:
    return 2 * _recurrent(result, *args)


def _attention(result: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    heads = math.prod(q.shape[:-2])
    return 2 * heads * q.shape[-2] * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(result: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    # Five products like the forward pass's two: the recomputed scores, and the gradients of v, the probabilities, q and k.
    return _attention(result, q, k, v) * 5 // 2


FLOP_COUNTS: dict[Any, CountFlops] = {
    aten.mm: _matmul,
    OPERATION: _matmul,
    aten.bmm: _matmul,
    aten.addmm: _addmm,
    aten.baddbmm: _addmm,
    aten.addbmm: _addbmm,
    aten.mv: _matmul,
    aten.addmv: _addmm,
    aten.dot: _dot,
    aten.vdot: _dot,
    aten.addr: _outer,
    aten._trilinear: _trilinear,
    aten._cdist_forward: _distances,
    aten._cdist_backward: _distances_backward,
    aten._euclidean_dist: _distances,
    aten._sparse_addmm: _addmm,
    aten._sparse_sparse_matmul: _sparse_product,
    aten._scaled_mm: _matmul,
    aten._int_mm: _matmul,
    aten._grouped_mm: _grouped,
    aten._scaled_grouped_mm: _grouped,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    aten._cudnn_rnn: _recurrent,
    aten._cudnn_rnn_backward: _recurrent_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_cudnn_attention: _attention,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
}
"""The FLOP formula of each operation, from its result and its arguments."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Counts over one step, or over several."""

    by_format: Mapping[str, int] = field(default_factory=dict)
    """FLOPs of all products."""
    num_lowered: int | None = None
    """Operations, products or not, that read or wrote numbers below 32 bits; None if they were not counted."""
    outside: int = 0
    """FLOPs of forward code outside modules, autocast regions and compiled functions."""
    switched_off: int = 0
    """FLOPs of forward code inside those, where autocast was turned off again."""
    step: int | None = None
    """The first counted step."""
    uncounted: Mapping[str, str] = field(default_factory=dict)
    """Why FLOPs are missing from ``by_format``, by the operation's name."""
    in_updates: Mapping[str, int] = field(default_factory=dict)
    """FLOPs of optimizers' own products, which ``by_format`` includes."""


def effective(counted: Counted, policy: Policy | None, *, emulates: bool, uncounted: Effective) -> Effective:
    """Return what ran in which format, and what was left alone.

    Args:
        counted: the counts.
        policy: the run's policy as applied; None for the script's own precision.
        emulates: whether the policy's formats are emulated.
        uncounted: what is known without the counts.
    """
    left = [*uncounted.left_alone, *(_not_lowered(counted, policy) if policy is not None and policy.lowers else [])]
    missing = sorted(counted.uncounted.items())
    left += [Note(what="FLOPs not counted", value=name, reason=why) for name, why in missing]
    rounds = emulates and (lowered(counted.by_format) or (not counted.by_format and counted.num_lowered != 0))
    counts: dict[str, object] = {
        "flops_by_format": dict(counted.by_format),
        "update_flops_by_format": dict(counted.in_updates),
        "emulated": rounds or (policy is not None and policy.changes_gradients),
        "num_lowered": counted.num_lowered,
        "counted_on_step": counted.step,
        "left_alone": left,
        "uncounted": [name for name, _ in missing],
    }
    return uncounted.model_copy(update=counts)


def _not_lowered(counted: Counted, policy: Policy) -> list[Note]:
    """Return what ran in FP32 because the policy was not in effect there, or had nothing to lower."""
    total, num_lowered = sum(counted.by_format.values()), counted.num_lowered
    reasons = []
    if not total and num_lowered == 0 and not counted.uncounted:
        why = f"no matrix product, convolution or other operation ran that {policy.name} lowers, so it costs and gains nothing"
        reasons.append(Note(what="nothing to lower", value="no products", reason=why))
    if counted.outside:
        why = (
            "forward code outside any module: only modules, autocast regions and compiled functions are switched. Call a "
            "model as model(x), not as model.forward(x); put other code into torch.autocast"
        )
        reasons.append(Note(what="FP32 code", value=_share(counted.outside, total), reason=why))
    if counted.switched_off and not (policy.fp32_modules and num_lowered):  # else the policy itself keeps it in FP32
        why = "the script or a library turns autocast off there, as by torch.autocast(enabled=False), and is not overruled"
        if policy.fp32_modules:
            why = f"the policy keeps modules in FP32 ({', '.join(policy.fp32_modules)}), and nothing else was left to lower"
        reasons.append(Note(what="FP32 inside modules", value=_share(counted.switched_off, total), reason=why))
    return reasons


def _share(flops: int, total: int) -> str:
    return f"{flops / total:.0%} of FLOPs and their backward pass"
