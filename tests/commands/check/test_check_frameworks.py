"""A check diagnoses what the observers inspect, by what the first run trained in, and says why it does not diagnose the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers_compare import falling, run
from mezzo.commands.check.plan import NextStage, next_stage
from mezzo.commands.check.runs import Check, CheckSettings
from mezzo.errors import ScriptError
from mezzo.studies.loop import Finished, Study
from mezzo.studies.side_by_side import one_after_another

NAN = float("nan")


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing runs in this test")


def checking(folder: Path) -> Check:
    settings = CheckSettings(
        policies=("fp32", "fp16"),
        seeds=1,
        budget_s=600.0,
        metric=None,
        make_request=refuse,
        arguments=(),
        framework="keras",
    )
    study = Study(one_after_another, Finished(folder, {}))
    return Check(settings=settings, folder=folder, study=study, say=lambda _: None)


@pytest.mark.parametrize(
    ("framework", "next_kind"),
    [
        ("torch 2.13.0", "diagnose"),
        ("keras 3.15.1 on torch 2.13.0", "diagnose"),  # which backend it is only the run knows
        ("paddle 3.3.0", "diagnose"),
        ("keras 3.15.1 on tensorflow 2.21.0", "diagnose"),
        ("keras 3.15.1 on jax 0.8.0", ""),
    ],
)
def test_what_fails_is_diagnosed_in_every_framework_that_is_inspected(
    framework: str, next_kind: str, tmp_path: Path
) -> None:
    check = checking(tmp_path)
    for policy, losses in (("fp32", falling(1.0)), ("fp16", [5.0, 4.0] + [NAN] * 18)):
        asked = NextStage(kind="run", policy=policy, why="")
        check._learn(asked, run(policy, losses, seed=0, framework=framework))
    then = next_stage(check.known)
    assert ("" if then is None else then.kind) == next_kind


def test_a_diagnosis_that_is_refused_says_why(tmp_path: Path) -> None:
    refused = run("fp16", [], error="static graphs are not inspected", exit_code=2)
    said = checking(tmp_path)._learn(NextStage(kind="diagnose", policy="fp16", why=""), refused)
    assert said == "no diagnosis: static graphs are not inspected"


def test_a_search_that_is_refused_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise ScriptError("the script has no module to keep in FP32", hint="none")

    monkeypatch.setattr("mezzo.commands.check.runs.fallback_of_script", refused)
    monkeypatch.setattr(Check, "_request", lambda *_, **__: None)
    stages = iter([NextStage(kind="fallback", policy="fp16", why="")])
    monkeypatch.setattr("mezzo.commands.check.runs.next_stage", lambda known: next(stages, None))
    check = checking(tmp_path)
    check.run()
    assert [stage.outcome for stage in check.stages] == ["no result: the script has no module to keep in FP32"]
