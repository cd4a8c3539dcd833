"""Everything that Mezzo learns from a run, as typed values that are written whole or not at all.

Records are the narrow waist of the program: commands write them, views read them, and nothing else passes between the two. A
record is JSON with a ``kind`` and a ``schema_version``; a reader refuses a version newer than its own. Numbers that are
not finite are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``: JSON has no such numbers, and a NaN
is just what this tool exists to show.

Imports no torch.
"""

from __future__ import annotations

from mezzo.records.audit import AuditRecord as AuditRecord
from mezzo.records.audit import CastTotal as CastTotal
from mezzo.records.audit import Cause as Cause
from mezzo.records.audit import Kernel as Kernel
from mezzo.records.audit import Operation as Operation
from mezzo.records.audit import Phase as Phase
from mezzo.records.audit import Product as Product
from mezzo.records.audit import RoundTrip as RoundTrip
from mezzo.records.audit import WideProduct as WideProduct
from mezzo.records.bottleneck import Bottleneck as Bottleneck
from mezzo.records.bottleneck import GpuUse as GpuUse
from mezzo.records.bottleneck import Limit as Limit
from mezzo.records.check import Answer as Answer
from mezzo.records.check import CheckRecord as CheckRecord
from mezzo.records.check import CheckStage as CheckStage
from mezzo.records.check import Decision as Decision
from mezzo.records.check import Gain as Gain
from mezzo.records.check import StageName as StageName
from mezzo.records.compare import FAILING as FAILING
from mezzo.records.compare import NOT_EQUIVALENT as NOT_EQUIVALENT
from mezzo.records.compare import CompareRecord as CompareRecord
from mezzo.records.compare import Difference as Difference
from mezzo.records.compare import Row as Row
from mezzo.records.compare import ScaleName as ScaleName
from mezzo.records.compare import SharedFile as SharedFile
from mezzo.records.compare import Verdict as Verdict
from mezzo.records.diagnose import Diagnosed as Diagnosed
from mezzo.records.diagnose import DiagnoseRecord as DiagnoseRecord
from mezzo.records.diagnose import Operand as Operand
from mezzo.records.diagnose import Pass as Pass
from mezzo.records.diagnose import StepPhase as StepPhase
from mezzo.records.diagnose import TrendStep as TrendStep
from mezzo.records.doctor import DeviceReport as DeviceReport
from mezzo.records.doctor import DoctorRecord as DoctorRecord
from mezzo.records.doctor import FormatSupport as FormatSupport
from mezzo.records.fallback import FallbackRecord as FallbackRecord
from mezzo.records.fallback import FallbackVerdict as FallbackVerdict
from mezzo.records.fallback import ModuleError as ModuleError
from mezzo.records.fallback import Verification as Verification
from mezzo.records.fallback import clear_error as clear_error
from mezzo.records.files import AnyRecord as AnyRecord
from mezzo.records.files import Record as Record
from mezzo.records.files import read_record as read_record
from mezzo.records.files import record_at as record_at
from mezzo.records.files import write_record as write_record
from mezzo.records.findings import Finding as Finding
from mezzo.records.findings import Severity as Severity
from mezzo.records.guardrails import Alarm as Alarm
from mezzo.records.guardrails import AlarmKind as AlarmKind
from mezzo.records.guardrails import GuardAction as GuardAction
from mezzo.records.guardrails import Guardrails as Guardrails
from mezzo.records.guardrails import HeldModule as HeldModule
from mezzo.records.guardrails import OutOfMemory as OutOfMemory
from mezzo.records.guardrails import Rewind as Rewind
from mezzo.records.predict import BatchCurve as BatchCurve
from mezzo.records.predict import MemoryTimeline as MemoryTimeline
from mezzo.records.predict import ModuleShare as ModuleShare
from mezzo.records.predict import ModuleTime as ModuleTime
from mezzo.records.predict import Prediction as Prediction
from mezzo.records.predict import PredictionDetail as PredictionDetail
from mezzo.records.predict import PredictRecord as PredictRecord
from mezzo.records.predict import RealGpus as RealGpus
from mezzo.records.ranges import GRADIENTS as GRADIENTS
from mezzo.records.ranges import Casts as Casts
from mezzo.records.ranges import FormatLimits as FormatLimits
from mezzo.records.ranges import Histogram as Histogram
from mezzo.records.ranges import KindRange as KindRange
from mezzo.records.ranges import RangeKind as RangeKind
from mezzo.records.ranges import RangesRecord as RangesRecord
from mezzo.records.ranges import ScaleWindow as ScaleWindow
from mezzo.records.ranges import TensorRange as TensorRange
from mezzo.records.ranges import UpdateLoss as UpdateLoss
from mezzo.records.resume_check import MissingState as MissingState
from mezzo.records.resume_check import ResumeCheckRecord as ResumeCheckRecord
from mezzo.records.resume_check import ResumeVerdict as ResumeVerdict
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
from mezzo.records.tune import RowStatus as RowStatus
from mezzo.records.tune import TuneDecision as TuneDecision
from mezzo.records.tune import TuneRecord as TuneRecord
from mezzo.records.tune import TuneRow as TuneRow
from mezzo.records.tune import TuneTrial as TuneTrial
from mezzo.records.values import SCHEMA_VERSION as SCHEMA_VERSION
from mezzo.records.values import Environment as Environment
from mezzo.records.values import Reason as Reason
from mezzo.records.values import Value as Value
from mezzo.records.values import WholeRecord as WholeRecord
from mezzo.records.values import varied as varied
