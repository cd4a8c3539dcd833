"""Which operation runs in which precision: the portable op lists, as data.

The lists are ``torch.autocast("cuda")``'s (pytorch ``aten/src/ATen/autocast_mode.h``, torch 2.13), grouped into
families that a policy can change and that run on every device. torch's own CPU lists differ (softmax, layer_norm, sum
and pow stay in 16 bits there), so a CPU run under ``torch.autocast("cpu")`` says little about a GPU run.

``lower``   operands are cast to the policy's compute format
``fp32``    16-bit operands are cast to FP32, and so the result is FP32
``widest``  mixed operands are cast to the widest format among them
``follow``  nothing is cast, unless a policy names the family

An operation is listed by its ATen name, with the overload unless it is the default (``sum.dim_IntList``). Operations
that torch composes of others (``square``, ``trapezoid``, ``matrix_power``) are in no list: their parts are cast one by
one, as on CUDA. Names that a torch version lacks are ignored when a policy is applied.

Two deliberate differences from CUDA: ``binary_cross_entropy`` runs in FP32 (CUDA's autocast refuses it), and whole
recurrent layers are listed by the name that Python calls rather than by the cuDNN kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mezzo.errors import PolicyError, nearest

Precision = Literal["lower", "fp32", "widest", "follow"]
USER_LISTS: tuple[Precision, ...] = ("lower", "fp32", "widest")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Operations that share one precision for one reason."""

    name: str
    precision: Precision
    ops: tuple[str, ...]
    reason: str


def _family(name: str, precision: Precision, ops: str, reason: str) -> Family:
    return Family(name=name, precision=precision, ops=tuple(ops.split()), reason=reason)


FAMILIES: tuple[Family, ...] = (
    # --- lower: products whose sums are accumulated in FP32 by the matrix unit -------------------------------------------------
    _family(
        "matmul",
        "lower",
        "linear matmul mm addmm bmm baddbmm addbmm einsum mv addmv addr chain_matmul linalg_vecdot linalg_multi_dot",
        "matrix units multiply 16-bit operands and add in FP32: nearly all FLOPs and all of the speed-up",
    ),
    _family(
        "conv",
        "lower",
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d.input conv_transpose3d.input conv_tbc convolution "
        "_convolution _convolution.deprecated cudnn_convolution cudnn_convolution_transpose",
        "convolutions run on the same matrix units with FP32 sums",
    ),
    _family(
        "attention",
        "lower",
        "scaled_dot_product_attention _scaled_dot_product_flash_attention",
        "two matrix products around a softmax that the kernel keeps in FP32",
    ),
    _family(
        "rnn",
        "lower",
        "lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data "
        "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell",
        "the gates are matrix products; cuDNN runs the layer in 16 bits with FP32 sums",
    ),
    _family("prelu", "lower", "prelu", "its weight is cast with its input"),
    # --- fp32: large outputs, small differences or long sums -------------------------------------------------------------------
    _family("exp", "fp32", "exp expm1", "exp leaves FP16's range at 11.1"),
    _family("log", "fp32", "log log10 log2 log1p", "near 1 the result is smaller than the argument's rounding"),
    _family("trigonometric", "fp32", "acos asin cosh sinh tan", "steep at the ends of their domain"),
    _family("erfinv", "fp32", "erfinv", "steep at both ends"),
    _family(
        "pow", "fp32", "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar", "256 squared is already beyond FP16's range"
    ),
    _family("reciprocal", "fp32", "reciprocal rsqrt", "small arguments overflow"),
    _family("softmax", "fp32", "softmax.int log_softmax.int", "a sum of exponentials"),
    _family("logsumexp", "fp32", "logsumexp", "a sum of exponentials"),
    _family("softplus", "fp32", "softplus", "contains exp and log1p"),
    _family("layer_norm", "fp32", "layer_norm native_layer_norm", "sums of squares"),
    _family("rms_norm", "fp32", "rms_norm", "sums of squares; overflow there is silent"),
    _family("group_norm", "fp32", "group_norm", "sums of squares"),
    _family(
        "norm",
        "fp32",
        "norm.Scalar norm.ScalarOpt_dim renorm nuclear_norm nuclear_norm.dim frobenius_norm.dim "
        "linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord",
        "sums of squares",
    ),
    _family("distance", "fp32", "dist cdist pdist cosine_similarity", "sums of squared differences"),
    _family(
        "loss",
        "fp32",
        "nll_loss nll_loss2d l1_loss smooth_l1_loss huber_loss mse_loss multilabel_margin_loss soft_margin_loss "
        "multi_margin_loss poisson_nll_loss cosine_embedding_loss hinge_embedding_loss kl_div margin_ranking_loss "
        "triplet_margin_loss binary_cross_entropy_with_logits",
        "a loss sums over everything, and its value starts the gradient",
    ),
    _family(
        "binary_cross_entropy",
        "fp32",
        "binary_cross_entropy",
        "log(p) and log(1 - p) of 16-bit probabilities are infinite near 0 and 1; CUDA's autocast refuses it",
    ),
    _family("sum", "fp32", "sum sum.dim_IntList", "a long sum rounds away its small terms"),
    _family("prod", "fp32", "prod prod.dim_int cumprod", "products leave the range"),
    _family("cumsum", "fp32", "cumsum", "a long sum"),
    _family(
        "interpolate",
        "fp32",
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
        "upsample_bicubic2d _upsample_bicubic2d_aa",
        "its backward adds many gradients into one place",
    ),
    # --- widest: mixed operands meet -------------------------------------------------------------------------------------------
    _family("addcdiv", "widest", "addcdiv", "three operands must agree"),
    _family("addcmul", "widest", "addcmul", "three operands must agree"),
    _family("atan2", "widest", "atan2", "two operands must agree"),
    _family("bilinear", "widest", "bilinear", "four operands must agree"),
    _family("cross", "widest", "cross", "two operands must agree"),
    _family("dot", "widest", "dot vdot", "two operands must agree"),
    _family("grid_sample", "widest", "grid_sampler", "image and grid must agree"),
    _family("index_put", "widest", "index_put", "target and values must agree"),
    _family("tensordot", "widest", "tensordot", "two operands must agree"),
    _family("scatter_add", "widest", "scatter_add", "both must agree"),
    # --- follow: run in the format of the operands unless a policy names them --------------------------------------------------
    _family("relu", "follow", "relu hardtanh", "exact in every format"),
    _family("gelu", "follow", "gelu", "its output is bounded by its input"),
    _family("silu", "follow", "silu", "its output is bounded by its input"),
    _family("sigmoid", "follow", "sigmoid", "its output lies in 0 to 1"),
    _family("tanh", "follow", "tanh", "its output lies in -1 to 1"),
    _family(
        "batch_norm",
        "follow",
        "batch_norm instance_norm",
        "its kernels keep statistics and sums in FP32 whatever the input's format is",
    ),
    _family("mean", "follow", "mean mean.dim", "its kernel adds in FP32 and rounds once"),
    _family(
        "var",
        "follow",
        "var var.dim var.correction std std.dim std.correction var_mean var_mean.dim var_mean.correction std_mean "
        "std_mean.dim std_mean.correction",
        "its kernel adds in FP32 and rounds once",
    ),
    _family("sqrt", "follow", "sqrt", "it halves the exponent"),
    _family("square", "follow", "square", "torch computes it by pow, which is listed"),
    _family(
        "cross_entropy",
        "follow",
        "cross_entropy_loss",
        "torch computes it by nll_loss and log_softmax in the format of its operand",
    ),
    _family("add", "follow", "add.Tensor", "torch promotes"),
    _family("sub", "follow", "sub.Tensor rsub.Scalar rsub.Tensor", "torch promotes"),
    _family("mul", "follow", "mul.Tensor", "torch promotes"),
    _family("div", "follow", "div.Tensor div.Tensor_mode", "torch promotes"),
    _family(
        "fft",
        "follow",
        " ".join(
            f"fft_{kind}{dims}" for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft") for dims in ("", "2", "n")
        ),
        "CUDA transforms FP16 in FP16 if the sizes are powers of two; CPUs have no such kernel, so there it is emulated",
    ),
    _family("embedding", "follow", "embedding", "a look-up: exact in every format"),
)

BY_NAME = {family.name: family for family in FAMILIES}

SYNONYMS = {"arccos": "acos", "arcsin": "asin", "arctan2": "atan2", "__matmul__": "matmul", "__pow__": "pow"}
"""Python's other names of listed operations."""


def python_name(op: str) -> str:
    """Return the name by which Python code calls the operation ``op``: ``sum`` for ``sum.dim_IntList``."""
    return op.split(".")[0].removeprefix("linalg_")


_FAMILY_OF_OP = {python_name(op): family for family in FAMILIES for op in family.ops}


def is_listed(name: str) -> bool:
    """Return whether ``name`` names a family or an operation in one."""
    return name in BY_NAME or SYNONYMS.get(name, name).removeprefix("linalg_") in _FAMILY_OF_OP


def resolve(name: str) -> tuple[str, ...]:
    """Return the operations that a family's or an operation's ``name`` stands for.

    A family's name covers all its operations (``matmul`` covers linear, mm, einsum and more); an operation's own name
    (``log_softmax``) covers its overloads.

    Raises:
        PolicyError: nothing has that name; the nearest names are suggested.
    """
    if name in BY_NAME:
        return BY_NAME[name].ops
    if not is_listed(name):
        known = nearest(name, [*BY_NAME, *_FAMILY_OF_OP], listed=BY_NAME)
        raise PolicyError(
            f"unknown operation or family {name!r}; {known}, and the operations in them",
            hint="name a family such as 'softmax' or an operation such as 'log_softmax'",
        )
    plain = SYNONYMS.get(name, name).removeprefix("linalg_")
    return tuple(op for op in _FAMILY_OF_OP[plain].ops if python_name(op) == plain)


def assign(lower: tuple[str, ...], fp32: tuple[str, ...], widest: tuple[str, ...]) -> dict[str, Precision]:
    """Return the precision of every operation: the families' own, changed by the names a user gave.

    Raises:
        PolicyError: a name is unknown, or in two lists.
    """
    chosen: dict[str, Precision] = {op: f.precision for f in FAMILIES for op in f.ops}
    changed: dict[str, str] = {}
    for precision, names in zip(USER_LISTS, (lower, fp32, widest), strict=True):
        for name in names:
            for op in resolve(name):
                if changed.setdefault(op, precision) != precision:
                    raise PolicyError(
                        f"operation {python_name(op)} is in the lists {changed[op]!r} and {precision!r}",
                        hint=f"leave {name!r} in one of the lists {', '.join(USER_LISTS)}",
                    )
                chosen[op] = precision
    return chosen
