"""Predictions for a comparison: which policies are priced as which, and a script that cannot be traced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mezzo.errors import UsageError
from mezzo.gpus import gpu_named
from mezzo.measure.predict.calibrate import Calibration
from mezzo.measure.predict.rates import CostLine, MachineRates
from mezzo.measure.predict.script import plan as module
from mezzo.measure.predict.script import plan as script_plan
from mezzo.measure.predict.script.plan import priced_as, real_gpus
from mezzo.measure.predict.script.process import record_script
from mezzo.measure.predict.script.tapes import ScriptTape, TapeRequest
from paths import SCRIPTS

GPUS = [gpu_named("t4"), gpu_named("h100")]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("fp32", "fp32"),
        ("fp16", "fp16"),
        ("fp16:init_scale=1024:growth_interval=100", "fp16"),
        ("bf16-master", "bf16-master"),
        ("fp16:fp32_modules=head", ""),
        ("bf16:fp32=softmax", ""),
        ("fp8:accumulate=fp22", "fp8"),
        ("bf16:gradients=bf16", ""),
        ("as-is", ""),
    ],
)
def test_policies_are_priced_as_presets(text: str, name: str) -> None:
    assert priced_as(text) == name


def test_each_gpu_under_each_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    def tapes(requests: Sequence[TapeRequest], *, deadline_s: float | None) -> list[ScriptTape]:
        assert deadline_s is None
        return [record_script(request) for request in requests]

    monkeypatch.setattr(script_plan, "recorded_tapes", tapes)
    policies = {"fp32": "fp32", "mine": "fp16:init_scale=8", "as-is": "as-is"}
    found = real_gpus(str(SCRIPTS / "plain.py"), ["3"], policies, GPUS)
    assert found.reason == ""
    names = [(one.gpu, one.policy) for one in found.predictions]
    assert names == [("t4", "fp32"), ("t4", "mine"), ("h100-sxm", "fp32"), ("h100-sxm", "mine")]
    assert [one.what for one in found.not_predicted] == ["as-is"]


def test_a_calibrated_cpu_is_predicted_from_operations_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[bool, bool]] = []

    def tapes(requests: Sequence[TapeRequest], *, deadline_s: float | None) -> list[ScriptTape]:
        asked.extend((request.on_cpu, request.gpu_present) for request in requests)
        return [record_script(request) for request in requests]

    monkeypatch.setattr(script_plan, "recorded_tapes", tapes)
    lines = {"(products)": CostLine(1e-6, 0.0, 1e-9), "(others)": CostLine(1e-6, 0.0, 0.0)}
    calibration = Calibration("a CPU", 1, "", "", {"fp32": MachineRates(lines)}, low=0.9, high=1.1)
    found = real_gpus(str(SCRIPTS / "plain.py"), ["3"], {"fp32": "fp32"}, GPUS[:1], calibration=calibration)
    assert found.here is not None
    assert (found.here.gpu, found.here.policy, found.here.calibrated) == ("cpu", "fp32", True)
    assert found.here.step_ms > 0
    assert (asked[0], asked[-1]) == ((False, True), (True, False))
    late = real_gpus(
        str(SCRIPTS / "plain.py"), ["3"], {"fp32": "fp32"}, GPUS[:1], calibration=calibration, limit_s=1e-9
    )
    assert late.here is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UsageError("x.py cannot be traced\nwith more", hint="no"), "x.py cannot be traced"),
        (ValueError("a bug\nof ours"), "ValueError: a bug"),
    ],
)
def test_a_failure_is_one_line(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(module, "script_plan", fails)
    found = real_gpus("x.py", [], {"fp32": "fp32"}, GPUS)
    assert (found.reason, found.predictions, found.gpus) == (reason, [], ["t4", "h100-sxm"])


def test_nothing_to_predict() -> None:
    assert real_gpus("x.py", [], {"as-is": "as-is"}, GPUS).reason == "no policy of this comparison can be predicted"


def test_a_script_that_does_not_exist_is_said(tmp_path: Path) -> None:
    assert "there is no script" in real_gpus(str(tmp_path / "no.py"), [], {"fp32": "fp32"}, GPUS).reason
