"""Accelerate, Fabric and Lightning's Trainer in two processes under a policy, against one process on the same data."""

from __future__ import annotations

import re

import pytest
import torch

from forked_processes import in_forks
from mezzo import SessionError
from mezzo.compat.driven import Driven
from paths import SCRIPTS


def weights(library: str, size: int) -> list[float]:
    """Return the sum of the weights' magnitudes after training in ``size`` processes, of each."""
    return [float(m[1]) for m in re.finditer(r"RANK \d+ weights (\S+)", printed("trainer_ranks.py", library, size))]


def printed(script: str, library: str, size: int) -> str:
    """Return what a script printed in ``size`` processes."""
    ended = in_forks([library], program=[str(SCRIPTS / script)], size=size, launched=size > 1)
    assert [one.code for one in ended] == [0] * size, ended
    return "".join(one.printed for one in ended)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["accelerate", "fabric"])
def test_two_processes_train_as_one_and_skip_the_same_updates(library: str) -> None:
    first, second = weights(library, 2)
    assert first == second
    assert first == pytest.approx(weights(library, 1)[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["automatic", "manual"])
def test_lightnings_trainer_in_two_processes_trains_as_one(way: str) -> None:
    """``Trainer(devices=2, strategy="ddp")``: accumulation with a short last window, clipping, a schedule, and an overflow on rank 1."""
    (first, skips), (second, others) = trained(way, 2, script="lightning_ranks.py")
    assert (first, skips) == (second, others)
    assert skips == 1
    assert trained(way, 1, script="lightning_ranks.py") == [(pytest.approx(first, rel=1e-6), 1)]


def trained(library: str, size: int, *, script: str = "hf_trainer_ranks.py") -> list[tuple[float, int]]:
    """Return the weights' magnitudes and the skipped updates of each process."""
    found = re.finditer(r"RANK \d+ weights (\S+) skipped (\d+)", printed(script, library, size))
    return [(float(m[1]), int(m[2])) for m in found]


@pytest.mark.slow
def test_trainer_in_two_processes_trains_as_a_session_under_ddp() -> None:
    (first, skips), (second, others) = trained("trainer", 2)
    assert (first, skips) == (second, others)
    assert skips == 1
    for library, size in (("session", 2), ("trainer", 1)):
        for weight, skipped in trained(library, size):
            assert (weight, skipped) == (pytest.approx(first, rel=1e-6), 1), (library, size)


def test_what_the_library_does_not_keep_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(SessionError, match="training in 2 processes with policy fp16-master, which casts weights"):
        _ = Driven("fp16-master").session
    flat = torch.nn.Linear(2, 2)
    flat.weight._is_flat_param = True  # as FullyShardedDataParallel marks its own
    driven = Driven("fp16")
    driven.add(flat)
    with pytest.raises(SessionError, match="training in 2 processes with sharded parameters"):
        _ = driven.session
