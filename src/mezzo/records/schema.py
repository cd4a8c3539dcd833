"""The JSON schema of records (draft 2020-12), for readers other than Mezzo. Imports no torch.

The classes of this package are its only source: the docstring below a field is its description.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from mezzo.records.files import Record

_NOT_FINITE = ["NaN", "Infinity", "-Infinity"]


def json_schema() -> dict[str, Any]:
    """Return the schema of every kind of record; a number that is not finite is one of three strings."""
    schema = TypeAdapter(Record).json_schema(mode="serialization", schema_generator=_Schema)
    return {"$schema": GenerateJsonSchema.schema_dialect, "title": "A record of Mezzo", **schema}


class _Schema(GenerateJsonSchema):
    """Pydantic's schema with the strings that stand for NaN and infinities, and without titles derived from field names."""

    def float_schema(self, schema: Any) -> JsonSchemaValue:
        return {"anyOf": [{"type": "number"}, {"enum": _NOT_FINITE}]}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


if __name__ == "__main__":
    json.dump(json_schema(), sys.stdout, indent=1)
    print()
