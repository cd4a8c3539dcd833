"""One training step, written as each library recommends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mezzo
from benchmarks.gpu.contest.cases import Way
from benchmarks.gpu.contest.workloads import Workload
from mezzo.devices import this_device

LEARNING_RATE, CLIP = 1e-4, 1.0
Batch = tuple[Tensor, ...]


class NotHereError(Exception):
    """A way cannot run on this machine."""


@dataclass
class Contestant:
    """A way that is ready to train."""

    step: Callable[[Batch], Tensor]
    note: str = ""


def build(way: Way, work: Workload, example: Batch, device: str, *, tiny: bool) -> Contestant:
    """Return a way ready to train.

    Raises:
        NotHereError: the device cannot do it, or this Mezzo lacks it.
        ImportError: a library is not installed.
    """
    model = work.model(device)
    if way.mode == "reduce-overhead":
        model.compile(**({"backend": "aot_eager"} if tiny else {"mode": way.mode}))
    elif "compiled" in way.mode:
        model.compile(backend="aot_eager" if tiny else "inductor")
    builders = {"mezzo": _mezzo, "torch.amp": _torch_amp, "accelerate": _accelerate, "fabric": _fabric}
    return builders[way.library](way, model, work, example, device)


def _mezzo(way: Way, model: nn.Module, work: Workload, example: Batch, device: str) -> Contestant:
    policy = mezzo.Policy.parse(way.policy)
    if policy.compute == "fp8" and device == "cuda":
        support = this_device(device).support(policy.required_formats[0])
        if support.level != "native":
            raise NotHereError(support.reason)
    optimizer = mezzo.AdamW(model.parameters(), lr=LEARNING_RATE)
    session = mezzo.Session(model, optimizer, policy=policy, clip_norm=CLIP)
    reasons = {choice.what: choice.value for choice in session.explain()}
    note = f"update: {reasons['update']}" + ("; emulated arithmetic" if session.casting.emulates else "")
    if "captured" in way.mode:
        captured = session.capture(lambda *inputs: work.loss(model, *inputs), *example)
        return Contestant(lambda batch: captured(*batch), note)

    def step(batch: Batch) -> Tensor:
        with session.autocast():
            loss = work.loss(model, *batch)
        session.step(loss)
        return loss

    return Contestant(step, note)


def _torch_amp(way: Way, model: nn.Module, work: Workload, example: Batch, device: str) -> Contestant:
    captured = way.mode == "captured"
    if captured and device != "cuda":
        raise NotHereError("a CUDA graph needs a CUDA device")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, capturable=captured)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(way.policy)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)

    def step(batch: Batch) -> Tensor:
        if way.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        # No cache while capturing: a graph would replay with a cast of the weight from before the capture.
        with nullcontext() if dtype is None else torch.autocast(device, dtype=dtype, cache_enabled=not captured):
            loss = work.loss(model, *batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    if captured:
        return Contestant(_in_a_graph(step, model, optimizer, scaler, example), "AdamW(fused=True, capturable=True)")
    return Contestant(step, "AdamW(fused=True)")


def _in_a_graph(
    step: Callable[[Batch], Tensor], model: nn.Module, optimizer: Any, scaler: Any, example: Batch
) -> Callable[[Batch], Tensor]:
    """Return the step as a CUDA graph, as torch's notes on whole-network capture recommend.

    With a fused optimizer the scaler reads nothing back, so it can be captured too.
    """
    inputs = tuple(t.clone() for t in example)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), rewound(model, optimizer, scaler):
        for _ in range(3):
            step(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(inputs)
    written = (model, optimizer, scaler)  # a graph stores addresses and does not keep their tensors alive

    def replay(batch: Batch, _keep: Any = written) -> Tensor:
        for place, tensor in zip(inputs, batch, strict=True):
            place.copy_(tensor)
        graph.replay()
        return loss

    return replay


@contextmanager
def rewound(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> Iterator[None]:
    """Restore everything after the block, as if no step had run: every way starts from the same weights."""
    weights, scale = copy.deepcopy(model.state_dict()), scaler.state_dict()
    yield
    model.load_state_dict(weights)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
    scaler.load_state_dict(scale)


def _accelerate(way: Way, model: nn.Module, work: Workload, example: Batch, device: str) -> Contestant:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # Accelerate fixes one precision per process, and other cases run in this one
    accelerator = Accelerator(mixed_precision=way.policy, cpu=device == "cpu")
    plain = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    prepared, optimizer = accelerator.prepare(model, plain)

    def step(batch: Batch) -> Tensor:
        loss = work.loss(prepared, *batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Contestant(step, "AdamW(fused=True)")


def _fabric(way: Way, model: nn.Module, work: Workload, example: Batch, device: str) -> Contestant:
    from lightning.fabric import Fabric

    precision: Any = {"fp16": "16-mixed", "bf16": "bf16-mixed"}[way.policy]
    fabric = Fabric(accelerator=device, devices=1, precision=precision)
    fused = way.policy != "fp16"  # Fabric refuses to clip with a fused optimizer and a loss scale
    plain = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
    prepared, optimizer = fabric.setup(model, plain)

    def step(batch: Batch) -> Tensor:
        loss = work.loss(prepared, *batch)
        fabric.backward(loss)
        fabric.clip_gradients(prepared, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Contestant(step, f"AdamW({'fused' if fused else 'foreach'}=True)")
