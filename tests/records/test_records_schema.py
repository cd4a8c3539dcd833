"""The schema of records, read by a validator that is not pydantic."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel
from test_records import KINDS, Filler

from mezzo.records.schema import json_schema
from paths import ROOT
from record_builders import compare_record, run_record

SCHEMA = json_schema()
CHECK = jsonschema.Draft202012Validator(SCHEMA)
PAGE = ROOT / "docs" / "records.schema.json"


def as_json(record: BaseModel) -> Any:
    return json.loads(record.model_dump_json())


def test_the_page_holds_the_schema_of_today() -> None:
    assert json.loads(PAGE.read_text(encoding="utf-8")) == SCHEMA, (
        "python -m mezzo.records.schema > docs/records.schema.json"
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_records_of_every_kind_fit_the_schema(kind: type[BaseModel]) -> None:
    CHECK.check_schema(SCHEMA)
    CHECK.validate(as_json(Filler().model(kind)))


def test_numbers_that_are_not_finite_fit_as_three_strings_only() -> None:
    diverged = as_json(run_record("fp16-pure"))
    assert "NaN" in json.dumps(as_json(compare_record()))
    CHECK.validate(as_json(compare_record()))
    for value, fits in [
        ("NaN", True),
        ("Infinity", True),
        ("-Infinity", True),
        ("nan", False),
        (None, False),
        (1, True),
    ]:
        diverged["steps"]["loss"] = [value]
        assert CHECK.is_valid(diverged) is fits, value


@pytest.mark.parametrize(
    ("place", "value"),
    [(("kind",), "ran"), (("steps", "skipped"), [0.5]), (("policy",), 16), (("unknown",), 1), (("environment",), {})],
)
def test_what_is_no_record_does_not_fit(place: tuple[str, ...], value: object) -> None:
    record = as_json(run_record())
    inside = record
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    assert not CHECK.is_valid(record)


def test_fields_carry_the_sentences_that_stand_below_them() -> None:
    steps = SCHEMA["$defs"]["Steps"]["properties"]
    assert steps["time_ms"]["description"] == "Wall time since the previous step."
    assert "description" not in steps["loss"]
    assert SCHEMA["$defs"]["Steps"]["description"].startswith("One number for each training step")
