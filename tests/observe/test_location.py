"""Operations have the names of torch's documentation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers_torch import op_db
from mezzo import oplists
from mezzo.observe.location import public_name

NAMES = {
    "_to_copy": "to",
    "to_copy": "to",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "_log_softmax_backward_data": "log_softmax",
    "native_layer_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm",
    "native_group_norm": "group_norm",
    "_native_batch_norm_legit": "batch_norm",
    "native_batch_norm_backward": "batch_norm",
    "_fused_rms_norm": "rms_norm",
    "native_dropout": "dropout",
    "nll_loss_forward": "nll_loss",
    "nll_loss2d_forward": "nll_loss",
    "mse_loss_backward": "mse_loss",
    "linalg_vector_norm": "linalg.vector_norm",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "_efficient_attention_forward": "scaled_dot_product_attention",
    "_thnn_fused_lstm_cell": "lstm",
    "_prelu_kernel": "prelu",
    "max_pool2d_with_indices": "max_pool2d",
    "_adaptive_avg_pool2d": "adaptive_avg_pool2d",
    "upsample_bilinear2d": "interpolate",
    "reflection_pad2d": "pad",
    "grid_sampler_2d": "grid_sample",
    "embedding_dense_backward": "embedding",
    "_cdist_forward": "cdist",
    "_fft_r2c": "fft.rfft",
    "_foreach_mul_": "mul",
    "copy_": "copy_",
    "clamp_min": "clamp_min",
    "einsum": "einsum",
    "steep": "steep",  # a custom function keeps its name
}


@pytest.mark.parametrize(("name", "public"), NAMES.items())
def test_the_dispatchers_name_becomes_the_public_one(name: str, public: str) -> None:
    assert public_name(name) == public


@pytest.mark.parametrize(
    ("dims", "transposed", "name"), [(3, False, "conv1d"), (4, False, "conv2d"), (4, True, "conv_transpose2d")]
)
def test_a_convolution_is_named_by_its_dimensions(dims: int, transposed: bool, name: str) -> None:
    x, weight = torch.ones((1,) * dims), torch.ones((1,) * dims)
    args = (x, weight, None, [1], [0], [1], transposed, [0], 1)
    assert public_name("convolution", args) == name
    assert (
        public_name("convolution_backward", (x, x, weight, None, [1], [0], [1], transposed, [0], 1, [True] * 3)) == name
    )


@pytest.mark.parametrize(("mode", "name"), list(enumerate(("rnn_relu", "rnn_tanh", "lstm", "gru"))))
def test_a_recurrent_layer_is_named_by_its_kind(mode: int, name: str) -> None:
    assert public_name("_cudnn_rnn", (0, 0, 0, 0, 0, 0, mode)) == name


def test_every_operation_that_torch_tests_has_a_public_name() -> None:
    """All that op_db's entries dispatch to; what a person never calls by that name is listed."""
    private = ("_refs", "sparse", "signal", "jiterator", "_chunk_cat", "nn.functional.", "torch.ops")
    named = {op.aten_name or op.name for op in op_db if not (op.aten_name or op.name).startswith(private)}
    homes = (torch, F, Tensor, torch.linalg, torch.special, torch.fft, torch.nn.utils.rnn)
    missing = [
        name for name in sorted(named) if not any(hasattr(home, public_name(name).split(".")[-1]) for home in homes)
    ]
    assert missing == [], missing


def test_the_op_lists_know_the_names_that_a_policy_can_take() -> None:
    for name in ("einsum", "mul", "layer_norm", "softmax", "conv2d", "linear", "scaled_dot_product_attention", "lstm"):
        assert oplists.resolve(name)
