"""Two processes against one on the same data: weights, norms, scales and skipped updates; and when the two talk."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distributed_runs
from distributed_runs import (
    RUNS,
    WORLD,
    Found,
    Run,
    both_kinds,
    several_losses,
    train,
    two_backward_passes,
    two_players,
)
from helpers_engine import mlp
from mezzo import Session
from mezzo.engine.processes.shards import BUCKET_BYTES, buckets, is_shared, local, parts, shared_as
from mezzo.engine.scaling import DynamicScale
from mezzo.engine.state import FloorWatch
from mezzo.engine.window import Window
from processes import left_by_ranks

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Results:
    """Return what two processes found, by the names of their runs."""
    return left_by_ranks(distributed_runs.__file__, WORLD, tmp_path_factory, worker_id)


def close(a: Any, b: Any) -> bool:
    """Return whether two nests of tensors and numbers agree but for the order of sums."""
    if isinstance(a, Tensor):
        return torch.allclose(a, b, rtol=2e-6, atol=1e-7)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
    return math.isclose(a, b, rel_tol=2e-6) or (math.isnan(a) and math.isnan(b)) or a == b


def same(a: Any, b: Any) -> bool:
    """Return whether two nests of tensors, numbers and strings agree to the bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_one(name: str, results: Results) -> None:
    both: list[Found] = [found[name] for found in results]
    assert [found.error for found in both] == ["", ""]
    one = train(replace(RUNS[name], kind="one"))
    for part in ("weights", "norms", "scales", "skipped", "rates"):
        assert same(getattr(both[0], part), getattr(both[1], part)), part
        assert close(getattr(both[0], part), getattr(one, part)), part
    assert both[0].skipped[-1] == (RUNS[name].spoiled is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_no_all_reduce_before_the_last_backward_pass_of_a_window(name: str, results: Results) -> None:
    run, (found, other) = RUNS[name], [found[name] for found in results]
    assert found.reduced == other.reduced
    for number, (*micro_batches, update) in enumerate(found.reduced):
        learns_graph = number == 0 and "static_graph" in run.options
        early, last = micro_batches[learns_graph : run.accumulate - 1], micro_batches[run.accumulate - 1 :]
        first_loss = number == 0
        # Shards: is it the sum of squares alone that left FP32's range? mezzo's optimizers take it in FP64.
        asked = run.spoiled is not None and run.spoiled[0] == number and "mezzo" not in run.optimizer
        if run.kind == "ddp":
            assert early == [[]] * len(early)
            assert all("allreduce" in said for said in last)
            gradients = 1 if run.micro_batches else 0  # a short window: one bucket, at the update
            assert update == ["allreduce"] * (first_loss + run.weighted + gradients)
        else:
            scattered = ["reduce_scatter_base"] * 2 if run.kind == "fsdp" else []  # nothing to scatter over one process
            assert early == [scattered] * len(early)
            assert last == [scattered + ["allreduce"] * 2 * (run.kind == "hsdp")] * len(last)
            assert update == ["allreduce"] * (first_loss + 1 + run.unscaled + asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if "mezzo" in run.optimizer])
def test_an_update_in_one_pass_reads_nothing_back(name: str, results: Results) -> None:
    reads = [found[name].host_reads for found in results]
    scheduled = int(RUNS[name].scheduled)  # on a CPU a scheduler checks immediately whether it waits
    assert [each[1:] for each in reads] == [[scheduled] * (RUNS[name].updates - 1)] * WORLD


@pytest.mark.slow
def test_the_runs_differ_in_what_they_are_to_show(results: Results) -> None:
    clipped, free = (train(Run(kind="one", clip_norm=limit)) for limit in (0.3, None))
    assert not close(clipped.weights, free.weights)
    uneven, even = (train(Run(kind="one", rows=(6, 2), weighted=weighted)) for weighted in (True, False))
    assert not close(uneven.weights, even.weights)
    assert results[0]["ddp: overflow"].rates[-1] == pytest.approx(0.1 * 0.9**4)


SEVERAL = {
    "several losses": lambda: several_losses("one", [0, 1]),
    "two backward passes": lambda: two_backward_passes("one", slice(None)),
    "two players": lambda: two_players("one", slice(None)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_backward_passes_and_models(name: str, kind: str, results: Results) -> None:
    first, second = (found[f"{name} {kind}"] for found in results)
    assert same(first, second), first
    assert close(first, SEVERAL[name]())


@pytest.mark.slow
def test_replicated_gradients_count_once_next_to_sharded_ones(results: Results) -> None:
    first, second = (found["both kinds"] for found in results)
    assert same(first, second), first
    assert close(first, both_kinds(("one", "one"), slice(None)))


@pytest.mark.slow
def test_buffers_come_from_the_first_process_also_where_the_session_averages(results: Results) -> None:
    first, second = (found["buffers"] for found in results)
    assert same(first, second)
    assert first[0].abs().max() > 0


@pytest.mark.slow
def test_a_loss_that_overflows_in_one_process_lowers_its_own_scale_only(results: Results) -> None:
    _, scales, skipped, _ = results[0]["several losses ddp"]
    assert (scales, skipped) == ([2048.0, 512.0], 1)  # four updates, growth after three


# --- what all must be told --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_squares_beyond_fp32_in_one_process_skip_nothing(kind: str, results: Results) -> None:
    first, second = (found[f"large squares {kind}"] for found in results)
    assert first == second
    skipped, norm, scale = first
    assert (skipped, scale) == (0, 1024.0)
    assert 1e20 < norm < math.inf


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_an_overflow_in_one_shard_skips_the_update_everywhere(kind: str, results: Results) -> None:
    skipped, norms, scales = zip(*(found[f"one overflow {kind}"] for found in results), strict=True)
    assert (skipped, scales) == ((1, 1), (512.0, 512.0))
    assert not any(map(math.isfinite, norms))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_first_loss_that_is_not_finite_stops_all(kind: str, results: Results) -> None:
    (step, message), (other_step, other_message) = (found[f"loss {kind}"] for found in results)
    assert step == other_step == 1  # when the window closes
    assert message.endswith("here and not finite in another process before the first update")
    assert other_message == "the loss is nan before the first update"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "mezzo.SGD"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_scale_s_floor_stops_all_at_the_same_update(kind: str, optimizer: str, results: Results) -> None:
    first, second = (found[f"floor {kind} {optimizer}"] for found in results)
    assert first == second
    assert first[:3] == (2, 2, 1.0)
    assert first[3].startswith("gradients overflow at the loss scale's floor of 1; not finite: ")
    assert "2.weight (100%)" in first[3]


REFUSED = {
    "sharded masters": (
        "policy fp16-master casts weights, and fully_shard's are shards of FP32 weights\n"
        "  hint: use policy fp16: with mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16) the shards are the FP32 "
        "masters of 16-bit weights"
    ),
    "optimizer before fully_shard": (
        "SGD has 4 parameters, none of which is the model's\n"
        "  hint: build the optimizer from the parameters of the model that you pass to the session, after the model was copied or sharded; "
        "pass several models as a list"
    ),
    "a model left out": (
        "a parameter of shape (1, 3) belongs to this process alone, while several share others: each process would "
        "train its own copy\n"
        "  hint: wrap the whole model, call fully_shard on the outermost module too, and build optimizers after that"
    ),
    "hook before the session": (
        "the policy casts weights, and DistributedDataParallel with a process_group or a communication hook cannot be "
        "rebuilt for the cast weights\n"
        "  hint: register the hook after the session is built, leave process_group out, or use policy fp16 or bf16"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_together_is_refused(name: str, results: Results) -> None:
    assert [found[f"refused: {name}"] for found in results] == [REFUSED[name]] * WORLD


@pytest.mark.slow
def test_a_short_window_on_a_mesh_with_replicas_is_refused(results: Results) -> None:
    message = (
        "update() before the window's 2 backward passes, on a mesh that replicates shards: fully_shard keeps their sum to "
        "itself until the last\n"
        "  hint: drop the last, shorter window of an epoch, or shard over a mesh of one dimension"
    )
    assert [found["hybrid_short_window"] for found in results] == [message] * WORLD


@pytest.mark.slow
def test_parameters_used_in_one_process_only(results: Results) -> None:
    # Gradients of 1 in one of two processes average to 0.5, and weights of 1 lose that; what none uses stays.
    for found in results:
        assert [w.unique().tolist() for w in found["unused_parameters"]] == [[0.5], [0.5], [1.0]]


@pytest.mark.slow
def test_weights_in_16_bits_are_exchanged_in_16_bits(results: Results) -> None:
    expected = ([torch.float16], ["the last backward pass of a window averages the gradients"])
    assert [found["formats_exchanged"] for found in results] == [expected] * WORLD


@pytest.mark.slow
def test_a_group_of_processes_changes_nothing_for_a_model_that_is_not_shared(results: Results) -> None:
    assert [found["alone"] for found in results] == [False] * WORLD


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "mezzo.AdamW", "mezzo.AdamW 8bit"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_saved_state_resumes_as_if_nothing_had_happened(kind: str, optimizer: str, results: Results) -> None:
    for found in results:
        (kept, restored), (counts, restored_counts), names = found[f"state {kind} {optimizer}"]
        assert same(kept, restored)
        assert counts == restored_counts
        assert counts[:3] == (4, 0, 2048.0)
        assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]  # without a wrapper's prefix


# --- parts that need no other process ---------------------------------------------------------------------------------


def test_a_plain_tensor_is_its_own_shard() -> None:
    tensor, parameter = torch.ones(2), nn.Parameter(torch.ones(2))
    for each in (tensor, parameter):
        assert local(each) is each
        assert not is_shared(each)
        assert parts(each) == 1
    assert shared_as(parameter, tensor) is tensor


def test_one_process_has_nothing_to_explain() -> None:
    model = mlp(6, 3)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    assert [choice for choice in session.explain() if choice.what == "processes"] == []


BUCKETS = [
    # elements of FP32 and of FP16 gradients, elements in each bucket
    ([], [], []),
    ([4], [], [[4]]),
    ([4, 8], [2], [[4, 8], [2]]),
    ([BUCKET_BYTES // 4, 1], [], [[BUCKET_BYTES // 4], [1]]),
    ([1, BUCKET_BYTES // 2, 1], [], [[1], [BUCKET_BYTES // 2], [1]]),
]


@pytest.mark.parametrize(("wide", "narrow", "expected"), BUCKETS)
def test_buckets_hold_one_format_and_their_size(wide: list[int], narrow: list[int], expected: list[list[int]]) -> None:
    gradients = [torch.empty(n, device="meta") for n in wide]
    gradients += [torch.empty(n, device="meta", dtype=torch.float16) for n in narrow]
    assert [[g.numel() for g in bucket] for bucket in buckets(gradients)] == expected


def test_a_window_counts_in_a_given_unit() -> None:
    window = Window()
    window.open(2, 1)
    assert [window.share(weight, 0, unit=4.0) for weight in (4.0, 12.0)] == [0.5, 1.5]
    assert window.total() == 2.0
    window.mean_total = torch.tensor(1.25)  # of this process's 2 and another's 0.5
    assert window.total() is window.mean_total


def test_processes_see_the_floor_at_updates_that_do_not_depend_on_the_device() -> None:
    stuck = DynamicScale(1.0, min_scale=1.0), torch.ones(())
    watch = FloorWatch(torch.device("cpu"), several=True)
    watch.note([stuck])
    assert watch.reached()  # a CPU does not lag behind
    watch = FloorWatch(torch.device("cpu"))
    watch._every = 4  # as on a device that does
    seen = []
    for _ in range(12):
        watch.note([stuck])
        seen.append(watch.reached())
    assert [number for number, flag in enumerate(seen, 1) if flag] == [6, 10]  # sent at 4 and 8


def test_nothing_is_imported_for_models_that_are_not_shared() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import mezzo.engine.session; "
        "print([m for m in set(sys.modules) - before if m.startswith('torch.distributed')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
