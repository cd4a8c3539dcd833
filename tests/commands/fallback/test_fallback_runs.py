"""What the runs of a search for modules to keep in FP32 are asked to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mezzo.children.signals import Stopped
from mezzo.commands.fallback.runs import fallback_of_script
from mezzo.launch.request import Request
from mezzo.policy import Policy


class Asked:
    """Stops the search at its first run."""

    request: Request

    def record(self, request: Request, **_: Any) -> None:
        self.request = request
        raise Stopped(2)


def test_no_run_finds_the_checkpoints_of_another(tmp_path: Path) -> None:
    request = Request(
        target="x",
        kind="script",
        policy=Policy.parse("fp16"),
        record_path=str(tmp_path / "record.json"),
        command=("mezzo",),
        arguments=("--out", "a/{run}"),
    )
    asked = Asked()
    with pytest.raises(Stopped):
        fallback_of_script(request, folder=tmp_path, study=asked)  # type: ignore[arg-type]
    assert asked.request.arguments == ("--out", "a/reference")
