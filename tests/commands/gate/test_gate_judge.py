"""What a gate makes of the numbers of its runs: each check against scipy's own tests, and the rates of a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.verdicts.gates import DRAWS, simulated
from scipy import stats

from mezzo.commands.gate.golden import read_golden, write_golden
from mezzo.commands.gate.judge import (
    WatchedNumber,
    findings_check,
    format_changes,
    formats_check,
    judge,
)
from mezzo.records import GateCheck, Golden, GoldenRun

MACHINE = {"torch": "2.13", "cpu": "x", "threads": "2", "device": "cpu"}
TENTHS = [1.0, 1.1, 0.9, 1.05, 0.95, 1.02, 0.98, 1.03, 0.97, 1.0]
"""The losses of ten seeds, with a standard deviation of 0.056."""


def runs(losses: Sequence[float], **columns: Sequence[Any]) -> list[GoldenRun]:
    """Return a run a loss, with seeds from 0 on."""
    each = [{name: values[seed] for name, values in columns.items()} for seed in range(len(losses))]
    return [
        GoldenRun(**{"seed": seed, "num_steps": 10, "losses": {"loss": loss}, **each[seed]})
        for seed, loss in enumerate(losses)
    ]


def golden(before: Sequence[GoldenRun], **fields: Any) -> Golden:
    known = {"golden_version": 1, "script": "train.py", "policy": "fp32", "script_sha256": "", "machine": MACHINE}
    return Golden(**{**known, "timed_in": "reference", "runs": list(before), **fields})


def checks(before: Golden, now: Sequence[GoldenRun], **fields: Any) -> dict[str, GateCheck]:
    return {one.name: one for one in judge(before, now, **{"machine": MACHINE, **fields}).checks}


def test_an_unchanged_script_is_the_same() -> None:
    found = checks(golden(runs(TENTHS)), runs(TENTHS[:5]))
    assert (found["loss"].status, found["loss"].golden, found["loss"].now) == ("same", 1.0, 1.0)
    assert found["loss"].margin == pytest.approx(0.5 * np.std(TENTHS, ddof=1), rel=1e-12)
    assert found["steps"].status == "same"


@pytest.mark.parametrize(
    ("by", "status"),
    [(0.06, "failed"), (0.02, "inside"), (-0.06, "better"), (math.nan, "failed")],
)
def test_a_move_of_every_seed(by: float, status: str) -> None:
    assert checks(golden(runs(TENTHS)), runs([loss + by for loss in TENTHS[:5]]))["loss"].status == status


def test_the_error_is_students_t() -> None:
    """Of pairs with noise, by scipy's paired test; of runs without pairs, by its test of two samples."""
    noise = np.array([0.0, 0.02, -0.02, 0.03, 0.01])
    now = np.array(TENTHS[:5]) + 0.05 + noise
    by_seed = {"golden": dict(enumerate(TENTHS)), "now": dict(enumerate(now))}
    paired, unpaired = WatchedNumber(name="loss", worse=1, margin=0.0, **by_seed).moves
    assert paired.error == pytest.approx(stats.ttest_rel(now, TENTHS[:5]).pvalue / 2, rel=1e-9)
    assert unpaired.error == pytest.approx(stats.ttest_ind(now, TENTHS).pvalue / 2, rel=1e-9)
    check, doubtful = WatchedNumber(name="loss", worse=1, margin=0.0, **by_seed).check(error=0.005)
    assert check.error == pytest.approx(2 * min(paired.error, unpaired.error), rel=1e-9)
    assert (check.status, doubtful) == ("failed", True)


def test_a_doubtful_loss_wants_more_runs_unless_something_else_has_failed() -> None:
    now = runs([1.3, 0.9, 1.2, 0.95, 1.25])
    before = golden(runs(TENTHS))
    assert judge(before, now, machine=MACHINE).doubtful == ["loss"]
    assert judge(before, now, machine=MACHINE).wants_more
    shorter = [run.model_copy(update={"num_steps": 9}) for run in now]
    failed = judge(before, shorter, machine=MACHINE)
    assert not failed.wants_more
    assert {one.name: one.status for one in failed.undecided()}["loss"] == "not compared"


@pytest.mark.parametrize(
    ("sizes", "status"),
    [((1000, 1000), "same"), ((1000, 1005), "inside"), ((1000, 1030), "failed"), ((1000, 900), "better")],
)
def test_memory_fails_beyond_a_hundredth(sizes: tuple[int, int], status: str) -> None:
    before = golden(runs(TENTHS, memory_bytes=[sizes[0]] * 10))
    found = checks(before, runs(TENTHS[:5], memory_bytes=[sizes[1]] * 5))["memory"]
    assert (found.status, found.margin, found.error) == (status, 10.0, None)


@pytest.mark.parametrize(
    ("before", "now", "status"),
    [
        ([2.0, 2.1, 3.0], [2.2, 9.0, 9.0], "inside"),  # 10% slower: within 12%
        ([2.0, 2.1, 3.0], [2.5, 2.6, 2.7], "failed"),  # 25%
        ([2.0, 2.6, 3.0], [2.5, 2.6, 2.7], "inside"),  # the golden's own fastest runs lie 30% apart
        ([2.0, 2.1, 3.0], [1.5, 2.6, 2.7], "better"),
        ([2.0, None, None], [9.0, 9.0, 9.0], "not compared"),
    ],
)
def test_times_are_those_of_the_fastest_run(before: list[float | None], now: list[float], status: str) -> None:
    found = checks(golden(runs([1.0, 1.1, 0.9], step_time=before)), runs([1.0, 1.1, 0.9], step_time=now))["speed"]
    assert found.status == status


@pytest.mark.parametrize(
    ("metrics", "worse", "status"),
    [(0.02, 0, "failed"), (0.02, 1, "failed"), (0.02, -1, "better"), (-0.02, -1, "failed"), (0.005, 0, "inside")],
)
def test_a_metric_fails_in_its_bad_direction(metrics: float, worse: int, status: str) -> None:
    """Its values come in steps of 0.01: a move of one step or less never fails."""
    before = golden(runs(TENTHS, metric=[0.8] * 10), metric="acc=(.*)")
    now = runs(TENTHS[:5], metric=[0.8 + metrics] * 5)
    assert checks(before, now, worse=worse, step=0.01)["metric"].status == status


@pytest.mark.parametrize(
    ("what", "other", "left_out"),
    [
        ({"cpu": "y"}, TENTHS, {"speed"}),
        ({"threads": "4"}, TENTHS, {"speed"}),
        ({"gpu": "NVIDIA H100"}, TENTHS, {"memory", "speed"}),
        ({"torch": "2.14"}, TENTHS, set()),
        ({"torch": "2.14"}, [1.0] * 10, {"loss"}),  # no seed changes it: nothing says how much a rounding does
        ({}, [1.0] * 10, set()),
    ],
)
def test_what_another_machine_cannot_tell_is_left_out(
    what: dict[str, str], other: list[float], left_out: set[str]
) -> None:
    before = golden(runs(other, memory_bytes=[9] * 10, step_time=[2.0] * 10), machine=MACHINE | what)
    found = checks(before, runs([loss + 0.001 for loss in other[:5]], memory_bytes=[9] * 5, step_time=[2.0] * 5))
    assert {name for name, one in found.items() if one.status == "not compared"} == left_out


def test_other_numbers_of_steps_fail_unless_the_goldens_own_differ() -> None:
    now = [run.model_copy(update={"num_steps": 9}) for run in runs(TENTHS[:5])]
    assert checks(golden(runs(TENTHS)), now)["steps"].status == "failed"
    assert checks(golden(runs(TENTHS, num_steps=[9, 10] * 5)), now)["steps"].status == "inside"


def test_a_loss_that_is_gone_fails() -> None:
    before = golden([one.model_copy(update={"losses": {"netG": 1.0, "netD": 2.0}}) for one in runs(TENTHS)])
    now = [one.model_copy(update={"losses": {"netG": 1.0}}) for one in runs(TENTHS[:5])]
    assert {name: one.status for name, one in checks(before, now).items() if name[0] == "n"} == {
        "netD": "failed",
        "netG": "same",
    }


def test_formats_and_findings() -> None:
    formats = {"a": {"forward": ["bf16"], "dgrad": ["bf16"]}, "b": {"forward": ["bf16"]}, "old": {"forward": ["fp32"]}}
    before = golden(runs(TENTHS), audited_step=3, formats=formats, varying=["c"], findings={"A101": ["a"]})
    now = {"a": {"forward": ["fp32"], "dgrad": ["bf16"]}, "b": {"forward": ["bf16"]}, "c": {"forward": ["fp32"]}}
    (changed,) = format_changes(before, now)
    assert (changed.module, changed.phase, changed.golden, changed.now) == ("a", "forward", ["bf16"], ["fp32"])
    check = formats_check(before, [changed], why_not="")
    assert (check.status, check.reason) == ("failed", "a: bf16 then, fp32 now (forward)")
    assert formats_check(before, [], why_not="").status == "same"
    assert formats_check(before, [], why_not="no audit").status == "not compared"
    rows = [(["A101"], "same", ""), (["A101", "A103"], "failed", "new: A103"), ([], "better", "gone: A101")]
    for codes, status, reason in rows:
        found = findings_check(before, codes, why_not="")
        assert (found.status, found.reason) == (status, reason)


def test_rates_of_simulated_gates() -> None:
    """400 gates of each kind: of a rate of 1% or less, at most 10 fail (99.7% of cases); of one of 95% or more, 92% are found."""
    for rate in simulated(400, {"normal": DRAWS["normal"]}):
        assert rate.share <= 10 / 400 if rate.most else rate.share >= 0.92, rate.what


def test_a_golden_file_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that looks like a token, nor the value of a secret variable of this machine that was typed."""
    typed = "plain-words-of-a-key"
    monkeypatch.setenv("WANDB_API_KEY", typed)
    monkeypatch.setattr("sys.argv", ["mezzo", f"--key={typed}"])
    token = "hf_" + "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA1b"
    write_golden(golden(runs(TENTHS), arguments=[typed, token]), tmp_path / "golden.json")
    text = (tmp_path / "golden.json").read_text(encoding="utf-8")
    assert (typed in text, token in text) == (False, False)
    assert len(read_golden(tmp_path / "golden.json", accept="").arguments) == 2
