"""A script that prepares its data for a long time has numbers until it builds its first module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers_predict import tape_of
from mezzo.errors import ScriptError
from mezzo.measure.predict.script import batches as script_data
from mezzo.measure.predict.script import tapes
from mezzo.measure.predict.script.batches import SlowData
from mezzo.measure.predict.script.plan import script_plan
from mezzo.measure.predict.script.process import record_script
from mezzo.measure.predict.script.tapes import ScriptTape, TapeRequest, recorded_tapes

SAMPLES, CLASSES = 60, 7
TRAINS = """
import torch
from torch import nn

def prepare():
    xs, ys = torch.zeros({samples}, 8), torch.zeros({samples}, dtype=torch.long)
    for i in range({samples}):
        xs[i, i % 8] = 1.0
        ys[i] = i % 7
    return xs, ys

{before}
model = nn.Linear(8, {classes})
{after}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x, y = xs[step * 8 : step * 8 + 8], ys[step * 8 : step * 8 + 8]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if loss.item() < 0:
        raise SystemExit("a loss is never negative")
"""
PREPARED = "xs, ys = prepare()"
OF_DATA = "int(ys.max()) + 1"


def script(
    folder: Path, *, samples: int = SAMPLES, before: str = PREPARED, after: str = "", classes: str = OF_DATA
) -> str:
    path = folder / "train.py"
    path.write_text(TRAINS.format(samples=samples, before=before, after=after, classes=classes), encoding="utf-8")
    return str(path)


def traced(path: str, *, numbers_first: bool) -> ScriptTape:
    request = TapeRequest(script=path, arguments=(), policy="fp32", numbers_first=numbers_first)
    return record_script(request)


def parameters_bytes(made: ScriptTape) -> int:
    return sum(block.size_bytes for block in tape_of(made).blocks if block.kind == "parameters")


def test_numbers_first_is_a_tape_of_the_model_that_the_data_ask_for(tmp_path: Path) -> None:
    path = script(tmp_path)
    assert parameters_bytes(traced(path, numbers_first=True)) == 4 * (8 * CLASSES + CLASSES)
    assert parameters_bytes(traced(path, numbers_first=False)) == 4 * (8 + 1)  # without numbers the maximum is 0


def test_both_ways_give_the_same_tape(tmp_path: Path) -> None:
    path = script(tmp_path, classes="3")
    with_numbers, without = (tape_of(traced(path, numbers_first=first)) for first in (True, False))
    assert with_numbers.operations == without.operations
    assert with_numbers.blocks == without.blocks


@pytest.mark.parametrize(("before", "after", "slow"), [(PREPARED, "", True), ("", PREPARED, False)])
def test_only_what_comes_before_the_first_module_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, slow: bool
) -> None:
    monkeypatch.setattr(script_data, "MOST_OPERATIONS", 2 * SAMPLES)
    path = script(tmp_path, before=before, after=after, classes="3")
    if slow:
        with pytest.raises(SlowData):
            traced(path, numbers_first=False)
        return
    assert traced(path, numbers_first=False).tape is not None


LOW_LIMIT = """
import sys
from mezzo.measure.predict.script import batches, process
batches.MOST_OPERATIONS = 100
process.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_slow_data_are_prepared_with_numbers_and_the_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tapes.Guarded

    def start_with_low_limit(command: list[str], **settings: Any) -> Any:
        return start([command[0], "-c", LOW_LIMIT, command[-1]], **settings)

    monkeypatch.setattr(tapes, "Guarded", start_with_low_limit)
    plan = script_plan(script(tmp_path), [], ["fp32", "bf16"])
    assert {pair.first.batch for pair in plan.tapes.values()} == {8}
    (said,) = (one for one in plan.assumptions if one.what == "data that the script prepares")
    assert said.value == "with numbers"
    assert "over 20,000 operations before its first module" in said.reason


def test_a_script_that_takes_too_long_is_refused_in_time(tmp_path: Path) -> None:
    import time

    path = tmp_path / "train.py"
    path.write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    request = TapeRequest(script=str(path), arguments=(), policy="fp32")
    with pytest.raises(ScriptError, match=r"train.py was not traced in the time that was left"):
        recorded_tapes([request], deadline_s=time.monotonic() + 0.5)
