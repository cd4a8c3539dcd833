"""Which operation runs in which precision: the portable op lists, as data.

The lists are those that ``torch.autocast("cuda")`` applies (pytorch ``aten/src/ATen/autocast_mode.h``, torch 2.13),
written down by family so that they can be read, changed by a policy and applied on every device. torch's own CPU
lists are other lists (softmax, layer_norm, sum and pow stay in 16 bits there), so a CPU run under
``torch.autocast("cpu")`` says little about a GPU run.

``lower``   the operands are cast to the policy's compute format ``fp32``    16-bit operands are cast to FP32, and so
the result is FP32 ``widest``  mixed operands are cast to the widest format among them ``follow``  nothing is cast;
the operation runs in the format of its operands. Only a policy that names the family changes it.

An operation is named by the place where torch exposes it: ``torch.``, ``F.`` (torch.nn.functional), ``Tensor.``,
``_nn.`` (torch._C._nn, where most losses end), ``_VF.`` (torch._C._VariableFunctions), ``linalg.`` and ``special.``.
A name that a torch version lacks is left out when the table is built.

Two deliberate differences from CUDA: ``binary_cross_entropy`` runs in FP32 (CUDA's autocast refuses it), and whole
recurrent layers (``torch.lstm``, ``gru``, ``rnn_tanh``, ``rnn_relu``) are listed by the name that Python calls rather
than by the cuDNN kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mezzo.errors import PolicyError, nearest

Precision = Literal["lower", "fp32", "widest", "follow"]
USER_LISTS: tuple[Precision, ...] = ("lower", "fp32", "widest")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Hold operations that share one precision for one reason."""

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
        "F.linear torch.matmul Tensor.matmul Tensor.__matmul__ torch.mm Tensor.mm torch.addmm Tensor.addmm "
        "torch.bmm Tensor.bmm torch.baddbmm Tensor.baddbmm torch.addbmm Tensor.addbmm torch.einsum _VF.einsum torch.mv "
        "Tensor.mv torch.addmv Tensor.addmv torch.addr Tensor.addr torch.chain_matmul _VF.chain_matmul linalg.matmul "
        "linalg.vecdot linalg.multi_dot",
        "matrix units multiply 16-bit operands and add in FP32: nearly all FLOPs and all of the speed-up",
    ),
    _family(
        "conv",
        "lower",
        "torch.conv1d torch.conv2d torch.conv3d torch.conv_transpose1d torch.conv_transpose2d torch.conv_transpose3d "
        "torch.conv_tbc torch.convolution torch._convolution torch.cudnn_convolution torch.cudnn_convolution_transpose",
        "convolutions run on the same matrix units with FP32 sums",
    ),
    _family(
        "attention",
        "lower",
        "F.scaled_dot_product_attention",
        "two matrix products around a softmax that the kernel keeps in FP32",
    ),
    _family(
        "rnn",
        "lower",
        "_VF.lstm _VF.gru _VF.rnn_tanh _VF.rnn_relu _VF.lstm_cell _VF.gru_cell _VF.rnn_tanh_cell _VF.rnn_relu_cell "
        "torch.lstm torch.gru torch.rnn_tanh torch.rnn_relu torch.lstm_cell torch.gru_cell torch.rnn_tanh_cell "
        "torch.rnn_relu_cell",
        "the gates are matrix products; cuDNN runs the layer in 16 bits with FP32 sums",
    ),
    _family("prelu", "lower", "torch.prelu F.prelu Tensor.prelu", "its weight is cast with its input"),
    # --- fp32: large outputs, small differences or long sums -------------------------------------------------------------------
    _family(
        "exp",
        "fp32",
        "torch.exp Tensor.exp torch.expm1 Tensor.expm1 special.expm1",
        "exp leaves FP16's range at 11.1",
    ),
    _family(
        "log",
        "fp32",
        "torch.log Tensor.log torch.log10 Tensor.log10 torch.log2 Tensor.log2 torch.log1p Tensor.log1p special.log1p",
        "near 1 the result is smaller than the argument's rounding",
    ),
    _family(
        "trigonometric",
        "fp32",
        "torch.acos Tensor.acos torch.arccos Tensor.arccos torch.asin Tensor.asin torch.arcsin Tensor.arcsin torch.cosh "
        "Tensor.cosh torch.sinh Tensor.sinh torch.tan Tensor.tan",
        "steep at the ends of their domain",
    ),
    _family("erfinv", "fp32", "torch.erfinv Tensor.erfinv special.erfinv", "steep at both ends"),
    _family(
        "pow",
        "fp32",
        "torch.pow Tensor.pow Tensor.__pow__",
        "256 squared is already beyond FP16's range",
    ),
    _family(
        "reciprocal",
        "fp32",
        "torch.reciprocal Tensor.reciprocal torch.rsqrt Tensor.rsqrt",
        "small arguments overflow",
    ),
    _family(
        "softmax",
        "fp32",
        "torch.softmax Tensor.softmax torch.log_softmax Tensor.log_softmax special.softmax special.log_softmax",
        "a sum of exponentials",
    ),
    _family(
        "logsumexp",
        "fp32",
        "torch.logsumexp Tensor.logsumexp special.logsumexp",
        "a sum of exponentials",
    ),
    _family("softplus", "fp32", "F.softplus", "contains exp and log1p"),
    _family("layer_norm", "fp32", "torch.layer_norm torch.native_layer_norm", "sums of squares"),
    _family("rms_norm", "fp32", "torch.rms_norm", "sums of squares; overflow there is silent"),
    _family("group_norm", "fp32", "torch.group_norm", "sums of squares"),
    _family(
        "norm",
        "fp32",
        "torch.norm torch.renorm Tensor.renorm torch.nuclear_norm torch.frobenius_norm linalg.norm linalg.vector_norm "
        "linalg.matrix_norm _VF.norm _VF.frobenius_norm _VF.nuclear_norm",
        "sums of squares",
    ),
    _family(
        "distance",
        "fp32",
        "torch.dist Tensor.dist torch.cdist torch.pdist torch.cosine_similarity torch.pairwise_distance _VF.cdist",
        "sums of squared differences",
    ),
    _family(
        "loss",
        "fp32",
        "_nn.cross_entropy_loss _nn.nll_loss _nn.nll_loss2d _nn.nll_loss_nd _nn.l1_loss _nn.smooth_l1_loss _nn.huber_loss "
        "_nn.mse_loss _nn.multilabel_margin_loss _nn.soft_margin_loss _nn.multi_margin_loss torch.poisson_nll_loss "
        "torch.cosine_embedding_loss torch.hinge_embedding_loss torch.kl_div torch.margin_ranking_loss "
        "torch.triplet_margin_loss torch.binary_cross_entropy_with_logits",
        "a loss sums over everything, and its value starts the gradient",
    ),
    _family(
        "binary_cross_entropy",
        "fp32",
        "_nn.binary_cross_entropy",
        "log(p) and log(1 - p) of 16-bit probabilities are infinite near 0 and 1; CUDA's autocast refuses it",
    ),
    _family("sum", "fp32", "torch.sum Tensor.sum", "a long sum rounds away its small terms"),
    _family("prod", "fp32", "torch.prod Tensor.prod torch.cumprod Tensor.cumprod", "products leave the range"),
    _family("cumsum", "fp32", "torch.cumsum Tensor.cumsum", "a long sum"),
    _family(
        "interpolate",
        "fp32",
        "_nn.upsample_nearest1d _nn.upsample_nearest2d _nn.upsample_nearest3d _nn._upsample_nearest_exact1d "
        "_nn._upsample_nearest_exact2d _nn._upsample_nearest_exact3d _nn.upsample_linear1d _nn.upsample_bilinear2d "
        "_nn._upsample_bilinear2d_aa _nn.upsample_trilinear3d _nn.upsample_bicubic2d _nn._upsample_bicubic2d_aa",
        "its backward adds many gradients into one place",
    ),
    # --- widest: mixed operands meet -------------------------------------------------------------------------------------------
    _family("addcdiv", "widest", "torch.addcdiv Tensor.addcdiv", "three operands must agree"),
    _family("addcmul", "widest", "torch.addcmul Tensor.addcmul", "three operands must agree"),
    _family(
        "atan2",
        "widest",
        "torch.atan2 Tensor.atan2 torch.arctan2 Tensor.arctan2",
        "two operands must agree",
    ),
    _family("bilinear", "widest", "torch.bilinear F.bilinear", "four operands must agree"),
    _family("cross", "widest", "torch.cross Tensor.cross", "two operands must agree"),
    _family("dot", "widest", "torch.dot Tensor.dot torch.vdot Tensor.vdot", "two operands must agree"),
    _family("grid_sample", "widest", "torch.grid_sampler", "image and grid must agree"),
    _family("index_put", "widest", "torch.index_put Tensor.index_put", "target and values must agree"),
    _family("tensordot", "widest", "torch.tensordot _VF.tensordot", "two operands must agree"),
    _family("scatter_add", "widest", "torch.scatter_add Tensor.scatter_add", "both must agree"),
    # --- follow: run in the format of the operands unless a policy names them --------------------------------------------------
    _family("relu", "follow", "torch.relu Tensor.relu F.hardtanh", "exact in every format"),
    _family("gelu", "follow", "F.gelu", "its output is bounded by its input"),
    _family("silu", "follow", "_nn.silu F.silu", "its output is bounded by its input"),
    _family("sigmoid", "follow", "torch.sigmoid Tensor.sigmoid", "its output lies in 0 to 1"),
    _family("tanh", "follow", "torch.tanh Tensor.tanh", "its output lies in -1 to 1"),
    _family(
        "batch_norm",
        "follow",
        "torch.batch_norm torch.instance_norm",
        "its kernels keep statistics and sums in FP32 whatever the input's format is",
    ),
    _family("mean", "follow", "torch.mean Tensor.mean", "its kernel adds in FP32 and rounds once"),
    _family(
        "var",
        "follow",
        "torch.var Tensor.var torch.std Tensor.std torch.var_mean torch.std_mean",
        "its kernel adds in FP32 and rounds once",
    ),
    _family("sqrt", "follow", "torch.sqrt Tensor.sqrt", "it halves the exponent"),
    _family("add", "follow", "torch.add Tensor.add Tensor.__add__ Tensor.__radd__", "torch promotes"),
    _family("mul", "follow", "torch.mul Tensor.mul Tensor.__mul__ Tensor.__rmul__", "torch promotes"),
    _family("div", "follow", "torch.div Tensor.div Tensor.__truediv__", "torch promotes"),
    _family("embedding", "follow", "torch.embedding", "a look-up: exact in every format"),
)

BY_NAME = {family.name: family for family in FAMILIES}
_FAMILY_OF_OP = {op.split(".")[-1]: family for family in FAMILIES for op in family.ops}


def resolve(name: str) -> tuple[str, ...]:
    """Return the operations that a family's or an operation's ``name`` stands for.

    A family's name covers all its operations (``matmul`` covers linear, mm, einsum, ``@`` and more); an operation's own name
    (``log_softmax``) covers that operation as a function and as a method.

    Raises:
        PolicyError: nothing has that name; the nearest names are offered.
    """
    if name in BY_NAME:
        return BY_NAME[name].ops
    family = _FAMILY_OF_OP.get(name)
    if family is None:
        known = nearest(name, [*BY_NAME, *_FAMILY_OF_OP], listed=BY_NAME)
        raise PolicyError(
            f"unknown operation or family {name!r}; {known}, and the operations in them",
            hint="name a family such as 'softmax' or an operation such as 'log_softmax'",
        )
    return tuple(op for op in family.ops if op.split(".")[-1] in (name, f"__{name}__"))


def assign(lower: tuple[str, ...], fp32: tuple[str, ...], widest: tuple[str, ...]) -> dict[str, Precision]:
    """Return the precision of every operation: the families' own, changed by the names a user gave.

    Raises:
        PolicyError: an unknown name, or one that stands in two lists.
    """
    chosen: dict[str, Precision] = {op: f.precision for f in FAMILIES for op in f.ops}
    changed: dict[str, str] = {}
    for precision, names in zip(USER_LISTS, (lower, fp32, widest), strict=True):
        for name in names:
            for op in resolve(name):
                if changed.setdefault(op, precision) != precision:
                    raise PolicyError(
                        f"operation {op} stands in the lists {changed[op]!r} and {precision!r}",
                        hint=f"leave {name!r} in one of the lists {', '.join(USER_LISTS)}",
                    )
                chosen[op] = precision
    return chosen
