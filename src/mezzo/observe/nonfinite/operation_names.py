"""Name an operation as torch's documentation does: ``softmax``, not ``_softmax``; ``conv2d``, not ``convolution``.

Operations in a dispatch mode have the dispatcher's names, and graph nodes those of their classes. Most of these differ from a public name
only by a prefix or a suffix; a table has the rest.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_PLACES = (torch, F, Tensor)
_NAMESPACES = ("linalg", "special", "fft")
_BEFORE = re.compile(
    r"^(native|cudnn|miopen|mkldnn|mps|foreach|fused|thnn|slow|nested|unsafe|amp|infinitely_differentiable|unique_dim)_"
)
_AFTER = re.compile(
    r"_(backward|forward|double|data|jvp|legit|no_training|functional|with_flatten|copy|dense|helper|impl|interface|kernel"
    r"|aa|cpu|math|overrideable|only|differentiable|cachemask|with_indices|consecutive|\dd_cpu_fallback)$"
)
_TABLE: tuple[tuple[str, str], ...] = (
    (r"to_copy|autocast_to_\w+|cast_[A-Z]\w+", "to"),
    (r"\w*(scaled_dot_product|flash|efficient|cudnn)\w*attention\w*", "scaled_dot_product_attention"),
    (r"(native|triton)_multi_head_attention", "multi_head_attention_forward"),
    (r"\w*lstm\w*", "lstm"),
    (r"\w*gru\w*", "gru"),
    (r"\w*upsample_\w+", "interpolate"),
    (r"(reflection_pad\dd|replication_pad\dd|constant_pad_nd|pad_circular|pad_enum)\w*", "pad"),
    (r"nll_loss\w*", "nll_loss"),
    (r"cross_entropy_loss", "cross_entropy"),
    (r"embedding_(dense|sparse)_backward", "embedding"),
    (r"embedding_bag\w*", "embedding_bag"),
    (r"(unsafe_)?(masked_)?(index|slice|select)(_backward)?", "__getitem__"),
    (r"(index_put_impl|unsafe_index_put|unsafe_masked_index_put_accumulate)_?", "index_put"),
    (r"\w*batch_norm\w*", "batch_norm"),
    (r"weight_norm\w*", "_weight_norm"),
    (r"(safe|masked)_softmax\w*", "softmax"),
    (r"log_sigmoid\w*", "logsigmoid"),
    (r"rrelu_with_noise\w*", "rrelu"),
    (r"grid_sampler_\w+", "grid_sample"),
    (r"euclidean_dist", "cdist"),
    (r"im2col", "unfold"),
    (r"col2im", "fold"),
    (r"fft_r2c", "fft.rfft"),
    (r"fft_c2r", "fft.irfft"),
    (r"fft_c2c", "fft.fft"),
    (r"(scaled_(grouped_)?mm|mkldnn_linear)\w*", "linear"),
    (r"value_selecting_reduction_backward|cummaxmin_backward", "max"),
    (r"foreach_powsum", "norm"),
    (r"trilinear", "bilinear"),
)
_CONVOLUTION = re.compile(r"\w*conv(olution)?(_|\d|$)\w*")
_RECURRENT = {"cudnn_rnn": 6, "miopen_rnn": 6, "mkldnn_rnn_layer": 9}
"""The position of the argument that says which recurrent layer an operation is."""
_LAYERS = ("rnn_relu", "rnn_tanh", "lstm", "gru")


def public_name(name: str, args: Sequence[Any] = ()) -> str:
    """Return torch's public name of an operation; an unknown one keeps its name, without the underscores around it.

    Args:
        name: the dispatcher's name (``_to_copy``), or a node's in the same spelling (``to_copy``).
        args: the operation's arguments, which determine the dimensions of a convolution and the kind of a recurrent layer.
    """
    known = _resolved(name)
    if known == "convolution":
        return _convolution(name, args)
    place = _RECURRENT.get(known.removesuffix("_backward"))
    mode = args[place] if place is not None and len(args) > place else None
    return _LAYERS[mode] if isinstance(mode, int) and 0 <= mode < len(_LAYERS) else known


@functools.cache
def _resolved(name: str) -> str:
    bare = name.strip("_")
    if name.startswith("__") and hasattr(Tensor, name):
        return name
    for pattern, public in _TABLE:
        if re.fullmatch(pattern, bare):
            return public
    if bare.removesuffix("_backward") in _RECURRENT:
        return bare
    if _CONVOLUTION.fullmatch(bare) and not re.fullmatch(r"conv(_transpose)?\dd|conv_tbc", bare):
        return "convolution"
    found, shorter = "", bare
    while shorter:
        found = _public(shorter) or _public(f"{shorter}_") or found
        last, shorter = shorter, _BEFORE.sub("", shorter)
        if shorter == last:
            shorter = _AFTER.sub("", last)
        if shorter == last:
            break
    return found or bare


def _public(name: str) -> str:
    """Return the public name of torch's function or method ``name``; empty if torch has none."""
    for space in _NAMESPACES:
        inside = name.removeprefix(f"{space}_")
        if inside != name and hasattr(getattr(torch, space), inside):
            return f"{space}.{inside}"
    return name if any(callable(getattr(place, name, None)) for place in _PLACES) else ""


def _convolution(name: str, args: Sequence[Any]) -> str:
    number = 2 if "backward" in name else 1
    tensors = [a for a in args if isinstance(a, Tensor)]
    transposed = "transpose" in name or next((a for a in args if isinstance(a, bool)), False)
    kind = "conv_transpose" if transposed else "conv"
    return f"{kind}{tensors[number].dim() - 2}d" if len(tensors) > number else "convolution"
