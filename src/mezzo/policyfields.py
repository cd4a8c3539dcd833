"""Allowed values of a policy's fields, and allowed combinations; errors say what is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from mezzo.errors import PolicyError, nearest

if TYPE_CHECKING:
    from mezzo.policy import Policy

Compute = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
Casting = Literal["none", "ops", "model"]
LossScale = Literal["none", "static", "dynamic"]
Arithmetic = Literal["auto", "native", "emulated"]
OpLists = Literal["portable", "device"]
Fp8Recipe = Literal["tensorwise", "rowwise"]
Fp8Formats = Literal["ocp", "fnuz"]
Exchanged = Literal["auto", "fp32", "bf16", "fp16"]
ReduceOrder = Literal["ring", "tree"]

DYNAMIC_SCALE = ("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min_scale", "max_scale")
"""The fields that say how a dynamic loss scale changes."""
COUNTS = ("growth_interval", "hysteresis", "world")
SEPARATORS = ":+, "
NAMES = ("lower", "fp32", "widest", "fp32_modules")
WORDS: dict[str, tuple[object, ...]] = {
    "compute": get_args(Compute),
    "casting": get_args(Casting),
    "norms": ("fp32", "compute"),
    "master_weights": (True, False),
    "loss_scale": get_args(LossScale),
    "arithmetic": get_args(Arithmetic),
    "op_lists": get_args(OpLists),
    "fp8_recipe": get_args(Fp8Recipe),
    "fp8_formats": get_args(Fp8Formats),
    "reduce": get_args(Exchanged),
    "gather": get_args(Exchanged),
    "reduce_order": get_args(ReduceOrder),
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


def check_policy(policy: Policy) -> None:
    """Refuse values outside what a field allows, and fields that contradict each other.

    Raises:
        PolicyError: names the field, its value and what is allowed.
    """
    _check_words(policy)
    _check_numbers(policy)
    _check_combination(policy)


def _check_words(policy: Policy) -> None:
    for field, allowed in WORDS.items():
        value = getattr(policy, field)
        if not any(value == word and type(value) is type(word) for word in allowed):  # 1 == True
            raise PolicyError(
                f"policy field {field}={value!r}; {nearest(str(value), map(str, allowed))}",
                hint=f"set {field} to one of them",
            )


def _check_numbers(policy: Policy) -> None:
    for field, (low, high) in RANGES.items():
        value = getattr(policy, field)
        kinds, noun = ((int,), "whole number") if field in COUNTS else ((int, float), "number")
        number = isinstance(value, kinds) and not isinstance(value, bool)
        if not number or not low <= value <= high:
            raise PolicyError(
                f"policy field {field}={value!r}; allowed: a {noun} from {low:g} to {high:g}",
                hint=f"choose {field} inside that range",
            )
    for field in NAMES:
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


def _check_combination(policy: Policy) -> None:
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
    for field, default in (("fp8_recipe", "tensorwise"), ("fp8_formats", "ocp")):
        if getattr(policy, field) != default and policy.compute != "fp8":
            raise PolicyError(
                f"{field}={getattr(policy, field)} and compute={policy.compute} contradict each other",
                hint=f"leave {field} out, or start from the preset fp8",
            )
    _check_communication(policy)


def _check_communication(policy: Policy) -> None:
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
