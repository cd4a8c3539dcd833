"""What one operation of a step computes and moves, from its arguments and its result: the rows of a tape.

A convolution's backward pass is two products, with their own shapes and bytes: the gradients of its input and of its weight.
Bytes count each operand read once and each result written once. An embedding reads the rows that it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.autograd.function import once_differentiable

from mezzo.engine.casts.conversion import HALF
from mezzo.formats import format_of
from mezzo.measure.flops import FLOP_COUNTS
from mezzo.measure.predict.tape import ATTENTION_ROWS, CostedOperation, ProductSize, TapePhase

aten: Any = torch.ops.aten
_FREE = frozenset(
    {
        aten.detach,
        aten.alias,
        aten.lift_fresh,
        aten._unsafe_view,
        aten.empty,
        aten.empty_like,
        aten.empty_strided,
        aten.new_empty,
        aten.new_empty_strided,
    }
)
"""Operations that compute nothing."""
_OVERWRITES = frozenset({aten.copy_, aten.zero_, aten.fill_})
"""Operations that do not read their first operand."""
_READS_WHAT_IT_WRITES = frozenset({aten.embedding, aten.index_select, aten.gather})
_LAYOUTS: dict[Any, tuple[int, ...]] = {
    aten.convolution: (0, 1),
    aten.native_batch_norm: (0,),
    aten._native_batch_norm_legit: (0,),
    aten.native_batch_norm_backward: (1,),
}
"""Operations whose time depends on the layout, with the places of the operands that decide it."""
_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
_ON_LISTS = ("_foreach_", "_fused_")
_CHUNK, _CHUNKS = 65536, 320
"""Elements of a chunk of an operation on lists, and the chunks of a kernel (torch's ``MultiTensorApply.cuh``)."""
_TENSORS = (110, 64, 48, 36, 30)
"""Tensors of each list in a kernel, by the number of lists."""
_LOADED_BYTES = 16
"""What a thread loads at once where the address allows it."""
_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)
_NORMS = {
    aten.native_batch_norm: 0,
    aten._native_batch_norm_legit: 0,
    aten.native_batch_norm_backward: 1,
}
"""Normalisations over the batch, with the place of their input."""


def operations_of(
    func: Any, args: Any, kwargs: Any, result: Any, phase: TapePhase, module: str, *, gpu: bool = True
) -> list[CostedOperation]:
    """Return what ``func`` computes, on a GPU or on a CPU; empty for an operation that computes nothing."""
    packet = func.overloadpacket
    if packet in _FREE or func.is_view or func.namespace == "prim":
        return []
    inputs = [*tensors_in(args), *tensors_in(list((kwargs or {}).values()))]
    outputs = tensors_in(result)
    counts_batches = packet is aten.add_ and phase == "forward"  # batch normalisation, on the device
    if all(t.dim() == 0 for t in (*inputs, *outputs)) and not counts_batches:
        return []
    form = _format(inputs or outputs)
    if packet is aten.convolution_backward:
        return _convolution_backward(args, result, form, phase, module)
    written = outputs or tensors_in(args[:1])  # a list operation in place
    read = inputs[1:] if packet in _OVERWRITES else inputs
    if packet in _READS_WHAT_IT_WRITES:
        read = [*inputs[1:], *outputs]
    count = FLOP_COUNTS.get(packet)
    bias = (
        packet is aten.convolution and gpu and args[2] is not None
    )  # on a GPU a kernel of its own adds it to the result
    found = CostedOperation(
        name=packet.__name__,
        phase=phase,
        module=module,
        format=form,
        flops=count(result, *args) if count is not None else 0,
        read_bytes=sum(map(_bytes, read)) - (_bytes(args[2]) if bias else 0),
        written_bytes=sum(map(_bytes, written)),
        shape=_shape(packet, args, result, kwargs),
        channels_last=packet in _LAYOUTS and _is_channels_last(args, _LAYOUTS[packet]),
        unaligned=packet in _PRODUCTS and any(map(_is_unaligned, (*inputs, *outputs))),
    )
    if packet.__name__.startswith(_ON_LISTS) and gpu:
        return [found, *[replace(found, read_bytes=0, written_bytes=0)] * (_num_kernels(args, result) - 1)]
    if not bias:
        return [found]
    return [found, CostedOperation("add_", phase, module, form, 0, found.written_bytes, found.written_bytes)]


def _num_kernels(args: Sequence[Any], result: Any) -> int:
    """Return how many kernels compute an operation on lists of tensors: each takes so many tensors, and so many chunks of them."""
    lists: list[Sequence[Tensor]] = [
        part for part in (*args, result) if isinstance(part, (list, tuple)) and part and isinstance(part[0], Tensor)
    ]
    chunks = sum(math.ceil(tensor.numel() / _CHUNK) for tensor in lists[0])
    most = _TENSORS[min(len(lists), len(_TENSORS)) - 1]
    return max(math.ceil(len(lists[0]) / most), math.ceil(chunks / _CHUNKS))


def _is_channels_last(args: Sequence[Any], places: Sequence[int]) -> bool:
    """Return whether cuDNN computes channels-last: one of the operands at ``places`` is stored so."""
    return any(suggest_memory_format(args[place]) in _CHANNELS_LAST for place in places)


def _is_unaligned(tensor: Tensor) -> bool:
    """Return whether a matrix has rows, as they lie in memory, that do not all begin at multiples of 16 bytes."""
    steps = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and step > 1]
    return tensor.dim() > 1 and any(step * tensor.element_size() % _LOADED_BYTES for step in steps)


def tensors_in(arguments: Any) -> list[Tensor]:
    """Return the tensors among an operation's arguments or results, in order; operations take no other collections than lists."""
    if isinstance(arguments, Tensor):
        return [arguments]
    if not isinstance(arguments, (list, tuple)):
        return []
    found: list[Tensor] = []
    for part in arguments:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (list, tuple)):
            found.extend(tensors_in(part))
    return found


def _convolution_backward(
    args: Sequence[Any], result: Sequence[Tensor | None], form: str, phase: TapePhase, module: str
) -> list[CostedOperation]:
    grad, x, weight, transposed, groups = args[0], args[1], args[2], args[7], args[9]
    forward = _convolved(x.shape, weight.shape, grad.shape, transposed, groups)
    flops = 2 * forward.products * forward.rows * forward.columns * forward.depth
    kinds = {
        # the input's gradient sums over output channels, the weight's over positions
        "convolution_input_gradient": (
            result[0],
            weight,
            ProductSize(
                forward.products,
                x.shape[0] * math.prod(x.shape[2:]),
                x.shape[1] // groups,
                forward.columns * math.prod(weight.shape[2:]),
                forward.window,
            ),
        ),
        "convolution_weight_gradient": (
            result[1],
            x,
            ProductSize(forward.products, forward.columns, forward.depth, forward.rows, forward.window),
        ),
    }
    found = []
    channels_last = _is_channels_last(args, (1, 2))
    for name, (gradient, operand, shape) in kinds.items():
        if gradient is not None:
            found.append(
                CostedOperation(
                    name=name,
                    phase=phase,
                    module=module,
                    format=form,
                    flops=flops,
                    read_bytes=_bytes(grad) + _bytes(operand),
                    written_bytes=_bytes(gradient),
                    shape=shape,
                    channels_last=channels_last,
                )
            )
    if len(result) > 2 and (bias := result[2]) is not None:
        found.append(CostedOperation("sum", phase, module, form, 0, _bytes(grad), _bytes(bias)))
    return found


def _shape(packet: Any, args: Any, result: Any, kwargs: Any) -> ProductSize:
    found = _SHAPES.get(packet)
    if found is not None:
        return found(args, result)
    if packet in _ATTENTIONS:
        return _attended(packet, args, kwargs or {})
    if packet in _NORMS:
        x = args[_NORMS[packet]]
        return ProductSize(1, x.shape[1], x.numel() // x.shape[1], 0)
    return ProductSize()


def _product(a: Tensor, b: Tensor) -> ProductSize:
    if a.dim() < 2 or b.dim() < 2:
        return ProductSize(1, a.shape[-2] if a.dim() > 1 else 1, b.shape[-1] if b.dim() > 1 else 1, a.shape[-1])
    return ProductSize(math.prod(a.shape[:-2]), a.shape[-2], b.shape[-1], a.shape[-1])


def _convolved(x: Sequence[int], weight: Sequence[int], y: Sequence[int], transposed: bool, groups: int) -> ProductSize:
    window = math.prod(weight[2:])
    if transposed:  # the gradient of a convolution from y to x
        rows = x[0] * math.prod(x[2:])
        return ProductSize(groups, rows, weight[1] * window, weight[0] // groups, window)
    return ProductSize(groups, y[0] * math.prod(y[2:]), weight[0] // groups, weight[1] * window, window)


def _attended(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProductSize:
    """Return the products of queries and keys; under a causal mask a block of queries sees about half of the keys."""
    query, causal = _ATTENTIONS[packet]
    q, k = args[query], args[query + 1]
    columns = k.shape[-2]
    if kwargs.get("is_causal", args[causal] if len(args) > causal else False):
        columns = (columns + min(columns, ATTENTION_ROWS)) // 2
    return ProductSize(math.prod(q.shape[:-2]), q.shape[-2], columns, q.shape[-1])


_ATTENTIONS: dict[Any, tuple[int, int]] = {
    aten._scaled_dot_product_flash_attention: (0, 4),
    aten._scaled_dot_product_flash_attention_backward: (1, 11),
    aten._scaled_dot_product_efficient_attention: (0, 6),
    aten._scaled_dot_product_efficient_attention_backward: (1, 11),
}
"""The place of the query among the arguments, before the key, and the place of ``is_causal``."""
_SHAPES: dict[Any, Callable[[Any, Any], ProductSize]] = {
    aten.mm: lambda a, _: _product(a[0], a[1]),
    aten.mv: lambda a, _: _product(a[0], a[1]),
    aten.bmm: lambda a, _: _product(a[0], a[1]),
    aten.addmm: lambda a, _: _product(a[1], a[2]),
    aten.baddbmm: lambda a, _: _product(a[1], a[2]),
    aten.convolution: lambda a, r: _convolved(a[0].shape, a[1].shape, r.shape, a[6], a[8]),
}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _format(tensors: list[Tensor]) -> str:
    operand = next((t for t in tensors if t.is_floating_point()), None)
    if operand is None:
        return "other"
    found = format_of(operand.dtype)
    return found.name if found is not None else "other"


# Operations that a GPU computes by other kernels than a CPU, replaced while a step is recorded: dropout, attention, recurrent layers.
#
# On a CPU dropout multiplies by a mask of floating-point numbers; a GPU saves a mask of booleans. Attention takes the path that
# keeps all scores on a CPU; a GPU uses flash attention in 16 bits, and the memory-efficient kernel in FP32. The functions of
# ``torch.nn.functional`` are replaced rather than caught by a mode, because activation checkpointing recomputes outside modes.

_FLASH_HEAD = 256
"""Largest head dimension of flash attention."""


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Replace the functions for the block."""
    originals = F.dropout, F.scaled_dot_product_attention
    F.dropout, F.scaled_dot_product_attention = dropout_as_cuda, _attention
    try:
        with recurrent_layers(_cast):
            yield
    finally:
        F.dropout, F.scaled_dot_product_attention = originals


def dropout_as_cuda(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop values as CUDA does, with a mask of booleans; in the place of ``torch.nn.functional.dropout``."""
    if not training or p == 0:
        return input
    result: Tensor = aten.native_dropout(input, p, True)[0]
    return result


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *settings: Any, enable_gqa: bool = False, **named: Any
) -> Tensor:
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        repeat = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeat, -3) for t in (key, value))
    return _attention_kernel(_cast(query, key, value), *settings, **named)


def _attention_kernel(
    operands: Sequence[Tensor],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Tensor:
    """Call the operator that CUDA chooses: FlashAttention in 16 bits without a mask, else the memory-efficient one."""
    query, key, value = operands
    scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    if attn_mask is None and query.dtype in HALF and query.shape[-1] <= _FLASH_HEAD:
        result: Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return result
    bias = None
    if attn_mask is not None:
        mask = attn_mask if attn_mask.dtype is not torch.bool else torch.zeros_like(attn_mask, dtype=query.dtype)
        bias = mask.expand(*query.shape[:-1], key.shape[-2])
    needs_sums = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    efficient: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_sums, dropout_p, is_causal, scale=scale
    )[0]
    return efficient


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    # Autocast's lists for CUDA put attention and recurrent layers in the lower precision; the operators called here are not on them.
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    return tuple(t.to(dtype) for t in tensors)


# A CPU has one kernel for a layer in FP32 and a dozen operations for each position in FP16, so a tape of either says nothing about a GPU,
# nor about one format against the other. cuDNN multiplies the inputs of all positions at once; then each position takes a product with
# the last state and a kernel for the gates. The gradients of the weights are again one product each. Only shapes matter here: there are
# no numbers.
#
# Limit: cuDNN starts its kernels faster than torch does, and keeps a small layer in one kernel. No measured rows validate it.

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@contextmanager
def recurrent_layers(cast: Callable[..., tuple[Tensor, ...]]) -> Iterator[None]:
    """Replace the functions behind ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` for the block; ``cast`` casts operands as autocast would."""
    with ExitStack() as stack:
        for name in _GATES:
            stack.enter_context(patch.object(torch._VF, name, _replaced(name, cast), create=True))
        yield


def _replaced(name: str, cast: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    original = getattr(torch._VF, name)

    def function(x: Tensor, state: Any, weights: Sequence[Tensor], *settings: Any) -> Any:
        has_biases, num_layers, dropout, training, bidirectional, *rest = settings
        states = state if isinstance(state, (list, tuple)) else [state]
        directions = num_layers * (2 if bidirectional else 1)
        each = 4 if has_biases else 2
        if not rest or len(weights) != each * directions:  # packed data, or projections
            return original(x, state, weights, *settings)
        x, *cast_states = cast(x, *states)
        parts = [cast(*weights[each * n : each * (n + 1)]) for n in range(directions)]
        out = x.transpose(0, 1) if rest[0] else x
        last: list[Tensor] = []
        for layer in range(num_layers):
            sides = []
            for n in range(layer * len(parts) // num_layers, (layer + 1) * len(parts) // num_layers):
                sides.append(_Direction.apply(out, cast_states[0][n], *parts[n]))
                last.append(sides[-1][-1])
            out = torch.cat(sides, -1) if len(sides) > 1 else sides[0]
            if training and dropout and layer < num_layers - 1:
                out = torch.nn.functional.dropout(out, dropout)
        finals = [torch.stack(last) for _ in states]
        return out.transpose(0, 1) if rest[0] else out, *finals

    return function


class _Direction(torch.autograd.Function):
    """One layer in one direction; positions come first."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, state: Tensor, input_weight: Tensor, state_weight: Tensor, *biases: Tensor
    ) -> Tensor:
        gates = _flat(x).mm(input_weight.t()) if not biases else torch.addmm(biases[0], _flat(x), input_weight.t())
        gates = gates.view(*x.shape[:2], -1)
        out = x.new_empty(*x.shape[:2], state_weight.shape[1])
        kept = [torch.empty_like(out)] if gates.shape[-1] == _GATES["lstm"] * out.shape[-1] else []  # an LSTM's cells
        for position in range(x.shape[0]):
            gates[position].add_(state.mm(state_weight.t()))
            state = out[position]
        ctx.save_for_backward(x, input_weight, state_weight, gates, out, *kept)
        ctx.num_biases = len(biases)
        return out

    @staticmethod
    @once_differentiable  # as cuDNN's
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, input_weight, state_weight, gates, out, *_ = ctx.saved_tensors
        gate_gradients = torch.empty_like(gates)
        state_gradient = gradient[-1]
        for position in reversed(range(x.shape[0])):
            gate_gradients[position].add_(gates[position])
            state_gradient = gate_gradients[position].mm(state_weight)
        flat = _flat(gate_gradients)
        input_gradient = flat.mm(input_weight).view(x.shape) if ctx.needs_input_grad[0] else None
        weight_gradients = (flat.t().mm(_flat(x)), flat.t().mm(_flat(out)))
        return input_gradient, state_gradient, *weight_gradients, *(flat.sum(0) for _ in range(ctx.num_biases))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
