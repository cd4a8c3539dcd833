"""The guard of a script's run: what it notices at which step, how it stops a run, and that it reads nothing of the device."""

from __future__ import annotations

import gc
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fake_cuda import Operations
from helpers_launch import run_in_child
from helpers_values import existing
from mezzo.commands.run.page import guard_facts
from mezzo.engine.alarms import UpdateNumbers
from mezzo.launch.patches import Patches
from mezzo.launch.request import GuardRequest, SnapshotRequest
from mezzo.launch.torch import training
from mezzo.launch.torch.guarding import seen_in
from mezzo.launch.torch.snapshots.taking import ScriptSnapshots
from mezzo.measure.steps import StepRecorder
from mezzo.observe.settings import StopScript
from mezzo.records import Guardrails, RunRecord, Steps
from paths import SCRIPTS


def ran(folder: Path, *arguments: str, action: str = "note", policy: str = "fp32", **asked: Any) -> RunRecord:
    guard = GuardRequest.model_validate({"action": action, "commands": {"loss not finite": "mezzo diagnose x.py"}})
    return run_in_child(folder, str(SCRIPTS / "going_wrong.py"), *arguments, policy=policy, guard=guard, **asked)


CASES = [
    ("nan", "fp32", [("loss not finite", 60)]),
    ("zero", "fp32", [("gradients zero", 10)]),
    ("spike", "fp32", [("loss spike", 64)]),
    ("storm", "fp16", [("skip storm", 60)]),
    ("well", "fp32", []),
    ("well", "fp16", []),
]


@pytest.mark.parametrize(("fault", "policy", "expected"), CASES)
def test_what_goes_wrong_is_noticed_at_its_step(
    tmp_path: Path, fault: str, policy: str, expected: list[tuple[str, int]]
) -> None:
    record = ran(tmp_path, fault, policy=policy)
    found = [(alarm.kind, alarm.step) for alarm in guarded(record).alarms]
    assert found == expected
    assert (record.exit_code, len(record.steps)) == (0, 80)
    printed = (tmp_path / "output.log").read_text()
    assert [f"mezzo: guard: {kind}, step {step}:" in printed for kind, step in found] == [True] * len(found)
    assert ("guard: next, type: mezzo diagnose x.py" in printed) == (fault == "nan")


@pytest.mark.parametrize(("fault", "step"), [("nan", 60), ("zero", 10)])
def test_a_run_is_stopped_with_an_exit_code_of_its_own(tmp_path: Path, fault: str, step: int) -> None:
    record = ran(tmp_path, fault, action="stop")
    assert record.exit_code == 10
    assert record.error == f"the run was stopped by its guard: {guarded(record).stopped}"
    assert len(record.steps) == step
    assert "finished" not in (tmp_path / "output.log").read_text()


def test_an_alarm_that_cannot_stop_a_run_is_noted_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script has started its processes itself, so they cannot be stopped after the same step."""
    monkeypatch.setattr("mezzo.launch.torch.guarding.are_several", lambda: True)
    record, why = ran(tmp_path, "nan", action="stop"), "stop in several processes needs a launcher"
    assert (record.exit_code, guarded(record).stopped, guarded(record).only_noted) == (0, "", why)
    assert [(fact.what, fact.reason) for fact in guard_facts(guarded(record))[1:]] == [("only noted", why)]


def test_an_alarm_of_the_last_steps_fails_the_run_too(tmp_path: Path) -> None:
    assert ran(tmp_path, "nan", "60", action="stop").exit_code == 10


def test_looking_at_steps_runs_no_operation_and_reads_no_tensor() -> None:
    recorder = StepRecorder()
    for step in range(40):
        recorder.loss(torch.tensor(float(step)))
        recorder.norm(torch.tensor(2.0))
        recorder.close(skipped=torch.tensor(float(step == 3)), scale=torch.tensor(8.0))
    with Operations() as log, mock.patch.object(torch.Tensor, "item", side_effect=AssertionError):
        seen = recorder.seen_from(0)
        recorder.send_numbers()
    assert (log.names, log.reads) == ([], [])
    assert seen == [UpdateNumbers(k + 1, float(k), 2.0, k == 3, 8.0) for k in range(40)]


def test_a_record_has_the_updates_that_the_recorder_has() -> None:
    steps = Steps(loss=[1.0, float("nan")], grad_norm=[float("nan"), 2.0], skipped=[False, True], loss_scale=[])
    first, second = seen_in(steps, 0)
    assert first == UpdateNumbers(1, 1.0, None, False, None)
    assert (second.step, second.norm, second.skipped) == (2, 2.0, True)


RETURNS = """
import sys, torch
from torch import nn
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
step, weights = 0, {}
for epoch in range(5):
    for x, y in torch.utils.data.DataLoader(data, batch_size=8):
        step += 1
        loss = nn.functional.mse_loss(model(x), y)
        if step == int(sys.argv[1]) or (len(sys.argv) > 2 and step > 20):
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
print("finished", step, optimizer.param_groups[0]["lr"], scheduler.get_last_lr(), bool(model.weight.isfinite().all()))
"""


def returned(
    folder: Path, *arguments: str, source: str = RETURNS, rewinds: int = 3, policy: str = "fp32", resume: bool = False
) -> RunRecord:
    (folder / "train.py").write_text(source)
    snapshots = SnapshotRequest(folder=str(folder / "snapshots"), every_s=0.0, resume=resume, identity={})
    guard = GuardRequest(action="rewind", rewinds=rewinds)
    return run_in_child(folder, str(folder / "train.py"), *arguments, policy=policy, guard=guard, snapshots=snapshots)


def guarded(record: RunRecord) -> Guardrails:
    return existing(record.guardrails)


def test_a_script_returns_to_the_snapshot_from_before_with_half_the_rate(tmp_path: Path) -> None:
    record = returned(tmp_path, "17")
    said = (tmp_path / "output.log").read_text()
    assert "finished 40 0.05 [0.05] True" in said, said
    assert (record.exit_code, len(record.steps)) == (0, 40)
    (rewind,) = guarded(record).rewinds
    assert (rewind.alarm, rewind.updates, rewind.step) == ("loss not finite", 16, 18)
    assert [(one.what, one.value) for one in rewind.changes] == [("learning rate", "x 0.5, now 0.05")]
    assert "mezzo: guard: back to " in said


def test_a_script_that_goes_wrong_again_is_ended(tmp_path: Path) -> None:
    record = returned(tmp_path, "17", "again", rewinds=2)
    assert record.exit_code == 10
    assert len(guarded(record).rewinds) == 2
    assert "after 2 returns to a snapshot" in guarded(record).stopped


def test_nothing_is_saved_between_a_return_and_the_next_update(tmp_path: Path) -> None:
    first, second = guarded(returned(tmp_path, "21", "again", rewinds=2)).rewinds
    assert (first.snapshot, first.updates) == (second.snapshot, second.updates)
    assert first.updates == 20
    assert [change.what for change in second.changes] == ["learning rate", "policy"]


def test_a_script_without_a_good_snapshot_is_ended(tmp_path: Path) -> None:
    with mock.patch.object(ScriptSnapshots, "_is_due", lambda self: self._run.update.num_updates == 30):
        record = returned(tmp_path, "5")
    assert record.exit_code == 10
    assert existing(record.error).endswith("there is no snapshot from before update 5 to return to")


def test_a_script_without_a_loader_returns_too(tmp_path: Path) -> None:
    loop = RETURNS.replace("torch.utils.data.DataLoader(data, batch_size=8)", "[data[:8]] * 8")
    record = returned(tmp_path, "5", source=loop)
    assert (record.exit_code, len(record.steps)) == (0, 40)
    assert [rewind.alarm for rewind in guarded(record).rewinds] == ["loss not finite"]


def test_the_weights_of_a_stopped_script_are_known_though_its_model_is_gone() -> None:
    """Processes compare their digests. The frames of a stopped script may be freed before its process takes one."""

    def script() -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(64):
            optimizer.zero_grad()
            (model(torch.ones(4, 2)).mean() * (1.0 if step < 8 else float("nan"))).backward()
            optimizer.step()

    patches = Patches()
    with training(None, seed=0, observe=None) as running:
        running.keep_weights(patches)
        running.begin_guard(GuardRequest(action="stop"))
        with suppress(StopScript):  # pytest.raises would keep the frames
            script()
        gc.collect()
        assert running.guardrails().stopped
        assert not running._run.objects.optimizers
        assert running.weights()
    patches.undo()


FALLS_BACK = """
import os, sys, torch
from torch import nn
fault, made = sys.argv[1], 0
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))

class Grown(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)
    def forward(self, x):
        y = self.inner(x)
        if y.dtype is torch.float16 and step > 20:
            y.register_hook(lambda gradient: gradient * float("inf"))  # a gradient beyond FP16, for any scale
        return y

model = Grown()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step, formats = 0, []
own = torch.autocast("cpu", dtype=torch.float16)
for epoch in range(15):
    for x, y in torch.utils.data.DataLoader(data, batch_size=8):
        step += 1
        out = model(x)
        with own:
            formats.append(str(nn.functional.linear(x, model.inner.weight).dtype)[6:])
        loss = nn.functional.mse_loss(out.float(), y)
        if fault == "loss" and step in (21, 25, 29):
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9, error_if_nonfinite=fault != "loss")
        optimizer.step()
runs = [f for n, f in enumerate(formats) if not n or f != formats[n - 1]]
print("finished", step, optimizer.param_groups[0]["lr"], runs, bool(model.inner.weight.isfinite().all()))
"""

RATES = [[("learning rate", f"x {share}, now {0.1 * share}")] for share in (0.5, 0.25, 0.125)]
FALLS = [
    # Overflows at any scale: first a smaller scale, then BF16, under which the script trains to its end.
    (
        "range",
        "fp16",
        "0.1 ['float16', 'bfloat16'] True",
        [[("loss scale", "x 0.0625")], [("policy", "bf16, before fp16")]],
    ),
    # BF16 has the range, so what comes back is not its fault: its precision is tried, with FP32.
    (
        "loss",
        "bf16",
        "0.025 ['bfloat16', 'float32'] True",
        [RATES[0], [*RATES[0], ("policy", "fp32, before bf16")], RATES[1]],
    ),
    ("loss", "fp32", "0.0125 ['float32'] True", [RATES[0], [*RATES[1], ("policy", "unchanged")], RATES[2]]),
]


@pytest.mark.parametrize(("fault", "policy", "ends", "changes"), FALLS)
def test_a_second_return_falls_back_to_a_safer_policy(
    fault: str, policy: str, ends: str, changes: list[Any], tmp_path: Path
) -> None:
    with mock.patch.object(ScriptSnapshots, "_is_due", lambda self: self._run.update.num_updates == 16):
        record = returned(tmp_path, fault, policy=policy, source=FALLS_BACK)
    said = (tmp_path / "output.log").read_text()
    assert [[(one.what, one.value) for one in rewind.changes] for rewind in guarded(record).rewinds] == changes, said
    assert f"finished 120 {ends}" in said, said
    assert record.exit_code == 0


def test_a_resumed_run_goes_on_under_the_policy_that_was_fallen_back_to(tmp_path: Path) -> None:
    source = FALLS_BACK.replace("        optimizer.zero_grad()", "        if step == 110 and os.environ.get('DIES'): raise SystemExit(3)\n"
                                "        optimizer.zero_grad()") + "print(model.inner.weight.tolist())\n"  # fmt: skip
    ends: dict[str, Any] = {}
    for name in ("whole", "dies", "resumed"):
        folder = tmp_path / name
        if name == "resumed":  # this process still has the lock on the folder of the run that died
            shutil.copytree(tmp_path / "dies", folder, ignore=shutil.ignore_patterns("*.lock", ".lock*"))
        folder.mkdir(exist_ok=True)
        dies = mock.patch.dict(os.environ, {"DIES": "1"} if name == "dies" else {})
        with (
            dies,
            mock.patch.object(ScriptSnapshots, "_is_due", lambda self: self._run.update.num_updates in (16, 100)),
        ):
            record = returned(folder, "range", policy="fp16", source=source, resume=name == "resumed")
        ends[name] = (folder / "output.log").read_text().split("finished")[-1], record
    assert ends["dies"][1].exit_code == 3
    assert ends["resumed"][0] == ends["whole"][0]
    (why,) = [one for one in ends["resumed"][1].explanation if one.what == "policy"]
    assert (why.value, why.reason) == (
        "bf16 after step 0",
        "the run that is resumed had fallen back to it; see its record",
    )
