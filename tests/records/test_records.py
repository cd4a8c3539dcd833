"""Records: every value of every kind survives a round trip, files are whole or absent, and other files are refused."""

from __future__ import annotations

import json
import math
import os
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from mezzo import records
from mezzo.errors import HOW_TO_UPDATE, RecordError
from mezzo.records import (
    SCHEMA_VERSION,
    DoctorRecord,
    Effective,
    Environment,
    Memory,
    RunRecord,
    Steps,
    read_record,
    write_record,
)

KINDS: tuple[type[BaseModel], ...] = get_args(get_args(records.Record)[0])
NAN, INF = math.nan, math.inf


# --- every field with a value of its own ---------------------------------------------------------


def free_fields(cls: type[BaseModel]) -> list[str]:
    fixed = ("kind", "schema_version") if cls in KINDS else ()
    return [name for name in cls.model_fields if name not in fixed]


class Filler:
    """Make values that differ from each other and from every default, from the annotations of a record."""

    def __init__(self) -> None:
        self.count = 0

    def model(self, cls: type[BaseModel]) -> BaseModel:
        hints = typing.get_type_hints(cls)
        return cls(**{name: self.value(hints[name]) for name in free_fields(cls)})

    def value(self, hint: Any) -> Any:
        origin, inner = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self.value(inner[0])
        if origin is Literal:
            return inner[-1]
        if origin in (Union, types.UnionType):
            return self.value(next(arm for arm in inner if arm is not type(None)))
        if origin is list:
            return [self.value(inner[0]), self.value(inner[0])]
        if origin is tuple:
            return tuple(self.value(arm) for arm in inner)
        if origin is dict:
            return {self.value(inner[0]): self.value(inner[1]), self.value(inner[0]): self.value(inner[1])}
        return self.plain(hint)

    def plain(self, hint: Any) -> Any:
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            return self.model(hint)
        if hint is bool:
            return True
        self.count += 1
        made = {str: f'text "{self.count}" \u2014\n', int: self.count, float: self.count + 0.1}
        return made[hint]


def models_in(value: Any) -> Iterator[BaseModel]:
    """Yield ``value`` and all records inside it."""
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from models_in(getattr(value, name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from models_in(item)
    elif isinstance(value, dict):
        yield from models_in(list(value.values()))


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_field_of_every_kind_survives_a_file(kind: type[BaseModel], tmp_path: Path) -> None:
    record: Any = Filler().model(kind)
    for model in models_in(record):
        for name in free_fields(type(model)):
            field = type(model).model_fields[name]
            default = field.get_default(call_default_factory=True)  # a required field has a marker here
            assert getattr(model, name) != default, f"{type(model).__name__}.{name} is at its default"

    write_record(record, tmp_path / "record.json")
    again = read_record(tmp_path / "record.json")

    assert type(again) is kind
    assert again == record
    assert again.schema_version == SCHEMA_VERSION


def test_every_model_of_the_package_is_inside_some_record() -> None:
    defined = {
        cls
        for cls in (getattr(records, name) for name in dir(records))
        if isinstance(cls, type) and issubclass(cls, BaseModel)
    }
    reached = {type(model) for kind in KINDS for model in models_in(Filler().model(kind))}
    assert {cls.__name__ for cls in defined - reached} == {"Value", "WholeRecord"}  # the bases of all


# --- numbers that are not finite -----------------------------------------------------------------

ENVIRONMENT = Environment(
    date="2026-01-02T03:04:05Z",
    mezzo="0.1.0",
    python="3.11.9",
    torch="2.13.0",
    os="Linux",
    cpu="a CPU",
    threads=2,
    device="cpu",
)


def run(**fields: Any) -> RunRecord:
    required: dict[str, Any] = {
        "command": ["mezzo", "run", "train.py"],
        "script": "train.py",
        "script_sha256": "00ff",
        "policy": "fp16",
        "environment": ENVIRONMENT,
    }
    return RunRecord(**(required | fields))


def alike(a: object, b: object) -> bool:
    """Return whether two floats are equal, NaN being equal to NaN and 0.0 not to -0.0."""
    assert isinstance(a, float)
    assert isinstance(b, float)
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


NUMBERS = [NAN, INF, -INF, -0.0, 5e-324, 1.7976931348623157e308, 0.1, 65504.0]


def test_numbers_that_are_not_finite_survive(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(run(steps=Steps(loss=NUMBERS, grad_norm=NUMBERS[::-1]), duration_s=-INF), path)
    again = read_record(path)

    assert isinstance(again, RunRecord)
    assert len(again.steps.loss) == len(NUMBERS)
    assert all(map(alike, again.steps.loss, NUMBERS))
    assert all(map(alike, again.steps.grad_norm, NUMBERS[::-1]))
    assert again.duration_s == -INF


def test_the_file_is_json_for_every_reader(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(run(steps=Steps(loss=[NAN, INF, -INF, 1.5])), path)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert data["steps"]["loss"] == ["NaN", "Infinity", "-Infinity", 1.5]
    assert (data["kind"], data["schema_version"]) == ("run", 1)


# --- derived values ------------------------------------------------------------------------------


def test_derived_values() -> None:
    assert len(Steps(loss=[1.0, 2.0])) == 2
    assert Steps(skipped=[True, False, True]).num_skipped == 2
    memory = Memory(
        parameters_bytes=1,
        gradients_bytes=20,
        optimizer_bytes=300,
        activations_bytes=4000,
        cuda_allocated_bytes=50_000,
        cuda_reserved_bytes=600_000,
    )
    assert memory.total_bytes == 4321
    assert Effective(flops_by_format={"fp16": 3, "fp32": 1}).share_by_format == {"fp16": 0.75, "fp32": 0.25}
    assert Effective().share_by_format == {}
    assert Effective(flops_by_format={"fp32": 0}).share_by_format == {}


@pytest.mark.parametrize(("scales", "final"), [([], None), ([8.0, 4.0], 4.0), ([8.0, NAN], None)])
def test_final_scale(scales: list[float], final: float | None) -> None:
    assert run(steps=Steps(loss_scale=scales)).final_scale == final


def test_records_share_no_lists() -> None:
    first, second = run(), run()
    first.steps.loss.append(1.0)
    first.effective.flops_by_format["fp16"] = 1
    assert (second.steps.loss, second.effective.flops_by_format) == ([], {})
    assert run() == second


# --- whole or not at all -------------------------------------------------------------------------


def test_parent_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one" / "record.json"
    write_record(run(), path)
    assert read_record(path) == run()
    assert os.listdir(path.parent) == ["record.json"]


def test_a_record_is_as_readable_for_others_as_any_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_record(run(), tmp_path / "record.json")
    assert (tmp_path / "record.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_record(failing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(run(seed=1), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="No space left"):
        write_record(run(seed=2), path)

    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_reader_never_sees_half_a_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(run(seed=1), path)
    seen: list[int | None] = []

    def look(_: int) -> None:
        found = read_record(path)  # when everything is written and nothing has been moved
        assert isinstance(found, RunRecord)
        seen.append(found.seed)

    monkeypatch.setattr(os, "fsync", look)
    write_record(run(seed=2), path)
    found = read_record(path)
    assert isinstance(found, RunRecord)
    assert [*seen, found.seed] == [1, 2]


# --- files that are not records -----------------------------------------------------------------

HINT = "pass the record.json that a mezzo command wrote"
NEWER = run().model_dump_json().replace('"schema_version":1', '"schema_version":2')
EXTRA = run().model_dump_json().replace('"kind":"run"', '"kind":"run","color":"red"')
WORD = run().model_dump_json().replace('"threads":2', '"threads":"two"')

WRONG = [
    ("", "is not a record: Expecting value: line 1 column 1 (char 0)", HINT),
    ("loss 0.5\n", "is not a record: Expecting value: line 1 column 1 (char 0)", HINT),
    ("[]", "is not a record: the file: Input should be an object", HINT),
    ("{}", "is not a record: the file: Unable to extract tag using discriminator 'kind'", HINT),
    (
        '{"kind": "walk"}',
        "is not a record: the file: Input tag 'walk' found using 'kind' does not match any of the expected tags: "
        + ", ".join(repr(kind.model_fields["kind"].default) for kind in KINDS),
        HINT,
    ),
    ('{"kind": "run"}', "is not a record: run.command: Field required", HINT),
    (EXTRA, "is not a record: run.color: Extra inputs are not permitted", HINT),
    (
        WORD,
        "is not a record: run.environment.threads: Input should be a valid integer, "
        "unable to parse string as an integer",
        HINT,
    ),
    (NEWER, "has schema version 2; this Mezzo reads up to 1", HOW_TO_UPDATE),
    (
        '{"kind": "dream", "schema_version": 99, "unknown": []}',
        "has schema version 99; this Mezzo reads up to 1",
        HOW_TO_UPDATE,
    ),
]


def check_error(path: Path, message: str, hint: str) -> None:
    with pytest.raises(RecordError) as caught:
        read_record(path)
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert caught.value.exit_code == 8


@pytest.mark.parametrize(("text", "message", "hint"), WRONG)
def test_a_file_that_is_no_record(text: str, message: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text, encoding="utf-8")
    check_error(path, f"{str(path)!r} {message}", hint)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(b"PK\x03\x04\xff")
    message = "is not a record: 'utf-8' codec can't decode byte 0xff in position 4: invalid start byte"
    check_error(path, f"{str(path)!r} {message}", HINT)


def test_json_nested_without_end(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("[" * 200_000, encoding="utf-8")
    with pytest.raises(RecordError, match="is not a record: "):
        read_record(path)


@pytest.mark.parametrize(("name", "why"), [("absent.json", "No such file or directory"), ("", "Is a directory")])
def test_a_file_that_cannot_be_read(name: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / name
    hint = "pass the record.json that a mezzo command wrote"
    check_error(path, f"cannot read the record {str(path)!r}: {why}", hint)


def test_a_path_may_be_a_string(tmp_path: Path) -> None:
    record = DoctorRecord(environment=ENVIRONMENT, devices=[])
    write_record(record, tmp_path / "record.json")
    assert read_record(str(tmp_path / "record.json")) == record


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("训.py".encode().decode("ascii", "surrogateescape"), "训.py"),  # as in the C locale
        ("\udc80.py", "\ufffd.py"),  # no UTF-8
        ("\ud800.py", "?.py"),  # half of a character
    ],
)
def test_a_text_that_is_no_unicode_is_readable_in_the_record(text: str, read: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(run(seed=2, script=text, error="训"), path)
    record = read_record(path)
    assert isinstance(record, RunRecord)
    assert (record.script, record.error) == (read, "训")
