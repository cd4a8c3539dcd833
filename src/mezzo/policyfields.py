"""The fields of a policy, their allowed values and combinations; errors say what is allowed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, cast, get_args

from mezzo import formats
from mezzo.devices import Device
from mezzo.errors import PolicyError, UnsupportedFormatError, nearest

Compute = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"]
CastingKind = Literal["none", "ops", "model"]
LossScaleKind = Literal["none", "static", "dynamic"]
Arithmetic = Literal["auto", "native", "emulated"]
OpLists = Literal["portable", "device"]
Fp8Formats = Literal["ocp", "fnuz"]
ScaleRuleName = Literal["auto", "rceil", "floor", "exact", "four_or_six"]
WeightBlocks = Literal["auto", "rows", "squares"]
Hadamard = Literal["auto", "wgrad", "none"]
GradientRounding = Literal["auto", "nearest", "stochastic"]
LayerProduct = Literal["forward", "dgrad", "wgrad"]
EndLayers = Literal["bf16", "compute"]
Exchanged = Literal["auto", "fp32", "bf16", "fp16"]
ReduceOrder = Literal["ring", "tree"]
Accumulate = Literal["fp32", "fp22", "fp22-128", "hopper"]
GradientSums = Literal["auto", "bf16"]

PROMOTED: Accumulate = "fp22-128"
"""Sums in 14 significant bits, which are added to sums in FP32 after every 128 products."""
DYNAMIC_SCALE = ("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min_scale", "max_scale")
"""The fields that say how a dynamic loss scale changes."""
INTEGER_FIELDS = ("growth_interval", "hysteresis", "world")
SEPARATORS = ":+, "
MODULE_FIELDS = ("lower", "fp32", "widest", "fp32_modules", "bf16_products")
LAYER_PRODUCTS: tuple[LayerProduct, ...] = get_args(LayerProduct)
"""The products of a linear layer: its result, and the gradients of its input and of its weight."""
_BY_BLOCKS = ("mxfp8", "mxfp4", "nvfp4")
IN_LAYERS = ("fp8", *_BY_BLOCKS)
"""Compute formats of linear layers; all else computes in BF16."""
_RULES_OF_BLOCKS = {
    "fp8": ("exact", "rceil"),
    "mxfp8": ("rceil", "floor"),
    "mxfp4": ("rceil", "floor"),
    "nvfp4": ("exact", "four_or_six"),
}
"""The rules of scales that each block format has; the first is its own."""
WORDS: dict[str, tuple[object, ...]] = {
    "compute": get_args(Compute),
    "casting": get_args(CastingKind),
    "norms": ("fp32", "compute"),
    "master_weights": (True, False),
    "loss_scale": get_args(LossScaleKind),
    "arithmetic": get_args(Arithmetic),
    "op_lists": get_args(OpLists),
    "fp8_recipe": formats.RECIPE_NAMES,
    "fp8_formats": get_args(Fp8Formats),
    "scale_rule": get_args(ScaleRuleName),
    "weight_blocks": get_args(WeightBlocks),
    "hadamard": get_args(Hadamard),
    "gradient_rounding": get_args(GradientRounding),
    "end_layers": get_args(EndLayers),
    "reduce": get_args(Exchanged),
    "gather": get_args(Exchanged),
    "reduce_order": get_args(ReduceOrder),
    "accumulate": get_args(Accumulate),
    "gradients": get_args(GradientSums),
}
RANGES: dict[str, tuple[float, float]] = {
    "init_scale": (2.0**-100, 2.0**100),
    "growth_factor": (1.0, 2.0**20),
    "backoff_factor": (2.0**-20, 1.0),
    "growth_interval": (1, 2**31 - 1),
    "hysteresis": (1, 2**31 - 1),
    "min_scale": (2.0**-100, 2.0**100),
    "max_scale": (2.0**-100, 2.0**100),
    "world": (1, 2**20),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class PolicyFields:
    """The fields of a ``Policy``, and what follows from them."""

    name: str = "fp32"
    """The preset that it is based on."""
    compute: Compute = "fp32"
    """Format of matrix products and convolutions; 8-bit and 4-bit ones are of linear layers, beside which the rest computes in BF16."""
    casting: CastingKind = "none"
    """``ops``: operation by operation, by the op lists. ``model``: the model's weights and inputs are cast."""
    norms: Literal["fp32", "compute"] = "fp32"
    """With ``casting=model``: the format of normalisation layers."""
    master_weights: bool = False
    """With ``casting=model``: the optimizer updates FP32 copies of the weights."""
    loss_scale: LossScaleKind = "none"
    init_scale: float = 65536.0
    """Loss scale at the start; the loss scale itself when ``loss_scale=static``."""
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    """Updates without overflow after which the scale grows."""
    hysteresis: int = 1
    """Overflows in a row before the scale backs off."""
    min_scale: float = 2.0**-24
    """Floor of the dynamic scale; reaching it with gradients that still overflow is an error."""
    max_scale: float = 2.0**24
    arithmetic: Arithmetic = "auto"
    """``native`` kernels, ``emulated`` ones, or the better of the two for the device."""
    op_lists: OpLists = "portable"
    """``portable``: the same lists on every device. ``device``: whatever torch.autocast does there."""
    fp8_recipe: str = formats.RECIPE_NAMES[0]
    """Under ``fp8``: a scale per tensor, and gradients in E5M2; or all in E4M3, and a scale per row or per block of 128 (``blockwise``)."""
    fp8_formats: Fp8Formats = "ocp"
    """Under ``fp8``: E4M3 and E5M2 as NVIDIA and newer AMD GPUs have them, or ``fnuz``, as AMD's MI300 has them."""
    scale_rule: ScaleRuleName = "auto"
    """How the scales of blocks follow from their largest magnitudes (``formats.ScaleRule``); ``auto``: the format's own way."""
    weight_blocks: WeightBlocks = "auto"
    """Under ``nvfp4``: blocks of weights are 16 x 16 (``squares``, its own way) or 16 values of a row."""
    hadamard: Hadamard = "auto"
    """With 4-bit blocks: whether the operands of a weight's gradient are transformed first; ``auto``: under ``nvfp4``."""
    gradient_rounding: GradientRounding = "auto"
    """In MX and NVFP4 blocks: how gradients are rounded; ``auto``: at random under ``nvfp4``, else to the nearest."""
    end_layers: EndLayers = "bf16"
    """With blocks: whether a model's first and last linear layers stay in BF16."""
    bf16_products: tuple[str, ...] = ()
    """With blocks: products that stay in BF16, as ``layer.product``: ``forward``, ``dgrad``, ``wgrad`` or ``*`` of layers by name."""
    accumulate: Accumulate = "fp32"
    """Under ``fp8``: the format in which emulated matrix units keep partial sums. ``fp22``: Hopper's. ``fp22-128``: likewise, and sums
    of 128 products are added up in FP32. ``hopper``: the first for results and the second for gradients, as torchao has them."""
    gradients: GradientSums = "auto"
    """Format in which gradients add up over the micro-batches of an update; ``auto``: their own. Emulated in one process."""
    reduce: Exchanged = "auto"
    """Format in which gradients are summed over processes; ``auto``: their own."""
    gather: Exchanged = "auto"
    """Format in which ``fully_shard`` gathers weights; ``auto``: as the script says."""
    world: int = 1
    """In one process: the number of processes whose reduction is emulated; 1 for none."""
    reduce_order: ReduceOrder = "ring"
    """Order of an emulated reduction's sum: one process after the other (``ring``), or by pairs (``tree``)."""
    lower: tuple[str, ...] = ()
    """Families or operations to run in the compute format, beyond the lists."""
    fp32: tuple[str, ...] = ()
    """Families or operations to run in FP32, beyond the lists."""
    widest: tuple[str, ...] = ()
    """Families or operations to run in the widest format of their operands, beyond the lists."""
    fp32_modules: tuple[str, ...] = ()
    """Name patterns (``*`` and ``?``) of modules that are kept in FP32."""

    @property
    def storage(self) -> formats.Format:
        """The format that low-precision tensors are stored in (BF16 beside 8-bit and 4-bit layers)."""
        stored = "bf16" if self.in_layers else "fp32" if self.compute == "tf32" else self.compute
        return formats.FORMATS[stored]

    @property
    def changes_gradients(self) -> bool:
        """Whether Mezzo rounds gradients after a backward pass: as sums over micro-batches, or as an emulated reduction would."""
        return self.world > 1 or (self.gradients != "auto" and self.casting != "model")

    @property
    def in_layers(self) -> bool:
        """Whether the compute format is one of linear layers only, in 8 or 4 bits, and the rest is BF16."""
        return self.compute in IN_LAYERS

    @property
    def in_blocks(self) -> bool:
        """Whether operands share scales by blocks."""
        return self.compute in _BY_BLOCKS or self.fp8_recipe == formats.BLOCKWISE

    @property
    def lowers(self) -> bool:
        """Whether any tensor is cast below FP32."""
        return self.casting != "none"

    @property
    def required_formats(self) -> tuple[formats.Format, ...]:
        """The formats that the device has to compute in."""
        recipe = recipe_of(self)
        if recipe is not None:
            return recipe.values, recipe.gradients
        return (formats.FORMATS[self.compute],)

    def arithmetic_on(self, device: Device) -> tuple[Literal["native", "emulated"], str]:
        """Return how the compute format is calculated on ``device``, and why.

        Raises:
            UnsupportedFormatError: native arithmetic was requested on a device that has none.
        """
        supports = [device.support(fmt) for fmt in self.required_formats]
        worst = next((s for s in supports if s.level != "native"), supports[0])
        if worst.level == "native" and (beyond := self._beyond_units()):
            worst = dataclasses.replace(worst, level="emulated", reason=f"torchao's MXFP8 layers have no {beyond}")
        if not self.lowers:
            return "native", worst.reason
        if worst.level == "impossible":
            raise UnsupportedFormatError(
                f"policy {self!s} cannot compute in {worst.format} on {device.name}: {worst.reason}",
                hint="choose another device: mezzo doctor lists this machine's devices",
            )
        if self.arithmetic == "emulated":
            return "emulated", "the policy asks for emulated arithmetic"
        if self.accumulate != "fp32":
            return "emulated", f"a device chooses the format of its own sums; accumulate={self.accumulate} is emulated"
        if self.arithmetic == "native" or self.op_lists == "device":
            return "native", self._native_reason(device, worst.level, worst.reason)
        return ("native" if worst.level == "native" else "emulated"), worst.reason

    def _beyond_units(self) -> str:
        """Return the field of a block format that only emulation has; empty if there is none."""
        if self.gradient_rounding == "stochastic":
            return "gradient_rounding=stochastic"
        products = [name for name in self.bf16_products if split_product(name)[1] in ("forward", "dgrad")]
        return f"bf16_products={'+'.join(products)}" if products else ""

    def _native_reason(self, device: Device, level: str, reason: str) -> str:
        # torch has slow 16-bit kernels for every CPU, but trains in FP8 on GPUs only.
        if level != "native" and (device.kind != "cpu" or self.in_layers):
            raise UnsupportedFormatError(
                f"policy {self!s} asks for native {self.compute} arithmetic on {device.name}: {reason}",
                hint="leave arithmetic=auto and op_lists=portable, which emulate it here, or choose another format",
            )
        why = "asks for native arithmetic" if self.arithmetic == "native" else "asks for device lists"
        return f"the policy {why}; {reason}"


def recipe_of(policy: PolicyFields) -> formats.Recipe | None:
    """Return how linear layers compute in 8 or 4 bits under ``policy``; None if they do not."""
    if not policy.in_layers:
        return None
    if not policy.in_blocks:
        return formats.RECIPES[policy.fp8_recipe, policy.fp8_formats]
    rule = cast(
        formats.ScaleRule, _RULES_OF_BLOCKS[policy.compute][0] if policy.scale_rule == "auto" else policy.scale_rule
    )
    if policy.compute == "fp8":
        return formats.blockwise_recipe(policy.fp8_formats, rule=rule)
    nv = policy.compute == "nvfp4"
    hadamard = nv if policy.hadamard == "auto" else policy.hadamard == "wgrad"
    stochastic = nv if policy.gradient_rounding == "auto" else policy.gradient_rounding == "stochastic"
    if nv:
        square = policy.weight_blocks != "rows"
        return formats.nvfp4_recipe(rule=rule, square=square, hadamard=hadamard, stochastic=stochastic)
    return formats.mx_recipe(policy.compute, rule=rule, hadamard=hadamard, stochastic=stochastic)


def split_product(text: str) -> tuple[str, str]:
    """Return the layer pattern and the product of a name in ``bf16_products``."""
    layer, _, product = text.rpartition(".")
    return layer, product


def check_policy(policy: PolicyFields) -> None:
    """Refuse values outside what a field allows, and fields that contradict each other.

    Raises:
        PolicyError: names the field, its value and what is allowed.
    """
    _check_words(policy)
    _check_numbers(policy)
    _check_combination(policy)


def _check_words(policy: PolicyFields) -> None:
    for field, allowed in WORDS.items():
        value = getattr(policy, field)
        if not any(value == word and type(value) is type(word) for word in allowed):  # 1 == True
            raise PolicyError(
                f"policy field {field}={value!r}; {nearest(str(value), map(str, allowed))}",
                hint=f"set {field} to one of them",
            )


def _check_numbers(policy: PolicyFields) -> None:
    for field, (low, high) in RANGES.items():
        value = getattr(policy, field)
        kinds, noun = ((int,), "whole number") if field in INTEGER_FIELDS else ((int, float), "number")
        number = isinstance(value, kinds) and not isinstance(value, bool)
        if not number or not low <= value <= high:
            raise PolicyError(
                f"policy field {field}={value!r}; allowed: a {noun} from {low:g} to {high:g}",
                hint=f"choose {field} inside that range",
            )
    for field in MODULE_FIELDS:
        value = getattr(policy, field)
        if not isinstance(value, tuple) or not all(_is_name(v) for v in value):
            raise PolicyError(
                f"policy field {field}={value!r}; allowed: names without any of {SEPARATORS!r}",
                hint=f"write {field}=name+name in a text, a list of strings in a file or in Python",
            )
    if policy.min_scale > policy.max_scale:
        raise PolicyError(
            f"min_scale={policy.min_scale:g} is above max_scale={policy.max_scale:g}",
            hint="the floor of the loss scale must not be above its ceiling",
        )


def _is_name(value: object) -> bool:
    # A name must not contain a separator of policy texts, or of lists of policies.
    if not isinstance(value, str) or not value:
        return False
    return value.isprintable() and not set(value) & set(SEPARATORS)


def _check_combination(policy: PolicyFields) -> None:
    if (policy.casting == "none") != (policy.compute in ("fp32", "tf32")):
        raise PolicyError(
            f"compute={policy.compute} and casting={policy.casting} contradict each other",
            hint="fp32 and tf32 cast nothing (casting=none); the others cast ops or the model",
        )
    if policy.casting != "model" and (policy.master_weights or policy.norms != "fp32"):
        raise PolicyError(
            f"casting={policy.casting} keeps weights and norms in FP32, and master_weights={policy.master_weights}, "
            f"norms={policy.norms} contradict it",
            hint="set casting=model, or start from a preset ending in -master or -pure",
        )
    if policy.loss_scale == "dynamic" and not policy.min_scale <= policy.init_scale <= policy.max_scale:
        raise PolicyError(
            f"init_scale={policy.init_scale:g} is outside min_scale={policy.min_scale:g} to max_scale={policy.max_scale:g}",
            hint="choose init_scale between the floor and the ceiling of the loss scale",
        )
    if policy.op_lists == "device" and policy.arithmetic == "emulated":
        raise PolicyError(
            "op_lists=device and arithmetic=emulated contradict each other",
            hint="device lists are torch's own native kernels; emulation follows the portable lists",
        )
    for field in ("fp8_recipe", "fp8_formats"):
        if getattr(policy, field) != getattr(PolicyFields, field) and policy.compute != "fp8":
            raise PolicyError(
                f"{field}={getattr(policy, field)} and compute={policy.compute} contradict each other",
                hint=f"leave {field} out, or start from the preset fp8",
            )
    _check_blocks(policy)
    _check_sums(policy)
    _check_communication(policy)


def _check_sums(policy: PolicyFields) -> None:
    if policy.accumulate != "fp32":
        others = {
            "compute": "fp8",
            "arithmetic": "auto or emulated",
            "op_lists": "portable",
            "fp8_formats": "ocp",
        }
        for field, allowed in others.items():
            if (value := getattr(policy, field)) not in allowed.split(" or "):
                raise PolicyError(
                    f"accumulate={policy.accumulate} emulates the sums of Hopper's FP8 units, and {field}={value} contradicts it; "
                    f"allowed: {field}={allowed}",
                    hint="write fp8:accumulate=fp22, or leave accumulate out",
                )
        if policy.in_blocks and policy.accumulate != PROMOTED:
            raise PolicyError(
                f"accumulate={policy.accumulate} under policy {policy.name}; allowed by blocks: fp32, {PROMOTED}",
                hint="a block's scale is applied where its sum is added to one in FP32, so sums are promoted after every block",
            )
    if policy.gradients != "auto" and policy.casting == "model" and policy.storage.name != policy.gradients:
        raise PolicyError(
            f"gradients={policy.gradients} and policy {policy.name} contradict each other: its gradients are in {policy.storage.name}",
            hint="leave gradients out, or choose a preset that keeps weights in FP32",
        )


_PRESETS_WITH = {
    "scale_rule": "nvfp4, mxfp4, mxfp8, fp8-block",
    "weight_blocks": "nvfp4",
    "hadamard": "nvfp4, mxfp4",
    "gradient_rounding": "nvfp4, mxfp4, mxfp8",
    "end_layers": "nvfp4, mxfp4, mxfp8, fp8-block",
}


def _check_blocks(policy: PolicyFields) -> None:
    """Refuse fields of blocks under policies without them, and choices that a block format does not have."""
    four_bits = policy.compute in ("mxfp4", "nvfp4")
    taken = {
        "scale_rule": ("auto", *_RULES_OF_BLOCKS[policy.compute]) if policy.in_blocks else ("auto",),
        "weight_blocks": get_args(WeightBlocks) if policy.compute == "nvfp4" else ("auto",),
        "hadamard": get_args(Hadamard) if four_bits else ("auto",),
        "gradient_rounding": get_args(GradientRounding) if policy.compute in _BY_BLOCKS else ("auto",),
        "end_layers": get_args(EndLayers) if policy.in_blocks else ("bf16",),
    }
    for field, allowed in taken.items():
        if getattr(policy, field) not in allowed:
            raise PolicyError(
                f"{field}={getattr(policy, field)} under policy {policy.name}; allowed: {', '.join(allowed)}",
                hint=f"leave {field} out, or start from a preset that has it: {_PRESETS_WITH[field]}",
            )
    for name in policy.bf16_products:
        layer, product = split_product(name)
        if not policy.in_blocks or not layer or product not in (*LAYER_PRODUCTS, "*"):
            raise PolicyError(
                f"bf16_products names {name!r} under policy {policy.name}; allowed: a layer's name, a dot, and one of "
                f"{', '.join(LAYER_PRODUCTS)} or *, under a block format",
                hint="for example mxfp8:bf16_products=*.wgrad",
            )


def _check_communication(policy: PolicyFields) -> None:
    if policy.world > 1 and policy.reduce == "auto":
        raise PolicyError(
            f"world={policy.world} emulates a reduction, and reduce=auto names no format for it",
            hint=f"name the format: reduce=bf16:world={policy.world}, or leave world out",
        )
    if policy.reduce_order != "ring" and policy.world == 1:
        raise PolicyError(
            f"reduce_order={policy.reduce_order} is the order of an emulated reduction, and world=1 emulates none",
            hint="set world to a number of processes; among real ones the communication library chooses the order",
        )
    allowed = ["auto", "fp32", *([policy.storage.name] if policy.casting == "ops" else [])]
    if policy.gather not in allowed:
        raise PolicyError(
            f"gather={policy.gather} under policy {policy.name} (compute={policy.compute}, casting={policy.casting}); "
            f"allowed: {', '.join(allowed)}",
            hint="sharded weights are computed with in the format in which they were gathered: choose the policy of that format",
        )
