"""Paddle's operations by the families of the portable op lists, and Paddle's own lists, as data.

An operation has up to two names: that of the function in ``paddle._C_ops``, and the one under which ``paddle.amp`` lists it
if that differs (``matmul`` is ``matmul_v2`` there). ``AMP_NAMES`` contains the second, as printed for a call by
``paddle.amp.debugging.collect_operator_stats`` of Paddle 3.3.1; ``PADDLE_WHITE`` and ``PADDLE_BLACK`` are the lists in
``paddle/amp/amp_lists.py`` of that version, without operations that belong to no family. Families that are missing here are not
separate operations in Paddle.
"""

from __future__ import annotations

from mezzo import oplists
from mezzo.oplists import Precision
from mezzo.policy import Policy

OPS: dict[str, tuple[str, ...]] = {
    family: tuple(names.split())
    for family, names in {
        "matmul": "matmul linear linear_v2 bmm mv addmm addmm_ baddbmm einsum",
        "conv": "conv2d depthwise_conv2d conv3d conv2d_transpose depthwise_conv2d_transpose conv3d_transpose",
        "attention": "flash_attn memory_efficient_attention",
        "rnn": "rnn",
        "prelu": "prelu",
        "exp": "exp expm1",
        "log": "log log10 log2 log1p",
        "trigonometric": "acos asin cosh sinh tan",
        "erfinv": "erfinv",
        "pow": "pow elementwise_pow",
        "reciprocal": "reciprocal rsqrt",
        "softmax": "softmax log_softmax",
        "logsumexp": "logsumexp",
        "softplus": "softplus",
        "layer_norm": "layer_norm",
        "rms_norm": "rms_norm",
        "group_norm": "group_norm",
        "norm": "p_norm frobenius_norm renorm",
        "distance": "dist",
        "loss": "cross_entropy_with_softmax nll_loss huber_loss kldiv_loss sigmoid_cross_entropy_with_logits",
        "binary_cross_entropy": "bce_loss",
        "sum": "sum",
        "prod": "prod cumprod",
        "cumsum": "cumsum",
        "interpolate": "linear_interp nearest_interp bilinear_interp bicubic_interp trilinear_interp",
        "relu": "relu",
        "gelu": "gelu",
        "silu": "silu",
        "sigmoid": "sigmoid",
        "tanh": "tanh",
        "batch_norm": "batch_norm instance_norm",
        "mean": "mean mean_all",
        "sqrt": "sqrt",
        "add": "add",
        "mul": "multiply",
        "div": "divide",
        "embedding": "embedding",
    }.items()
}
"""Functions of ``paddle._C_ops`` by family."""

AMP_NAMES = {
    "matmul": "matmul_v2",
    "linear": "matmul_v2",
    "addmm_": "addmm",
    "cross_entropy_with_softmax": "softmax_with_cross_entropy",
    "sum": "reduce_sum",
    "prod": "reduce_prod",
    "mean": "reduce_mean",
    "mean_all": "mean",
    "add": "elementwise_add",
    "multiply": "elementwise_mul",
    "divide": "elementwise_div",
    "embedding": "lookup_table_v2",
    "linear_interp": "linear_interp_v2",
    "nearest_interp": "nearest_interp_v2",
    "bilinear_interp": "bilinear_interp_v2",
    "bicubic_interp": "bicubic_interp_v2",
    "trilinear_interp": "trilinear_interp_v2",
}
"""Names of operations in ``paddle.amp`` that differ from those in ``paddle._C_ops``."""

OPERATORS = {
    "__matmul__": "matmul",
    "__add__": "add",
    "__radd__": "add",
    "__mul__": "multiply",
    "__rmul__": "multiply",
    "__truediv__": "divide",
    "__pow__": "elementwise_pow",
}
"""Operators of ``paddle.Tensor`` that bypass ``paddle._C_ops``, with the operation that each performs."""

PADDLE_WHITE = frozenset(("conv2d", "einsum", "matmul_v2", "linear_v2", "flash_attn"))
_BLACK = (
    "tan acos asin sinh cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt pow reduce_sum mean reduce_mean "
    "reduce_prod cumprod cumsum dist frobenius_norm renorm group_norm layer_norm softmax softplus log_softmax "
    "softmax_with_cross_entropy sigmoid_cross_entropy_with_logits nll_loss huber_loss linear_interp_v2 "
    "nearest_interp_v2 bilinear_interp_v2 bicubic_interp_v2 trilinear_interp_v2 lookup_table_v2"
)
PADDLE_BLACK = frozenset(_BLACK.split())

_LOSSES = ("loss", "binary_cross_entropy", "sum", "mean")
"""Families that a loss consists of in Paddle: its gradient begins as large as the loss scale, which may exceed FP16's range."""
_NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm")


def amp_name(op: str) -> str:
    """Return the name under which ``paddle.amp`` lists the operation ``op`` of ``paddle._C_ops``."""
    return AMP_NAMES.get(op, op)


def listed_by(name: str) -> tuple[str, ...]:
    """Return the operations of ``paddle._C_ops`` that a family's or an operation's name in a policy means; empty if Paddle has none."""
    if name in OPS:
        return OPS[name]
    return tuple(op for ops in OPS.values() for op in ops if op == name)


def precisions(policy: Policy) -> dict[str, Precision]:
    """Return the precision of every operation under ``policy``: the portable lists, or Paddle's own under ``op_lists=device``."""
    portable = policy.op_lists == "portable"
    found: dict[str, Precision] = {
        op: oplists.BY_NAME[family].precision if portable else _paddles_own(op)
        for family, ops in OPS.items()
        for op in ops
    }
    for precision in oplists.USER_LISTS:
        for name in getattr(policy, precision):
            found.update(dict.fromkeys(listed_by(name), precision))
    return found


def _paddles_own(op: str) -> Precision:
    if amp_name(op) in PADDLE_WHITE:
        return "lower"
    return "fp32" if amp_name(op) in PADDLE_BLACK else "follow"


def custom_lists(policy: Policy) -> tuple[list[str], list[str]]:
    """Return what ``policy`` adds to Paddle's white list and to its black list, sorted, by the names of ``paddle.amp``."""
    chosen = precisions(policy)
    white = {amp_name(op) for op, precision in chosen.items() if precision == "lower"}
    black = {amp_name(op) for op, precision in chosen.items() if precision == "fp32"}
    return sorted(white - PADDLE_WHITE), sorted(black - PADDLE_BLACK - white)


def unknown_to_paddle(policy: Policy) -> list[tuple[str, str]]:
    """Return the names in the policy's lists that no operation of Paddle matches, each with the name of its list."""
    names = [(lst, name) for lst in oplists.USER_LISTS for name in getattr(policy, lst)]
    return [(lst, name) for lst, name in names if not listed_by(name)]


def for_scripts(policy: Policy) -> Policy:
    """Return ``policy`` for a script whose parameters stay FP32: with casts by operation.

    A policy that casts the model becomes lists that run everything in 16 bits except losses and, if the policy says so, norms.
    """
    if policy.casting != "model":
        return policy
    excepted = {*policy.fp32, *policy.widest, *policy.lower, *_LOSSES, *(_NORMS if policy.norms == "fp32" else ())}
    lower = (*policy.lower, *(family for family in OPS if family not in excepted))
    return policy.replace(casting="ops", master_weights=False, norms="fp32", lower=lower)
