"""Unmodified scripts under every policy: the same losses as without, every step counted, overflows skipped and recovered from.

Tolerances: fp16 rounds to 11 bits, bf16 to 8, so one rounding is off by up to 2**-11 and 2**-8 of a value. The scripts train a
dozen updates through two or three layers; four such units of the largest loss leave room for what adds up on the way. Line searches
take other steps for a tiny difference, so for LBFGS it is thirty-two.
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest

from helpers_launch import AS_IS, PLAIN, Ran, ran

# script, arguments, updates that it makes, and what is particular about it:
#   one      each loss that the script prints is that of one update
#   shifts   every update sees the same data, so a skipped update repeats the loss before
#   pure     it trains in 16-bit weights (Adam's epsilon is zero in fp16, so scripts with Adam do not)
SCENARIOS: dict[str, tuple[str, tuple[str, ...], int, set[str]]] = {
    "plain loop": ("plain", (), 12, {"one", "shifts"}),
    "accumulation": ("accumulation", (), 6, {"pure"}),
    "clipping by norm": ("clipping", ("norm",), 12, {"one", "shifts", "pure"}),
    "clipping by value": ("clipping", ("value",), 12, {"one", "shifts", "pure"}),
    "clipping in a hook": ("clipping", ("hook",), 12, {"one", "shifts", "pure"}),
    "two networks in turn": ("gan", (), 20, {"one"}),
    "two optimizers": ("two_optimizers", (), 12, {"one"}),
    "several losses": ("several_losses", (), 12, {"shifts", "pure"}),
    "penalty on a gradient": ("penalty", (), 10, {"one"}),
    "evaluation in between": ("evaluation", (), 12, {"one", "pure"}),
    "reentrant checkpoints": ("checkpointing", ("module", "reentrant"), 8, {"one", "shifts", "pure"}),
    "checkpoints": ("checkpointing", ("module", "not"), 8, {"one", "shifts", "pure"}),
    "a model in a reentrant checkpoint": ("checkpointing", ("script", "reentrant"), 8, {"one", "shifts", "pure"}),
    "a model in a checkpoint": ("checkpointing", ("script", "not"), 8, {"one", "shifts", "pure"}),
    "schedule by update": ("schedule", ("step", "update"), 12, {"one", "shifts", "pure"}),
    "one-cycle schedule": ("schedule", ("onecycle", "update"), 12, {"one", "shifts", "pure"}),
    "sequential schedule": ("schedule", ("sequential", "update"), 12, {"one", "shifts", "pure"}),
    "a schedule of the script": ("schedule", ("own", "update"), 12, {"one", "shifts", "pure"}),
    "schedule by epoch": ("schedule", ("step", "epoch"), 12, {"one", "pure"}),
    "schedule on a plateau": ("schedule", ("plateau", "epoch"), 12, {"one", "pure"}),
    "optimizer before .to": ("device_order", ("before",), 12, {"one", "shifts"}),
    "optimizer after .to": ("device_order", ("after",), 12, {"one", "shifts"}),
    "LBFGS with line search": ("closures", ("lbfgs",), 6, {"one", "chaotic"}),
    "LBFGS": ("closures", ("lbfgs-fixed",), 6, {"one", "chaotic"}),
    "a closure for SGD": ("closures", ("sgd",), 6, {"one", "pure"}),
    "by hand from .grad": ("by_hand", ("backward",), 12, {"one", "shifts", "pure"}),
    "by hand from autograd.grad": ("by_hand", ("grad",), 12, {"one", "shifts", "pure"}),
    "optimizer fed by autograd.grad": ("by_hand", ("optimizer",), 12, {"one", "pure"}),
    "gradients of weights inside a backward pass": ("adjoint", ("function",), 8, {"one", "shifts", "pure"}),
    "gradients inside a hook": ("adjoint", ("equilibrium",), 8, {"one", "shifts", "pure"}),
    "probabilities": ("probabilities", (), 8, {"one", "pure"}),
    "code outside modules": ("functional", (), 8, {"one", "shifts", "pure"}),
    "torch.func": ("transformed", (), 8, {"one"}),
    "torch.func of detached weights": ("transformed", ("shared",), 8, {"one"}),
    "attacked inputs": ("adversarial", (), 8, {"pure"}),
    "recurrent": ("recurrent", (), 8, {"one", "shifts"}),
    "tied weights": ("tied", ("tied",), 12, {"one", "shifts"}),
    "sparse gradients": ("tied", ("sparse",), 12, {"one"}),
    "a second thread": ("threads", (), 30, {"one", "shifts"}),
    "backward hooks": ("hooked", ("after",), 8, {"one", "shifts", "pure"}),
    "updates inside the backward pass": ("hooked", ("inside",), 8, {"one", "pure"}),
    "loop in an imported module": ("imported_loop", (), 5, {"one"}),
}
# The loss scale at which a script's gradients do not overflow, where the usual 65536 is too large.
SETTLED = {"penalty": 4096, "evaluation": 4096}
UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp16-master": 2.0**-11, "fp16-pure": 2.0**-11}


@functools.cache
def plain(script: str, *arguments: str) -> Ran:
    return ran(script, PLAIN, *arguments)


def in_turns(*policies: str) -> list[tuple[str, str]]:
    """Give each scenario one of the policies: what a script does and how it is rounded hardly touch each other."""
    pairs = zip(SCENARIOS.items(), itertools.cycle(policies), strict=False)
    return [
        (name, "bf16" if policy == "fp16-pure" and "pure" not in row[3] else policy) for (name, row), policy in pairs
    ]


def assert_close(found: list[float], expected: list[float], tolerance: float) -> None:
    largest = max(map(abs, expected))
    assert len(found) == len(expected)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= tolerance * largest


@pytest.mark.parametrize(("name", "policy"), in_turns("fp32", AS_IS))
def test_watching_alone_changes_nothing(name: str, policy: str) -> None:
    script, arguments, updates, traits = SCENARIOS[name]
    found, expected = ran(script, policy, *arguments), plain(script, *arguments)
    assert found.losses == expected.losses
    assert len(found.steps) == updates
    assert found.steps.num_skipped == 0
    assert found.steps.loss_scale == []
    assert found.findings == []
    assert set(found.effective.flops_by_format) == {"fp32"}
    if "one" in traits:
        assert_close(found.steps.loss, expected.losses, 1e-6)


@pytest.mark.parametrize(
    ("name", "policy"), [*((name, "fp16") for name in SCENARIOS), *in_turns("bf16", "fp16-master", "fp16-pure")]
)
def test_losses_follow_the_script_alone(name: str, policy: str) -> None:
    script, arguments, updates, traits = SCENARIOS[name]
    scaled = policy in ("fp16", "fp16-master")
    scale = float(SETTLED.get(script, 65536))
    found = ran(script, f"{policy}:init_scale={scale:.0f}" if scaled else policy, *arguments)
    expected = plain(script, *arguments)
    assert_close(found.losses, expected.losses, UNIT[policy] * (32 if "chaotic" in traits else 4))
    assert found.losses != expected.losses  # it did run in 16 bits
    assert len(found.steps) == updates
    assert found.steps.num_skipped == 0
    assert found.steps.loss_scale == ([scale] * updates if scaled else [])
    assert found.findings == []
    if "one" in traits:
        assert_close(found.steps.loss, found.losses, 1e-6)


@pytest.mark.parametrize("name", [n for n, s in SCENARIOS.items() if "shifts" in s[3]])
def test_a_skipped_update_is_as_if_it_had_not_happened(name: str) -> None:
    script, arguments, updates, _ = SCENARIOS[name]
    # 2**20 overflows here for a few updates at most; then the script goes the way that it would have gone before.
    found, expected = ran(script, "fp16:init_scale=1048576", *arguments), plain(script, *arguments)
    skipped = found.steps.num_skipped
    assert 1 <= skipped <= 6
    assert found.steps.skipped == [True] * skipped + [False] * (updates - skipped)
    assert found.steps.loss_scale == [2.0 ** (20 - min(k + 1, skipped)) for k in range(updates)]
    assert found.losses[: skipped + 1] == [found.losses[0]] * (skipped + 1)
    assert_close(found.losses[skipped:], expected.losses[: updates - skipped], 4 * UNIT["fp16"])
    assert all(map(math.isnan, found.steps.grad_norm[:skipped]))
    assert all(map(math.isfinite, found.steps.grad_norm[skipped:]))
    assert found.findings == []


@pytest.mark.parametrize("key", ["norms", "before", "every", "inner", "seen", "penalties", "evaluated"])
def test_gradients_that_a_script_reads_are_unscaled(key: str) -> None:
    for script, arguments, _, traits in SCENARIOS.values():
        expected = plain(script, *arguments).values
        if key in expected and "chaotic" not in traits:
            found = ran(script, f"fp16:init_scale={SETTLED.get(script, 65536)}", *arguments).values
            assert_close(_flat(found[key]), _flat(expected[key]), 16 * UNIT["fp16"])


def _flat(values: list[float] | list[list[float]]) -> list[float]:
    return [x for v in values for x in (v if isinstance(v, list) else [v])]


# --- what is particular to some of them --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lbfgs", "lbfgs-fixed"])
def test_a_closure_that_overflows_is_evaluated_again(kind: str) -> None:
    found, expected = ran("closures", "fp16:init_scale=16777216", kind), ran("closures", "fp16", kind)
    lowered = round(24 - math.log2(found.steps.loss_scale[-1]))
    assert lowered >= 2
    assert found.steps.num_skipped == 0
    assert len(found.steps) == 6
    assert found.values["evaluations"] == expected.values["evaluations"] + lowered
    assert found.losses == expected.losses  # scales are powers of two: the gradients are the same to the bit
    assert_close(found.steps.loss, found.losses, 1e-6)


def test_gradients_of_unknown_use_are_computed_again_where_they_overflow() -> None:
    """The script may compute with them; once it has set them as an optimizer's, their overflow skips the update."""
    found, expected = ran("by_hand", "fp16:init_scale=1048576", "optimizer"), plain("by_hand", "optimizer")
    lowered = round(20 - math.log2(found.steps.loss_scale[0]))
    assert lowered >= 1
    assert found.steps.num_skipped == 0
    assert_close(found.losses, expected.losses, 4 * UNIT["fp16"])


def test_a_closure_that_is_called_once_is_called_once_also_where_it_overflows() -> None:
    found, expected = ran("closures", "fp16:init_scale=16777216", "sgd"), plain("closures", "sgd")
    skipped = found.steps.num_skipped
    assert skipped >= 2
    assert found.steps.skipped == [True] * skipped + [False] * (6 - skipped)
    assert found.values["evaluations"] == expected.values["evaluations"]
    assert found.steps.loss_scale[-1] == 2.0 ** (24 - skipped)
    assert_close(found.steps.loss, found.losses, 1e-6)


def test_a_penalty_that_overflows_lowers_its_own_scale_and_not_the_loss() -> None:
    found, expected = ran("penalty", "fp16"), plain("penalty")
    skipped = found.steps.num_skipped
    assert 1 <= skipped <= 6
    assert all(map(math.isfinite, found.losses))
    assert abs(found.values["penalties"][0] - expected.values["penalties"][0]) < 4 * UNIT["fp16"]


def test_a_summed_loss_far_outside_16_bits_trains_at_a_scale_below_one() -> None:
    found, expected = ran("sum_loss", "fp16"), plain("sum_loss")
    skipped = found.steps.num_skipped
    assert found.steps.loss[0] > 65504 * 1000
    assert found.steps.loss_scale[-1] == 2.0 ** (16 - skipped) < 1
    assert_close(found.losses[skipped:], expected.losses[: 40 - skipped], 4 * UNIT["fp16"])


@pytest.mark.parametrize("way", ["function", "equilibrium"])
def test_products_inside_a_backward_pass_count_for_the_format_that_they_emulate(way: str) -> None:
    ((_, flops),) = ran("adjoint", "fp32", way).effective.flops_by_format.items()
    assert ran("adjoint", "fp16", way).effective.flops_by_format == {"fp16": flops}


def test_float64_models_are_left_alone_with_the_reason() -> None:
    found, expected = ran("double", "fp16"), plain("double")
    assert found.losses == expected.losses
    assert found.values["dtype"] == "torch.float64"
    assert found.effective.flops_by_format == {"fp64": 4608}
    assert found.reasons == ["float64 Sequential: its weights are float64, and float64 is never cast"]


def test_gradients_inside_vmap_are_not_scaled_and_that_is_said() -> None:
    found = ran("transformed", "fp16")
    assert found.reasons == [
        "loss scale gradients inside torch.func.vmap: no value can be read there, so small ones may become 0 in FP16; "
        "BF16 needs no scale"
    ]


def test_code_outside_modules_is_left_alone_with_its_share() -> None:
    found = ran("functional", "fp16")
    outside, inside = 2 * 8 * 6 * 16, 2 * 8 * 16 * 2  # forward, by hand
    assert found.effective.flops_by_format == {"fp32": 2 * outside, "fp16": 3 * inside}
    share = outside / (2 * outside + 3 * inside)
    assert found.reasons == [
        f"FP32 code {share:.0%} of FLOPs and their backward pass: forward code outside any module: only modules, "
        "autocast regions and compiled functions are switched. Call a model as model(x), not as model.forward(x); put other code into "
        "torch.autocast"
    ]


def test_updates_by_hand_say_how_they_are_counted() -> None:
    assert ran("by_hand", "fp16", "grad").reasons == [
        "update by hand: no optimizer object: every backward pass counts as an update"
    ]


def test_sparse_embeddings_stay_fp32_under_master_weights() -> None:
    found = ran("tied", "fp16-master", "sparse")
    assert found.reasons == [
        "sparse embedding Words: torch cannot cast a sparse gradient, so its weight is looked up in FP32"
    ]


def test_weights_that_the_policy_cast_are_not_the_scripts_own() -> None:
    assert ran("adversarial", "fp16-pure").reasons == []
    assert ran("plain", "fp16-pure", "2").values["dtypes"] == ["torch.float16"] * 4
    assert ran("plain", "fp16-master", "2").values["dtypes"] == ["torch.float32"] * 4


def test_what_leaves_a_module_is_fp32_again() -> None:
    assert ran("evaluation", "fp16").values["dtypes"] == ["torch.float32"]
    assert ran("threads", "bf16").values["dtypes"] == ["torch.float32"]
    assert ran("checkpointing", "fp16", "script", "not").values["dtype"] == "torch.float32"


def test_each_optimizer_is_skipped_by_its_own_gradients() -> None:
    found = ran("two_optimizers", "fp16:init_scale=4194304")
    losses = found.losses
    # The body's gradients overflow more often than the head's: the head learns while the body waits, one scale for both.
    first_change = next(k for k in range(12) if losses[k] != losses[0])
    assert first_change <= found.steps.num_skipped
    assert found.steps.loss_scale == [2.0 ** (22 - min(k + 1, found.steps.num_skipped)) for k in range(12)]


@pytest.mark.parametrize("rate_of", ["update", "epoch"])
def test_schedules_are_held_by_update_and_never_by_epoch(rate_of: str) -> None:
    found, expected = ran("schedule", "fp16:init_scale=16777216", "step", rate_of), plain("schedule", "step", rate_of)
    skipped = found.steps.num_skipped
    assert skipped >= 4  # more than an epoch of three
    if rate_of == "epoch":
        assert found.values["rates"] == expected.values["rates"]
    else:
        assert found.values["rates"] == [0.1] * skipped + expected.values["rates"][: 12 - skipped]
