"""A resumed session is bit for bit the one that was never stopped."""

from __future__ import annotations

import functools
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import mezzo
from mezzo import SessionError, SnapshotError
from mezzo.engine.snapshots import container
from mezzo.engine.snapshots.folder import saved_in
from snapshot_runs import CALLS, OPTIMIZERS, built, final_bits, same, stopped_and_resumed, train

POLICIES = ["fp32", "tf32", "fp16", "bf16", "fp16-master", "bf16-master", "fp16-pure", "bf16-pure", "fp8"]
CASES: list[tuple[str, str, int]] = [
    *((policy, "mezzo.AdamW", at) for policy, at in zip(POLICIES, (5, 9) * 5, strict=False)),
    *(("fp16-master", name, 8) for name in OPTIMIZERS if name != "stochastic"),
    *(("bf16-master", name, 8) for name in ("torch.AdamW", "mezzo.AdamW 8bit")),
    ("fp16-pure", "torch.Adagrad", 8),
    ("bf16-pure", "stochastic", 8),
]


@pytest.mark.filterwarnings("ignore::mezzo.PrecisionWarning")
@pytest.mark.parametrize(("policy", "optimizer", "at"), CASES)
def test_a_resumed_run_is_the_one_that_never_stopped(policy: str, optimizer: str, at: int, tmp_path: Path) -> None:
    how: dict[str, Any] = {"policy": policy, "optimizer": OPTIMIZERS[optimizer]}
    session, loader = built(**how)
    losses = train(session, loader)
    wanted = final_bits(session)

    resumed_losses, resumed = stopped_and_resumed(tmp_path, at, **how)

    assert resumed_losses == losses
    assert same(final_bits(resumed), wanted)


@pytest.mark.parametrize("at", [1, 2, 3, 6, 7, 8, 14, 15, 20])  # about the ends of windows and of passes over the data
def test_wherever_it_was_stopped(at: int, tmp_path: Path) -> None:
    losses, bits = whole_run()

    resumed_losses, resumed = stopped_and_resumed(tmp_path, at)

    assert resumed_losses == losses
    assert same(final_bits(resumed), bits)


@functools.cache
def whole_run() -> tuple[list[float], list[torch.Tensor]]:
    session, loader = built()
    return train(session, loader), final_bits(session)


def test_workers_are_brought_to_the_same_place(tmp_path: Path) -> None:
    session, loader = built(workers=1)
    losses = train(session, loader, calls=10)
    session, loader = built(workers=1)
    train(session, loader, calls=9, after=lambda s, made: s.save(tmp_path) and None if made == 9 else None)
    again, loader = built(workers=1)
    session.state.snapshots.saving.wait()  # type: ignore[union-attr]

    again.load(tmp_path)

    assert train(again, loader, calls=10) == losses[9:]


def test_after_unscale_inside_a_window(tmp_path: Path) -> None:
    def run(*, stop: bool) -> list[torch.Tensor]:
        session, loader = built("fp16-master", OPTIMIZERS["torch.AdamW"])
        batches = list(loader)
        for number, (x, y) in enumerate(batches[:2]):
            with session.autocast():
                loss = torch.nn.functional.cross_entropy(session.models[0](x), y)
            session.backward(loss, weight=1.0 + number)
        session.unscale()
        if stop:
            session.save(tmp_path).wait()  # type: ignore[union-attr]
            session, _ = built("fp16-master", OPTIMIZERS["torch.AdamW"])
            session.load(tmp_path)
        session.update()
        return final_bits(session)

    assert same(run(stop=True), run(stop=False))


@pytest.mark.parametrize(("saved", "loaded"), [("fp32", "fp16-master"), ("bf16-master", "fp32"), ("fp16", "bf16-pure")])
@pytest.mark.filterwarnings("ignore::mezzo.PrecisionWarning")
def test_a_snapshot_loads_under_another_policy(saved: str, loaded: str, tmp_path: Path) -> None:
    first, loader = built(saved)
    train(first, loader, calls=6)
    first.save(tmp_path, extra={"best": 0.25}).wait()  # type: ignore[union-attr]
    second, loader = built(loaded)

    found = second.load(tmp_path)

    assert found is not None
    assert (found.updates, found.extra, found.refused) == (2, {"best": 0.25}, [])
    given, wanted = second.state_dict()["models"][0], first.state_dict()["models"][0]
    assert all(torch.allclose(given[name].float(), wanted[name].float(), rtol=2.0**-8) for name in wanted)
    assert len(train(second, loader)) == CALLS - 6


WINDOW = (
    "it was saved inside an accumulation window, of 3 micro-batches under policy fp16; this session has 3 under bf16"
)
OTHERS = "it contains the state of AdamW, MultiStepLR; this session has SGD, MultiStepLR"
REFUSALS = [({"policy": "bf16"}, 4, WINDOW), ({"optimizer": OPTIMIZERS["mezzo.SGD"]}, 6, OTHERS)]


@pytest.mark.parametrize(("how", "at", "message"), REFUSALS)
def test_what_does_not_fit_changes_nothing(how: dict[str, Any], at: int, message: str, tmp_path: Path) -> None:
    session, loader = built()
    train(session, loader, calls=at, after=lambda s, made: s.save(tmp_path) and None if made == at else None)
    session.state.snapshots.saving.wait()  # type: ignore[union-attr]
    other, _ = built(**how)
    before = final_bits(other)

    with pytest.raises(SnapshotError, match=message):
        other.load(tmp_path)

    assert same(final_bits(other)[:-4], before[:-4])


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    session, _ = built()
    session.save(tmp_path).wait()  # type: ignore[union-attr]
    net = torch.nn.Linear(6, 16)
    other = mezzo.Session(net, mezzo.AdamW(net.parameters()), policy="fp16", accumulate=3)
    before = net.weight.clone()

    text = r"'weight' is not in the snapshot, and has shape \(16, 6\) in the model: it belongs to another"
    with pytest.raises(SnapshotError, match=text):
        other.load(tmp_path)

    assert torch.equal(net.weight, before)


def test_saving_changes_nothing_and_old_ones_go(tmp_path: Path) -> None:
    session, loader = built()
    losses = train(session, loader, after=lambda s, _: s.save(tmp_path, keep=2) and None)
    session.state.snapshots.saving.wait()  # type: ignore[union-attr]

    assert losses == whole_run()[0]
    assert same(final_bits(session), whole_run()[1])
    assert [saved.number for saved in saved_in(tmp_path)] == [CALLS, CALLS - 1]
    assert [(saved.updates, saved.calls) for saved in saved_in(tmp_path)] == [(7, 0), (6, 2)]


def test_every_s_saves_when_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = built()
    now = [session.state.snapshots.last_s]
    monkeypatch.setattr("mezzo.engine.snapshots.background.time.monotonic", lambda: now[0])
    assert session.save(tmp_path, every_s=60) is None
    now[0] += 60
    assert session.save(tmp_path, every_s=60) is not None
    assert session.save(tmp_path, every_s=60) is None
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        session.save(tmp_path, every_s=60)
    assert stop.value.code == 143
    assert len(saved_in(tmp_path)) == 2


def test_a_save_that_is_due_does_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = built()
    written, write = threading.Event(), container.write

    def slowly(*arguments: Any) -> None:
        assert written.wait(60)
        write(*arguments)

    monkeypatch.setattr(container, "write", slowly)
    saving = session.save(tmp_path, every_s=1e-9)
    assert saving is not None
    assert session.save(tmp_path, every_s=1e-9) is None
    written.set()
    saving.wait()
    assert session.save(tmp_path, every_s=1e-9) is not None


def test_a_folder_without_snapshots(tmp_path: Path) -> None:
    session, _ = built()

    assert session.load(tmp_path, must_exist=False) is None
    assert session.load(tmp_path / "none", must_exist=False) is None
    with pytest.raises(SnapshotError, match="there is no snapshot at"):
        session.load(tmp_path)


def test_the_newest_whole_one_is_loaded_and_the_others_are_named(tmp_path: Path) -> None:
    session, loader = built()
    train(session, loader, calls=6, after=lambda s, _: s.save(tmp_path) and None)
    session.state.snapshots.saving.wait()  # type: ignore[union-attr]
    newest, middle, oldest = (saved.path for saved in saved_in(tmp_path))
    newest.write_bytes(newest.read_bytes()[:-1])
    middle.write_bytes(pickle.dumps(Path))
    again, _ = built()

    text = r"loaded 000004.*not loaded, though newer: 000006.*truncated.*000005.*a pickle"
    with pytest.warns(UserWarning, match=text):
        found = again.load(tmp_path)

    assert found is not None
    assert found.path == oldest
    assert [one.path for one in found.refused] == [newest, middle]
    oldest.write_bytes(b"")
    with pytest.raises(SnapshotError, match=r"none of the 3 snapshots in .* can be loaded"):
        again.load(tmp_path)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    session, _ = built()

    with pytest.raises(SnapshotError, match=r"the state contains a Session at extra\.inner\.0"):
        session.save(tmp_path, extra={"inner": [session]})
    for keep in (0, True):
        with pytest.raises(SnapshotError, match=f"keep={keep}; allowed: a whole number of 1 or more"):
            session.save(tmp_path, keep=keep)


def test_batches_refuses_iterators() -> None:
    session, loader = built()

    with pytest.raises(SessionError, match=r"batches\(\) got the iterator zip"):
        next(session.batches(zip(loader, loader, strict=True)))
