"""Everything that Mezzo learns from a run, as typed values that are written whole or not at all.

Records are the waist of the program: commands write them, views read them, and nothing else passes between the two. A
record is JSON with a ``kind`` and a ``schema_version``; a reader refuses a version above its own. Numbers that are
not finite are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``: JSON has no such numbers, and a NaN
is what this tool exists to show.

Imports no torch.
"""

from __future__ import annotations

from mezzo.records.audit import (
    AuditRecord,
    CastTotal,
    Cause,
    Kernel,
    Operation,
    Phase,
    Product,
    RoundTrip,
    WideProduct,
)
from mezzo.records.compare import CompareRecord, Difference, Row, ScaleName, SharedFile, Verdict
from mezzo.records.diagnose import Diagnosed, DiagnoseRecord, Direction, Operand, Pass, TrendStep
from mezzo.records.doctor import DeviceReport, DoctorRecord, FormatSupport
from mezzo.records.fallback import FallbackRecord, FallbackVerdict, ModuleError, Verification
from mezzo.records.files import AnyRecord, Record, read_record, write_record
from mezzo.records.findings import Finding, Severity
from mezzo.records.ranges import (
    GRADIENTS,
    Casts,
    FormatLimits,
    Histogram,
    KindRange,
    RangeKind,
    RangesRecord,
    ScaleWindow,
    TensorRange,
    UpdateLoss,
)
from mezzo.records.run import AS_IS, FILE_CLOCK_TICK_S, Effective, FileRead, Loss, Memory, Metric, RunRecord, Steps
from mezzo.records.values import SCHEMA_VERSION, Environment, Reason, Value

__all__ = [
    "AS_IS",
    "FILE_CLOCK_TICK_S",
    "GRADIENTS",
    "SCHEMA_VERSION",
    "AnyRecord",
    "AuditRecord",
    "CastTotal",
    "Casts",
    "Cause",
    "CompareRecord",
    "DeviceReport",
    "DiagnoseRecord",
    "Diagnosed",
    "Difference",
    "Direction",
    "DoctorRecord",
    "Effective",
    "Environment",
    "FallbackRecord",
    "FallbackVerdict",
    "FileRead",
    "Finding",
    "FormatLimits",
    "FormatSupport",
    "Histogram",
    "Kernel",
    "KindRange",
    "Loss",
    "Memory",
    "Metric",
    "ModuleError",
    "Operand",
    "Operation",
    "Pass",
    "Phase",
    "Product",
    "RangeKind",
    "RangesRecord",
    "Reason",
    "Record",
    "RoundTrip",
    "Row",
    "RunRecord",
    "ScaleName",
    "ScaleWindow",
    "Severity",
    "SharedFile",
    "Steps",
    "TensorRange",
    "TrendStep",
    "UpdateLoss",
    "Value",
    "Verdict",
    "Verification",
    "WideProduct",
    "read_record",
    "write_record",
]
