"""The formats of a machine as display strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mezzo.records import DeviceReport, DoctorRecord
from mezzo.report import formatting as fmt
from mezzo.report.sheets import shared
from mezzo.report.sheets.shared import Fact, Sheet


@dataclass(frozen=True, kw_only=True)
class DeviceSheet:
    """The words and tables of one device, ready for any view."""

    name: str
    details: str
    formats: list[Fact]


@dataclass(frozen=True, kw_only=True)
class DoctorSheet(Sheet):
    """The words and tables of a machine, ready for any view."""

    devices: list[DeviceSheet]
    tf32: list[Fact] = field(default_factory=list)
    advice: list[Fact] = field(default_factory=list)
    environment: list[Fact] = field(default_factory=list)


_LEVEL_TONES = {"native": "good", "emulated": "warn", "impossible": "bad"}


def doctor_sheet(record: DoctorRecord) -> DoctorSheet:
    """Return the sheet of ``record``."""
    return DoctorSheet(
        title="What this machine can do",
        headline=_doctor_headline(record.devices),
        devices=[_device_sheet(device) for device in record.devices],
        tf32=shared.facts(record.tf32),
        advice=shared.facts(record.advice),
        environment=shared.environment_facts(record.environment),
    )


def _doctor_headline(devices: Sequence[DeviceReport]) -> str:
    if not devices:
        return "No device was found"
    # The headline is about the accelerator if there is one; the table lists the processor too.
    best = next((d for d in devices if d.kind != "cpu"), devices[0])
    native = [fmt.clean(f.format) for f in best.formats if f.level == "native"]
    name = fmt.clean(best.name)
    return f"{name} computes natively in {fmt.listed(native or ['no known format'])}"


def _device_sheet(device: DeviceReport) -> DeviceSheet:
    details = [device.kind]
    if device.compute_capability is not None:
        details.append(f"compute capability {device.compute_capability}")
    if device.memory_bytes is not None:
        details.append(fmt.bytes_text(device.memory_bytes))
    return DeviceSheet(
        name=fmt.clean(device.name),
        details=fmt.clean(", ".join(details)),
        formats=[
            Fact(
                what=fmt.clean(f.format),
                value=f.level,
                reason=fmt.clean(f.reason),
                tone=_LEVEL_TONES[f.level],
            )
            for f in device.formats
        ],
    )
