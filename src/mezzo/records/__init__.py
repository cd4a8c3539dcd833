"""Everything that Mezzo learns from a run, as typed values that are written whole or not at all.

Records are the narrow waist of the program: commands write them, views read them, and nothing else passes between the two. A
record is JSON with a ``kind`` and a ``schema_version``; a reader refuses a version newer than its own. Numbers that are
not finite are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``: JSON has no such numbers, and a NaN
is just what this tool exists to show.

A record lies with its command, and is imported on first use. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mezzo.lazy_names import modules_by_name, value_of

if TYPE_CHECKING:
    from mezzo.commands.audit.record import AuditRecord as AuditRecord
    from mezzo.commands.audit.record import Breach as Breach
    from mezzo.commands.audit.record import CastTotal as CastTotal
    from mezzo.commands.audit.record import Cause as Cause
    from mezzo.commands.audit.record import CheckedContract as CheckedContract
    from mezzo.commands.audit.record import ContractMoment as ContractMoment
    from mezzo.commands.audit.record import ContractRole as ContractRole
    from mezzo.commands.audit.record import Kernel as Kernel
    from mezzo.commands.audit.record import Operation as Operation
    from mezzo.commands.audit.record import PassKind as PassKind
    from mezzo.commands.audit.record import Product as Product
    from mezzo.commands.audit.record import RoundTrip as RoundTrip
    from mezzo.commands.audit.record import TensorFormat as TensorFormat
    from mezzo.commands.audit.record import WideProduct as WideProduct
    from mezzo.commands.check.record import Answer as Answer
    from mezzo.commands.check.record import CheckRecord as CheckRecord
    from mezzo.commands.check.record import CheckStage as CheckStage
    from mezzo.commands.check.record import Decision as Decision
    from mezzo.commands.check.record import Gain as Gain
    from mezzo.commands.check.record import StageName as StageName
    from mezzo.commands.compare.record import FAILING as FAILING
    from mezzo.commands.compare.record import NOT_EQUIVALENT as NOT_EQUIVALENT
    from mezzo.commands.compare.record import CompareRecord as CompareRecord
    from mezzo.commands.compare.record import Difference as Difference
    from mezzo.commands.compare.record import Row as Row
    from mezzo.commands.compare.record import ScaleName as ScaleName
    from mezzo.commands.compare.record import SharedFile as SharedFile
    from mezzo.commands.compare.record import Verdict as Verdict
    from mezzo.commands.diagnose.record import Diagnosed as Diagnosed
    from mezzo.commands.diagnose.record import DiagnoseRecord as DiagnoseRecord
    from mezzo.commands.diagnose.record import Operand as Operand
    from mezzo.commands.diagnose.record import Pass as Pass
    from mezzo.commands.diagnose.record import StepPhase as StepPhase
    from mezzo.commands.diagnose.record import TrendStep as TrendStep
    from mezzo.commands.diff.record import DiffBeginning as DiffBeginning
    from mezzo.commands.diff.record import DiffOutcome as DiffOutcome
    from mezzo.commands.diff.record import DiffRecord as DiffRecord
    from mezzo.commands.diff.record import DiffTrial as DiffTrial
    from mezzo.commands.diff.record import DiffVerdict as DiffVerdict
    from mezzo.commands.diff.record import ModuleGrowth as ModuleGrowth
    from mezzo.commands.diff.record import PointDifference as PointDifference
    from mezzo.commands.diff.record import ValuePair as ValuePair
    from mezzo.commands.diff.record import ValuePlace as ValuePlace
    from mezzo.commands.doctor.record import DeviceReport as DeviceReport
    from mezzo.commands.doctor.record import DoctorRecord as DoctorRecord
    from mezzo.commands.doctor.record import FormatSupport as FormatSupport
    from mezzo.commands.fallback.record import FORMAT_KEPT as FORMAT_KEPT
    from mezzo.commands.fallback.record import FallbackRecord as FallbackRecord
    from mezzo.commands.fallback.record import FallbackVerdict as FallbackVerdict
    from mezzo.commands.fallback.record import ModuleError as ModuleError
    from mezzo.commands.fallback.record import Searched as Searched
    from mezzo.commands.fallback.record import Verification as Verification
    from mezzo.commands.fallback.record import clear_error as clear_error
    from mezzo.commands.gate.record import FormatChange as FormatChange
    from mezzo.commands.gate.record import GateCheck as GateCheck
    from mezzo.commands.gate.record import GateRecord as GateRecord
    from mezzo.commands.gate.record import GateStatus as GateStatus
    from mezzo.commands.gate.record import GateUnit as GateUnit
    from mezzo.commands.gate.record import GateVerdict as GateVerdict
    from mezzo.commands.gate.record import Golden as Golden
    from mezzo.commands.gate.record import GoldenRun as GoldenRun
    from mezzo.commands.gate.record import ModuleFormats as ModuleFormats
    from mezzo.commands.predict.record import WORTH_SWITCHING as WORTH_SWITCHING
    from mezzo.commands.predict.record import BatchCurve as BatchCurve
    from mezzo.commands.predict.record import DataSet as DataSet
    from mezzo.commands.predict.record import LoaderRate as LoaderRate
    from mezzo.commands.predict.record import MemoryTimeline as MemoryTimeline
    from mezzo.commands.predict.record import ModuleShare as ModuleShare
    from mezzo.commands.predict.record import ModuleTime as ModuleTime
    from mezzo.commands.predict.record import Prediction as Prediction
    from mezzo.commands.predict.record import PredictionDetail as PredictionDetail
    from mezzo.commands.predict.record import PredictRecord as PredictRecord
    from mezzo.commands.predict.record import RealGpus as RealGpus
    from mezzo.commands.ranges.record import GRADIENTS as GRADIENTS
    from mezzo.commands.ranges.record import BlockLoss as BlockLoss
    from mezzo.commands.ranges.record import BlockOperand as BlockOperand
    from mezzo.commands.ranges.record import Casts as Casts
    from mezzo.commands.ranges.record import FormatLimits as FormatLimits
    from mezzo.commands.ranges.record import Histogram as Histogram
    from mezzo.commands.ranges.record import KindRange as KindRange
    from mezzo.commands.ranges.record import RangeKind as RangeKind
    from mezzo.commands.ranges.record import RangesRecord as RangesRecord
    from mezzo.commands.ranges.record import ScaleWindow as ScaleWindow
    from mezzo.commands.ranges.record import TensorRange as TensorRange
    from mezzo.commands.ranges.record import UpdateLoss as UpdateLoss
    from mezzo.commands.resume_check.record import MissingState as MissingState
    from mezzo.commands.resume_check.record import ResumeCheckRecord as ResumeCheckRecord
    from mezzo.commands.resume_check.record import ResumeVerdict as ResumeVerdict
    from mezzo.commands.tune.record import RowStatus as RowStatus
    from mezzo.commands.tune.record import TuneDecision as TuneDecision
    from mezzo.commands.tune.record import TuneRecord as TuneRecord
    from mezzo.commands.tune.record import TuneRow as TuneRow
    from mezzo.commands.tune.record import TuneTrial as TuneTrial
    from mezzo.records.files import AnyRecord as AnyRecord
    from mezzo.records.files import Record as Record
    from mezzo.records.files import read_record as read_record
    from mezzo.records.files import record_at as record_at
    from mezzo.records.files import write_record as write_record
    from mezzo.records.run import AS_IS as AS_IS
    from mezzo.records.run import FILE_CLOCK_TICK_S as FILE_CLOCK_TICK_S
    from mezzo.records.run import Effective as Effective
    from mezzo.records.run import FileRead as FileRead
    from mezzo.records.run import Loss as Loss
    from mezzo.records.run import Memory as Memory
    from mezzo.records.run import Metric as Metric
    from mezzo.records.run import ModelChange as ModelChange
    from mezzo.records.run import Placement as Placement
    from mezzo.records.run import RankRun as RankRun
    from mezzo.records.run import RunRecord as RunRecord
    from mezzo.records.run import SnapshotProof as SnapshotProof
    from mezzo.records.run import SnapshotsTaken as SnapshotsTaken
    from mezzo.records.run import Steps as Steps
    from mezzo.records.run import inspecting as inspecting
    from mezzo.records.values import SCHEMA_VERSION as SCHEMA_VERSION
    from mezzo.records.values import Alarm as Alarm
    from mezzo.records.values import AlarmKind as AlarmKind
    from mezzo.records.values import Bottleneck as Bottleneck
    from mezzo.records.values import Environment as Environment
    from mezzo.records.values import Finding as Finding
    from mezzo.records.values import GpuUse as GpuUse
    from mezzo.records.values import GuardAction as GuardAction
    from mezzo.records.values import Guardrails as Guardrails
    from mezzo.records.values import HeldModule as HeldModule
    from mezzo.records.values import Limit as Limit
    from mezzo.records.values import Note as Note
    from mezzo.records.values import OutOfMemory as OutOfMemory
    from mezzo.records.values import Rewind as Rewind
    from mezzo.records.values import Severity as Severity
    from mezzo.records.values import Value as Value
    from mezzo.records.values import WholeRecord as WholeRecord
    from mezzo.records.values import varied as varied


def __getattr__(name: str) -> object:
    return value_of("mezzo.records", name)


def __dir__() -> list[str]:
    return sorted(modules_by_name("mezzo.records"))
