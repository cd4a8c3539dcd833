"""What another machine can compute, in a file: read back as written; any other content is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo.cli.machines import main, read_facts
from mezzo.errors import RecordError
from mezzo.measure.doctor import facts


def test_what_is_written_is_read(tmp_path: Path) -> None:
    main([str(tmp_path / "facts.json")])
    assert read_facts(tmp_path / "facts.json") == facts()


@pytest.mark.parametrize("text", [None, "", "{}", '{"devices": 3}'])
def test_anything_else_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "facts.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match="does not describe what the machine can compute"):
        read_facts(path)
