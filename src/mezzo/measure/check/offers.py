"""The policies worth trying on a device, and why each is tried or left out."""

from __future__ import annotations

from collections.abc import Sequence
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
