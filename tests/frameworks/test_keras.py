"""Keras scripts under a policy, on its three backends: what is recorded, against what Keras itself and a count by hand say.

All runs of a backend share one process, which ``scripts/keras_cases.py`` is: a backend is chosen once, at import.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from keras_runs import answers, close

pytest.importorskip("keras")
TF, TORCH, JAX = "tensorflow", "torch", "jax"
BACKENDS = [name for name in (TF, TORCH, JAX) if pytest.importorskip(name)]
B, STEPS = 8, 6
HIDDEN, HEAD = 2 * B * 4 * 16, 2 * B * 16 * 3
FLOPS = {"hidden": 2 * HIDDEN, "head": 3 * HEAD}  # the first layer needs no gradient of its input
STRESSED = "fp16:init_scale=16777216:growth_interval=8"

Run = tuple[str, str, int | None]
EVERYWHERE: list[Run] = [
    ("fit", "plain", None),
    ("fit", "fp32", None),
    ("fit", "tf32", None),
    ("fit", "fp16", None),
    ("fit", "bf16-pure", None),
    ("fit", "fp16:loss_scale=none", None),
    ("fit", "fp16:loss_scale=static:init_scale=1024", None),
    ("fit", "bf16:loss_scale=dynamic:init_scale=8:max_scale=16:growth_interval=2", None),
    ("fit", "fp16:fp32_modules=he*", None),
    ("fit", "fp32", 0),
    ("fit", "fp32", 1),
    ("batch_losses", "fp16", None),
    ("own_policy", "plain", None),
    ("own_policy", "as-is", None),
    ("own_scaler", "fp32", None),
    ("own_scaler", "as-is", None),
    ("long_fit", STRESSED, None),
    ("accumulating", "fp32", None),
    ("convolutions", "fp32", None),
]
WITH_LOOPS: list[Run] = [
    ("fit", "fp16:fp32_modules=hed", None),
    ("fit", "fp8", None),
    ("random_layers", "fp32", None),
    ("random_layers", "fp32", 0),
    ("random_layers", "fp32", 1),
    ("own_policy", "fp32", None),
    ("own_dtype", "fp16", None),
    ("mixed_layer", "fp16", None),
    ("norms", "fp16-master", None),
    ("norms", "bf16-pure", None),
    ("embedding", "fp16", None),
    ("own_step", "fp16", None),
    ("loop", "plain", None),
    ("loop", "fp32", None),
    ("loop", "fp16", None),
    ("overflowing_loop", "fp16", None),
    ("overflowing_loop", "fp16:min_scale=65536", None),
    ("two_optimizers", "fp16", None),
    ("gan", "fp32", None),
    ("given_gradients", "as-is", None),
    ("given_gradients", "fp32", None),
    ("given_gradients", "fp16", None),
    ("two_epochs_adam", "fp32", None),
]
"""On TensorFlow and PyTorch, where scripts train in loops of their own; on JAX such a loop is stateless."""
FLOOR = "fp16:init_scale=16777216:min_scale=16777216"
OWN: dict[str, list[Run]] = {
    TF: [(case, "fp16", None) for case in ("eager", "several_a_call", "compiled_by_xla", "traced_loop")],
    TORCH: [("inside_loop", "fp16", None), ("stopped", "fp16", None)],
    JAX: [("eager", "fp16", None), ("several_a_call", "fp16", None), ("long_fit", FLOOR, None)],
}
OWN[JAX] += [("stateless_loop", "plain", None), ("stateless_loop", "fp32", None)]


class Runs:
    """Hold what every run of a backend gave, and run them all at the first question."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._found: dict[Run, Any] = {}

    def __call__(self, case: str, policy: str, seed: int | None = None) -> dict[str, Any]:
        if not self._found:
            wanted = [*EVERYWHERE, *([] if self.backend == JAX else WITH_LOOPS), *OWN[self.backend]]
            found = answers("keras_cases.py", wanted, KERAS_BACKEND=self.backend)
            self._found = dict(zip(wanted, found, strict=True))
        one: dict[str, Any] = self._found[case, policy, seed]
        return one


RUNS = {backend: Runs(backend) for backend in BACKENDS}


@pytest.fixture(params=BACKENDS)
def everywhere(request: pytest.FixtureRequest) -> Runs:
    return RUNS[request.param]


@pytest.fixture(params=[TF, TORCH])
def runs(request: pytest.FixtureRequest) -> Runs:
    return RUNS[request.param]


# --- fit -----------------------------------------------------------------------------------------------------------------------


def test_fp32_trains_as_plain_keras_does(everywhere: Runs) -> None:
    for policy in ("fp32", "tf32"):
        found = everywhere("fit", policy)
        assert close(found["script"]["weights"], everywhere("fit", "plain")["script"]["weights"], 1e-6)
        assert found["left_alone"] == []


def test_loss_of_a_step_is_the_batchs(everywhere: Runs) -> None:
    found = everywhere("batch_losses", "fp16")
    assert close(found["steps"]["loss"], found["script"]["losses"], 1e-6)
    assert close(found["steps"]["loss"], everywhere("fit", "fp16")["steps"]["loss"], 1e-6)


def test_fp16_is_keras_own_mixed_precision(everywhere: Runs) -> None:
    """The script that switches Keras' own on ends at the same weights: the scale is a power of two in both."""
    plain = everywhere("own_policy", "plain")["script"]
    found = everywhere("fit", "fp16")
    assert plain["compute"] == found["script"]["compute"] == {"hidden": "float16", "head": "float16"}
    assert close(found["script"]["weights"], plain["weights"], 1e-6 if everywhere.backend == JAX else 1e-4)
    assert not close(found["script"]["weights"], everywhere("fit", "plain")["script"]["weights"], 1e-6)
    assert found["steps"]["loss_scale"] == [65536.0] * STEPS
    assert found["steps"]["skipped"] == [False] * STEPS


@pytest.mark.parametrize(
    ("case", "policy", "compute", "variables"),
    [
        ("fit", "bf16-pure", {"hidden": "bfloat16", "head": "bfloat16"}, ["bfloat16"]),
        ("fit", "fp16:fp32_modules=he*", {"hidden": "float16", "head": "float32"}, ["float32"]),
        ("own_policy", "fp32", {"hidden": "float32", "head": "float32"}, ["float32"]),
        ("own_policy", "as-is", {"hidden": "float16", "head": "float16"}, ["float32"]),
        ("own_dtype", "fp16", {"hidden": "float16", "head": "float32"}, ["float32"]),
        ("mixed_layer", "fp16", {"hidden": "float16", "head": "float16"}, ["float32"]),
        ("norms", "fp16-master", {"dense": "float16", "norm": "float32", "dense_1": "float16"}, ["float32"]),
        ("norms", "bf16-pure", {"dense": "bfloat16", "norm": "bfloat16", "dense_1": "bfloat16"}, ["bfloat16"]),
    ],
)
def test_layers_compute_in(runs: Runs, case: str, policy: str, compute: dict[str, str], variables: list[str]) -> None:
    script = runs(case, policy)["script"]
    assert (script["compute"], script["variables"]) == (compute, variables)


def test_own_dtype_of_a_layer_is_listed(runs: Runs) -> None:
    reason = "layer head in float32: the script, or the file that it was loaded from, sets this layer's own dtype"
    assert reason in runs("own_dtype", "fp16")["left_alone"]


def test_scale_and_skips_are_those_of_the_optimizer(everywhere: Runs) -> None:
    found = everywhere("long_fit", STRESSED)
    script, steps = found["script"], found["steps"]
    iterations = script["iterations"]
    assert steps["loss_scale"] == script["scales"]
    assert steps["skipped"] == [now == before for now, before in zip(iterations, [0, *iterations[:-1]], strict=True)]
    assert sum(steps["skipped"]) == len(iterations) - iterations[-1] > 5
    assert steps["loss_scale"][0] == 2.0**23  # the first step overflowed
    grown = [b / a for a, b in zip(steps["loss_scale"], steps["loss_scale"][1:], strict=False)]
    assert set(grown) == {0.5, 1.0, 2.0}
    assert all(math.isfinite(float(n)) != s for n, s in zip(steps["grad_norm"], steps["skipped"], strict=True))


@pytest.mark.parametrize(
    ("case", "policy", "scales"),
    [
        ("fit", "fp32", []),
        ("fit", "fp16:loss_scale=none", []),
        ("fit", "fp16:loss_scale=static:init_scale=1024", [1024.0] * STEPS),
        ("fit", "bf16:loss_scale=dynamic:init_scale=8:max_scale=16:growth_interval=2", [8.0, *[16.0] * 5]),
        ("own_policy", "as-is", [32768.0] * STEPS),
        ("own_scaler", "fp32", []),
        ("own_scaler", "as-is", [2.0 ** (40 + (k + 1) // 2) for k in range(48)]),
    ],
)
def test_loss_scales(everywhere: Runs, case: str, policy: str, scales: list[float]) -> None:
    assert everywhere(case, policy)["steps"]["loss_scale"] == scales


def test_own_scaler_passes_everything_through_under_fp32(everywhere: Runs) -> None:
    found = everywhere("own_scaler", "fp32")
    assert close(found["steps"]["loss"][:STEPS], everywhere("fit", "fp32")["steps"]["loss"], 1e-6)
    assert found["script"]["scales"] == [1.0] * 48


def test_accumulated_gradients_make_one_step(everywhere: Runs) -> None:
    found = everywhere("accumulating", "fp32")
    assert len(found["steps"]["loss"]) == STEPS // 2
    assert found["script"]["iterations"] == [0, 1, 1, 2, 2, 3]
    assert found["steps"]["loss"][0] != everywhere("fit", "fp32")["steps"]["loss"][0]  # the mean of two batches


def test_sparse_gradients(runs: Runs) -> None:
    found = runs("embedding", "fp16")
    assert found["steps"]["skipped"] == [False] * STEPS
    assert all(0.01 < norm < 10 for norm in found["steps"]["grad_norm"])


# --- what ran -----------------------------------------------------------------------------------------------------------------


ALL = sum(FLOPS.values())
COUNTED: list[tuple[list[str], str, str, dict[str, int]]] = [
    (BACKENDS, "fit", "fp32", {"fp32": ALL}),
    (BACKENDS, "fit", "fp16", {"fp16": ALL}),
    (BACKENDS, "fit", "fp16:fp32_modules=he*", {"fp16": FLOPS["hidden"], "fp32": FLOPS["head"]}),
    (BACKENDS, "fit", "bf16-pure", {"bf16": ALL}),
    ([TF, TORCH], "mixed_layer", "fp16", {"fp16": ALL}),
    ([TF, TORCH], "two_optimizers", "fp16", {"fp16": ALL}),
    ([TF, TORCH], "loop", "fp16", {"fp16": ALL}),
    ([TF, TORCH], "own_step", "fp16", {"fp16": ALL}),
]


@pytest.mark.parametrize(
    ("backend", "case", "policy", "flops"), [(name, *row) for names, *row in COUNTED for name in names]
)
def test_operations_by_format(backend: str, case: str, policy: str, flops: dict[str, int]) -> None:
    found = RUNS[backend](case, policy)
    reason = "fp16 products in fp32: on a CPU, Keras on torch computes matrix products of FP16 operands in FP32"
    if backend == TORCH and policy.startswith("fp16"):
        assert found["flops"] == {"fp32": sum(flops.values())}
        assert reason in found["left_alone"]
    else:
        assert found["flops"] == flops
        assert reason not in found["left_alone"]
    eager = backend == TORCH or case in {"loop", "two_optimizers"}
    assert found["counted_on_step"] == (2 if eager else 1)  # a traced step is counted from its graph


def test_convolutions_are_counted(everywhere: Runs) -> None:
    first = 2 * B * (3 * 3 * 4) * (3 * 3 * 2)
    second = 2 * B * (2 * 2 * 6) * (2 * 2 * (2 if everywhere.backend == TORCH else 4))  # two groups on torch
    depthwise = 2 * B * (2 * 2 * 18) * (2 * 2)
    dense = 2 * B * 72 * 3
    assert everywhere("convolutions", "fp32")["flops"] == {"fp32": 2 * first + 3 * (second + depthwise + dense)}


def test_bytes(runs: Runs) -> None:
    weights = 4 * 16 + 16 + 16 * 3 + 3
    adam, pure = runs("two_epochs_adam", "fp32")["memory"], runs("fit", "bf16-pure")["memory"]
    assert (adam["parameters_bytes"], adam["gradients_bytes"]) == (4 * weights, 4 * weights)
    assert 0 <= adam["optimizer_bytes"] - 2 * 4 * weights <= 16  # and the learning rate and the count of updates
    assert (pure["parameters_bytes"], pure["gradients_bytes"]) == (2 * weights, 2 * weights)
    kept = 4 * (B * 4 + B * 16 + B * 3)  # the input, what the hidden layer gives, what the loss keeps of the logits
    found = runs("fit", "fp32")["memory"]["activations_bytes"]
    more = 4 if runs.backend == TF else 8 * B * 8  # a number of samples; torch keeps the labels too, and masks
    assert kept <= found <= kept + more


def test_framework_is_named_with_its_backend(everywhere: Runs) -> None:
    assert f" on {everywhere.backend}" in everywhere("fit", "fp32")["framework"]


# --- training loops of the script's own ---------------------------------------------------------------------------------------


def test_own_loop_sees_true_losses_and_gradients(runs: Runs) -> None:
    plain, found = runs("loop", "plain")["script"], runs("loop", "fp16")
    for name in ("losses", "norms", "weights"):
        assert close(found["script"][name], plain[name], 0.02), name
        assert found["script"][name] != plain[name]
    assert close(runs("loop", "fp32")["script"]["weights"], plain["weights"], 1e-6)
    assert close(found["steps"]["loss"], found["script"]["losses"], 1e-6)
    assert close(found["steps"]["grad_norm"], [0.5] * STEPS, 1e-5)  # clipped by the script
    assert found["steps"]["loss_scale"] == [65536.0] * STEPS


def test_gradients_of_weights_inside_a_backward_pass_are_unscaled_once() -> None:
    found, expected = RUNS[TORCH]("inside_loop", "fp16"), RUNS[TORCH]("loop", "fp16")
    for name in ("losses", "norms", "weights"):
        assert close(found["script"][name], expected["script"][name], 1e-6), name


def test_overflow_in_a_loop_is_skipped(runs: Runs) -> None:
    found = runs("overflowing_loop", "fp16")
    assert found["steps"]["skipped"] == [False, False, True, False, False, False]
    assert found["steps"]["loss_scale"] == [65536.0] * 2 + [32768.0] * 4
    assert found["script"]["iterations"] == [5]
    assert close(found["script"]["losses"][3:], runs("loop", "plain")["script"]["losses"][3:], 0.1)


def test_own_train_step_without_scale_loss(runs: Runs) -> None:
    """Keras itself divides such gradients by a scale that they were never multiplied by."""
    found = runs("own_step", "fp16")
    assert close(found["script"]["weights"], runs("fit", "fp16")["script"]["weights"], 1e-3)
    assert found["steps"]["loss_scale"] == [65536.0] * STEPS


def test_two_optimizers_after_one_backward_pass_make_one_step(runs: Runs) -> None:
    found = runs("two_optimizers", "fp16")
    assert close(found["steps"]["loss"], runs("fit", "fp16")["steps"]["loss"], 1e-3)


def test_losses_of_two_optimizers_in_turn_are_told_apart(runs: Runs) -> None:
    found = runs("gan", "fp32")
    assert close(found["steps"]["loss"], found["script"]["losses"], 1e-6)
    assert [(loss["name"], loss["steps"]) for loss in found["steps"]["losses"]] == [
        ("judges", [*range(1, 2 * STEPS, 2)]),
        ("makes", [*range(2, 2 * STEPS + 1, 2)]),
    ]
    for loss, first in zip(found["steps"]["losses"], (0, 1), strict=True):
        assert close(loss["values"], found["script"]["losses"][first::2], 1e-6)
    assert runs("two_optimizers", "fp16")["steps"]["losses"] == runs("fit", "fp16")["steps"]["losses"] == []


@pytest.mark.parametrize("policy", ["as-is", "fp32", "fp16"])
def test_a_loss_counts_times_the_gradient_that_its_backward_pass_starts_from(runs: Runs, policy: str) -> None:
    assert runs("given_gradients", policy)["steps"]["loss"] == [2.0, -2.0, 2.5]


@pytest.mark.parametrize(
    ("backend", "case", "tolerance"),
    [
        *((TF, case, 1e-4) for case in ("eager", "several_a_call", "compiled_by_xla")),
        *((JAX, case, 1e-5) for case in ("eager", "several_a_call")),
    ],
)
def test_every_way_of_running_a_step_gives_the_same(backend: str, case: str, tolerance: float) -> None:
    found, expected = RUNS[backend](case, "fp16"), RUNS[backend]("fit", "fp16")
    assert close(found["script"]["weights"], expected["script"]["weights"], 1e-6 if backend == JAX else 1e-4)
    for column in ("loss", "grad_norm", "loss_scale", "skipped"):
        assert close(found["steps"][column], expected["steps"][column], tolerance), column
    assert found["flops"] == expected["flops"]


def test_traced_loop_gives_what_the_eager_one_gives() -> None:
    found, expected = (RUNS[TF](case, "fp16") for case in ("traced_loop", "loop"))
    assert close(found["script"]["weights"], expected["script"]["weights"], 1e-4)
    assert close(found["steps"]["loss"], expected["steps"]["loss"], 1e-4)
    assert found["flops"] == expected["flops"]


def test_a_jitted_loop_of_the_script_on_jax() -> None:
    plain, found = (RUNS[JAX]("stateless_loop", policy) for policy in ("plain", "fp32"))
    assert close(found["script"]["weights"], plain["script"]["weights"], 1e-6)
    assert close(found["steps"]["loss"], plain["script"]["losses"], 1e-6)
    assert found["left_alone"] == []


def test_steps_of_one_call_share_its_time() -> None:
    found = RUNS[TF]("several_a_call", "fp16")
    times = found["steps"]["time_ms"]
    assert [len(set(times[:4])), len(set(times[4:])), len(set(times))] == [1, 1, 2]
    reason = "time a step not known of each: one call of a traced function makes several steps; each is given an even share of its time"
    assert reason in found["left_alone"]


def test_a_run_is_stopped_after_a_number_of_steps() -> None:
    whole, found = (RUNS[TORCH](case, "fp16") for case in ("fit", "stopped"))
    assert (len(whole["steps"]["loss"]) > 3, found["steps"]["loss"]) == (True, whole["steps"]["loss"][:3])
    assert whole["input_elements"] == found["input_elements"] == B * 4


# --- seeds and refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "case"), [*((name, "fit") for name in BACKENDS), (TF, "random_layers"), (TORCH, "random_layers")]
)
def test_seeds(backend: str, case: str) -> None:
    none, zero, one = (RUNS[backend](case, "fp32", seed)["steps"]["loss"] for seed in (None, 0, 1))
    assert none == zero
    assert all(abs(a - b) > 1e-3 for a, b in zip(zero[:2], one[:2], strict=True))


NO_FP8 = (
    "policy fp8 has no dtype policy in Keras, which trains in FP8 only layers that are quantized after "
    "they are built; allowed: fp32, tf32, fp16, bf16, fp16-master, bf16-master, fp16-pure, bf16-pure"
)
NO_MODULE = (
    "no module is named 'hed'; did you mean head? Allowed: hidden, sequential.hidden, head, sequential.head, sequential"
)
AT_FLOOR = "gradients overflow at the loss scale's floor of {}, update {}"


@pytest.mark.parametrize(
    ("case", "policy", "error"),
    [
        ("fit", "fp8", f"PolicyError: {NO_FP8}"),
        ("fit", "fp16:fp32_modules=hed", f"PolicyError: {NO_MODULE}"),
        ("overflowing_loop", "fp16:min_scale=65536", f"ScaleFloorError: {AT_FLOOR.format(65536, 3)}"),
    ],
)
def test_refusals(runs: Runs, case: str, policy: str, error: str) -> None:
    assert runs(case, policy) == {"error": error}


def test_a_scale_at_its_floor_ends_a_script_on_jax() -> None:
    assert RUNS[JAX]("long_fit", FLOOR) == {"error": f"ScaleFloorError: {AT_FLOOR.format('1.67772e+07', 1)}"}
