"""Records as files: written whole or not at all, and read with their kind and version checked.

A new kind of record needs a file of its own here, a name in ``AnyRecord``, and a file of its kind in ``mezzo.report.pages``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from mezzo.commands.audit.record import AuditRecord
from mezzo.commands.check.record import CheckRecord
from mezzo.commands.compare.record import CompareRecord
from mezzo.commands.diagnose.record import DiagnoseRecord
from mezzo.commands.diff.record import DiffRecord
from mezzo.commands.doctor.record import DoctorRecord
from mezzo.commands.fallback.record import FallbackRecord
from mezzo.commands.gate.record import GateRecord
from mezzo.commands.predict.record import PredictRecord
from mezzo.commands.ranges.record import RangesRecord
from mezzo.commands.resume_check.record import ResumeCheckRecord
from mezzo.commands.tune.record import TuneRecord
from mezzo.errors import HOW_TO_UPDATE, RecordError
from mezzo.records.run import RunRecord
from mezzo.records.values import SCHEMA_VERSION, Value
from mezzo.secrets import hidden_text, secrets_among

AnyRecord: TypeAlias = (
    RunRecord
    | CompareRecord
    | CheckRecord
    | DoctorRecord
    | RangesRecord
    | AuditRecord
    | DiagnoseRecord
    | DiffRecord
    | FallbackRecord
    | PredictRecord
    | TuneRecord
    | ResumeCheckRecord
    | GateRecord
)

R = TypeVar("R", bound=Value)
Record = Annotated[AnyRecord, Field(discriminator="kind")]
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
"""A text in JSON."""


def write_record(record: R, path: Path) -> R:
    """Write ``record`` to ``path`` whole or not at all, and return what was written: ``without_secrets``."""
    shown = without_secrets(record)
    write_whole(shown.model_dump_json(indent=1), path)
    return shown


def without_secrets(record: R) -> R:
    """Return a record with placeholders for secrets in its texts, such as messages of errors; the record itself if there are none."""
    text = record.model_dump_json()
    values = secrets_among(sys.argv, os.environ).values()

    def shown(found: re.Match[str]) -> str:
        if len(found[0]) < 10:
            return found[0]
        before = json.loads(found[0])
        after = hidden_text(before, values=values)
        return found[0] if after == before else json.dumps(after, ensure_ascii=False)

    changed = _TEXT.sub(shown, text)
    return record if changed == text else type(record).model_validate_json(changed)


def write_whole(text: str, path: Path) -> None:
    """Write ``text`` to a temporary file next to ``path``, then move it into place; create the folder if need be.

    Raises:
        OSError: it names ``path``; the disk may be full.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # a crash of the machine must not leave an empty file under the final name
        os.replace(temporary, path)
    except OSError as error:  # one of a full disk names no file
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


@cache
def _adapter() -> TypeAdapter[AnyRecord]:
    return TypeAdapter(Record)


def read_record(path: Path | str) -> AnyRecord:
    """Return the record in the JSON file at ``path``.

    Raises:
        RecordError: the file is missing, is not a record, or was written by a newer Mezzo.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(
            f"cannot read the record {str(path)!r}: {error.strerror}",
            hint="pass the record.json that a mezzo command wrote",
        ) from None
    except ValueError as error:
        raise _not_a_record(path, str(error)) from None
    try:
        record = _adapter().validate_json(text)
    except ValidationError as error:
        _refuse_newer(path, _version_in(text, path))
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise _not_a_record(path, f"{place}: {first['msg']}") from None
    _refuse_newer(path, record.schema_version)
    return record


def record_at(path: Path | str) -> AnyRecord | None:
    """Return the record in a file; None if it cannot be read."""
    try:
        return read_record(path)
    except RecordError:
        return None


def _not_a_record(path: Path | str, why: str) -> RecordError:
    return RecordError(f"{str(path)!r} is not a record: {why}", hint="pass the record.json that a mezzo command wrote")


def _version_in(text: str, path: Path | str) -> object:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, or nested too deeply
        raise _not_a_record(path, str(error)) from None
    return data.get("schema_version") if isinstance(data, dict) else None


def _refuse_newer(path: Path | str, version: object) -> None:
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RecordError(
            f"{str(path)!r} has schema version {version}; this Mezzo reads up to {SCHEMA_VERSION}",
            hint=HOW_TO_UPDATE,
        )


# --- files of several processes --------------------------------------------------------------------------------------------------


def file_of_rank(path: Path, rank: int) -> Path:
    """Return a rank's own file, next to the file ``path`` of rank 0."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def files_of_ranks(path: Path) -> list[Path]:
    """Return rank 0's file ``path`` and the other ranks' files next to it, in order."""
    name = re.compile(rf"{re.escape(path.stem)}\.rank(\d+){re.escape(path.suffix)}")
    candidates = path.parent.glob(f"*{path.suffix}")
    others = [(int(match[1]), other) for other in candidates if (match := name.fullmatch(other.name))]
    return [path, *(other for _, other in sorted(others))]
