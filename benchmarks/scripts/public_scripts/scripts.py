"""The public scripts of docs/public-scripts.md: where each one is, and the arguments with which it ends within seconds.

``scripts.csv`` has them by kind: ``cpu``; ``cuda``, which say CUDA where no GPU is; ``framework``, Keras and Paddle scripts, which run
with the interpreter that runs the benchmark. ``commits.csv`` has the commit of each repository.

Why a script has its variables: two guides of Keras validate on 10,000 training images. vicreg needs what torchrun sets for one process.
SupContrast's tensorboard_logger has generated code of an old protobuf. awd-lstm-lm loads a pickled model, as torch allowed until 2.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.scripts.public_scripts import data
from benchmarks.shared import csv_rows

HERE = Path(__file__).parent
COMMITS = {cells["repository"]: cells["commit"] for cells in csv_rows.read(HERE / "commits.csv")}


class Script(NamedTuple):
    """One script and how to run it."""

    kind: str
    repository: str
    file: str
    arguments: str
    folder: str
    """Relative to the repository, where the script runs: empty for the file's own folder."""
    data: Callable[[Path], None] | None
    """Writes the files that the script reads, given the folder that it runs in."""
    prepare: str
    """A file of the repository that is run first, with the same Python, relative to the folder."""
    variables: Mapping[str, str]
    leave_out: str
    """Files of the repository to leave out: large ones that are not read, or that ``data`` replaces."""

    @property
    def commit(self) -> str:
        return COMMITS[self.repository]

    @property
    def where(self) -> str:
        """Return the folder that the script runs in, relative to the repository."""
        return self.folder or str(Path(self.file).parent)

    @property
    def name(self) -> str:
        return f"{self.repository} {self.file} {self.arguments}".strip()


def _script(cells: dict[str, str]) -> Script:
    variables = dict(pair.split("=") for pair in cells["variables"].split())
    write = getattr(data, cells["data"]) if cells["data"] else None
    changed = {"data": write, "variables": variables, "leave_out": cells["leave_out"] or "*.gif"}
    return Script(**cells | changed)  # type: ignore[arg-type]


SCRIPTS = [_script(cells) for cells in csv_rows.read(HERE / "scripts.csv")]
