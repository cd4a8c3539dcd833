"""How long a search lets a run take: many times as long as its first run did, also where an interrupted search made that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers_compare import falling, run
from mezzo.commands.tune.plan import Configuration, SearchKnowledge
from mezzo.commands.tune.runs import Tune
from mezzo.records import AS_IS, AnyRecord, RunRecord, write_record
from mezzo.studies.loop import Finished, carry_out

NOW, OTHER = Configuration(policy=AS_IS), Configuration(policy="bf16")
FIRST_S = 300.0
"""Compilation takes minutes."""


class Runs:
    """One run at a time; each is asked for with a limit, which is kept."""

    at_once = 1
    reused: set[str] = set()

    def __init__(self, record: RunRecord, finished: Finished) -> None:
        self.limits_s: list[float | None] = []
        self._record, self.finished = record, finished

    def record(self, request: Any, *, limit_s: Callable[[], float | None], **_: Any) -> AnyRecord:
        self.limits_s.append(limit_s())
        return self._record


@pytest.mark.parametrize("resumed", [False, True])
def test_the_limit_follows_from_the_first_run(resumed: bool, tmp_path: Path) -> None:
    first = run(AS_IS, falling(1.0), seed=0, duration_s=FIRST_S, time_ms=[100.0] * 20)
    study = Runs(first, Finished(tmp_path, {}))
    if resumed:
        (tmp_path / "round1-as-is").mkdir()
        write_record(first, tmp_path / "round1-as-is" / "record.json")
        study.finished.add("round1-as-is")
    tune = Tune(
        known=SearchKnowledge(configurations=(NOW, OTHER), steps=20, repeats=3, margin=0.02),
        budget_s=1e6,
        folder=tmp_path,
        study=study,  # type: ignore[arg-type]
        make_request=lambda *_, **__: None,  # type: ignore[arg-type,return-value]
        arguments=(),
        say=lambda _: None,
    )
    carry_out(lambda: tune._next() if len(tune.trials) < 2 else None, study=study)  # type: ignore[arg-type]
    assert [trial.resumed for trial in tune.trials] == [resumed, False]
    assert len(study.limits_s) == 2 - resumed
    assert study.limits_s[-1] == 20 * FIRST_S
