"""The files of a record that is logged, and the name that a tracker shows for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TrackedRecord:
    """A record on disk and its page."""

    record: Path
    page: Path

    @property
    def folder(self) -> Path:
        """The folder of the record."""
        return self.record.parent

    @property
    def name(self) -> str:
        """The name of the record's folder, which is unique to a command; a rank's folder is prefixed with rank 0's."""
        folder = self.folder.resolve()
        name = f"{folder.parent.name}-{folder.name}" if re.fullmatch(r"rank\d+", folder.name) else folder.name
        return name if self.record.name == "record.json" else f"{name}-{self.record.stem}"
