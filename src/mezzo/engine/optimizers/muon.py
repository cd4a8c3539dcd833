"""Muon over master weights: momentum, made orthogonal as whole matrices by Newton-Schulz in BF16; AdamW for the rest.

The iteration multiplies each singular value of a matrix towards 1. It must see the whole matrix: a half of one has other singular
values. So a sharded weight's direction is gathered in BF16, which it is rounded to in any case, every process
computes the same, and each updates its own part.

Where a device has no BF16 units, operands and results are rounded to BF16 and multiplied in FP32: the numbers of such units, at
FP32's speed.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mezzo.devices import this_device
from mezzo.engine.kernels.reference import Rule, Values
from mezzo.engine.optimizers.adamw import ADAMW, AdamW, moments_of, settings_of
from mezzo.engine.optimizers.one_pass import OnePass, check_range, rate
from mezzo.errors import PolicyError, SessionError
from mezzo.explain import Choice
from mezzo.formats import BF16

_RATES = ("original", "match_rms_adamw")
_KERNEL_DIMS = (4, 5)
_NO_MATRICES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)
"""Modules whose weights may have two dimensions and multiply nothing as a matrix: they look rows up, or scale element by element."""
_SHOWN_NAMES = 6


@dataclass(frozen=True, kw_only=True)
class MuonSettings:
    """A group's settings for one update, with the names of ``torch.optim.Muon``."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    maximize: bool = False


def orthogonalized(
    matrix: Tensor, *, coefficients: tuple[float, float, float], steps: int, eps: float, native: bool
) -> Tensor:
    """Return a BF16 matrix with singular values near 1 in place of its own: the quintic Newton-Schulz iteration.

    Its coefficients a, b, c take a singular value s to a*s + b*s**3 + c*s**5. The order of roundings is ``torch.optim.Muon``'s.

    Args:
        matrix: BF16, two dimensions.
        coefficients: a, b, c.
        steps: number of iterations.
        eps: the least norm that the matrix is divided by.
        native: whether the device multiplies BF16 itself; otherwise FP32 products are rounded.
    """
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=eps)  # FP32 inside, one rounding of the norm and one of each quotient

    def rounded(product: Tensor) -> Tensor:
        return product if native else product.to(BF16.dtype).float()

    x = x if native else x.float()
    for _ in range(steps):
        gram = rounded(x @ x.mT)
        polynomial = rounded(torch.addmm(gram, gram, gram, beta=b, alpha=c))
        x = rounded(torch.addmm(x, polynomial, x, beta=a))
    x = x.to(BF16.dtype)
    return x.mT if tall else x


@functools.cache
def _units(device_type: str) -> tuple[bool, str]:
    """Return whether a device multiplies BF16 itself, and why."""
    support = this_device(device_type).support(BF16)
    return support.level == "native", support.reason


def _muon(values: Values, settings: MuonSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what ``torch.optim.Muon`` would make of a weight and its momentum."""
    s, weight = settings, values.weight
    buffer = torch.lerp(values.moments["momentum_buffer"], values.gradient, 1 - s.momentum)
    ahead = torch.lerp(values.gradient, buffer, s.momentum) if s.nesterov else buffer
    whole = values.spread.whole(ahead.to(BF16.dtype))
    matrix = whole.flatten(1)  # a convolution's kernel: one row for each output channel
    native, _ = _units(matrix.device.type)
    straight = orthogonalized(matrix, coefficients=s.ns_coefficients, steps=s.ns_steps, eps=s.eps, native=native)
    ratio = _rate_ratio(s.adjust_lr_fn, *matrix.shape)
    direction = values.spread.part(straight.reshape(whole.shape)).float()
    # One rounding of the weight. torch multiplies it by 1 - lr * decay first, which is rounded too.
    decayed = torch.add(direction, weight, alpha=s.weight_decay / ratio)
    return torch.add(weight, decayed, alpha=-s.lr * ratio), {"momentum_buffer": buffer}


def _rate_ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """Return what the learning rate is multiplied by for a matrix, so that updates of all shapes are of one size.

    ``original`` is Jordan's (https://kellerjordan.github.io/posts/muon/), ``match_rms_adamw`` Moonshot's (arXiv:2502.16982).
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


_ADAMW_DEFAULTS = {
    name: inspect.signature(AdamW).parameters[name].default
    for name in ("betas", "eps", "weight_decay", "amsgrad", "maximize")
}


class Muon(OnePass):
    """Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) for matrices, and AdamW for the rest.

    A group with ``use_muon=False`` is trained by ``mezzo.AdamW``, with that class's settings; its ``lr`` must be given. All
    other groups hold matrices, and kernels of Conv2d and Conv3d, each flattened to a row for each output channel. ``Muon.groups``
    makes both groups of a model. A parameter without a gradient is left as it is.

    Args:
        params: as for ``torch.optim.Muon``; FP32, FP16 or BF16.
        lr: learning rate.
        weight_decay: decoupled; a share of the weight times ``lr``.
        momentum: share of the mean of gradients that is kept.
        nesterov: look ahead along the momentum.
        ns_coefficients: of the iteration's polynomial, for the first, third and fifth power.
        eps: the least norm that a matrix is divided by.
        ns_steps: number of iterations, 1 to 99.
        adjust_lr_fn: ``original`` (None means it), or ``match_rms_adamw`` for updates as large as AdamW's.
        moments: the format of the momentum (4, 2 or 1.01 bytes) and of AdamW's moments; stochastically rounded below FP32.
        rounding: how BF16 weights without masters are rounded; ``stochastic`` weights have no masters.

    Raises:
        PolicyError: a setting is outside its range.
        SessionError: a parameter is no matrix, or a group for AdamW has no learning rate.
    """

    _rule = Rule(formula=_muon, whole_matrices=True)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        moments: Literal["fp32", "bf16", "8bit"] = "fp32",
        rounding: Literal["nearest", "stochastic"] = "nearest",
    ) -> None:
        check_range(lr=(lr, 0, None), weight_decay=(weight_decay, 0, None), momentum=(momentum, 0, 1))
        check_range(eps=(eps, 0, None), ns_steps=(ns_steps, 1, 100))
        if len(ns_coefficients) != 3:
            wrong = f"ns_coefficients={ns_coefficients!r}; allowed: three numbers"
            raise PolicyError(wrong, hint="pass the factors of the first, third and fifth power")
        if adjust_lr_fn not in (None, *_RATES):
            wrong = f"adjust_lr_fn={adjust_lr_fn!r}; allowed: None, {', '.join(_RATES)}"
            raise PolicyError(wrong, hint="choose adjust_lr_fn from these")
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        iteration = {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        storage = {"moments": moments, "rounding": rounding}
        super().__init__(params, {**defaults, **iteration, "use_muon": True, **storage})

    @staticmethod
    def groups(
        model: nn.Module, *, adamw_names: Sequence[str], adamw: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a model's parameters as two groups: hidden matrices, and what AdamW trains.

        AdamW trains embeddings, with what shares their weights, all that has one or three dimensions, norms, and what you name.

        Args:
            model: the model, sharded or not.
            adamw_names: names or patterns (``blocks.*.gate``) of modules and parameters for AdamW: the output layer, if it shares
                no embedding's weight, and a position table that is a parameter.
            adamw: AdamW's settings, with ``lr``.

        Raises:
            SessionError: a name matches nothing, or no matrix is left.
        """
        if isinstance(adamw_names, str):
            wrong = f"adamw_names={adamw_names!r} is one text; allowed: a list of names"
            raise SessionError(wrong, hint=f"write adamw_names=[{adamw_names!r}]")
        chosen: set[nn.Parameter] = set()
        for name in adamw_names:
            modules = [m for n, m in model.named_modules() if fnmatch.fnmatchcase(n, name)]
            matched = {p for m in modules for p in m.parameters()}
            matched |= {p for n, p in model.named_parameters() if fnmatch.fnmatchcase(n, name)}
            if not matched:
                raise SessionError(
                    f"adamw_names has {name!r}, which is no module or parameter of {type(model).__name__}",
                    hint="print the names: [name for name, _ in model.named_parameters()]",
                )
            chosen |= matched
        chosen |= {p for m in model.modules() if isinstance(m, _NO_MATRICES) for p in m.parameters(recurse=False)}
        named = list(model.named_parameters())
        hidden = [(n, p) for n, p in named if p not in chosen and _is_matrix(p)]
        if not hidden:
            raise SessionError(
                f"{type(model).__name__} has no matrix that adamw_names={list(adamw_names)!r} leaves to Muon",
                hint="take names out of adamw_names, or train with mezzo.AdamW",
            )
        kept = {id(p) for _, p in hidden}
        return {"params": hidden}, {
            **adamw,
            "params": [(n, p) for n, p in named if id(p) not in kept],
            "use_muon": False,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do; with ``use_muon=False`` one for AdamW.

        Raises:
            SessionError: a parameter is no matrix or has another format, or a group for AdamW has no learning rate.
        """
        by_muon = param_group.get("use_muon", True)
        if not by_muon and "lr" not in param_group:
            raise SessionError(
                "a group with use_muon=False has no lr; allowed: AdamW's own, since Muon's is many times larger",
                hint="add it to the group: {'params': ..., 'use_muon': False, 'lr': 3e-4}",
            )
        super().add_param_group(param_group if by_muon else {**_ADAMW_DEFAULTS, **param_group})
        group = self.param_groups[-1]
        names = group.get("param_names", [""] * len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            if by_muon and not _is_matrix(parameter):
                del self.param_groups[-1]
                called = f" {name!r}" if name else ""
                raise SessionError(
                    f"the parameter{called} of shape {tuple(parameter.shape)} is no matrix; allowed for Muon: 2 dimensions, or the "
                    f"{' or '.join(map(str, _KERNEL_DIMS))} of a convolution's kernel",
                    hint="give it to AdamW, in a group with use_muon=False; mezzo.Muon.groups(model, ...) makes both groups",
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved by this class, by torch's Muon, or by the author's reference, whose groups are marked in the same way.

        Raises:
            SessionError: a group was trained by the other of Muon and AdamW.
        """
        saved, groups = state_dict["param_groups"], []
        for number, (own, theirs) in enumerate(zip(self.param_groups, saved, strict=False)):
            by_muon = theirs.get("use_muon", own["use_muon"])
            if by_muon != own["use_muon"]:
                raise SessionError(
                    f"group {number} of the state has use_muon={by_muon}, and this optimizer's has use_muon={own['use_muon']}",
                    hint="build the groups in the order of the run that saved the state",
                )
            groups.append({**({} if by_muon else _ADAMW_DEFAULTS), **theirs, "use_muon": by_muon})
        super().load_state_dict({**state_dict, "param_groups": [*groups, *saved[len(groups) :]]})

    def explain(self) -> list[Choice]:
        """Return which parameters Muon and AdamW train, and how Newton-Schulz multiplies here."""
        choices = []
        for what, chosen in (("Muon", True), ("AdamW", False)):
            groups = [group for group in self.param_groups if group["use_muon"] is chosen and group["params"]]
            parameters = [p for group in groups for p in group["params"]]
            if not parameters:
                continue
            names = [name for group in groups for name in group.get("param_names", ())]
            reason = f"use_muon={chosen}" + (f": {_listed(names)}" if names else "")
            choices.append(
                Choice(what=what, value=f"{len(parameters)} parameter{'s' * (len(parameters) != 1)}", reason=reason)
            )
            if chosen:
                native, why = _units(parameters[0].device.type)
                how = "native" if native else "emulated: FP32 products of BF16 values, rounded"
                choices.append(Choice(what="Newton-Schulz", value=f"BF16, {how}", reason=why))
        return choices

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        return self._rule if group["use_muon"] else ADAMW

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["use_muon"] else moments_of(group)

    def _settings(self, group: dict[str, Any]) -> Any:
        if not group["use_muon"]:
            return settings_of(group, functools.partial(self._settings, group))
        names = ("weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
        return MuonSettings(lr=rate(group), **{name: group[name] for name in names})


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.ndim == 2 or parameter.ndim in _KERNEL_DIMS


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")
