"""A precision policy: a frozen value that prints, parses and explains itself.

Grammar of a policy text::

    policy  = name *(":" field "=" value)          fp16:init_scale=1024:fp32_modules=head.*+norm
    value   = number | word | name *("+" name)

``name`` is a preset or another library's name for it (``O1``, ``16-mixed``, ``mixed_float16`` ...). ``str(policy)``
is the shortest such text, and ``Policy.parse(str(policy)) == policy`` for every policy. The separator is a colon
because the command line lists policies with commas.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mezzo import formats, oplists
from mezzo.devices import Device
from mezzo.errors import PolicyError, UnsupportedFormatError, nearest
from mezzo.explain import Choices, explain, in_short
from mezzo.policyfields import (
    COUNTS,
    NAMES,
    RANGES,
    Arithmetic,
    Casting,
    Compute,
    Exchanged,
    Fp8Formats,
    Fp8Recipe,
    LossScale,
    OpLists,
    ReduceOrder,
    check_policy,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True, repr=False)
class Policy:
    """The formats that a model computes in and is stored in, how its loss is scaled, and what stays in FP32.

    Presets give the fields that belong together (``Policy.parse("fp16")``); ``replace`` changes single ones.
    """

    name: str = "fp32"
    """The preset that it is based on."""
    compute: Compute = "fp32"
    """Format of matrix products and convolutions. ``fp8`` computes linear layers in E4M3/E5M2 and the rest in BF16."""
    casting: Casting = "none"
    """``ops``: operation by operation, by the op lists. ``model``: the model's weights and inputs are cast."""
    norms: Literal["fp32", "compute"] = "fp32"
    """With ``casting=model``: the format of normalisation layers."""
    master_weights: bool = False
    """With ``casting=model``: the optimizer updates FP32 copies of the weights."""
    loss_scale: LossScale = "none"
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
    fp8_recipe: Fp8Recipe = "tensorwise"
    """Under ``fp8``: one scale per tensor and gradients in E5M2, or one scale per row (``rowwise``) and all in E4M3."""
    fp8_formats: Fp8Formats = "ocp"
    """Under ``fp8``: E4M3 and E5M2 as NVIDIA and newer AMD GPUs have them, or ``fnuz``, as AMD's MI300 has them."""
    reduce: Exchanged = "auto"
    """Format in which gradients are summed over processes; ``auto``: the one that they are in."""
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

    def __post_init__(self) -> None:
        if PRESETS and self.name not in PRESETS:  # PRESETS is empty while they are built
            raise PolicyError(
                f"policy field name={self.name!r}; {nearest(str(self.name), PRESETS)}",
                hint="start from Policy.parse(name) and change fields with replace",
            )
        check_policy(self)
        oplists.assign(self.lower, self.fp32, self.widest)

    def __repr__(self) -> str:
        return f"<Policy {self!s}: {in_short(self)}>"

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{field}={_print(value)}" for field, value in self._changed().items())])

    def _changed(self) -> dict[str, Any]:
        """Return the fields that differ from the preset, by name."""
        preset = PRESETS[self.name]
        return {f: getattr(self, f) for f in _SETTABLE if getattr(self, f) != getattr(preset, f)}

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Return the policy that ``text`` stands for.

        Raises:
            PolicyError: an unknown name or field, or a value outside what the field allows.
        """
        name, *settings = text.strip().split(":")
        preset = _preset(name.strip())
        fields: dict[str, Any] = {}
        for setting in settings:
            field, equals, value = setting.partition("=")
            if not equals:
                raise PolicyError(
                    f"policy {text!r} has {setting!r} where field=value is expected",
                    hint="write name:field=value:field=value, for example fp16:init_scale=1024",
                )
            if field.strip() in fields:
                message = f"policy {text!r} sets {field.strip()} twice; allowed: once"
                raise PolicyError(message, hint="keep one of the two")
            fields[field.strip()] = _read(field.strip(), value.strip())
        return preset.replace(**fields)

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """Return the policy in a TOML file: a ``policy`` text and any fields that change it.

        Raises:
            PolicyError: the file is missing, is not TOML, or has a field or value that no policy has.
        """
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PolicyError(
                f"cannot read the policy file {str(path)!r}: {error.strerror}",
                hint='check the path; a policy file is TOML with policy = "fp16" and fields below it',
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise PolicyError(
                f"policy file {str(path)!r} is not TOML: {error}",
                hint='start from the line: policy = "fp16"',
            ) from None
        base = cls.parse(str(table.pop("policy", "fp32")))
        return base.replace(**{k: tuple(v) if isinstance(v, list) else v for k, v in table.items()})

    @classmethod
    def of(cls, value: Policy | str | Path) -> Policy:
        """Return ``value`` as a policy: itself, a policy text, or the path of a ``.toml`` file."""
        if isinstance(value, Policy):
            return value
        return cls.load(value) if str(value).endswith(".toml") else cls.parse(str(value))

    def replace(self, **fields: Any) -> Policy:
        """Return a copy with the given fields changed.

        Raises:
            PolicyError: an unknown field, or a value outside what the field allows.
        """
        for field in fields:
            if field not in _SETTABLE:
                raise PolicyError(
                    f"a policy has no field {field!r}; {nearest(field, _SETTABLE)}",
                    hint="see the fields of mezzo.Policy",
                )
        return dataclasses.replace(self, **fields)

    def to_toml(self) -> str:
        """Return the text of a policy file that ``load`` reads back as this policy."""
        fields = {"policy": self.name, **self._changed()}
        return "".join(f"{field} = {_toml(value)}\n" for field, value in fields.items())

    @property
    def storage(self) -> formats.Format:
        """The format that low-precision tensors are stored in (BF16 under ``fp8``)."""
        stored = {"tf32": "fp32", "fp8": "bf16"}.get(self.compute, self.compute)
        return formats.FORMATS[stored]

    @property
    def lowers(self) -> bool:
        """Whether any tensor is cast below FP32."""
        return self.casting != "none"

    @property
    def required_formats(self) -> tuple[formats.Format, ...]:
        """The formats that the device has to compute in."""
        if self.compute == "fp8":
            return formats.FP8_PAIRS[self.fp8_formats]
        return (formats.FORMATS[self.compute],)

    def arithmetic_on(self, device: Device) -> tuple[Literal["native", "emulated"], str]:
        """Return how the compute format is calculated on ``device``, and why.

        Raises:
            UnsupportedFormatError: native arithmetic was requested on a device that has none.
        """
        supports = [device.support(fmt) for fmt in self.required_formats]
        if self.fp8_recipe == "rowwise":
            supports.append(device.support_for_row_scales(self.required_formats[0]))
        worst = next((s for s in supports if s.level != "native"), supports[0])
        if not self.lowers:
            return "native", worst.reason
        if worst.level == "impossible":
            raise UnsupportedFormatError(
                f"policy {self!s} cannot compute in {worst.format} on {device.name}: {worst.reason}",
                hint="choose another device: mezzo doctor lists those of this machine",
            )
        if self.arithmetic == "emulated":
            return "emulated", "the policy asks for emulated arithmetic"
        if self.arithmetic == "native" or self.op_lists == "device":
            return "native", self._native_reason(device, worst.level, worst.reason)
        return ("native" if worst.level == "native" else "emulated"), worst.reason

    def _native_reason(self, device: Device, level: str, reason: str) -> str:
        # torch has slow 16-bit kernels for every CPU, but trains in FP8 on GPUs only.
        if level != "native" and (device.kind != "cpu" or self.compute == "fp8"):
            raise UnsupportedFormatError(
                f"policy {self!s} asks for native {self.compute} arithmetic on {device.name}: {reason}",
                hint="leave arithmetic=auto and op_lists=portable, which emulate it here, or choose another format",
            )
        why = "asks for native arithmetic" if self.arithmetic == "native" else "asks for device lists"
        return f"the policy {why}; {reason}"

    def explain(self, where: Device | str = "cpu") -> Choices:
        """Return the choices that this policy makes on a device, each with its reason; the result prints as a table.

        Args:
            where: a ``Device``, or a torch device type of this machine.

        Raises:
            UnsupportedFormatError: the device can neither do what the policy asks nor emulate it.
        """
        return explain(self, where)


_WITHOUT_MASTERS = re.compile(r"[-_]?no[-_]?masters?$", re.IGNORECASE)
"""Spellings that people try for the presets without FP32 master weights."""


def canonical(name: str) -> str:
    """Return the preset that ``name`` is, or that it is another name for, in any case; ``name`` itself if there is none."""
    return _CANONICAL.get(name.strip().lower(), name)


def _preset(name: str) -> Policy:
    found = PRESETS.get(canonical(name))
    if found is None:
        raise PolicyError(
            f"unknown policy {name!r}; {nearest(_WITHOUT_MASTERS.sub('-pure', name.lower()), [*PRESETS, *ALIASES])}",
            hint="name a preset, another library's name for it, or a .toml policy file",
        )
    return found


def _read(field: str, text: str) -> Any:
    if field in NAMES:
        return tuple(part for part in text.split("+") if part)
    if field == "master_weights":
        return {"true": True, "false": False}.get(text.lower(), text)
    if field in RANGES:
        try:
            return int(text) if field in COUNTS else float(text)
        except ValueError:
            return text  # refused with its range by _check_numbers
    return text


def _print(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(value)
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e16 else repr(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return _print(value) if isinstance(value, bool) else repr(value)


_SETTABLE = tuple(f.name for f in dataclasses.fields(Policy) if f.name != "name")
PRESETS: dict[str, Policy] = {}


def _presets() -> list[Policy]:
    dynamic: dict[str, Any] = {"loss_scale": "dynamic"}
    pure: dict[str, Any] = {"casting": "model", "norms": "compute"}
    master: dict[str, Any] = {"casting": "model", "master_weights": True}
    return [
        Policy(name="fp32"),
        Policy(name="tf32", compute="tf32"),
        Policy(name="fp16", compute="fp16", casting="ops", **dynamic),
        Policy(name="bf16", compute="bf16", casting="ops"),
        Policy(name="fp16-master", compute="fp16", **master, **dynamic),
        Policy(name="bf16-master", compute="bf16", **master),
        Policy(name="fp16-pure", compute="fp16", **pure),
        Policy(name="bf16-pure", compute="bf16", **pure),
        Policy(name="fp8", compute="fp8", casting="ops"),
    ]


PRESETS.update({policy.name: policy for policy in _presets()})

ALIASES = {
    # NVIDIA Apex
    "O0": "fp32",
    "O1": "fp16",
    "O2": "fp16-master",
    "O3": "fp16-pure",
    # Lightning
    "32-true": "fp32",
    "16-mixed": "fp16",
    "bf16-mixed": "bf16",
    "16-true": "fp16-pure",
    "bf16-true": "bf16-pure",
    # Hugging Face
    "no": "fp32",
    # PyTorch
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "amp": "fp16",  # torch.amp without a dtype, on CUDA
    # Keras
    "mixed_float16": "fp16",
    "mixed_bfloat16": "bf16",
}
"""Other libraries' names of the presets."""

_CANONICAL = {name.lower(): preset for name, preset in {**{name: name for name in PRESETS}, **ALIASES}.items()}
