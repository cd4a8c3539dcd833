"""Captured steps, streams and the allocator on a GPU: what can be captured equals eager steps to the bit, what cannot says why."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from gpu_jobs import CUDA, NEEDS_A_GPU, Ask, Job, mezzo, plan

from mezzo import SGD, Session
from paths import TESTS

sys.path.insert(0, str(TESTS / "engine"))

from test_captured_step import batches, built, eager_step, everything, loss_of

POLICIES = ["fp32", "tf32", "bf16", "fp16", "bf16-master", "fp16-master", "bf16-pure", "fp16-pure"]
BROKEN = {
    # what the step does, a part of the hint
    "live loss": "del loss",
    "reduce-overhead": "mode='reduce-overhead'",
    "item": "waits for the host",
    "checkpoint": "preserve_rng_state=False",
}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
plan(
    "test_gpu_captures",
    **{what: Job(("{here}/broken_captures.py", "{device}", what)) for what in [*BROKEN, "out of memory", "dropout"]},
    stream=mezzo("run", "--policy", "bf16", "{here}/streams_script.py", "{device}", "stream"),
    default=mezzo("run", "--policy", "bf16", "{here}/streams_script.py", "{device}", "default"),
    expandable=mezzo(
        "run", "--policy", "bf16", "{here}/streams_script.py", "{device}", "default", variables=EXPANDABLE
    ),
    memory=mezzo("run", "--policy", "bf16", "{here}/streams_script.py", "{device}", "out of memory"),
)
on_a_gpu = pytest.mark.parametrize("device", [CUDA])


def stepped(policy: str, optimizer: str, settings: dict[str, Any], *, captured: bool) -> tuple[Any, list[float]]:
    """Return a session after eager or captured steps, without dropout, and its losses."""
    one = built(policy, optimizer, device="cuda", **settings)
    one.models[0].dropout = 0.0
    data = batches(4 * settings.get("accumulate", 1) + 2, device="cuda")
    step = one.capture(loss_of(one), *batches(1, device="cuda")[0]) if captured else None
    losses = [step(x, y).clone() if step else eager_step(one, x, y) for x, y in data]
    return one, torch.stack(losses).tolist()


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.5, "accumulate": 2}], ids=["", "clipped, accumulated"])
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW 8bit", "SGD"])
@pytest.mark.parametrize("policy", POLICIES)
@on_a_gpu
def test_captured_steps_equal_eager_ones_to_the_bit(
    policy: str, optimizer: str, settings: dict[str, Any], device: str
) -> None:
    one, losses = stepped(policy, optimizer, settings, captured=True)
    other, expected = stepped(policy, optimizer, settings, captured=False)
    assert losses == expected
    assert (one.loss_scale, one.skipped, one.updates) == (other.loss_scale, other.skipped, other.updates)
    for a, b in zip(everything(one), everything(other), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@on_a_gpu
def test_dropout_draws_new_numbers_in_every_replay(ended: Ask, device: str) -> None:
    (said,) = ended("dropout", device).well().said
    assert len(set(said["losses"])) == len(said["losses"])  # the same batch, and weights that stay
    assert said["kept"] == pytest.approx([0.75] * len(said["kept"]), abs=0.02)


@pytest.mark.parametrize("what", BROKEN)
@on_a_gpu
def test_what_cannot_be_captured_says_what_to_do(ended: Ask, what: str, device: str) -> None:
    """Some torch versions capture some of them; none refuses without the hint."""
    (said,) = ended(what, device).well().said
    assert (said["captured"] and what != "item") or BROKEN[what] in said["hint"], said


@pytest.mark.parametrize("what", BROKEN)
@on_a_gpu
def test_a_session_trains_on_after_a_capture_that_failed(ended: Ask, what: str, device: str) -> None:
    (said,) = ended(what, device).well().said
    assert said["eager"], said


@on_a_gpu
def test_out_of_memory_in_a_capture_comes_as_it_is(ended: Ask, device: str) -> None:
    (said,) = ended("out of memory", device).well().said
    assert (said["captured"], said["error"]) == (False, "OutOfMemoryError"), said


@on_a_gpu
def test_a_run_out_of_memory_leaves_the_hint(ended: Ask, device: str) -> None:
    run = ended("memory", device)
    assert run.code != 0
    assert "OutOfMemoryError" in run.errors + run.printed
    record = json.loads((run.out / "record.json").read_text(encoding="utf-8"))
    held = record["out_of_memory"]
    assert (held["step"], held["asked_bytes"]) == (6, 1 << 42)
    assert held["held_bytes"]["parameters"] > 0


@pytest.mark.parametrize(
    ("device", "kind"),
    [pytest.param("cpu", "default", marks=pytest.mark.slow)]
    + [pytest.param("cuda", kind, marks=NEEDS_A_GPU) for kind in ("stream", "default")],
)
def test_times_are_those_of_the_stream_that_the_script_chose(ended: Ask, device: str, kind: str) -> None:
    """Every fifth step keeps the device busy for 2e8 cycles, at least 50 ms; the host waits for none."""
    run = ended(kind, device)
    times_ms = run.record["steps"]["time_ms"]
    assert min(times_ms) > 0
    assert sum(times_ms) <= run.wall_s * 1e3
    busy = run.said[-1]["busy"]
    if device == "cuda":
        assert min(times_ms[number] for number in busy) >= 50.0
        quiet = sorted(t for n, t in enumerate(times_ms[10:], start=10) if n not in busy)
        assert quiet[len(quiet) // 2] < 50.0


@on_a_gpu
def test_peaks_are_recorded_with_expandable_segments(ended: Ask, device: str) -> None:
    one, other = (ended(name, device).record["memory"] for name in ("expandable", "default"))
    assert 0 < one["cuda_allocated_bytes"] <= one["cuda_reserved_bytes"]
    assert one["cuda_allocated_bytes"] == pytest.approx(other["cuda_allocated_bytes"], rel=0.1)
    assert ended("expandable", device).record["environment"]["variables"].items() >= EXPANDABLE.items()


@on_a_gpu
def test_a_replay_survives_that_cublas_workspaces_are_cleared(device: str) -> None:
    """``torch.compile(mode="reduce-overhead")`` clears them: a graph must not use one that then belongs to others."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16384, 64, bias=False, device=device)  # a long sum, which cuBLAS splits over a workspace
    session = Session(model, SGD(model.parameters(), lr=0.0), policy="bf16")
    batch = torch.randn(64, 16384, device=device)
    step = session.capture(lambda x: model(x).square().mean(), batch)
    before = step(batch).item()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    canary = torch.full((2**26,), 7.0, device=device)
    assert [step(batch).item() for _ in range(5)] == [before] * 5
    assert bool((canary == 7.0).all())
