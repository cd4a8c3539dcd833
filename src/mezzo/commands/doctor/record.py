"""The formats that a machine computes in."""

from __future__ import annotations

from typing import Literal

from mezzo.records.values import Environment, Note, Value, WholeRecord


class FormatSupport(Value):
    """How a device computes in a format, and why."""

    format: str
    level: Literal["native", "emulated", "impossible"]
    reason: str


class DeviceReport(Value):
    """One device and its formats."""

    kind: str
    name: str
    compute_capability: str | None = None
    memory_bytes: int | None = None
    formats: list[FormatSupport]


class DoctorRecord(WholeRecord):
    """The formats of every device of a machine."""

    kind: Literal["doctor"] = "doctor"
    environment: Environment
    devices: list[DeviceReport]
    tf32: list[Note] = []
    """State of TF32 for matrix products and convolutions."""
    advice: list[Note] = []
    """What to change, and what that gains."""

    @property
    def summary(self) -> str:
        """Each device with the formats that it computes natively, in one line."""
        return "; ".join(
            f"{device.name}: {', '.join(form.format for form in device.formats if form.level == 'native') or 'none'} native"
            for device in self.devices
        )
