"""Convert a policy to Paddle's own settings and back.

In Paddle, mixed precision is set by the arguments of ``paddle.amp.auto_cast`` (level, format and two lists of operations),
``paddle.amp.decorate`` (a model in 16 bits, with or without FP32 master weights) and ``paddle.amp.GradScaler``.
``paddle.Model.prepare`` accepts the same arguments in one dictionary. All three functions do nothing on a CPU. Imports no Paddle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mezzo import oplists
from mezzo.devices import Device
from mezzo.errors import PolicyError, nearest
from mezzo.explain import NOT_HONOURED, Choice, Choices, communication_not_honoured, loss_scale, modules, weights
from mezzo.formats import BF16, FP16
from mezzo.frameworks import Framework
from mezzo.oplists import Precision
from mezzo.policy import PRESETS, Policy

NO_EFFECT = "Paddle's AMP has no effect on a CPU: it turns itself off without a GPU"

_LEVELS = {"none": "O0", "ops": "O1", "model": "O2"}
_SCALER = {
    "init_loss_scaling": "init_scale",
    "incr_ratio": "growth_factor",
    "decr_ratio": "backoff_factor",
    "incr_every_n_steps": "growth_interval",
    "decr_every_n_nan_or_inf": "hysteresis",
}
"""GradScaler's names for a policy's fields."""


@dataclass(frozen=True, kw_only=True)
class PaddlePrecision:
    """The settings of Paddle that correspond to a policy, as keyword arguments."""

    auto_cast: dict[str, Any]
    """Arguments of ``paddle.amp.auto_cast``."""
    decorate: dict[str, Any] | None
    """Arguments of ``paddle.amp.decorate`` besides the models and optimizers; None if the model stays in FP32."""
    grad_scaler: dict[str, Any]
    """Arguments of ``paddle.amp.GradScaler``."""

    @property
    def amp_configs(self) -> dict[str, Any]:
        """The argument ``amp_configs`` of ``paddle.Model.prepare``.

        Raises:
            PolicyError: the format is BF16, which ``paddle.Model`` cannot express.
        """
        if self.auto_cast["dtype"] == BF16.dtype_name:
            raise PolicyError(
                f"paddle.Model computes in {FP16.dtype_name} at {self.auto_cast['level']}, and the policy asks for BF16; "
                f"allowed: policies in FP16 or FP32",
                hint="write the loop with paddle.amp.auto_cast, or run the script under mezzo run --policy bf16",
            )
        lists = {k: v for k, v in self.auto_cast.items() if k.startswith("custom_")}
        scaler = {k: v for k, v in self.grad_scaler.items() if k != "enable"}
        return {"level": self.auto_cast["level"], **lists, **scaler}


def to_paddle(policy: Policy) -> PaddlePrecision:
    """Return ``policy`` as arguments of Paddle's own functions; ``explain`` lists what they cannot express.

    Raises:
        PolicyError: Paddle has no such format.
    """
    check(policy)
    white, black = custom_lists(policy) if policy.lowers else ([], [])
    # Paddle requires a format even if the policy casts nothing.
    low = policy.storage.dtype_name if policy.lowers else FP16.dtype_name
    auto_cast = {
        "enable": policy.lowers,
        "custom_white_list": white,
        "custom_black_list": black,
        "level": _LEVELS[policy.casting],
        "dtype": low,
    }
    decorate = {"level": "O2", "dtype": low, "master_weight": policy.master_weights}
    scaler = {theirs: getattr(policy, ours) for theirs, ours in _SCALER.items()}
    switches = {
        "enable": policy.loss_scale != "none",
        "use_dynamic_loss_scaling": policy.loss_scale == "dynamic",
    }
    return PaddlePrecision(
        auto_cast=auto_cast,
        decorate=decorate if policy.casting == "model" else None,
        grad_scaler={**switches, **scaler},
    )


def check(policy: Policy) -> None:
    """Raise if Paddle lacks the format of a policy.

    Raises:
        PolicyError: Paddle lacks it; the message lists the policies that Paddle can run.
    """
    if policy.in_layers:
        allowed = ", ".join(name for name, preset in PRESETS.items() if not preset.in_layers)
        raise PolicyError(
            f"policy {policy!s} asks for {policy.compute.upper()}, which paddle.amp does not train in; allowed: {allowed}",
            hint="choose one of them",
        )


def from_paddle(value: PaddlePrecision | Mapping[str, Any] | str) -> Policy:
    """Return the policy that corresponds to Paddle's settings.

    Args:
        value: a ``PaddlePrecision``; the arguments of ``auto_cast``, ``decorate`` and ``GradScaler`` in one dictionary, as
            ``amp_configs`` of ``paddle.Model.prepare``; or a level (``O1``).

    Raises:
        PolicyError: an unknown argument, level, format or operation.
    """
    if isinstance(value, PaddlePrecision):
        scale = value.grad_scaler if value.grad_scaler["enable"] else {"use_dynamic_loss_scaling": None}
        value = {**value.auto_cast, **(value.decorate or {}), **{k: v for k, v in scale.items() if k != "enable"}}
    settings: dict[str, Any] = {"level": value} if isinstance(value, str) else dict(value)
    _check_settings(settings)
    policy = _base(settings)
    policy = _with_lists(policy, settings) if policy.lowers else policy
    return _with_scale(policy, settings)


def _check_settings(settings: dict[str, Any]) -> None:
    known = ["enable", "level", "dtype", "custom_white_list", "custom_black_list", "master_weight", *_SCALER]
    known += ["use_dynamic_loss_scaling", "use_promote", "use_fp16_guard"]
    for name in settings:
        if name not in known:
            raise PolicyError(
                f"Paddle's mixed precision has no setting {name!r}; {nearest(str(name), known)}",
                hint="pass arguments of paddle.amp.auto_cast, decorate and GradScaler, or amp_configs of paddle.Model.prepare",
            )
    for name, allowed in (("level", ("O0", "OD", "O1", "O2")), ("dtype", (FP16.dtype_name, BF16.dtype_name))):
        value = settings.get(name, allowed[0])
        if value not in allowed:
            raise PolicyError(
                f"Paddle's {name}={value!r} stands for no policy; {nearest(str(value), allowed)}",
                hint=f"set {name} to one of them",
            )


def _base(settings: dict[str, Any]) -> Policy:
    level = settings.get("level", "O1") if settings.get("enable", True) else "O0"
    if level == "O0":
        return PRESETS["fp32"]
    family = "bf16" if settings.get("dtype", FP16.dtype_name) == BF16.dtype_name else "fp16"
    if level != "O2":
        return PRESETS[family]
    masters = settings.get("master_weight", True) is not False  # None means "at O2" to Paddle
    # Paddle's O2 keeps batch normalisation in FP32 with or without masters.
    return PRESETS[f"{family}-master"].replace(master_weights=masters)


def _with_lists(policy: Policy, settings: dict[str, Any]) -> Policy:
    ops = [op for ops in OPS.values() for op in ops]
    known = sorted({*ops, *map(amp_name, ops)})
    chosen = precisions(policy)
    changed: dict[str, tuple[str, ...]] = {}
    for setting, precision in (("custom_white_list", "lower"), ("custom_black_list", "fp32")):
        listed: set[str] = set()
        for name in settings.get(setting) or ():
            if name not in known:
                raise PolicyError(
                    f"{setting} names {name!r}, which is in no family of a policy; {nearest(str(name), known)}",
                    hint="leave it out, or name one of them",
                )
            listed |= {op for op in ops if name in (op, amp_name(op))}
        changed[precision] = _policy_names({op for op in listed if chosen[op] != precision})
    return policy.replace(**changed)


def _policy_names(ops: set[str]) -> tuple[str, ...]:
    """Return a policy's names for operations of Paddle: whole families, and single operations if their names are torch's as well."""
    names = set()
    for family, members in OPS.items():
        of_family = ops & set(members)
        whole = len(of_family) == len(members) or not all(map(_is_policy_name, of_family))
        names |= ({family} if whole else of_family) if of_family else set()
    return tuple(sorted(names))


def _is_policy_name(op: str) -> bool:
    try:
        return bool(oplists.resolve(op))
    except PolicyError:
        return False


def _with_scale(policy: Policy, settings: dict[str, Any]) -> Policy:
    dynamic = settings.get("use_dynamic_loss_scaling", policy.loss_scale == "dynamic")
    if not policy.lowers or dynamic is None:
        return policy.replace(loss_scale="none")
    fields = {ours: settings[theirs] for theirs, ours in _SCALER.items() if theirs in settings}
    if not dynamic and "use_dynamic_loss_scaling" not in settings:
        return policy.replace(**fields)
    return policy.replace(loss_scale="dynamic" if dynamic else "static", **fields)


# --- explanations ------------------------------------------------------------------------------------------------------------


def explain(policy: Policy) -> Choices:
    """Return what ``policy`` does in Paddle's own settings, as choices; if they cannot honour one, its value begins by saying so.

    Raises:
        PolicyError: Paddle has no such format.
    """
    native = to_paddle(policy)
    choices = [_compute(policy, native), weights(policy), loss_scale(policy)]
    if policy.lowers:
        choices.append(_lists(native))
    return Choices([*choices, *(left.choice for left in not_honoured(policy))])


def explain_run(policy: Policy, device: Device) -> list[Choice]:
    """Return what ``policy`` does in a script that Mezzo runs on ``device``: Mezzo scales the loss and keeps modules in FP32."""
    check(policy)
    arithmetic, why = arithmetic_on(policy, device)
    if not policy.lowers:
        compute = Choice(what="compute", value=policy.compute, reason="the policy casts nothing")
    elif device.kind == "cpu" and arithmetic == "native":
        compute = Choice(what="compute", value="fp32", reason=why)
    else:
        compute = Choice(what="compute", value=f"{policy.compute}, {arithmetic} on {device.name}", reason=why)
    choices = [compute, weights(policy), loss_scale(policy), *communication_not_honoured(policy)]
    if policy.lowers and arithmetic == "emulated":
        exceptions = "but losses and norms" if policy.norms == "fp32" else "but losses"
        value = f"all {'of the lower list' if policy.casting == 'ops' else exceptions} rounded, the rest in fp32"
        why = "Paddle has hardly any FP16 or BF16 kernels for a CPU; what a 16-bit operation reads is rounded anyway"
        choices.append(Choice(what="operations", value=value, reason=why))
        why = "rounded values are kept in FP32 tensors, next to the originals: a GPU needs half as much"
        choices.append(Choice(what="memory", value="of the emulation", reason=why))
    return [*choices, *modules(policy), *_unlisted(policy)]


def arithmetic_on(policy: Policy, device: Device) -> tuple[str, str]:
    """Return whether Paddle's own kernels compute in the policy's format on ``device`` (``native``) or Mezzo rounds, and why.

    On a CPU ``arithmetic=native`` and ``op_lists=device`` leave a script to Paddle's AMP, which is off there.
    """
    if device.kind != "cpu":
        return policy.arithmetic_on(device)
    if not policy.lowers:
        return "native", "the policy casts nothing"
    if policy.arithmetic == "native" or policy.op_lists == "device":
        return "native", NO_EFFECT
    if policy.arithmetic == "emulated":
        return "emulated", "the policy asks for emulated arithmetic"
    return "emulated", NO_EFFECT


def _compute(policy: Policy, native: PaddlePrecision) -> Choice:
    if not policy.lowers:
        return Choice(what="compute", value=policy.compute, reason="the policy casts nothing; auto_cast is off")
    value = f"{policy.compute}, auto_cast at level {native.auto_cast['level']}"
    return Choice(what="compute", value=value, reason=f"on a GPU; {NO_EFFECT}")


def _lists(native: PaddlePrecision) -> Choice:
    white, black = (native.auto_cast[f"custom_{colour}_list"] for colour in ("white", "black"))
    value = f"Paddle's, with {', '.join(white) or 'nothing'} in 16 bits and {', '.join(black) or 'nothing'} in fp32"
    return Choice(what="op lists", value=value, reason="with these changes they are the lists of the policy")


class NotHonoured(NamedTuple):
    """A choice of a policy that Paddle's own settings cannot honour."""

    choice: Choice
    same_steps: bool
    """Whether the format and the scale of every step are the policy's without it."""


def not_honoured(policy: Policy) -> list[NotHonoured]:
    """Return what Paddle's own settings cannot honour."""
    choices = [NotHonoured(choice, same_steps=True) for choice in communication_not_honoured(policy)]
    choices += [NotHonoured(choice, same_steps=False) for choice in _unlisted(policy)]

    def cannot(what: str, value: str, reason: str, *, same_steps: bool = False) -> NotHonoured:
        return NotHonoured(Choice(what=what, value=f"{NOT_HONOURED}: {value}", reason=reason), same_steps)

    if policy.compute == "tf32":
        why = "NVIDIA_TF32_OVERRIDE in the environment decides"
        choices.append(cannot("tf32", "set by neither auto_cast nor decorate", why))
    if policy.fp32_modules:
        why = (
            "excluded_layers of paddle.amp.decorate takes layers, not names, and works at O2 only; mezzo run keeps them"
        )
        choices.append(cannot("fp32_modules", "+".join(policy.fp32_modules), why))
    if policy.casting == "model" and policy.norms == "compute":
        why = "Paddle keeps batch normalisation in FP32 at every level"
        choices.append(cannot("norms", "compute", why, same_steps=True))
    if policy.arithmetic == "emulated":
        choices.append(cannot("arithmetic", "emulated", "Paddle has native kernels or none; mezzo run emulates"))
    if policy.loss_scale == "dynamic":
        bounds = f"{policy.min_scale:g} to {policy.max_scale:g}"
        why = "GradScaler has neither a floor nor a ceiling"
        choices.append(cannot("scale bounds", bounds, why, same_steps=True))
        if policy.hysteresis > 1:
            why = "decr_every_n_nan_or_inf restarts its count after each backoff, a policy's hysteresis only after a good update"
            choices.append(cannot("hysteresis", f"exactly {policy.hysteresis}", why))
        if policy.compute == "bf16":
            choices.append(cannot("loss scale", "dynamic", "GradScaler turns itself off for BF16"))
    return choices


def _unlisted(policy: Policy) -> list[Choice]:
    """Return the operations in the policy's lists that Paddle cannot honour there."""
    why = "no operation of Paddle corresponds to it"
    unlisted = [(f"{lst} list", name, why) for lst, name in unknown_to_paddle(policy)]
    promoted = "auto_cast has no such list: an operation that it does not list runs in FP32 if an operand is FP32"
    unlisted += [("widest list", name, promoted) for name in policy.widest if listed_by(name)]
    return [Choice(what=what, value=f"{NOT_HONOURED}: {name}", reason=reason) for what, name, reason in unlisted]


def script_lines(before: str, new: Policy) -> str:
    """Return what a Paddle script writes to train under ``new`` instead of the policy ``before``; empty if that is the same to Paddle.

    Args:
        before: the policy of a run, or ``as-is``.
        new: the policy with a fix.
    """
    old = Policy.parse(before) if before.partition(":")[0] in PRESETS else PRESETS["fp16"]
    lines = []
    if set(new.fp32_modules) - set(old.fp32_modules):
        lines.append("with paddle.amp.auto_cast(enable=False):")
    ops = sorted({amp_name(op) for name in set(new.fp32) - set(old.fp32) for op in listed_by(name)})
    if ops:
        names = ", ".join(f'"{op}"' for op in ops)
        lines.append(f"paddle.amp.auto_cast(custom_black_list=[{names}])")
    if new.compute != old.compute and new.lowers:
        lines.append(f'paddle.amp.auto_cast(dtype="{new.storage.dtype_name}")')
    elif new.loss_scale != "none" and (new.loss_scale, new.init_scale) != (old.loss_scale, old.init_scale):
        lines.append(f"scaler = paddle.amp.GradScaler(init_loss_scaling={new.init_scale})")
    return "; ".join(lines)


# An operation has up to two names: its function's in ``paddle._C_ops``, and its name in the lists of ``paddle.amp``
# if that differs (``matmul`` is ``matmul_v2`` there). ``AMP_NAMES`` contains the second, as printed for a call by
# ``paddle.amp.debugging.collect_operator_stats`` of Paddle 3.3.1; ``PADDLE_WHITE`` and ``PADDLE_BLACK`` are the lists in
# ``paddle/amp/amp_lists.py`` of that version, without operations that belong to no family. Families that are missing here are not
# separate operations in Paddle.

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


_LINES = {
    "new scaler": "scaler = paddle.amp.GradScaler()  # scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()",
    "scaler": "scaler = paddle.amp.GradScaler(init_loss_scaling={end})",
    "autocast off": 'with paddle.amp.auto_cast(enable=False):  # in their forward, on x.astype("float32")',
    "own bf16": 'paddle.amp.auto_cast(dtype="bfloat16")  # and no GradScaler',
    "cast": 'x = x.astype("float32")  # before this line',
    "check data": "assert paddle.isfinite(batch).all()",
    "clip": "paddle.nn.utils.clip_grad_norm_(parameters, 1.0)",
    "not empty": "if x.size:",
    "of all": "y = x.std(unbiased=False)",
    "at least": "x = x.clip(min=1e-6)",
    "mask finite": "x = x.masked_fill(mask, paddle.finfo(x.dtype).min)",
    "root at 0": "y = paddle.sqrt(x.clip(min={end}))",
    "root": "y = paddle.sqrt(x + {end})",
    "rsqrt": "y = paddle.rsqrt(x + {end})",
    "log": "y = paddle.log(x.clip(min={end}))",
    "log1p": "y = paddle.log1p({x}.clip(min=-1 + 1e-6))",
    "div": "y = a / paddle.where(b.abs() < 1e-6, 1.0, b)",
    "pow": "y = x.clip(min={end}).pow(p)",
    "norm": "y = ((x * x).sum(-1) + {end}).sqrt()",
    "exp": "y = x.clip(max={end}).exp()",
    "acos": "y = {x}.clip(-1 + 1e-6, 1 - 1e-6).acos()",
    "softmax": "mask = mask & ~mask.all(-1, keepdim=True)",
}
FRAMEWORK = Framework(
    title="Paddle",
    stages={"Paddle": frozenset(("mezzo audit", "mezzo diagnose", "mezzo ranges", "mezzo fallback"))},
    stage_of=lambda target, kind: "Paddle",
    check=check,
    training_call="called backward()",
    not_seen="static graphs are not seen",
    in_fp32='x.astype("float32")',
    lines=_LINES,
)
