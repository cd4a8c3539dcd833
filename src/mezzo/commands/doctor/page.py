"""What a machine can do, in words."""

from __future__ import annotations

from collections.abc import Sequence

from mezzo.records import DeviceReport, DoctorRecord
from mezzo.report import formatting as fmt
from mezzo.report import pages
from mezzo.report.log_entries import LogEntry, plain_entry
from mezzo.report.sections import Fact, FactTable, Headline, NextStep, Page, Section, facts_section

_LEVEL_TONES = {"native": "good", "emulated": "warn", "impossible": "bad"}


def page(record: DoctorRecord) -> Page:
    """Return what ``record`` says."""
    why = "get one answer for your script; replace train.py with its name"
    return Page(
        title="What this machine can do",
        answer=_answer(record.devices),
        sections=[
            *map(_device, record.devices),
            facts_section("TF32", pages.facts(record.tf32)),
            facts_section("Advice", pages.facts(record.advice)),
        ],
        steps=[NextStep(why=why, command="mezzo check train.py")],
        environment=pages.environment_facts(record.environment),
    )


def _answer(devices: Sequence[DeviceReport]) -> Headline:
    """Return how the best device computes in each format: the accelerator if there is one."""
    if not devices:
        return Headline(tone="bad", word="no device", sentence="No device was found")
    best = next((d for d in devices if d.kind != "cpu"), devices[0])
    native = [f.format for f in best.formats if f.level == "native"]
    has_16_bits = any(form not in ("fp32", "fp64") for form in native)
    names = fmt.listed([*map(fmt.clean, native)] or ["no known format"])
    return Headline(
        tone="good" if has_16_bits else "open",
        word="16 bits natively" if has_16_bits else "emulates 16 bits",
        sentence=f"{fmt.clean(best.name)} computes natively in {names}",
        facts=[Fact(what=fmt.clean(f.format), value=f.level) for f in best.formats],
    )


def _device(device: DeviceReport) -> Section:
    details = [device.kind]
    if device.compute_capability is not None:
        details.append(f"compute capability {device.compute_capability}")
    if device.memory_bytes is not None:
        details.append(fmt.bytes_text(device.memory_bytes))
    rows = [
        Fact(what=fmt.clean(f.format), value=f.level, reason=fmt.clean(f.reason), tone=_LEVEL_TONES[f.level])
        for f in device.formats
    ]
    title = f"{fmt.clean(device.name)} ({fmt.clean(', '.join(details))})"
    return Section(title=title, blocks=[FactTable(rows=rows, heads=("format", "level", "reason"))])


def log_entry(record: DoctorRecord) -> LogEntry:
    """Return what is logged of the record."""
    return plain_entry(record)
