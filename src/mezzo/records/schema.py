"""The JSON schema of records (draft 2020-12), for readers that are not Mezzo. Imports no torch.

The classes of this room are its only source: fields are described by the sentences that stand below them.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from mezzo.records.files import Record
from mezzo.records.values import Value

_NOT_FINITE = ["NaN", "Infinity", "-Infinity"]


def json_schema() -> dict[str, Any]:
    """Return the schema of every kind of record; a number that is not finite is one of three strings."""
    schema = TypeAdapter(Record).json_schema(mode="serialization")
    for name, definition in schema["$defs"].items():
        described = _sentences(name)
        for field, form in definition["properties"].items():
            form.pop("title", None)
            if field in described:
                form["description"] = described[field]
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "title": "A record of Mezzo", **_with_not_finite(schema)}


def _sentences(name: str) -> dict[str, str]:
    """Return what stands below the fields of the class called ``name``."""
    owner = next(value for value in _classes(Value) if value.__name__ == name)
    body = ast.parse(inspect.getsource(owner)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def _classes(base: type[Value]) -> Iterator[type[Value]]:
    for derived in base.__subclasses__():
        yield derived
        yield from _classes(derived)


def _with_not_finite(form: Any) -> Any:
    if isinstance(form, list):
        return [_with_not_finite(part) for part in form]
    if not isinstance(form, dict):
        return form
    form = {key: _with_not_finite(value) for key, value in form.items()}
    if form.get("type") == "number":
        del form["type"]
        form["anyOf"] = [{"type": "number"}, {"enum": _NOT_FINITE}]
    return form


if __name__ == "__main__":
    json.dump(json_schema(), sys.stdout, indent=1)
    print()
