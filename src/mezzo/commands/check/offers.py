"""The policies worth trying on a device, and why each is tried or left out."""

from __future__ import annotations

from collections.abc import Sequence

from mezzo.devices import Device
from mezzo.formats import BF16, E4M3, FP16, FP32, TF32
from mezzo.records import AS_IS, Reason

BASELINE = FP32.name
TRIED, LEFT_OUT = "tried", "left out"


def offered(here: Device, *, target: Device | None = None, own_amp: str = "") -> list[Reason]:
    """Return the policies to consider, the baseline first.

    Args:
        here: the device that the script runs on.
        target: the device that the answer is for, if different.
        own_amp: the call or argument by which the script asks for mixed precision; empty if it does not.
    """
    target = target or here
    offers = [_reason(BASELINE, TRIED, "the baseline: all others are compared with it"), _tf32(here, target)]
    offers += _sixteen_bits(here, target)
    fp8 = target.support(E4M3)
    offers.append(_reason("fp8", TRIED if fp8.level == "native" else LEFT_OUT, f"{target.name}: {fp8.reason}"))
    if own_amp:
        why = f"the script asks for mixed precision itself ({own_amp}), which the other policies replace"
        offers.append(_reason(AS_IS, TRIED, why))
    return offers


def tried(offers: Sequence[Reason]) -> list[str]:
    """Return the policies to run, the baseline first."""
    return [offer.what for offer in offers if offer.value == TRIED]


def _tf32(here: Device, target: Device) -> Reason:
    target_support, here_support = target.support(TF32), here.support(TF32)
    if target_support.level != "native":
        return _reason(TF32.name, LEFT_OUT, f"{target.name}: {target_support.reason}")
    if here_support.level != "native":
        return _reason(TF32.name, LEFT_OUT, f"{target.name} has it, but it cannot be tried here: {here_support.reason}")
    return _reason(TF32.name, TRIED, f"{target.name}: {target_support.reason}")


def _sixteen_bits(here: Device, target: Device) -> list[Reason]:
    """Offer both 16-bit formats, unless an accelerator has units for only one; a CPU emulates a format it has no units for."""
    formats = (BF16, FP16)
    native = [fmt for fmt in formats if target.support(fmt).level == "native"]
    offers = []
    for fmt in formats:
        left_out = len(native) == 1 and target.kind != "cpu" and fmt not in native
        reason = f"{target.name}: {target.support(fmt).reason}"
        if here.support(fmt).level != "native":
            reason += "; emulated here, which shows what it does to training, not how fast it is"
        offers.append(_reason(fmt.name, LEFT_OUT if left_out else TRIED, reason))
    return offers


def _reason(what: str, value: str, reason: str) -> Reason:
    return Reason(what=what, value=value, reason=reason)
