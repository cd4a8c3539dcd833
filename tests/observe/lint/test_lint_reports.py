"""Public reports of "configured X, got Y", rebuilt (``tests/faults/configured.py``), and correct set-ups, of which nothing is said."""

from __future__ import annotations

import inspect
import re
from typing import NamedTuple

import configured
import pytest

from helpers_diagnose import source_of
from mezzo.launch.torch import switched
from mezzo.records import Finding
from paths import ROOT

PAGE = ROOT / "docs" / "public-reports.md"
ALL = ("Sequential",)
STEP, LOAD = "optimizer.step()", "optimizer.load_state_dict("


class Report(NamedTuple):
    name: str
    codes: dict[str, str]
    """The text of the source line of each finding, by its code."""
    what: str
    """What the last finding says of the tensor."""
    modules: tuple[str, ...] = ALL


REPORTS = [
    Report("state_in_the_format_of_the_weights", {"A633": STEP, "A622": STEP}, "second moments in BF16"),
    Report("state_promoted_by_the_update", {"A628": STEP}, "exp_avg of 0.weight and 7 more: BF16 before an update"),
    Report("state_stored_through_the_weights_format", {"A629": STEP}, "exp_avg of 0.weight and 5 more: FP32, but"),
    Report(
        "moments_saved_in_bf16", {"A628": LOAD}, "exp_avg of 0.weight and 7 more: BF16 in the state that AdamW loads"
    ),
    Report(
        "masters_rebuilt_from_live_weights", {"A629": LOAD}, "parameter 0, of 32 x 6 and 2 more: FP32", ("(script)",)
    ),
    Report("bf16_moments_resumed_as_fp32", {"A628": LOAD}, "exp_avg of 0.weight and 7 more: BF16 in the state"),
    Report(
        "resumed_in_pure_bf16", {"A633": STEP, "A628": LOAD}, "exp_avg of 0.weight and 7 more: FP32 in the state that"
    ),
    Report("master_weight_becomes_bf16", {"A628": LOAD}, "exp_avg of 0.weight and 11 more: FP32 in the state that"),
    Report("checkpoint_cast_whole", {"A628": LOAD, "A627": STEP}, "keeps step in BF16, for 4 weights"),
    Report(
        "upcast_of_a_local_name",
        {"A622": STEP, "A633": STEP},
        "AdamW updates BF16 weights, and of a sample with gradients 99% of 0.weight",
    ),
    Report("decay_in_bf16", {"A633": STEP}, "weight decay of RandomlyRounded multiplies BF16 weights by 0.999999"),
    Report("rate_below_the_spacing", {"A633": STEP}, "100% of 0.weight"),
    Report("masters_for_fp16_only", {"A633": STEP}, "100% of 0.weight, 100% of 0.bias, 100% of 2.weight"),
    Report("written_back_to_bf16", {"A633": STEP}, "100% of 3.weight", ("3",)),
    Report("average_of_adapters_in_fp16", {"A612": "slow.data.mul_(0.999)"}, "4 weights are averaged by hand"),
    Report("reduced_in_bf16_at_any_size", {"A631": "dist.all_reduce(flat)"}, "all_reduce of 290 BF16 gradients"),
    Report(
        "reduced_before_the_upcast",
        {"A631": "dist.all_reduce(partial)"},
        "all_reduce of 32 BF16 gradients",
        ("0", "1"),  # both have tensors of 32 numbers
    ),
    Report("norm_by_groups_in_bf16", {"A632": "clip_grad_norm_"}, "the norm of 4 gradients in BF16"),
    Report("norms_cast_before_the_sum", {"A632": "norms.norm().to("}, "the norm of gradients in BF16", ()),
    Report("scaled_before_the_library_scales", {"A634": "self.scaler.scale(loss)"}, "a factor of 128 and a GradScaler"),
    Report("flag_of_the_arguments", {"A630": "TrainingArguments("}, "step 2 ran in FP32", ()),
    Report("model_not_prepared", {"A630": "Accelerator("}, "step 2 ran in FP32", ()),
    Report("format_of_the_engine_itself", {"A630": "MixedPrecision("}, "step 2 ran in BF16", ()),
]
LATER = [
    Report("adam_inherits_bf16", {"A622": STEP, "A633": STEP}, "AdamW updates BF16 weights"),
    Report("norm_weights_at_one", {"A622": STEP, "A633": STEP}, "100% of 1.weight stand still", ("1",)),
    Report("buffer_of_the_other_format", {"A628": "load_state_dict(saved)"}, "exp_avg of 0.weight and 3 more: BF16"),
    Report("moments_like_fp16_weights", {"A609": ".backward()", "A622": STEP}, "second moments in FP16"),
    Report("norms_reduced_in_bf16", {"A632": "norm = torch.stack"}, "the norm of gradients in BF16", ()),
    Report("loaded_wider_than_asked", {}, ""),
    Report("option_that_is_not_passed_on", {}, ""),
    Report("weights_hard_coded_wide", {}, ""),
]
"""Reports that were looked up after the findings had been written; of the last three nothing is said."""
HEALTHY = [
    "fp32_weights_under_autocast",
    "bf16_weights_with_fp32_masters",
    "state_in_8_bits_with_scales",
    "bf16_weights_rounded_at_random",
    "average_in_fp32",
    "constants_and_zeros",
    "rows_that_no_batch_uses",
    "frozen_bf16_body",
    "replicated_in_fp32",
    "warm_up_from_zero",
    "tied_weights",
    "resumed_in_fp32",
]


def found_in(name: str) -> dict[str, Finding]:
    with switched(None) as (run, _):
        getattr(configured, name)()
    return {finding.code: finding for finding in run.lint.findings()}


@pytest.mark.parametrize("report", [*REPORTS, *LATER], ids=lambda r: r.name)
def test_a_report_is_found_with_tensor_and_line(report: Report) -> None:
    if report.name == "flag_of_the_arguments":
        pytest.importorskip("transformers")
    if report.name == "model_not_prepared":
        pytest.importorskip("accelerate")
    found = found_in(report.name)
    assert found.keys() == report.codes.keys()
    assert all(text in source_of(found[code].lines[0]) for code, text in report.codes.items())
    for last in list(report.codes)[-1:]:
        assert report.what in found[last].detail
        assert tuple(found[last].modules) == report.modules


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_correct_set_up(name: str) -> None:
    assert found_in(name) == {}


def test_the_page_has_every_report_and_set_up() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Configured X, got Y")[2].partition("\n## ")[0]
    rows = re.findall(
        r"^\| \[.*?\]\(https://github.com/(\S+?)\) \| (.*?) \| (.*?) \| (A.*?|nothing) \| `(\w+)` \|$", text, re.M
    )
    codes = {report.name: ", ".join(sorted(report.codes)) or "nothing" for report in [*REPORTS, *LATER]}
    assert {name: found for *_, found, name in rows} == codes
    for address, was_set, got, _, name in rows:
        assert (inspect.getdoc(getattr(configured, name)) or "") == f"{address}: configured: {was_set}; got: {got}."
    assert all(f"`{name}`" in text for name in HEALTHY)
    assert len(REPORTS) >= 20
    assert len(HEALTHY) == 12
