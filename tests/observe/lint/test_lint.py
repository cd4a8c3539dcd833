"""Lint of a script's own mixed precision: every planted misuse is found at its line, every healthy script is silent."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from helpers_launch import AS_IS, as_script, children_in_this_process
from mezzo.cli import main
from mezzo.launch.torch import switched
from mezzo.observe.lint.losses import loss_of
from mezzo.observe.lint.misuse_log import MISUSES, Misuse
from mezzo.policy import Policy
from mezzo.records import AuditRecord, DiagnoseRecord, Finding, RunRecord, read_record
from paths import ROOT, SCRIPTS

PAGES = ROOT / "docs" / "findings"
POLICIES = (AS_IS, "fp16")
RAISED = (AssertionError, ValueError, RuntimeError)
"""What torch itself raises at some misuses, under ``as-is``."""


def linted(script: str, policy: str, function: str) -> list[Finding]:
    """Return the findings on one function of ``tests/scripts/<script>.py``."""
    path = str(SCRIPTS / f"{script}.py")
    chosen = None if policy == AS_IS else Policy.parse(policy)
    sys.modules.pop("lint_planted", None)  # both files share its model
    raised = RAISED if script == "lint_planted" else ()
    with (
        as_script(path, [function]),
        contextlib.redirect_stdout(io.StringIO()),
        switched(chosen) as (run, _),
        contextlib.suppress(*raised),
    ):
        runpy.run_path(path, run_name="__main__")
    return run.lint.findings()


class Planted(NamedTuple):
    """Hold the line of a misuse as ``file:line``, and its code; both are empty for a function without a misuse."""

    line: str = ""
    code: str = ""


def functions(script: str) -> dict[str, Planted]:
    """Return, for each function of a script that needs no arguments, its first line that names a code."""
    path, found, current = SCRIPTS / f"{script}.py", dict[str, Planted](), ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        begins, code = re.match(r"def (\w+)\((.*)\):", line), re.search(r"# (A6\d\d)$", line)
        if begins:
            current = "" if begins[2] else begins[1]
            found |= {current: Planted()} if current else {}
        if code and current and not found[current].code:
            found[current] = Planted(f"{path}:{number}", code[1])
    return found


class Expected(NamedTuple):
    """Hold when and how often a misuse is noticed."""

    step: int = 1
    as_is: int = 4
    under_policy: int = 4
    modules: tuple[str, ...] = ("Sequential",)


NONE: tuple[str, ...] = ()
# What differs from "in each of four updates, of the whole model": torch raises at the first time, windows are fewer than updates,
# a calculation is ahead of the first that can be judged, or the policy makes the misuse impossible (0).
DIFFERENT = {
    Expected(
        1, 1, 1
    ): "eps_of_bf16_weights moments_in_bf16 moments_in_bf16_fused moments_of_adadelta moments_of_adamax moments_of_adagrad moments_by_hand "
    "state_in_bf16 steps_counted_in_bf16 state_promoted bf16_state_loaded_into_fp32 fp32_state_loaded_into_bf16 upcast_state_loaded",
    Expected(1, 1, 1, ("0", "3")): "masters_rebuilt_from_bf16",
    Expected(2, 1, 1): "state_through_bf16 masters_through_fp16",
    Expected(2, 1, 0, NONE): "region_around_nothing not_prepared other_format_than_asked",
    Expected(1, 24, 0, ("0",)): "reduced_in_bf16",
    Expected(1, 4, 0, ("DistributedDataParallel",)): "compressed_by_a_hook",
    Expected(1, 1, 1, NONE): "update_first schedule_at_the_top",
    Expected(1, 1, 4): "unscale_twice unscale_after_step cleared_with_scaler",
    Expected(1, 1, 4, ("Linear",)): "half_weights",
    Expected(1, 1, 0): "moments_in_fp16",  # the policy's scale times the script's overflows
    Expected(1, 1, 0, ("1",)): "statistics",
    Expected(1, 2, 0): "no_scaler scaler_off",
    Expected(1, 2, 2): "not_divided not_divided_weighted_sum decay_rounded_away",
    Expected(1, 3, 3): "divided_twice not_divided_with_scaler updates_rounded_away updates_by_hand_rounded_away",
    Expected(1, 3, 3, NONE): "schedule_first",
    Expected(
        1, 3, 0, NONE
    ): "average_in_new_tensors_on_skip average_by_new_lerps_on_skip",  # the last average is gone in the end
    Expected(1, 4, 0): "result_unused scattered_in_bf16 scaled_by_two_scalers scaled_by_accelerate_too",
    Expected(1, 4, 0, NONE): "schedule_on_skip schedule_on_skip_of_fused average_model_on_skip average_by_hand_on_skip "
    "average_copied_on_skip average_on_skip_of_fused",
    Expected(1, 6, 6): "unscale_each_micro_batch",
    Expected(1, 7, 7): "average_mul_add",
    Expected(1, 12, 12): "divided_twice_by_session clip_micro_batches",
    Expected(2, 1, 3): "no_update",
    Expected(2, 1, 1, ("Normalised",)): "statistics_of_its_own",
    Expected(3, 1, 1): "last_window_of_accelerate",
    Expected(3, 2, 2): "last_window_short last_window_of_one",
    Expected(3, 4, 4): "update_between_windows",
    Expected(
        modules=NONE
    ): "norms_cast_to_bf16 needless saved_without_scaler saved_without_scaler_deeply pickled_without_scaler "
    "saved_in_an_object_without_scaler saved_in_shards_without_scaler",
    Expected(modules=("0",)): "reentrant_checkpoint",
    Expected(modules=("3",)): "clip_one_of_two shared_by_two_optimizers",
    Expected(modules=("0", "3")): "shared_and_clipped",
    # seen in the counted step only
    Expected(
        2, 1, 1, NONE
    ): "clamped_probability clamped_in_bf16 clamped_to_zero eps_lost bound_of_normalize eps_in_a_tensor "
    "positions_plus_offsets rotary_in_polar_form labels_in_half steps_in_bf16 positions_in_half positions_times_frequencies "
    "stored_in_half rotary_in_autocast rotary_upcast_too_late times_rounded_first running_loss_in_bf16 running_counts_in_half "
    "cumulative_sum_in_bf16",
}
EXPECTED = {name: expected for expected, names in DIFFERENT.items() for name in names.split()}
PLANTED_SCRIPT = SCRIPTS / "lint_planted.py"
CALL = next(
    f"{PLANTED_SCRIPT}:{number}"
    for number, line in enumerate(PLANTED_SCRIPT.read_text(encoding="utf-8").splitlines(), 1)
    if "net(batch[0].to(dtype))" in line
)
"""The line that calls the model for those that train plainly."""
STATISTICS = Planted(CALL, "A613")
PLANTED = {**functions("lint_planted"), "statistics": STATISTICS, "statistics_of_its_own": STATISTICS}
SHARED = ("half", "network")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [name for name in PLANTED if name not in SHARED])
def test_a_planted_misuse_is_found_at_its_line(name: str, policy: str) -> None:
    line, code = PLANTED[name]
    expected = EXPECTED.get(name, Expected())
    found = linted("lint_planted", policy, name)
    count = expected.as_is if policy == AS_IS else expected.under_policy
    if name == "update_first" and policy != AS_IS:  # what follows from it is found as well: torch does not raise there
        assert [f.code for f in found] == ["A605", "A606"]
        found = found[:1]
    assert [(f.code, f.step, f.count) for f in found] == ([(code, expected.step, count)] if count else [])
    assert all(f.lines == ([line] if line else []) and f.modules == list(expected.modules) for f in found)


HEALTHY = [name for name in functions("lint_healthy") if name != "scaled_step"]


@pytest.mark.parametrize(("name", "policy"), [*((n, AS_IS) for n in HEALTHY), *((n, "fp16") for n in HEALTHY[::3])])
def test_a_healthy_script_is_silent(name: str, policy: str) -> None:
    assert linted("lint_healthy", policy, name) == []


def test_there_are_enough_cases() -> None:
    assert len(PLANTED.keys() - SHARED) >= 50
    assert len(HEALTHY) >= 70
    assert {planted.code for name, planted in PLANTED.items() if name not in SHARED} == {m.code for m in MISUSES}


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda m: m.code)
def test_every_misuse_has_a_page(misuse: Misuse) -> None:
    text = (PAGES / f"{misuse.code}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {misuse.code}: {misuse.title}\n")
    heads = re.findall(r"^## (.*)$", text, re.M)
    assert heads == ["Cause", "What it costs", "Example", "How it is found", "In the output", "Fix"]
    assert f"| [{misuse.code}]({misuse.code}.md) | {misuse.title} |" in (PAGES / "README.md").read_text(
        encoding="utf-8"
    )


# --- under the commands ------------------------------------------------------------------------------------------------------


def record_of(
    folder: Path, command: str, function: str, *options: str, script: str = "lint_planted"
) -> RunRecord | AuditRecord | DiagnoseRecord:
    """Run a command of Mezzo and return the record that it writes next to its page."""
    sys.modules.pop("lint_planted", None)
    with children_in_this_process():
        assert main([command, *options, "--out", str(folder), str(SCRIPTS / f"{script}.py"), function]) == 0
    record = read_record(folder / "record.json")
    assert isinstance(record, RunRecord | AuditRecord | DiagnoseRecord)
    return record


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are not broken."""
    monkeypatch.setenv("COLUMNS", "200")


def warned(said: str) -> list[str]:
    """Return the lines that name a finding."""
    return [line for line in said.splitlines() if line.startswith("mezzo: A")]


LINE = PLANTED["clip_norm"].line
TITLE = "gradients are clipped while they are scaled"


def test_run_says_it_in_one_line_and_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(tmp_path, "run", "clip_norm", "--policy", AS_IS)
    assert isinstance(record, RunRecord)
    assert [(f.code, f.severity, f.lines, f.step, f.count) for f in record.findings] == [
        ("A601", "error", [LINE], 1, 4)
    ]
    said = capsys.readouterr()
    where = Path(LINE).name
    assert warned(said.err) == [f"mezzo: A601: {TITLE} ({where}, step 1); the record says how to fix it"]
    assert f"A601  {TITLE}  (error, first in step 1, 4 times)" in said.out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(text in page for text in ("A601", TITLE, where, "docs/findings/A601.md"))


def test_run_names_the_other_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_of(tmp_path, "run", "update_first", "--policy", "fp16", "--json")
    said = warned(capsys.readouterr().err)
    assert len(said) == 1
    assert said[0].endswith("; also A606; the record says how to fix it")


def test_a_run_without_a_finding_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(tmp_path, "run", "recipe", "--policy", "fp16", script="lint_healthy")
    assert isinstance(record, RunRecord)
    assert record.findings == []
    assert warned(capsys.readouterr().err) == []


def test_audit_has_it_before_its_own_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(tmp_path, "audit", "clip_norm", "--at", "3")
    assert isinstance(record, AuditRecord)
    assert record.findings[0].code == "A601"
    assert record.findings[0].count == 3
    assert record.run.findings == record.findings[:1]
    assert {f.severity for f in record.findings[1:]} <= {""}
    assert f"A601  {TITLE}" in capsys.readouterr().out


@pytest.mark.parametrize("function", ["eps_lost", "labels_in_half", "rotary_in_autocast"])
def test_audit_checks_the_operations_of_its_step(function: str, tmp_path: Path) -> None:
    record = record_of(tmp_path, "audit", function, "--at", "3")
    assert isinstance(record, AuditRecord)
    found = record.run.findings
    assert [(f.code, f.step, f.lines) for f in found] == [(PLANTED[function].code, 3, [PLANTED[function].line])]


def test_diagnose_has_it_beside_a_healthy_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(tmp_path, "diagnose", "clip_norm", "--steps", "4")
    assert isinstance(record, DiagnoseRecord)
    assert [f.code for f in record.run.findings] == ["A601"]
    said = capsys.readouterr().out
    assert f"A601  {TITLE}" in said
    assert "nothing wrong" not in said
    assert "every loss and gradient is finite in 4 steps; 1 finding on the script's mixed precision" in said
    assert "A601" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("function", "detail"),
    [
        ("not_scaled", "step(SGD) after 1 backward pass not scaled"),
        ("penalty_not_scaled", "step(SGD) after 1 of 2 backward passes not scaled"),
        ("other_scaler", "step(SGD) after 1 backward pass scaled by another GradScaler"),
    ],
)
def test_a_backward_pass_that_was_not_scaled_is_counted_among_all(function: str, detail: str) -> None:
    [found] = [f for f in linted("lint_planted", AS_IS, function) if f.code == "A604"]
    assert found.detail.startswith(detail)


@pytest.mark.parametrize(("eps", "codes"), [(1e-8, ["A620", "A622"]), (1e-4, ["A622"])])
def test_an_eps_of_adam_that_fp16_rounds_to_zero(eps: float, codes: list[str]) -> None:
    """FP16's smallest number is 6e-8: where a second moment is 0, Adam divides by 0."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    with switched(None) as (run, _):
        optimizer = torch.optim.Adam([weight], lr=1e-3, eps=eps)
        weight.grad = torch.full_like(weight, 0.25)
        optimizer.step()
    assert [f.code for f in run.lint.findings()] == codes


LOSSES: list[tuple[str, Callable[[Tensor, Tensor], Tensor], bool]] = [
    ("mse_loss", nn.functional.mse_loss, True),
    ("half an mse_loss", lambda x, y: nn.functional.mse_loss(x, y) / 2, True),
    ("sum of squares", lambda x, y: ((x - y) ** 2).sum(), True),
    ("l1_loss", nn.functional.l1_loss, False),
    ("cross_entropy", lambda x, y: nn.functional.cross_entropy(x, y.argmax(1)), False),
    ("mean", lambda x, y: (x * y).mean(), False),
]


@pytest.mark.parametrize(("loss", "squares"), [row[1:] for row in LOSSES], ids=[row[0] for row in LOSSES])
def test_squares_are_told_from_other_losses(loss: Callable[[Tensor, Tensor], Tensor], squares: bool) -> None:
    """A half of a mean of squares is part of the loss, not a division by two micro-batches."""
    x, y = torch.ones(4, 3, requires_grad=True), torch.zeros(4, 3)
    assert loss_of(loss(x, y), ()).squares is squares
