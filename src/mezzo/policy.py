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
from typing import Any

from mezzo import oplists
from mezzo.devices import Device
from mezzo.errors import PolicyError, nearest
from mezzo.explain import Choices, explain, in_short
from mezzo.formats import BLOCKWISE
from mezzo.policyfields import INTEGER_FIELDS, MODULE_FIELDS, RANGES, PolicyFields, check_policy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True, repr=False)
class Policy(PolicyFields):
    """The formats that a model computes in and is stored in, how its loss is scaled, and what stays in FP32.

    Presets give the fields that belong together (``Policy.parse("fp16")``); ``replace`` changes single ones.
    """

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
            f"unknown policy {name!r}; {nearest(_WITHOUT_MASTERS.sub('-pure', name.lower()), [*PRESETS, *POLICY_ALIASES])}",
            hint="name a preset, another library's name for it, or a .toml policy file",
        )
    return found


def _read(field: str, text: str) -> Any:
    if field in MODULE_FIELDS:
        return tuple(part for part in text.split("+") if part)
    if field == "master_weights":
        return {"true": True, "false": False}.get(text.lower(), text)
    if field in RANGES:
        try:
            return int(text) if field in INTEGER_FIELDS else float(text)
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
        Policy(name="fp8-block", compute="fp8", casting="ops", fp8_recipe=BLOCKWISE),
        Policy(name="mxfp8", compute="mxfp8", casting="ops"),
        Policy(name="mxfp4", compute="mxfp4", casting="ops"),
        Policy(name="nvfp4", compute="nvfp4", casting="ops"),
    ]


PRESETS.update({policy.name: policy for policy in _presets()})

NAMES_ELSEWHERE: dict[str, dict[str, str]] = {
    "apex": {"O0": "fp32", "O1": "fp16", "O2": "fp16-master", "O3": "fp16-pure"},
    "lightning": {
        "32-true": "fp32",
        "16-mixed": "fp16",
        "bf16-mixed": "bf16",
        "16-true": "fp16-pure",
        "bf16-true": "bf16-pure",
    },
    "huggingface": {"no": "fp32"},
    "torch": {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "amp": "fp16"},  # amp: on CUDA
    "keras": {"mixed_float16": "fp16", "mixed_bfloat16": "bf16"},
}
"""Other libraries' names of the presets."""
POLICY_ALIASES = {name: preset for names in NAMES_ELSEWHERE.values() for name, preset in names.items()}

_CANONICAL = {name.lower(): preset for name, preset in {**{name: name for name in PRESETS}, **POLICY_ALIASES}.items()}
