"""The JSON schema of records (draft 2020-12), for readers other than Mezzo. Imports no torch.

The classes of this package are its only source: the docstring below a field is its description.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from mezzo.records.files import Record
from mezzo.records.values import Value

_NOT_FINITE = ["NaN", "Infinity", "-Infinity"]


def json_schema() -> dict[str, Any]:
    """Return the schema of every kind of record; a number that is not finite is one of three strings."""
    schema = TypeAdapter(Record).json_schema(mode="serialization", schema_generator=_Schema)
    return {"$schema": GenerateJsonSchema.schema_dialect, "title": "A record of Mezzo", **schema}


class _Schema(GenerateJsonSchema):
    """Pydantic's schema with the strings that stand for NaN and infinities, and without titles derived from field names."""

    def float_schema(self, schema: Any) -> JsonSchemaValue:
        return {"anyOf": [{"type": "number"}, {"enum": _NOT_FINITE}]}

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        described = super().model_schema(schema)
        for name, text in _docstrings(schema["cls"]):
            described["properties"][name]["description"] = text
        return described

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _docstrings(model: type) -> Iterator[tuple[str, str]]:
    """Yield the docstrings below the fields of a class and of its bases; pydantic would read them whenever Mezzo starts."""
    for base in reversed([base for base in model.__mro__ if issubclass(base, Value)]):
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                yield field.target.id, inspect.cleandoc(ast.literal_eval(below.value))


if __name__ == "__main__":
    json.dump(json_schema(), sys.stdout, indent=1)
    print()
