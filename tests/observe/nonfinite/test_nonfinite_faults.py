"""Planted faults: verdict, module, operation, phase, step and line are all right; healthy scripts raise no alarm."""

from __future__ import annotations

import inspect
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import beyond_fp32
import families
import pytest
import torch
import updates
from fixed import FIXED, with_fix

import faults
from helpers_backward import BOTH_WAYS, in_ways
from helpers_diagnose import assert_printed, diagnosed, fixed, module_of, place_of, run_here, source_of
from mezzo.commands.diagnose.plan import diagnose_script
from mezzo.launch.request import Request
from mezzo.observe.nonfinite.evidence import Evidence
from mezzo.observe.nonfinite.propagation import InfinityTracer
from mezzo.observe.settings import DiagnoseSettings
from mezzo.records import AS_IS, DiagnoseRecord
from paths import ROOT, SCRIPTS

# torch.compile instantiates a class of torch's while it traces a custom function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    faults.RUNS.clear()
    yield
    torch._dynamo.reset()


class Planted(NamedTuple):
    name: str
    verdict: str
    module: str
    op: str
    phase: str
    step: int
    line: str
    """Text of the source line."""
    policy: str = "fp16"


PLANTED = [
    Planted("range_linear", "range_overflow", "0", "linear", "forward", 1, "(call or model)(x)"),
    Planted("range_square", "range_overflow", "1", "mul", "forward", 1, "h * h"),
    Planted("range_functional", "range_overflow", "Model", "mul", "forward", 5, "3e5"),
    Planted("range_in_backward", "range_overflow", "1", "steep", "backward", 1, "x.clone()"),
    Planted("range_matmul", "range_overflow", "1", "matmul", "forward", 1, "torch.matmul"),
    Planted("range_rounded_to_zero", "range_overflow", "1", "div", "forward", 1, "1e-8"),
    Planted("range_convolution", "range_overflow", "1", "conv1d", "forward", 2, "(call or model)(x)"),
    Planted("range_own_amp", "range_overflow", "0", "addmm", "forward", 3, "1.5e4", AS_IS),
    Planted("scale_large_loss", "scale_overflow", "Sequential", "to", "backward", 1, "(call or model)(x)"),
    Planted("scale_own_scaler", "scale_overflow", "(script)", "to", "backward", 1, "out.float()", AS_IS),
    Planted("invalid_sqrt", "invalid_operation", "1", "sqrt", "backward", 1, "torch.sqrt"),
    Planted("invalid_sqrt", "invalid_operation", "1", "sqrt", "backward", 1, "torch.sqrt", "bf16"),
    Planted("invalid_log", "invalid_operation", "1", "log", "forward", 1, "torch.log"),
    Planted("invalid_log", "invalid_operation", "1", "log", "forward", 1, "torch.log", "fp32"),
    Planted("invalid_zero_times_inf", "invalid_operation", "1", "div", "forward", 1, "zeros_like"),
    Planted("invalid_data", "invalid_operation", "0", "to", "forward", 5, "(call or model)(x)"),
    Planted("invalid_targets", "invalid_operation", "(script)", "mse_loss", "forward", 3, "loss_of("),
    Planted("invalid_norm", "invalid_operation", "1", "pow", "backward", 1, "pow(0.5)"),
    Planted("invalid_masked_rows", "invalid_operation", "1", "softmax", "forward", 1, "softmax(-1)"),
    Planted("invalid_accumulated", "invalid_operation", "1", "log", "forward", 3, "torch.log"),
    Planted("silent_rmsnorm", "silent_saturation", "1", "mul", "forward", 1, "(h * h)"),
    Planted("silent_reciprocal", "silent_saturation", "1", "mul", "forward", 1, "h * h"),
    Planted("silent_layer_norm", "silent_saturation", "1", "mul", "forward", 1, "c * c", "fp16-master"),
    Planted("attention_scores", "range_overflow", "1", "matmul", "forward", 1, "h * 400", "fp16"),
    Planted("in_place", "range_overflow", "1", "mul", "forward", 1, "1e3"),
    Planted("silent_late", "silent_saturation", "norm", "mul", "forward", 4, "(h * h)"),
    Planted("compiled_square", "range_overflow", "1", "mul", "forward", 1, "h * h"),
    Planted("compiled_log", "invalid_operation", "1", "log", "forward", 1, "torch.log"),
    Planted("checkpointed_square", "range_overflow", "body", "mul", "forward", 1, "h * h"),
    Planted("checkpointed_sqrt", "invalid_operation", "body", "sqrt", "backward", 1, "torch.sqrt"),
    Planted("reentrant_square", "range_overflow", "body", "mul", "forward", 1, "h * h"),
    Planted("two_optimizers", "invalid_operation", "Sequential#2.1", "log", "forward", 2, "torch.log"),
    Planted("workers", "invalid_operation", "0", "to", "forward", 5, "model(x)"),
    Planted("late_log", "invalid_operation", "1", "log", "forward", 7, "torch.log"),
    Planted("raises", "invalid_operation", "1", "log", "forward", 1, "torch.log"),
    Planted("raw_log", "invalid_operation", "(script)", "log", "forward", 1, "torch.log"),
    Planted("raw_log", "invalid_operation", "(script)", "log", "forward", 1, "torch.log", AS_IS),
    Planted("raw_log_by_hand", "invalid_operation", "(script)", "log", "forward", 1, "torch.log"),
    Planted("raw_log_once", "invalid_operation", "(script)", "log", "forward", 1, "torch.log", "fp32"),
    Planted("raw_overflow", "range_overflow", "(script)", "mul", "forward", 1, "1e5"),
    Planted("raw_overflow", "range_overflow", "(script)", "mul", "forward", 1, "1e5", AS_IS),
    Planted("raw_in_backward", "range_overflow", "(script)", "steep", "backward", 1, "x.clone()"),
    Planted("raw_gan", "invalid_operation", "(script)", "log", "forward", 1, "torch.sigmoid"),
    Planted("invalid_behind_a_skip", "invalid_operation", "(script)", "sqrt", "backward", 7, "sqrt()"),
    Planted("session_bf16", "invalid_operation", "1", "log", "forward", 1, "torch.log", AS_IS),
    Planted("raw_jacobian", "invalid_operation", "(script)", "sqrt", "forward", 1, "torch.func.grad"),
]


def thread_matters(planted: Planted | InFamily) -> bool:
    """Return whether the backward pass has a part in the finding: its own values, its recomputation, or what silence costs in it."""
    inside = planted.name.startswith(("checkpointed", "reentrant", "invalid_accumulated", "raw_gan", "raw_jacobian"))
    return planted.phase == "backward" or planted.verdict == "silent_saturation" or inside


@in_ways("planted", PLANTED, both=thread_matters, ids=lambda p: f"{p.name}-{p.policy}")
def test_a_planted_fault_is_found(planted: Planted, tmp_path: Path) -> None:
    record = diagnosed(planted.name, planted.policy, tmp_path)
    assert place_of(record) == planted[1:6], record.model_dump_json(exclude={"run"})
    assert record.located
    assert record.fix
    assert planted.line in source_of(record.line)
    assert record.forced_eager == planted.name.startswith("compiled")
    assert_printed(record, planted.name)


def test_a_norm_beyond_fp32_is_not_called_unseen(tmp_path: Path) -> None:
    record = diagnosed("huge_gradients", "fp32", tmp_path)
    assert (record.verdict, record.located, record.step) == ("invalid_operation", False, 1)
    assert record.detail.startswith("every gradient of step 1 is finite, but their norm is beyond FP32's range")
    assert record.fix == "lower the learning rate, or clip the gradients"


class InFamily(NamedTuple):
    """Hold a planted fault with the fix that was tried and helped; ``fix`` is part of the line to write, empty where none can be tried."""

    name: str
    verdict: str
    module: str
    op: str
    phase: str
    step: int
    line: str
    fix: str
    policy: str = "fp16"


RANGE, SCALE, INVALID, SILENT = "range_overflow", "scale_overflow", "invalid_operation", "silent_saturation"
KEPT, UNSCALED, DENSE = '"fp16:fp32_modules=1"', "fp16:loss_scale=none", "layer.1.output.dense"
NO_AUTOCAST = "autocast(x.device.type, enabled=False)"
BY_FAMILY = [
    InFamily("mask_refused", RANGE, "1", "masked_fill", "forward", 1, "masked_fill", KEPT),
    InFamily("mask_refused_clamp", RANGE, "1", "clamp", "forward", 1, "clamp", KEPT),
    InFamily("mask_all_padded", RANGE, "1", "mul", "forward", 1, "-1e9", KEPT),
    InFamily("mask_without_softmax", RANGE, "1", "mul", "forward", 1, "* 7", KEPT),
    InFamily("norm_of_sum", SILENT, "1", "mul", "forward", 1, "sqrt", KEPT),
    InFamily("norm_by_variance", SILENT, "1", "mul", "forward", 1, "c * c", KEPT),
    InFamily("norm_exponential", SILENT, "1", "mul", "forward", 1, "exp", KEPT),
    InFamily("norm_arctangent", SILENT, "1", "mul", "forward", 1, "atan", KEPT),
    InFamily("norm_clamped", SILENT, "1", "mul", "forward", 1, "clamp", KEPT),
    InFamily("norm_nan_to_num", SILENT, "1", "mul", "forward", 1, "nan_to_num", KEPT),
    InFamily("norm_by_largest", RANGE, "1", "mul", "forward", 1, "amax", KEPT),
    InFamily("norm_loud_later", RANGE, "1", "mul", "forward", 1, "log", '"bf16"'),
    InFamily("eps_vanishes", RANGE, "1", "div", "forward", 1, "1e-8", KEPT),
    InFamily("eps_vanishes_rsqrt", RANGE, "1", "rsqrt", "forward", 1, "1e-10", KEPT),
    InFamily("einsum_in_script", RANGE, "Model", "einsum", "forward", 1, "einsum", '"fp16:fp32=einsum"'),
    InFamily("gan_log_of_zero", INVALID, "(script)", "log", "forward", 1, "90", ""),
    InFamily("gan_generator_scale", RANGE, "Sequential", "to", "backward", 2, "* gain", '"bf16"'),
    InFamily("rl_advantage_of_one", INVALID, "(script)", "div", "forward", 1, "std", ""),
    InFamily("rl_log_of_zero_probability", INVALID, "(script)", "log", "forward", 1, "p.log", ""),
    InFamily("rl_ratio", INVALID, "Policy", "exp", "forward", 1, "exp", ""),
    InFamily("ema_teacher_saturates", SILENT, "Sequential.1", "mul", "forward", 1, "3000", KEPT),
    InFamily("accumulated_overflow", RANGE, "Sequential", "to", "backward", 3, "backward", '"bf16"'),
    InFamily("scale_recurring", SCALE, "Sequential", "to", "backward", 6, "call or model", '"bf16"'),
    InFamily("own_without_scaler", SILENT, "(script)", "to", "backward", 1, "float()", "GradScaler()", AS_IS),
    InFamily("own_small_scale", SILENT, "(script)", "to", "backward", 1, "float()", "init_scale=65536.0", AS_IS),
    InFamily("own_without_scaler", SILENT, "(script)", "to", "backward", 1, "float()", '"fp16"', UNSCALED),
    InFamily("own_saturates", SILENT, "1", "mul", "forward", 1, "2000", NO_AUTOCAST, AS_IS),
    InFamily("own_refused", RANGE, "1", "masked_fill", "forward", 1, "-1e9", "autocast(", AS_IS),
    InFamily("own_recurring_skips", SCALE, "(script)", "to", "backward", 6, "float()", "bfloat16", AS_IS),
    InFamily("gradient_replaced", SCALE, "Sequential", "to", "backward", 1, "* 100", '"fp16:init_scale=512"'),
    InFamily("compiled_norm", SILENT, "1", "mul", "forward", 1, "sqrt", KEPT),
    InFamily("compiled_refused", RANGE, "1", "masked_fill", "forward", 1, "-1e9", 'policy = "'),
    InFamily("parallel_norm", SILENT, "1", "mul", "forward", 1, "sqrt", KEPT),
    InFamily("checkpointed_norm", SILENT, "body", "mul", "forward", 1, "sqrt", "=body"),
    InFamily("update_eps_adamw", RANGE, "0", "AdamW.step", "update", 1, "optimizer.step()", "eps=0.0001", AS_IS),
    InFamily("update_eps_rmsprop", RANGE, "0", "RMSprop.step", "update", 1, "optimizer.step()", "eps=0.0001", AS_IS),
    InFamily("update_eps_adagrad", RANGE, "0", "Adagrad.step", "update", 1, "optimizer.step()", "eps=0.0001", AS_IS),
    InFamily("update_eps_embedding", RANGE, "Embedding", "Adam.step", "update", 1, "step()", "eps=0.0001", AS_IS),
    InFamily("update_leaves_range", RANGE, "(script)", "SGD.step", "update", 1, "step()", "torch.bfloat16", AS_IS),
    InFamily("update_diverges", INVALID, "0", "SGD.step", "update", 1, "step()", "", AS_IS),
    InFamily("update_diverges", INVALID, "0", "SGD.step", "update", 1, "step()", ""),
    InFamily("update_late", INVALID, "0", "SGD.step", "update", 3, "step()", "", AS_IS),
    InFamily("update_clipped_by_hand", SILENT, "(script)", "pow", "update", 1, "square", "enabled=False", AS_IS),
    InFamily("update_normalized_by_hand", INVALID, "(script)", "div", "update", 1, "norm()", "", AS_IS),
    InFamily("cast_loss", RANGE, "(script)", "pow", "forward", 1, ".pow(2)", NO_AUTOCAST),
    InFamily("cast_softmax_by_hand", RANGE, "(script)", "log", "forward", 1, ".log()", "enabled=False"),
    InFamily("scale_static_by_hand", SCALE, "(script)", "to", "backward", 1, "float()", "scale = ", AS_IS),
    InFamily("scale_static_replaced", SCALE, "(script)", "to", "backward", 1, "float()", "scale = ", AS_IS),
    InFamily("scale_static_zeroed", SILENT, "(script)", "to", "backward", 1, "float()", "scale = ", AS_IS),
    InFamily("scale_clipped_away", SCALE, "(script)", "to", "backward", 1, "float()", "scale = ", AS_IS),
    InFamily("range_beside_a_percentage", RANGE, "(script)", "to", "backward", 1, "float()", "bfloat16", AS_IS),
    InFamily("scale_settles_low", SCALE, "(script)", "to", "backward", 10, "float()", "bfloat16", AS_IS),
    InFamily("penalty_at_zero", INVALID, "(script)", "sqrt", "backward", 1, "sqrt()", "", AS_IS),
    InFamily("penalty_beside_an_overflow", INVALID, "(script)", "sqrt", "backward", 1, "sqrt()", ""),
    InFamily("own_noise", RANGE, "(script)", "log", "forward", 1, "uniform", "enabled=False", AS_IS),
    InFamily("own_half_weights", RANGE, "1", "mul", "forward", 1, "h * 300", "bfloat16", AS_IS),
    InFamily("own_half_log", INVALID, "1", "log", "forward", 1, "torch.log", "", AS_IS),
    InFamily("beyond_rmsnorm", SILENT, "1", "mul", "forward", 1, "rsqrt()", "", AS_IS),
    InFamily("beyond_rmsnorm", SILENT, "1", "mul", "forward", 1, "rsqrt()", "", "fp32"),
    InFamily("beyond_arctangent", SILENT, "1", "mul", "forward", 1, "atan", "", AS_IS),
    InFamily("beyond_distance", SILENT, "1", "pow", "forward", 1, "square()", "", AS_IS),
    InFamily("beyond_bf16", SILENT, "1", "mul", "forward", 1, "wide * wide", "", AS_IS),
    InFamily("own_probabilities", RANGE, "(script)", "log1p", "forward", 1, "log1p", "enabled=False", AS_IS),
    InFamily("bert_outlier", RANGE, f"bert.encoder.{DENSE}", "to", "forward", 1, "", DENSE),
    InFamily("gpt2_queries", RANGE, "transformer.h.1.attn.c_attn", "to", "forward", 1, "", "transformer.h.1.attn"),
]


@pytest.mark.slow
@in_ways("planted", BY_FAMILY, both=lambda p: p.phase == "backward", ids=lambda p: f"{p.name}-{p.policy}")
def test_a_fault_of_a_family_is_found_and_a_fix_is_tried(planted: InFamily, tmp_path: Path) -> None:
    record = diagnosed(planted.name, planted.policy, tmp_path, steps=40)
    assert place_of(record) == planted[1:6], record.detail
    assert planted.line in source_of(record.line)
    tries = [p for p in record.passes if p.reason.startswith("to try")]
    assert_printed(record, planted.name)
    if planted.fix:
        assert planted.fix in record.fix_line
        assert record.fix_tried
        assert record.fix_note.startswith("tried: the script ran")
        assert tries[-1].outcome == "nothing is wrong"
    else:
        assert (record.fix_tried, record.fix_note) == (False, "not tried: it is a change of the script itself")
        assert not tries


WRITTEN = [(p.name, p.policy) for p in (*PLANTED, *BY_FAMILY) if {p.name, f"{p.name}-{p.policy}"} & FIXED.keys()]
WRITTEN += [("masked_entropy", AS_IS)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), WRITTEN)
def test_a_printed_line_written_into_the_script_makes_it_healthy_to_its_end(
    name: str, policy: str, tmp_path: Path
) -> None:
    file = Path(str(module_of(name).__file__))
    script = with_fix(name, fixed(name, policy), file, tmp_path)
    record = diagnosed(name, policy, tmp_path, steps=64, script=script)
    assert (record.verdict, record.run.error) == ("healthy", None), record.detail
    assert 0 < len(record.run.steps) < 64


OTHERS = (families, updates, beyond_fp32)
HEALTHY = [name for module in (faults, *OTHERS) for name in vars(module) if name.startswith("healthy_")]
IN_FAMILIES = [name for module in OTHERS for name in vars(module) if name.startswith("healthy_")]


@pytest.mark.parametrize(
    ("name", "op", "line"),
    [("raises_in_scatter", "scatter_reduce", "scatter_reduce_"), ("raises_in_put", "index_put", "= h")],
)
def test_an_operation_that_raises_is_named_and_a_fix_is_tried(name: str, op: str, line: str, tmp_path: Path) -> None:
    record = diagnosed(name, AS_IS, tmp_path)
    assert place_of(record) == ("unfinished", "1", op, "forward", 1)
    assert line in source_of(record.line)
    assert record.fix_tried
    assert "enabled=False" in record.fix_line


def test_an_error_that_no_operation_raises_has_module_line_and_function(tmp_path: Path) -> None:
    record = diagnosed("raises_in_a_check", AS_IS, tmp_path)
    assert place_of(record) == ("unfinished", "1.norm", "batch_norm", "forward", 1)
    assert "self.norm(h[:1])" in source_of(record.line)


@in_ways("name", dict.fromkeys(HEALTHY), both=lambda name: name not in IN_FAMILIES, ids=str)
def test_a_healthy_script_raises_no_alarm(name: str, tmp_path: Path) -> None:
    assert_healthy(name, AS_IS if "own" in name else "fp16", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bf16", "fp32"])
@pytest.mark.parametrize("name", [name for name in HEALTHY if name not in IN_FAMILIES and "own" not in name])
def test_a_healthy_script_raises_no_alarm_under_other_policies(name: str, policy: str, tmp_path: Path) -> None:
    assert_healthy(name, policy, tmp_path)


def assert_healthy(name: str, policy: str, folder: Path) -> None:
    record = diagnosed(name, policy, folder, steps=40)
    assert record.verdict == "healthy", record.model_dump_json(exclude={"run"})
    assert (record.module, record.op, record.step, record.fix) == ("", "", 0, "")


@BOTH_WAYS
@pytest.mark.parametrize(
    "name", ["gan", "recurrent", "several_losses", "penalty", "functional", "tied", "probabilities"]
)
def test_scenarios_of_the_launcher_raise_no_alarm(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(SCRIPTS / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path, "dense"])
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(faults, "scenario", lambda: runpy.run_path(path, run_name="__main__"), raising=False)
    record = diagnosed("scenario", "fp16", tmp_path)
    assert (record.verdict, record.run.error) == ("healthy", None), record.detail


def by_kind() -> dict[str, tuple[int, int]]:
    """Return how many planted faults and healthy scripts each section of ``tests/faults`` has."""
    found: dict[str, tuple[int, int]] = {}
    planted, kind = {p.name for p in (*PLANTED, *BY_FAMILY)}, ""
    for module in (faults, *OTHERS):
        for line in inspect.getsource(module).splitlines():
            section, function = re.match(r"# --- (.+?) -+$", line), re.match(r"def (\w+)\(", line)
            kind = section[1] if section else kind
            if function and (function[1] in planted or function[1] in HEALTHY):
                before = found.get(kind, (0, 0))
                found[kind] = before[0] + (function[1] in planted), before[1] + (function[1] in HEALTHY)
    return found


def test_the_page_counts_the_scripts() -> None:
    counted = by_kind()
    names = [name for module in (faults, *OTHERS) for name in vars(module) if name.startswith("healthy_")]
    assert len(names) == len(set(names)) == sum(healthy for _, healthy in counted.values())
    page = (ROOT / "docs" / "public-reports.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|`\[]+) \| (\d+) \| (\d+) \|$", page, re.M)
    expected = [(kind, *map(str, numbers)) for kind, numbers in counted.items()]
    total = ("all", *(str(sum(column)) for column in zip(*counted.values(), strict=True)))
    assert rows == [*expected, total]
    assert sum(planted > 0 for planted, _ in counted.values()) >= 12
    assert {p.verdict for p in PLANTED} == {RANGE, SCALE, INVALID, SILENT}


@BOTH_WAYS
def test_a_step_between_the_looks_is_looked_at_in_a_second_run(tmp_path: Path) -> None:
    record = diagnosed("late_log", "fp16", tmp_path)
    assert [(p.policy, p.num_steps, p.watched) for p in record.passes] == [
        ("fp16", 7, [1, 2, 4]),
        ("fp16", 7, [6, 7]),
        ("fp32", 7, [7]),
    ]
    assert record.bad_steps == [7]
    assert [t.step for t in record.trend] == [1, 2, 3, 4, 5, 6, 7]
    assert record.trend[-1].skipped


def test_a_script_that_goes_another_way_is_looked_at_until_the_next_fault(tmp_path: Path) -> None:
    record = diagnosed("another_step", "bf16", tmp_path)
    assert (record.verdict, record.perhaps, record.op, record.step) == ("undecided", "invalid_operation", "log", 6)
    assert record.passes[1].watched == [2, 3, 5, 6]  # a look cannot begin before it is known that step 3 was finite


@pytest.mark.parametrize(
    ("steps", "suspects", "watched"),
    [
        ((3, 4, 9), (3, 4), [3, 4, 5, 6, 7, 8, 9]),  # step 4 is being looked at when step 3 turns out to be finite
        ((3, 5, 9), (3, 5), [3, 5, 6, 7, 8, 9]),
        ((1, 2, 6), (1,), [1, 2, 3, 4, 5, 6]),
        ((2, 5), (), [2, 5]),
    ],
)
def test_finite_suspects_let_all_later_steps_be_looked_at(
    steps: tuple[int, ...], suspects: tuple[int, ...], watched: list[int], tmp_path: Path
) -> None:
    request = Request(
        target="x",
        kind="script",
        policy="bf16",
        record_path=str(tmp_path / "record.json"),
        command=("mezzo",),
        observe=DiagnoseSettings(steps=steps, suspects=suspects, evidence_path=str(tmp_path / "evidence.json")),
    )
    run_here(lambda: faults.train(faults.net(torch.tanh), steps=12), request)
    evidence = Evidence.model_validate_json((tmp_path / "evidence.json").read_text(encoding="utf-8"))
    assert evidence.watched == watched


def test_weights_that_an_update_made_infinite_are_named(tmp_path: Path) -> None:
    record = diagnosed("invalid_weights", AS_IS, tmp_path)
    assert place_of(record) == ("range_overflow", "0", "Adam.step", "update", 1)
    assert record.detail.startswith("Adam.step() makes weights that are not finite. Its eps of 1e-08 is 0 in FP16")
    assert (record.fix_tried, record.fix_line) == (True, "optimizer = Adam(..., eps=0.0001)")


@BOTH_WAYS
def test_skipped_updates_at_the_start_are_counted_and_are_no_fault(tmp_path: Path) -> None:
    record = diagnosed("healthy_few_skips", "fp16", tmp_path)
    assert 1 <= record.num_skipped <= 4
    assert record.bad_steps[:1] == [1]
    assert len(record.run.steps) == 12


def test_a_nan_that_the_loss_scaler_skipped_is_no_normal_skip(tmp_path: Path) -> None:
    record = diagnosed("invalid_behind_a_skip", "fp16", tmp_path)
    assert [(p.policy, p.watched) for p in record.passes] == [("fp16", [1, 2, 4, 8]), ("fp16", [7]), ("fp32", [7])]
    assert record.passes[1].reason == "to inspect the operations of step 7, whose update was skipped"
    assert record.faulty_steps == record.bad_steps == [7]
    assert "The loss scaler skipped that update, so the training continued" in record.detail
    assert record.fix == "the derivative of a root at 0 is infinite: keep its argument above 0"


def test_an_overflow_that_a_scale_skips_once_stays_normal(tmp_path: Path) -> None:
    record = diagnosed("healthy_one_spike", "fp16", tmp_path)
    assert (record.verdict, record.bad_steps) == ("healthy", [7])
    assert [p.outcome for p in record.passes][:1] == ["1 update skipped, for no known reason"]
    assert len(record.passes) == 2


@pytest.mark.parametrize(
    ("name", "verdict", "fix"),
    [("session_range", RANGE, "fp16:fp32_modules=1"), ("session_static_scale", SCALE, "fp16:init_scale=")],
)
def test_the_fix_of_a_session_is_a_policy_for_it(name: str, verdict: str, fix: str, tmp_path: Path) -> None:
    record = diagnosed(name, AS_IS, tmp_path)
    assert (record.verdict, record.fix_tried) == (verdict, True), record.detail
    assert record.fix_line.startswith(f'policy = "{fix}')
    assert record.fix_where.startswith(f'in code: mezzo.Session(model, optimizer, policy="{fix}')
    assert record.fix_where.split("; ")[1].startswith(f"or on the command line, in its place: --policy {fix}")


@BOTH_WAYS
def test_the_suggested_scale_is_the_largest_that_fits_with_room(tmp_path: Path) -> None:
    record = diagnosed("scale_large_loss", "fp16", tmp_path)
    assert record.largest is not None
    at_one = record.largest / record.loss_scale
    scale = int(record.fix_line.split("init_scale=")[1].rstrip('"'))
    assert at_one * scale * 4 <= 65504 < at_one * scale * 8
    assert record.passes[1].outcome == "finite"
    again = diagnosed("scale_large_loss", f"fp16:init_scale={scale}", tmp_path)
    assert (again.verdict, again.num_skipped) == ("healthy", 0)


def test_a_static_scale_that_is_too_large_is_a_fault_at_once(tmp_path: Path) -> None:
    record = diagnosed("healthy_few_skips", "fp16:loss_scale=static:init_scale=65536", tmp_path)
    assert (record.verdict, record.step, record.bad_steps) == ("scale_overflow", 1, [1])


@pytest.mark.parametrize(("name", "pattern"), [("silent_rmsnorm", "1"), ("range_square", "1"), ("range_matmul", "1")])
def test_the_fix_makes_the_script_healthy(name: str, pattern: str, tmp_path: Path) -> None:
    record = diagnosed(name, "fp16", tmp_path)
    policy = record.fix_line.split('"')[1]
    assert policy == f"fp16:fp32_modules={pattern}"
    assert diagnosed(name, policy, tmp_path).verdict == "healthy"


@BOTH_WAYS
def test_what_cannot_be_inspected_is_said_and_harms_no_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inspect_one = InfinityTracer._inspect

    def fails(tracer: InfinityTracer, index: int, operation: Any, result: Any) -> None:
        if operation.func.overloadpacket.__name__ == "tanh":
            raise NotImplementedError("of another kind")
        inspect_one(tracer, index, operation, result)

    monkeypatch.setattr(InfinityTracer, "_inspect", fails)
    request = Request(target="x", kind="script", policy="bf16", record_path=str(tmp_path / "record.json"), command=())
    record = diagnose_script(request, steps=4, child=lambda asked, **_: run_here(faults.healthy_plain, asked))
    assert isinstance(record, DiagnoseRecord)
    assert (record.verdict, len(record.run.steps)) == ("healthy", 4)
    assert [(n.what, n.value, n.reason) for n in record.notes] == [
        ("not inspected", "tanh()", "NotImplementedError: of another kind")
    ]


@BOTH_WAYS
def test_idle_steps_run_without_a_dispatch_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []

    def function(h: Any) -> Any:
        modes.append(len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))
        return torch.tanh(h)

    monkeypatch.setattr(faults, "watched", lambda: faults.train(faults.net(function), steps=9), raising=False)
    diagnosed("watched", "bf16", tmp_path)
    # Steps 1, 2, 4 and 8 are looked at; a look lasts until the next backward pass, so into the next forward pass.
    assert modes == [1, 1, 1, 1, 1, 0, 0, 1, 1]
