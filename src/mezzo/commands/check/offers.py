"""The policies worth trying on a device, and why each is tried or left out; the script's own mixed precision is one."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mezzo.devices import Device
from mezzo.formats import BF16, E4M3, FP16, FP32, TF32
from mezzo.records import AS_IS, Reason

BASELINE = FP32.name


class Offered(NamedTuple):
    """A policy that a check considers."""

    policy: str
    tried: bool
    reason: str

    @property
    def note(self) -> Reason:
        """The choice in words."""
        return Reason(what=self.policy, value="tried" if self.tried else "left out", reason=self.reason)


THE_BASELINE = Offered(BASELINE, True, "the baseline: all others are compared with it")


def offered(here: Device, *, target: Device | None = None, own_amp: str = "") -> list[Offered]:
    """Return the policies to consider, the baseline first.

    Args:
        here: the device that the script runs on.
        target: the device that the answer is for, if different.
        own_amp: the call or argument by which the script asks for mixed precision; empty if it does not.
    """
    target = target or here
    fp8 = target.support(E4M3)
    offers = [THE_BASELINE, _tf32(here, target), *_sixteen_bits(here, target)]
    offers.append(Offered("fp8", fp8.level == "native", f"{target.name}: {fp8.reason}"))
    if own_amp:
        why = f"the script asks for mixed precision itself ({own_amp}), which the other policies replace"
        offers.append(Offered(AS_IS, True, why))
    return offers


def tried(offers: Sequence[Offered]) -> list[str]:
    """Return the policies to run, the baseline first."""
    return [offer.policy for offer in offers if offer.tried]


def _tf32(here: Device, target: Device) -> Offered:
    target_support, here_support = target.support(TF32), here.support(TF32)
    if target_support.level != "native":
        return Offered(TF32.name, False, f"{target.name}: {target_support.reason}")
    if here_support.level != "native":
        return Offered(TF32.name, False, f"{target.name} has it, but it cannot be tried here: {here_support.reason}")
    return Offered(TF32.name, True, f"{target.name}: {target_support.reason}")


def _sixteen_bits(here: Device, target: Device) -> list[Offered]:
    """Offer both 16-bit formats, unless an accelerator has units for only one; a CPU emulates a format it has no units for."""
    formats = (BF16, FP16)
    native = [fmt for fmt in formats if target.support(fmt).level == "native"]
    offers = []
    for fmt in formats:
        left_out = len(native) == 1 and target.kind != "cpu" and fmt not in native
        reason = f"{target.name}: {target.support(fmt).reason}"
        if here.support(fmt).level != "native":
            reason += "; emulated here, which shows what it does to training, not how fast it is"
        offers.append(Offered(fmt.name, not left_out, reason))
    return offers


# --- the script's own mixed precision -------------------------------------------------------------------------------------------

_CALLS = ("autocast", "GradScaler")
_PRECISION = ("precision", "mixed_precision")
_OFF = ("no", "none", "false", "32", "32-true", "64", "64-true", "fp32", "float32", "highest", "high", "medium")
_FLAGS = ("fp16", "bf16")


def own_amp(sources: Iterable[str]) -> str:
    """Return the call or argument by which files ask for mixed precision: ``GradScaler``, ``precision='16-mixed'``; empty if none does."""
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        if found := next(_requests(tree), ""):
            return found
    return ""


def _requests(tree: ast.AST) -> Iterator[str]:
    if any(_is_session(node) for node in ast.walk(tree)):  # named before the autocast() that it contains
        yield "mezzo.Session"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if name in _CALLS and not _is(keywords.get("enabled"), False):
            yield name
        for option in _PRECISION:
            value = keywords.get(option)
            if isinstance(value, ast.Constant) and _lowers(value.value):
                yield f"{option}={value.value!r}"
        yield from (f"{flag}=True" for flag in _FLAGS if _is(keywords.get(flag), True))


def _is_session(node: ast.AST) -> bool:
    """Return whether ``node`` is ``mezzo.Session``, or its import."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "mezzo" and any(name.name == "Session" for name in node.names)
    if not isinstance(node, ast.Attribute) or node.attr != "Session":
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "mezzo"


def _is(node: ast.AST | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _lowers(value: object) -> bool:
    return (isinstance(value, str) and value.lower() not in _OFF and any(c in value for c in "168")) or value == 16
