"""The guard of a session: alarms, the end, the return to a snapshot with other settings, and no read of the device."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from fake_cuda import Linear, Operations, fake_gpus, step
from mezzo.engine.session_errors import PrecisionWarning
from mezzo.engine.session_guard import Arrivals, WatchedNumbers
from mezzo.engine.state import NoLoopChecks
from mezzo.errors import GuardError


def session(policy: str = "fp32", rate: float = 0.1, **settings: Any) -> tuple[mezzo.Session, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    one = mezzo.Session(model, optimizer, policy=policy, scheduler=scheduler, **settings)
    x, y = torch.randn(64, 4), torch.randn(64, 1)

    def train(factor: float = 1.0) -> None:
        with one.autocast():
            loss = nn.functional.mse_loss(model(x), y) * factor
        one.step(loss)

    return one, train


def test_a_loss_that_is_not_finite_stops_a_session() -> None:
    one, train = session(guard="stop")
    for _ in range(5):
        train()
    with pytest.warns(PrecisionWarning, match="loss not finite, update 6"), pytest.raises(GuardError) as raised:
        train(math.nan)
    assert raised.value.exit_code == 10
    assert one.guardrails is not None
    assert [(alarm.kind, alarm.step) for alarm in one.guardrails.alarms] == [("loss not finite", 6)]
    assert one.guardrails.stopped in raised.value.message


def test_to_note_changes_nothing() -> None:
    plain, train_plain = session()
    one, train = session(guard="note")
    for number in range(12):
        train_plain(math.nan if number == 10 else 1.0)
        if number == 10:
            with pytest.warns(PrecisionWarning):
                train(math.nan)
        else:
            train()
    assert [p.tolist() for p in plain.models[0].parameters()] != []
    for mine, other in zip(one.models[0].parameters(), plain.models[0].parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    assert plain.guardrails is None


def test_a_session_returns_to_the_snapshot_from_before_with_half_the_rate(tmp_path: Path) -> None:
    one, train = session(guard="rewind")
    kept: dict[int, list[Any]] = {}
    for number in range(1, 9):
        train()
        if number in (4, 8):
            one.save(tmp_path).wait()  # type: ignore[union-attr]
            kept[number] = [p.detach().clone() for p in one.models[0].parameters()]
    with pytest.warns(PrecisionWarning, match="loss not finite, update 9"):
        train(math.nan)
    for mine, then in zip(one.models[0].parameters(), kept[8], strict=True):
        assert torch.equal(mine, then)
    assert one.guardrails is not None
    (rewind,) = one.guardrails.rewinds
    assert (rewind.updates, rewind.step, rewind.alarm) == (8, 9, "loss not finite")
    assert [(c.what, c.value) for c in rewind.changes] == [("learning rate", "x 0.5, now 0.05")]
    assert one.optimizers[0].param_groups[0]["lr"] == 0.05
    assert one.updates == 8
    train()
    assert one.optimizers[0].param_groups[0]["lr"] == 0.05  # the schedule continues from the lower rate


def test_snapshots_with_weights_that_are_not_finite_are_passed_over_and_deleted(tmp_path: Path) -> None:
    one, train = session(guard="rewind")
    for _ in range(4):
        train()
    one.save(tmp_path).wait()  # type: ignore[union-attr]
    train()
    with torch.no_grad():
        next(one.models[0].parameters())[0, 0] = math.nan
    one.save(tmp_path).wait()  # type: ignore[union-attr]
    with pytest.warns(PrecisionWarning):
        train()
    assert one.guardrails is not None
    assert [rewind.updates for rewind in one.guardrails.rewinds] == [4]
    assert [path.name.split("-")[-1] for path in tmp_path.glob("*.safetensors")] == ["00000004.safetensors"]


def test_it_returns_three_times_and_then_stops(tmp_path: Path) -> None:
    one, train = session(guard="rewind")
    train()
    one.save(tmp_path).wait()  # type: ignore[union-attr]
    for _ in range(3):
        with pytest.warns(PrecisionWarning):
            train(math.nan)
    with pytest.warns(PrecisionWarning), pytest.raises(GuardError, match="after 3 returns"):
        train(math.nan)
    assert one.guardrails is not None
    assert [rewind.changes[0].value.split(",")[0] for rewind in one.guardrails.rewinds] == [
        "x 0.5",
        "x 0.25",
        "x 0.125",
    ]


def in_batches(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the numbers arrive as from a GPU, ``rows`` updates at a time."""
    waiting: list[WatchedNumbers] = []
    arrived = Arrivals.arrived

    def together(arrivals: Arrivals) -> Iterator[WatchedNumbers]:
        waiting.extend(arrived(arrivals))
        if len(waiting) == rows:
            yield from waiting[:]
            waiting.clear()

    monkeypatch.setattr(Arrivals, "arrived", together)


def test_updates_that_arrive_with_an_alarm_and_were_made_before_the_return_cause_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_batches(32, monkeypatch)
    one, train = session(guard="rewind")
    for _ in range(32):
        train()
    one.save(tmp_path).wait()  # type: ignore[union-attr]
    for _ in range(31):
        train(math.nan)
    with pytest.warns(PrecisionWarning, match="loss not finite, update 33"):
        train(math.nan)
    assert one.guardrails is not None
    assert [(rewind.updates, rewind.step) for rewind in one.guardrails.rewinds] == [(32, 33)]


def test_after_a_return_a_save_is_due_an_interval_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it were saved immediately, a copy of the old snapshot would count as progress, and the next remedy would be the mildest again."""
    one, train = session(guard="rewind")
    train()
    one.save(tmp_path).wait()  # type: ignore[union-attr]
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for _ in range(2):
        now_s += 61.0
        with pytest.warns(PrecisionWarning):
            train(math.nan)
        assert one.save(tmp_path, every_s=60) is None
    assert one.guardrails is not None
    assert [rewind.changes[0].value.split(",")[0] for rewind in one.guardrails.rewinds] == ["x 0.5", "x 0.25"]
    now_s += 61.0
    assert one.save(tmp_path, every_s=60) is not None


def test_without_a_snapshot_it_stops() -> None:
    _, train = session(guard="rewind")
    train()
    with pytest.warns(PrecisionWarning), pytest.raises(GuardError, match="no snapshot from before update 2"):
        train(math.nan)


def test_a_storm_of_skips_lowers_the_scale(tmp_path: Path) -> None:
    one, train = session("fp16", guard="rewind")
    for _ in range(3):
        train()
    one.save(tmp_path).wait()  # type: ignore[union-attr]
    handle = next(one.models[0].parameters()).register_hook(lambda gradient: gradient * math.inf)
    for _ in range(29):
        train()
    with pytest.warns(PrecisionWarning, match="skip storm"):
        train()
    handle.remove()
    assert one.loss_scale == 65536.0 / 16
    train()
    assert one.updates == 4


def test_other_values_are_refused() -> None:
    with pytest.raises(mezzo.SessionError, match="guard='always'; allowed: note, stop, rewind, or None"):
        session(guard="always")


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_a_guard_reads_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    with fake_gpus(monkeypatch):
        model = nn.Sequential(Linear(8, 8, device="cuda:0"))
        one = mezzo.Session(model, mezzo.AdamW(model.parameters(), lr=0.1), policy=policy, guard="note")
        one.state.progress.updates_closed, one._watch_rounding, one.state.loop_checks = 1, False, NoLoopChecks()
        step(one, "cuda:0")
        with Operations() as log:
            step(one, "cuda:0")
    assert log.reads == []
    assert log.transfers == (["copy_ cpu cuda:0"] if policy == "fp16" else [])  # the floor's flag, as without a guard
