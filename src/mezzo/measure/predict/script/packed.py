"""Pack sequences without numbers: every sequence is assumed to be as long as the padded batch.

The lengths are numbers, so a packed batch has as many rows as its padded one, and a recurrent layer gets the padded batch.
So memory is an upper bound and throughput a lower bound; the record says so, and names the lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


@contextmanager
def longest_sequences(on_pack: Callable[[], None]) -> Iterator[None]:
    """Let packed sequences be of the largest size for the block; ``on_pack`` is called for each that is packed."""

    def pack(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        on_pack()
        steps_first = padded.transpose(0, 1) if batch_first else padded
        steps = steps_first.shape[0]
        return steps_first.reshape(-1, *padded.shape[2:]), torch.empty(steps, dtype=torch.int64)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch._VF, "_pack_padded_sequence", pack, create=True))
        stack.enter_context(patch.object(torch._VF, "_pad_packed_sequence", _pad, create=True))
        for kind in (nn.RNN, nn.LSTM, nn.GRU):
            stack.enter_context(patch.object(kind, "forward", _of_padded(kind.forward)))
        yield


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    steps_first = data.reshape(batch_sizes.shape[0], -1, *data.shape[1:])
    steps, batch = steps_first.shape[:2]
    if total_length > steps:
        rest = steps_first.new_full((total_length - steps, *steps_first.shape[1:]), padding_value)
        steps_first = torch.cat([steps_first, rest])
    padded = steps_first.transpose(0, 1) if batch_first else steps_first
    return padded.contiguous(), torch.empty(batch, dtype=torch.int64)


def _of_padded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's ``forward`` that computes a packed sequence as a padded batch."""

    def forward(layer: Any, input: Any, hx: Any = None) -> Any:
        if not isinstance(input, PackedSequence):
            return original(layer, input, hx)
        data, batch_sizes, order, back = input
        padded = data.reshape(batch_sizes.shape[0], -1, *data.shape[1:])
        if hx is not None:
            hx = layer.permute_hidden(hx, order)
        out, hidden = original(layer, padded.transpose(0, 1) if layer.batch_first else padded, hx)
        if layer.batch_first:
            out = out.transpose(0, 1)
        flat = out.reshape(-1, *out.shape[2:])
        return PackedSequence(flat, batch_sizes, order, back), layer.permute_hidden(hidden, back)

    return forward
