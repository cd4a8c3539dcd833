"""Recurrent layers as cuDNN computes them, in every format alike, while a step is recorded.

A CPU has one kernel for a layer in FP32 and a dozen operations for each position in FP16, so a tape of either says nothing about a GPU, nor
about one format against the other. cuDNN multiplies the inputs of all positions at once; then each position takes a product with the last
state and a kernel for the gates. The gradients of the weights are again one product each. Only shapes matter here: there are no numbers.

Limit: cuDNN starts its kernels faster than torch does, and keeps a small layer in one kernel. No measured rows validate it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
