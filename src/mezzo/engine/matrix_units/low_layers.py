"""Which linear layers of a model compute in 8 or 4 bits, and why the others stay in BF16.

Few bits pay only for large products, because rounding costs a pass over every operand, and they harm some layers more than
others. So these layers stay in BF16, each with its reason in ``Session.explain``: layers whose sizes are not multiples of a block, or
of the 16 that FP8 matrix units require; layers smaller than those for which torchao measured a gain in FP8 (on H100s); the last
linear layer, whose errors reach the loss undamped, and in blocks the first; layers with their own code, whose results another
forward would change; and those that the policy keeps in BF16 or FP32 by name.

Layers in blocks are converted on every device, by a forward of their own. FP8 with a scale per tensor or row is emulated
operation by operation instead, without regard to layers (``emulation.float8_linear``).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from mezzo.engine.casts import conversion
from mezzo.engine.matrix_units.block_linear import LayerPlan, linear
from mezzo.engine.matrix_units.emulation import Emulation
from mezzo.engine.matrix_units.native_units import (
    MxLinear,
    float8_config,
    in_float8,
    lowers,
    mxfp8_linear,
    use_float8,
)
from mezzo.errors import SessionError
from mezzo.explain import Choice
from mezzo.formats import FP32, Recipe
from mezzo.policy import Policy
from mezzo.policyfields import LAYER_PRODUCTS, LayerProduct, recipe_of, split_product

SizeFault = Literal["not multiples", "too small"]
"""Why a linear layer's sizes keep it in 16 bits."""
_FIRST = (
    "the first linear layer in the order of modules: it reads what no norm has levelled; end_layers=compute includes it"
)
_LAST = "the last linear layer: its errors reach the loss undamped"
_LAST_IN_BLOCKS = f"{_LAST}; end_layers=compute includes it"
_OWN_CODE = "it has code of its own, which a layer in fewer bits would not run"
_OTHER_DTYPE = "its weight is in a format that is never cast"
_OF_TRANSFORMER_ENGINE = "a layer of TransformerEngine, whose own recipe decides in which format it computes"
_IN_FP32 = "the policy keeps it in FP32"
_IN_BF16 = "the policy keeps it in BF16"
_Judged = list[tuple[str, nn.Linear, str | None]]
"""Linear layers by name, with the reason why each is left alone, or None."""


def convert(models: Sequence[nn.Module], policy: Policy, *, emulated: bool) -> tuple[int, list[Choice]] | None:
    """Convert the linear layers of ``models`` that compute in fewer bits, in place.

    Return their number, and why the others are left alone; None if ``policy`` converts no layers here.

    Args:
        models: before their weights are cast.
        policy: the policy.
        emulated: whether the device emulates it.

    Raises:
        PolicyError: a name in ``bf16_products`` matches no module.
        UnsupportedFormatError: torchao cannot be imported.
    """
    recipe = recipe_of(policy)
    if recipe is None or (emulated and not recipe.by_layer):
        return None
    _check_products(models, policy)
    judged = [_judged(model, policy, recipe) for model in models]
    chosen = [one for of_model in judged for one in _chosen(of_model)]
    config = float8_config(policy) if chosen and not recipe.by_layer else None
    for name, layer in chosen:
        if not recipe.by_layer:
            use_float8(layer, config, policy, converted=_is_converted(layer))
        elif not _is_converted(layer):
            plan = plan_of(str(policy), *_in_16_bits(name, policy))
            use_blocks(layer, plan, policy, product=None if emulated else mxfp8_linear(policy))
    return len(chosen), _left_alone(judged, policy)


def planned(model: nn.Module, policy: Policy) -> dict[str, tuple[nn.Linear, LayerPlan]]:
    """Return the linear layers of ``model`` that compute in blocks under ``policy``, by name, with their plans; it changes none.

    Patterns of the policy may name modules of other models.
    """
    recipe = recipe_of(policy)
    if recipe is None or not recipe.by_layer:
        return {}
    own = policy.replace(fp32_modules=tuple(conversion.matching_patterns(model, policy.fp32_modules)))
    return {
        name: (layer, plan_of(str(own), *_in_16_bits(name, own)))
        for name, layer in _chosen(_judged(model, own, recipe))
    }


def plan_of(policy: str, *in_16_bits: LayerProduct) -> LayerPlan:
    """Return the plan of a layer from the text of its policy and the products that stay in BF16."""
    parsed = Policy.parse(policy)
    recipe = recipe_of(parsed)
    assert recipe is not None
    return LayerPlan(recipe=recipe, in_16_bits=frozenset(in_16_bits), accumulate=parsed.accumulate, policy=policy)


def release(models: Iterable[nn.Module]) -> None:
    """Undo the conversion to blocks of an earlier session.

    Raises:
        SessionError: another library, or another part of a policy, has wrapped a converted layer.
    """
    for model in models:
        for name, module in model.named_modules():
            conversion.unwrap(module, _in_blocks)
            if _is_converted(module, by=(_in_blocks,)):
                raise SessionError(
                    f"the layer {name!r} computes in blocks for an earlier session, and its forward was wrapped since",
                    hint="build the model anew for each session",
                )


def use_blocks(layer: nn.Linear, plan: LayerPlan, policy: Policy, *, product: MxLinear | None = None) -> None:
    """Make a layer compute in blocks in regions of ``policy``, by the device's ``product`` if it has one, else emulated."""
    conversion.wrap(layer, _in_blocks, layer, plan, product, policy.storage.dtype)


def _chosen(judged: _Judged) -> list[tuple[str, nn.Linear]]:
    return [(name, layer) for name, layer, reason in judged if reason is None]


def layer_choices(models: Sequence[nn.Module], policy: Policy, *, emulated: bool) -> list[Choice]:
    """Return which linear layers of ``models`` compute in fewer bits under ``policy``, and why the others do not."""
    recipe = recipe_of(policy)
    if recipe is None:
        return []
    judged = [_judged(model, policy, recipe) for model in models]
    every = [reason for of_model in judged for _, _, reason in of_model]
    what, gaining = f"{policy.compute} layers", f"{every.count(None)} of {len(every)} linear layers"
    if emulated and not recipe.by_layer:
        reason = f"emulation has no shapes to avoid; on a GPU with FP8 units {gaining} would compute in FP8"
        return [Choice(what=what, value="all linear layers", reason=reason)]
    if emulated:
        reason = "their products are emulated, with every rounding of a GPU's units"
    else:
        reason = f"torchao's {recipe.name} recipe on the GPU's units"
    return [Choice(what=what, value=gaining, reason=reason), *_left_alone(judged, policy)]


def _in_16_bits(name: str, policy: Policy) -> frozenset[LayerProduct]:
    """Return the products of the layer ``name`` that ``policy`` keeps in BF16."""
    wanted = [product for layer, product in map(split_product, policy.bf16_products) if fnmatchcase(name, layer)]
    return frozenset(product for product in LAYER_PRODUCTS if product in wanted or "*" in wanted)


def matching_products(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the ``names`` in ``bf16_products`` whose layer patterns match a module's name."""
    return {name for name in names if conversion.matching_patterns(model, [split_product(name)[0]])}


def _check_products(models: Sequence[nn.Module], policy: Policy) -> None:
    matched = {name for model in models for name in matching_products(model, policy.bf16_products)}
    for name in policy.bf16_products:
        if name not in matched:
            names = [name for model in models for name in conversion.module_names(model)]
            raise conversion.no_such_module(split_product(name)[0], names)


def _judged(model: nn.Module, policy: Policy, recipe: Recipe) -> _Judged:
    names = conversion.module_names(model) or {"the model": model}
    layers = {name: module for name, module in names.items() if isinstance(module, nn.Linear)}
    foreign = {
        name: cast(nn.Linear, module) for name, module in names.items() if _of_transformer_engine(module)
    }  # for its sizes
    in_fp32 = {inner for kept in conversion.fp32_modules(model, policy) for inner in kept.modules()}
    ends = _ends(list(layers.values()), policy, recipe)
    judged = [
        (name, layer, _IN_FP32 if layer in in_fp32 else ends.get(layer) or _why_not(name, layer, policy, recipe))
        for name, layer in layers.items()
    ]
    return [*judged, *((name, layer, _OF_TRANSFORMER_ENGINE) for name, layer in foreign.items())]


def _of_transformer_engine(module: nn.Module) -> bool:
    """Return whether a module is one of TransformerEngine's linear layers, by the name of its class' module: it is not installed here."""
    ours = type(module).__module__.partition(".")[0] == "transformer_engine"
    return ours and not isinstance(module, nn.Linear) and {"in_features", "out_features"} <= set(vars(module))


def _ends(layers: Sequence[nn.Linear], policy: Policy, recipe: Recipe) -> dict[nn.Linear, str]:
    """Return the first and the last layer, if they stay in BF16, with the reasons."""
    if not layers or (recipe.by_layer and policy.end_layers == "compute"):
        return {}
    return {layers[0]: _FIRST, layers[-1]: _LAST_IN_BLOCKS} if recipe.by_layer else {layers[-1]: _LAST}


def _why_not(name: str, layer: nn.Linear, policy: Policy, recipe: Recipe) -> str | None:
    kind = _class_before_sharding(layer) if recipe.by_layer else type(layer)
    plain = kind is nn.Linear and "forward" not in vars(layer) and not any(layer.children())
    if not plain and not _is_converted(layer):
        return _OWN_CODE
    if layer.weight.dtype not in (FP32.dtype, policy.storage.dtype):
        return _OTHER_DTYPE
    if len(_in_16_bits(name, policy)) == len(LAYER_PRODUCTS):
        return _IN_BF16
    fault = fault_of_sizes(layer.out_features, layer.in_features, recipe)
    if fault is None:
        return None
    return _sizes(recipe) if fault == "not multiples" else _least_sizes(recipe)


def _class_before_sharding(layer: nn.Module) -> type:
    """Return a module's class, without the one that ``fully_shard`` puts before it."""
    kinds = type(layer).__mro__
    return next(kind for kind in kinds if all(base.__name__ != "FSDPModule" for base in kind.__mro__))


def _sizes(recipe: Recipe) -> str:
    why = "so its blocks would not be whole" if recipe.by_layer else "which FP8 matrix units require"
    return f"a size is not a multiple of {recipe.multiple}, {why}"


def fault_of_sizes(outputs: int, inputs: int, recipe: Recipe) -> SizeFault | None:
    """Return why a linear layer of these sizes is not computed in fewer bits; None if it is."""
    if outputs % recipe.multiple or inputs % recipe.multiple:
        return "not multiples"
    return "too small" if _too_small(outputs, inputs, recipe) else None


def _too_small(outputs: int, inputs: int, recipe: Recipe) -> bool:
    return any(outputs <= most_outputs and inputs <= most_inputs for most_outputs, most_inputs in recipe.too_small)


def _least_sizes(recipe: Recipe) -> str:
    limits = [
        " and ".join(
            f"{most:g} {side}" for most, side in zip(sizes, ("outputs", "inputs"), strict=True) if math.isfinite(most)
        )
        for sizes in recipe.too_small
    ]
    return f"too small to gain: no more than {', or '.join(limits)} (torchao's measurements on H100s)"


def _left_alone(judged: Iterable[_Judged], policy: Policy) -> list[Choice]:
    """Return one choice per reason; layers of one size whose names differ only in numbers are grouped."""
    by_reason: dict[str, dict[tuple[str, str], list[str]]] = {}
    for name, layer, reason in (one for of_model in judged for one in of_model):
        if reason is not None:
            alike = re.sub(r"(?<![^.])\d+(?![^.])", "*", name), f"({layer.in_features} to {layer.out_features})"
            by_reason.setdefault(reason, {}).setdefault(alike, []).append(name)
    return [
        Choice(
            what=f"not in {policy.compute}",
            value=", ".join(_group_text(*group) for group in groups.items()),
            reason=reason,
        )
        for reason, groups in by_reason.items()
    ]


def _group_text(alike: tuple[str, str], names: list[str]) -> str:
    pattern, sizes = alike
    return f"{names[0]} {sizes}" if len(names) == 1 else f"{len(names)} x {pattern} {sizes}"


def _is_converted(layer: nn.Module, *, by: Sequence[Any] | None = None) -> bool:
    """Return whether a layer computes in few bits, by one of the wrappers ``by`` or by any."""
    forward = vars(layer).get("forward")
    while isinstance(forward, functools.partial):  # a wrapper that casts the inputs may be outside
        if forward.func in (by or (in_float8, _in_blocks)):
            return True
        forward = forward.args[0] if forward.args else None
    return False


def _in_blocks(
    call: Any, layer: nn.Linear, plan: LayerPlan, product: MxLinear | None, low: torch.dtype, input: Tensor
) -> Tensor:
    """Run a layer in blocks in the session's region, by torchao's ``product`` or emulated; elsewhere as ``call`` does."""
    if not lowers(layer, low, input):
        y: Tensor = call(input)
        return y
    with torch.autocast(input.device.type, enabled=False):  # the emulation's own products are not to be cast
        if product is not None:
            return product(input.to(low), layer.weight, layer.bias, with_hp="wgrad" in plan.in_16_bits)
        run = functools.partial(linear, plan=plan)
        y = Emulation(name="linear", format=plan.format_of("forward"), recipe=plan.recipe, run=run)(
            input.to(low), layer.weight, layer.bias
        )
        return y
