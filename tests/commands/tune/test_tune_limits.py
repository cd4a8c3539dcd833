"""How long a search lets a run take: many times as long as its first run did, also where an interrupted search made that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers_compare import falling, run
from mezzo.children.signals import stoppable
from mezzo.commands.tune.plan import Configuration, SearchKnowledge, Trial
from mezzo.commands.tune.runs import Tune
from mezzo.launch.resuming import Finished
from mezzo.records import AS_IS, AnyRecord, RunRecord, write_record

NOW, OTHER = Configuration(policy=AS_IS), Configuration(policy="bf16")
FIRST_S = 300.0
"""Compilation takes minutes."""


class Waves:
    """One run at a time; each is asked for with a limit, which is kept."""

    at_once = 1
    reused: set[str] = set()

    def __init__(self, record: RunRecord) -> None:
        self.limits_s: list[float | None] = []
        self._record = record

    def record(self, request: Any, *, limit_s: float | None, **_: Any) -> AnyRecord:
        self.limits_s.append(limit_s)
        return self._record


@pytest.mark.parametrize("resumed", [False, True])
def test_the_limit_follows_from_the_first_run(resumed: bool, tmp_path: Path) -> None:
    first = run(AS_IS, falling(1.0), seed=0, duration_s=FIRST_S, time_ms=[100.0] * 20)
    finished, waves = Finished(tmp_path, {}), Waves(first)
    if resumed:
        (tmp_path / "round1-as-is").mkdir()
        write_record(first, tmp_path / "round1-as-is" / "record.json")
        finished.add("round1-as-is", tmp_path / "round1-as-is" / "record.json")
    tune = Tune(
        known=SearchKnowledge(configurations=(NOW, OTHER), steps=20, repeats=3, margin=0.02),
        budget_s=1e6,
        folder=tmp_path,
        finished=finished,
        waves=waves,  # type: ignore[arg-type]
        make_request=lambda *_, **__: None,  # type: ignore[arg-type,return-value]
        arguments=(),
        say=lambda _: None,
    )
    with stoppable() as stop:
        tune._do(Trial(NOW, 0), stop)
        tune._do(Trial(OTHER, 0), stop)
    assert [trial.resumed for trial in tune.trials] == [resumed, False]
    assert len(waves.limits_s) == 2 - resumed
    assert waves.limits_s[-1] == 20 * FIRST_S
