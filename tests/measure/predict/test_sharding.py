"""Jobs of several GPUs: bytes of a rank by hand, and seconds that are sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from helpers_predict import trained_tape
from mezzo.errors import UsageError
from mezzo.gpus import GPUS, gpu_named
from mezzo.measure.predict.sharding import LINK_SHARE, GpuGroup, check_job, link_of
from mezzo.measure.predict.tape import TrainingTape
from mezzo.measure.predict.tape_memory import bytes_by_kind, predict_memory

LAYER = 4 * 256 * 256
HEAD = 4 * 256 * 8


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))
        self.head = nn.Linear(256, 8, bias=False)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def _tape(optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW) -> TrainingTape:
    return trained_tape(_Layers, 256, batch=2, optimizer=optimizer, zero_grad="after_step")


def test_units_are_the_layers_and_the_rest() -> None:
    assert _tape().units == {**{f"layers.{i}": LAYER for i in range(4)}, "": HEAD}


def test_one_gpu_is_the_tape_itself() -> None:
    tape = _tape()
    assert GpuGroup().tape_of_rank(tape) is tape
    assert GpuGroup().communication_s(tape, gpu_named("a100-80gb")) == 0.0


def test_data_parallel_adds_buckets_of_the_size_of_the_gradients() -> None:
    tape = _tape()
    alone = predict_memory(tape, workspace_bytes=0).allocated_bytes
    several = predict_memory(GpuGroup(8, "ddp").tape_of_rank(tape), workspace_bytes=0).allocated_bytes
    assert several - alone == 4 * LAYER + HEAD


def test_a_rank_holds_its_share_of_states() -> None:
    rank = GpuGroup(8, "fsdp").tape_of_rank(_tape())
    found = bytes_by_kind(rank, until=rank.optimizer_starts[-1])
    share = (4 * LAYER + HEAD) // 8
    assert {kind: found[kind] for kind in ("parameters", "gradients", "optimizer")} == {
        "parameters": share,
        "gradients": share,
        "optimizer": 2 * share,
    }


def test_two_layers_are_whole_while_a_step_computes_and_one_is_scattered_in_its_backward_pass() -> None:
    rank, tape = GpuGroup(8, "fsdp").tape_of_rank(_tape()), _tape()
    for place, whole in (("step", 2 * LAYER + HEAD), ("backward", 3 * LAYER + 2 * HEAD), ("optimizer", 0)):
        begins, ends = getattr(rank, f"{place}_starts")[-1], getattr(tape, f"{place}_starts")[-1]
        num = {"step": 3, "backward": 2, "optimizer": 5}[place]  # blocks that come or go at the mark
        held = bytes_by_kind(rank, until=begins + num - 1).get("temporaries", 0)
        assert held - bytes_by_kind(tape, until=ends - 1).get("temporaries", 0) == whole


def test_what_an_update_computes_with_is_a_share_and_what_a_pass_does_is_whole() -> None:
    tape = _tape()
    rank = GpuGroup(8, "fsdp").tape_of_rank(tape)
    begin, pairs = tape.optimizer_starts[-1], list(zip(tape.blocks, rank.blocks, strict=False))
    update = {event for event in tape.events[begin:] if event >= 0}
    inside = [pair for number, pair in enumerate(pairs) if number in update and pair[0].kind == "temporaries"]
    activations = [pair for pair in pairs if pair[0].kind == "activations"]
    assert {one.size_bytes for one, _ in inside} >= {LAYER, HEAD}
    assert all(share.size_bytes == -(-one.size_bytes // 8) for one, share in inside)
    assert activations
    assert all(one == whole for one, whole in activations)


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1)])
def test_every_block_is_freed_as_often_as_it_was(shard: Any, optimizer: Any) -> None:
    tape = _tape(optimizer)
    rank = GpuGroup(2, shard).tape_of_rank(tape)
    alive = lambda one: sum(1 if event >= 0 else -1 for event in one.events)  # noqa: E731
    assert alive(rank) - alive(tape) == (shard == "ddp")  # buckets stay
    assert predict_memory(rank).fits


def test_what_is_sent_by_hand() -> None:
    gpu, tape = gpu_named("a100-80gb"), _tape()
    size = 4 * LAYER + HEAD
    assert GpuGroup(8, "ddp").communication_s(tape, gpu) == pytest.approx(2 * 7 / 8 * size / (300e9 * LINK_SHARE))
    assert GpuGroup(8, "fsdp").communication_s(tape, gpu) == pytest.approx(3 * 7 / 8 * size / (300e9 * LINK_SHARE))


def test_communication_hides_behind_computation_but_for_one_layer() -> None:
    tape, job = _tape(), GpuGroup(2, "fsdp")
    alone = LAYER / (4 * LAYER + HEAD)
    assert job.step_s(10.0, 1.0, tape) == pytest.approx(10.0 + alone, rel=1e-3)
    assert job.step_s(0.1, 10.0, tape) == pytest.approx(10.0, rel=1e-3)


def test_every_gpu_has_a_link() -> None:
    assert {name for name, gpu in GPUS.items() if link_of(gpu).bytes_per_s < 10e9} == set()
    assert link_of(gpu_named("a100-pcie-80gb")).name == "PCIe 4 x16"
    to_host = {name: link_of(gpu, to="host").name for name, gpu in GPUS.items()}
    assert to_host["a100-80gb"] == "PCIe 4 x16"
    assert {name for name, link in to_host.items() if not link.startswith("PCIe")} == {"gh200-96gb"}


@pytest.mark.parametrize(("num_gpus", "shard"), [(8, "zero"), (1, "fsdp")])
def test_a_job_that_cannot_be(num_gpus: int, shard: str) -> None:
    with pytest.raises(UsageError):
        check_job(num_gpus, shard)
