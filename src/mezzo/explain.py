"""A policy in sentences: what happens on a device for each choice, and why."""

from __future__ import annotations

import html
import textwrap
from dataclasses import dataclass

from mezzo import oplists
from mezzo.devices import Device, this_device
from mezzo.policyfields import PolicyFields, recipe_of

NOT_HONOURED = "not honoured"
"""The first words of a choice's value if a framework cannot do what the policy asks."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One choice that was made, and why."""

    what: str
    value: str
    reason: str


_VALUE_WIDTH, _WIDTH = 40, 110


class Choices(list[Choice]):
    """A list of choices that prints as a table, in a terminal and in a notebook."""

    def __repr__(self) -> str:
        named = max((len(choice.what) for choice in self), default=0)
        valued = min(max((len(choice.value) for choice in self), default=0), _VALUE_WIDTH)
        lines = []
        for choice in self:
            values = textwrap.wrap(choice.value, valued) or [""]
            reasons = textwrap.wrap(choice.reason, max(_WIDTH - named - valued - 4, _VALUE_WIDTH)) or [""]
            for n in range(max(len(values), len(reasons))):
                what = choice.what if n == 0 else ""
                value, reason = ("".join(words[n : n + 1]) for words in (values, reasons))
                lines.append(f"{what:{named}}  {value:{valued}}  {reason}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = ((choice.what, choice.value, choice.reason) for choice in self)
        cells = ("".join(f'<td style="text-align:left">{html.escape(text)}</td>' for text in row) for row in rows)
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def in_short(policy: PolicyFields) -> str:
    """Return a policy in one line: its compute format, the format of weights, its loss scale."""
    if not policy.lowers:
        return f"computes in {policy.compute}, casts nothing"
    ways = {"ops": "chosen operation by operation", "model": "for the whole model"}
    words = [f"{policy.compute} {ways[policy.casting]}", f"weights {weights(policy).value}"]
    if policy.loss_scale != "none":
        begin = "from " if policy.loss_scale == "dynamic" else ""
        words.append(f"loss scale {policy.loss_scale} {begin}{policy.init_scale:g}")
    if policy.fp32_modules:
        words.append(f"{', '.join(policy.fp32_modules)} in fp32")
    return "; ".join(words)


def explain(policy: PolicyFields, device: Device | str) -> Choices:
    """Return what ``policy`` does on ``device``, one choice per line.

    Raises:
        UnsupportedFormatError: the device can neither do what the policy asks nor emulate it.
    """
    where = this_device(device) if isinstance(device, str) else device
    arithmetic, why = policy.arithmetic_on(where)
    choices = [_compute(policy, where, arithmetic, why), weights(policy), loss_scale(policy)]
    if policy.in_layers:
        choices += [_recipe(policy), *_blocks(policy), _speed(policy, arithmetic)]
    if policy.casting == "ops":
        choices.append(_lists(policy))
        choices += _user_lists(policy)
    if policy.casting == "model":
        choices.append(_norms(policy))
    choices += modules(policy)
    choices += _communication(policy)
    if where.kind != "cpu":
        choices.append(_choice("evidence", "it has run" if where.has_run else "none", where.evidence))
    return Choices(choices)


def _choice(what: str, value: str, reason: str) -> Choice:
    return Choice(what=what, value=value, reason=reason)


def _compute(policy: PolicyFields, device: Device, arithmetic: str, why: str) -> Choice:
    if policy.compute == "tf32":
        level = device.support(policy.required_formats[0]).level
        value = "tf32 matrix products" if level == "native" else "fp32 matrix products"
        return _choice("compute", value, why)
    if not policy.lowers:
        return _choice("compute", "fp32", "the policy casts nothing; TF32 is off")
    return _choice("compute", f"{policy.compute}, {arithmetic} on {device.name}", why)


def _recipe(policy: PolicyFields) -> Choice:
    recipe = recipe_of(policy)
    assert recipe is not None
    value = f"{recipe.name}: operands {recipe.values.name}, gradients {recipe.gradients.name}"
    return _choice(f"{policy.compute} recipe", value, recipe.reason)


def _blocks(policy: PolicyFields) -> list[Choice]:
    """Return how the operands of layers in blocks are rounded."""
    recipe = recipe_of(policy)
    if recipe is None or not recipe.by_layer:
        return []
    scaling = recipe.weights.scaling
    assert scaling is not None
    high, wide = scaling.tile(along=1)
    rules = {
        "exact": "the largest magnitude of a block becomes the format's largest value",
        "rceil": "a power of two, rounded up: nothing saturates",
        "floor": "a power of two, rounded down: the largest values of a block may saturate",
        "four_or_six": "the largest magnitude of a block becomes 4 or 6, whichever rounds with the smaller error",
    }
    choices = [
        _choice("scales", f"{scaling.format.name}, {scaling.rule}", rules[scaling.rule]),
        _choice(
            "blocks of weights",
            f"{high} x {wide}",
            "rows x columns" if high == 1 else "the same values for both products",
        ),
    ]
    if recipe.stochastic:
        reason = "on average nothing is lost; the draws follow from the step's own values, so a run can be repeated"
        choices.append(_choice("gradients", "rounded at random", reason))
    if recipe.hadamard:
        reason = "both operands of a weight's gradient are mixed 16 by 16, so that a large value is shared by its block"
        choices.append(_choice("Hadamard transform", "wgrad", reason))
    if policy.bf16_products:
        choices.append(_choice("products in bf16", ", ".join(policy.bf16_products), "the policy names them"))
    return choices


def _speed(policy: PolicyFields, arithmetic: str) -> Choice:
    if arithmetic == "native":
        reason = "until torch.compile fuses them, scaling and casts are separate passes over every operand"
        return _choice("speed", "compile the model: torch.compile(model)", reason)
    name = policy.compute.upper()
    reason = (
        f"every operation is emulated, also those in BF16: this shows what {name} does to training, not how fast it is"
    )
    return _choice("speed", "slower than bf16", reason)


def weights(policy: PolicyFields) -> Choice:
    """Return the format that the weights are kept in."""
    if policy.casting != "model":
        reason = "the optimizer updates them in FP32, so small updates are kept"
        return _choice("weights", "fp32", reason)
    if policy.master_weights:
        reason = "the optimizer updates FP32 masters; the model computes with their 16-bit copies"
        return _choice("weights", f"{policy.compute} with fp32 masters", reason)
    reason = "updates smaller than half a unit in the last place are lost"
    return _choice("weights", f"{policy.compute} only", reason)


def loss_scale(policy: PolicyFields) -> Choice:
    """Return how the loss is scaled."""
    if policy.loss_scale == "dynamic":
        value = f"dynamic from {policy.init_scale:g}, grows every {policy.growth_interval} updates"
        reason = f"small gradients would become zero in {policy.compute}"
        return _choice("loss scale", value, reason)
    if policy.loss_scale == "static":
        return _choice("loss scale", f"static {policy.init_scale:g}", "the policy fixes it")
    if policy.compute == "fp16":
        return _choice("loss scale", "none", "the policy sets none; small gradients become zero")
    return _choice("loss scale", "none", f"gradients in {policy.storage.name} have FP32's range")


def _lists(policy: PolicyFields) -> Choice:
    if policy.op_lists == "device":
        return _choice("op lists", "the device's", "whatever torch.autocast does on this device")
    counts = {p: sum(f.precision == p for f in oplists.FAMILIES) for p in oplists.USER_LISTS}
    value = ", ".join(f"{n} families {p}" for p, n in counts.items())
    return _choice("op lists", value, "CUDA autocast's lists, the same on every device")


def _communication(policy: PolicyFields) -> list[Choice]:
    choices = []
    if policy.reduce != "auto":
        value, reason = str(policy.reduce), "gradients are rounded to it and summed over the processes in it"
        if policy.world > 1:
            value = f"{value}, emulated for {policy.world} processes in a {policy.reduce_order}"
            reason = (
                "each process' share and every partial sum are rounded; shares are drawn at random around the gradient"
            )
        choices.append(_choice("reduction", value, reason))
    if policy.gather != "auto":
        reason = (
            "weights that fully_shard has sharded are gathered in it, and computed with in it; others stay as they are"
        )
        choices.append(_choice("gathering", policy.gather, reason))
    return choices


def communication_not_honoured(policy: PolicyFields) -> list[Choice]:
    """Return the formats of communication that ``policy`` names, as choices that a framework other than PyTorch does not honour."""
    reason = "formats of communication are set, and emulated, for PyTorch only"
    requested = [(field, getattr(policy, field)) for field in ("reduce", "gather") if getattr(policy, field) != "auto"]
    return [_choice(field, f"{NOT_HONOURED}: {value}", reason) for field, value in requested]


def _user_lists(policy: PolicyFields) -> list[Choice]:
    return [
        _choice("user op lists", f"{', '.join(names)}: {precision}", "the policy names them")
        for precision in oplists.USER_LISTS
        if (names := getattr(policy, precision))
    ]


def modules(policy: PolicyFields) -> list[Choice]:
    """Return which modules the policy keeps in FP32, if any."""
    value = f"{', '.join(policy.fp32_modules)} in fp32"
    return [_choice("modules", value, "the policy keeps them in FP32")] if policy.fp32_modules else []


def _norms(policy: PolicyFields) -> Choice:
    if policy.norms == "fp32":
        return _choice("normalisation layers", "fp32", "sums of squares leave 16-bit range or precision")
    return _choice("normalisation layers", policy.compute, "the policy casts the whole model")
