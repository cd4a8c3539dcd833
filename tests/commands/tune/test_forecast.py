"""What predictions leave out of a search: by memory and by time, with the reason, and never what the script does now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from helpers_predict import traced_in_forks
from mezzo.commands.tune.forecast import Forecast, beside, forecasts, not_predicted, predictable, ruled_out
from mezzo.commands.tune.plan import Configuration, grid
from mezzo.gpus import GPUS
from mezzo.measure.predict.host import SERVER
from mezzo.records import TuneRow

GIB = 2**30


@pytest.fixture(autouse=True)
def _in_forks() -> Iterator[None]:
    with traced_in_forks():
        yield


NOW, FP32, BF16 = Configuration(), Configuration(policy="fp32"), Configuration(policy="bf16")
LARGE = Configuration(policy="bf16", settings=(("batch", "64"),))
LARGE_FP32 = replace(LARGE, policy="fp32")


def at(rate: float, *, low: float = 0.9, high: float = 1.1, gib: float = 1.0, comparable: object = "") -> Forecast:
    return Forecast(
        needed_bytes=int(gib * GIB), rate=rate, rate_low=rate * low, rate_high=rate * high, comparable=comparable
    )


CASES: dict[str, tuple[dict[Configuration, Forecast], dict[Configuration, str]]] = {
    "above the limit by more than the error": (
        {BF16: at(10), LARGE: at(10, gib=11.1)},
        {LARGE: "predicted to need 11.1 GiB on T4, above the limit of 10 GiB by more than the predictor's 10%"},
    ),
    "above the limit within the error": ({BF16: at(10), LARGE: at(10, gib=10.9)}, {}),
    "slower beyond both bands": (
        {BF16: at(10), FP32: at(5)},
        {
            FP32: "predicted 0.5 times as fast as bf16 on T4, and slower even if the best end of its band meets the worst end of that "
            "one's"
        },
    ),
    "slower within the bands": ({BF16: at(10), FP32: at(8.5)}, {}),
    "steps of other batches are not compared": (
        {BF16: at(10, comparable=()), LARGE: at(2, comparable=LARGE.settings)},
        {},
    ),
    "what does not fit is no rival": ({BF16: at(5), LARGE: at(100, gib=20)}, {LARGE: "predicted to need 20 GiB"}),
    "what the script does now stays": ({NOW: at(1, gib=20), BF16: at(10)}, {}),
    "a CPU has no times": ({BF16: Forecast(needed_bytes=1), FP32: Forecast(needed_bytes=1)}, {}),
}


@pytest.mark.parametrize(("found", "expected"), CASES.values(), ids=CASES)
def test_what_needs_no_run(found: dict[Configuration, Forecast], expected: dict[Configuration, str]) -> None:
    out = ruled_out(found, limit_bytes=10 * GIB, where="T4", now=NOW)
    assert out.keys() == expected.keys()
    assert all(out[one].startswith(why) for one, why in expected.items())


def test_what_the_predictor_knows() -> None:
    every = grid(["fp32", "bf16", "fp16:init_scale=8"], {}, [(False, True)], [], checkpoints=["full"])
    assert [one.name for one in every if predictable(one)] == ["fp32", "bf16"]
    assert [one.value for one in not_predicted(every)] == ["as-is, compiled, checkpointed"]
    assert not_predicted([FP32]) == []


def test_predictions_of_the_gpu_of_the_runs_stand_beside_their_rows() -> None:
    found = {
        FP32: replace(at(10), step_ms=12.0),
        BF16: replace(at(10), step_ms=5.0),
        LARGE: replace(at(10), step_ms=9.0),
    }
    found[NOW] = Forecast(needed_bytes=1)  # a CPU has no times
    rows = [
        TuneRow(name=one.name, policy=one.policy, state="now", reason="", step_ms=10.0) for one in (NOW, FP32, BF16)
    ]
    assert [(note.value, note.reason) for note in beside(found, rows)] == [
        ("bf16", "predicted 5.00 ms, measured 10.0 ms: 50% off, too fast"),
        ("fp32", "predicted 12.0 ms, measured 10.0 ms: 20% off, too slow"),
    ]


SCRIPT = """
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    loss = model(torch.randn(int(sys.argv[1]), 256)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_script_is_traced_once_for_each_of_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    small, large = (Configuration(policy="fp32", settings=(("batch", value),)) for value in ("64", "4096"))
    left = iter([True, True, False])
    others = [replace(small, policy="as-is"), replace(small, settings=(("batch", "9"),))]
    found, notes = forecasts(str(path), ["{batch}"], [small, large, *others], gpu=None, in_time=lambda: next(left))
    assert found.keys() == {small, large}
    parameters = 4 * (256 * 1024 + 1024 + 1024 + 1)
    # Before the first layer's gradient is made: the parameters, and what the forward pass keeps of a batch.
    for one, size in ((small, 64), (large, 4096)):
        assert found[one].needed_bytes >= parameters + 4 * size * 1024
        assert found[one].needed_bytes <= 2 * parameters + 4 * size * (256 + 2 * 1024 + 2)
        assert found[one].rate is None
    assert [(one.value, one.reason) for one in notes] == [("batch 9", "a fifth of the budget went to predictions")]


def test_on_a_gpu_a_script_has_a_speed_with_a_band(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    bf16, fp32 = Configuration(policy="bf16"), Configuration(policy="fp32")
    found, notes = forecasts(str(path), ["64"], [fp32, bf16], gpu=GPUS["t4"])
    assert notes == [SERVER.note]
    assert found.keys() == {fp32}  # a T4 has no units for BF16
    one = found[fp32]
    assert one.rate is not None
    assert one.rate_low < one.rate < one.rate_high


def test_a_script_that_cannot_be_traced_is_left_to_the_measurement(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\n", encoding="utf-8")
    found, notes = forecasts(str(path), [], [Configuration(policy="fp32")], gpu=GPUS["t4"])
    assert found == {}
    assert [one.value for one in notes] == ["the script's own options"]
    assert "never trains" in notes[0].reason


FP16_FAILS = """
import torch
class Fails(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return torch.zeros(16, 4).scatter(1, torch.zeros(16, 1, dtype=torch.int64), y[:, :1])
model = Fails(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
"""


def test_a_policy_under_which_a_script_fails_is_left_to_the_measurement(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(FP16_FAILS, encoding="utf-8")
    fp16 = Configuration(policy="fp16")
    found, notes = forecasts(str(path), [], [FP32, fp16], gpu=GPUS["t4"])
    assert found.keys() == {FP32}
    assert [(one.what, one.value) for one in notes] == [("not predicted", fp16.name), ("host", SERVER.note.value)]
    assert notes[0].reason.startswith("fails under fp16: train.py:6: RuntimeError: ")
