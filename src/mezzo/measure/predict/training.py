"""Record a model's training as a tape: the setup, then steps in the order of the usual loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from mezzo.engine.casts.casting import Casting
from mezzo.engine.casts.conversion import cast_model
from mezzo.engine.optimizers.master_weights import MasterWeights, NoMasters
from mezzo.formats import FP32
from mezzo.measure.checkpointing.plan import plan_for
from mezzo.measure.checkpointing.trace import trace
from mezzo.measure.predict.operations import cuda_operators
from mezzo.measure.predict.placeholder_numbers import placeholder_numbers, reading_frame
from mezzo.measure.predict.recorder import Recorder
from mezzo.measure.predict.result_sizes import largest_sizes
from mezzo.measure.predict.tape import TrainingTape
from mezzo.policy import Policy

ZeroGrad = Literal["before_forward", "before_backward", "after_step"]
"""Where the loop sets gradients to None."""
STEPS = 2  # the optimizer's state is created in the first step, so the second has the peak


def record_training(
    build: Callable[[], nn.Module],
    batch_of: Callable[[int], Mapping[str, Tensor]],
    loss_of: Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, Any]],
    *,
    batch: int,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    policy: Policy | None = None,
    zero_grad: ZeroGrad = "before_forward",
    steps: int = STEPS,
    gpu: bool = True,
    checkpoint: str | None = None,
) -> TrainingTape:
    """Return the tape of a training on fake tensors.

    Args:
        build: builds the model.
        batch_of: creates the inputs for a batch size; called inside a fake-tensor mode.
        loss_of: returns the loss, and objects that the loop's variables keep alive until the next step, such as the model's outputs.
        batch: the batch size.
        optimizer: creates the optimizer from parameters.
        policy: the precision; None for FP32.
        zero_grad: where gradients are set to None.
        steps: how many steps to record.
        gpu: whether to record a GPU's operations, not a CPU's.
        checkpoint: a plan of ``mezzo.checkpoint`` by name, or its budget, for the model; None to keep everything.
    """
    model = _built(build, policy)
    model.train()
    recorder = Recorder(batch=batch, units=units_of(model), gpu=gpu)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    _make_fake(model, fake)
    region = region_of(policy)
    if checkpoint is not None:
        _checkpoint(model, fake, region, lambda: loss_of(model, batch_of(batch)), checkpoint)
    with recorder:
        _add_model(model, recorder)
        recorder.begin("optimizer")  # some optimizers create their state when they are constructed
        built_optimizer = optimizer(model.parameters())
        masters = _masters(model, built_optimizer, policy, recorder)
        for group in built_optimizer.param_groups:
            if gpu and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True  # what torch chooses on a GPU
        kept: Any = None
        for _ in range(steps):
            recorder.step_begins()
            recorder.begin("inputs")
            with fake:
                inputs = batch_of(batch)
            if zero_grad == "before_forward":
                built_optimizer.zero_grad()
            recorder.begin("forward")
            with (
                fake,
                _without_numbers(recorder),
                cuda_operators() if gpu else nullcontext(),
                recorder.modules_named(model),
            ):
                with region():
                    loss, outputs = loss_of(model, inputs)
                kept = outputs
                if zero_grad == "before_backward":
                    built_optimizer.zero_grad()
                recorder.backward_begins()
                with nullcontext() if checkpoint is None else backward_region_of(policy)():
                    loss.backward()
            del loss, outputs
            recorder.label((p.grad for p in model.parameters() if p.grad is not None), "gradients")
            recorder.update_begins()
            masters.pull_gradients()
            with _without_numbers(recorder):
                built_optimizer.step()
            masters.push()
            free_gradients(masters, model)
            recorder.label(optimizer_state(built_optimizer), "optimizer")
            if zero_grad == "after_step":
                built_optimizer.zero_grad()
            del inputs
    del kept
    return recorder.tape


@contextmanager
def _without_numbers(recorder: Recorder) -> Iterator[None]:
    """Answer what the block reads of fake tensors, and note the lines in the tape."""
    tape = recorder.tape
    with (
        placeholder_numbers(partial(_note_line, tape.read_at), some_are_real=True),
        largest_sizes(partial(_note_line, tape.sized_at)),
    ):
        yield


def _note_line(lines: list[str]) -> None:
    frame = reading_frame()
    line = "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    if line not in lines:
        lines.append(line)


def units_of(model: nn.Module) -> dict[str, int]:
    """Return the bytes of parameters by layer of a list, named up to its number; ``""`` for parameters outside of lists."""
    units: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        end = next((index + 1 for index, part in enumerate(parts) if part.isdecimal()), 0)
        unit = ".".join(parts[:end])
        units[unit] = units.get(unit, 0) + parameter.numel() * parameter.element_size()
    return units


def _checkpoint(
    model: nn.Module,
    fake: FakeTensorMode,
    region: Callable[[], AbstractContextManager[Any]],
    forward: Callable[[], Any],
    wanted: str,
) -> None:
    """Checkpoint the fake ``model`` by the plan that ``mezzo.checkpoint`` would choose."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # blocks that fill a cache cannot run again: transformers turns it off as well

    def run(_: nn.Module) -> Any:
        with fake, cuda_operators(), region():
            return forward()

    plan_for(trace(model, run), wanted).apply(model)


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors that ``optimizer`` keeps."""
    return [t for t in tree_leaves([dict(s) for s in optimizer.state.values()]) if isinstance(t, Tensor)]


def _masters(
    model: nn.Module, optimizer: torch.optim.Optimizer, policy: Policy | None, recorder: Recorder
) -> MasterWeights | NoMasters:
    """Return the FP32 masters of a cast model, in the optimizer's groups."""
    if policy is None or not policy.master_weights:
        return NoMasters()
    masters = MasterWeights(())
    masters.begin([optimizer])
    updated = ((p, masters.master_or_self(p)) for p in model.parameters())
    recorder.add_existing((master for p, master in updated if master is not p), "optimizer")
    return masters


def free_gradients(masters: MasterWeights | NoMasters, model: nn.Module) -> None:
    """Free the masters' FP32 gradients, which exist only during an update."""
    for parameter in model.parameters():
        if masters.master_or_self(parameter) is not parameter:
            masters.master_or_self(parameter).grad = None


def _built(build: Callable[[], nn.Module], policy: Policy | None) -> nn.Module:
    """Build the model, cast if the policy casts models; its weights take memory only if its constructor reads numbers."""
    try:
        with torch.device("meta"):
            model = build()
    except (RuntimeError, NotImplementedError):
        model = build()
    if policy is not None and policy.casting == "model":
        cast_model(model, policy, "cpu")
    return model


def _make_fake(model: nn.Module, fake: FakeTensorMode) -> None:
    """Replace the model's parameters and buffers by fake ones; tied weights stay tied."""
    fakes: dict[int, Any] = {}

    def faked(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            with fake, torch.no_grad():
                copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            fakes[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
        found: Tensor = fakes[id(tensor)]
        return found

    for module in model.modules():
        tensors: Any
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: faked(tensor) for name, tensor in tensors.items() if tensor is not None})


def _add_model(model: nn.Module, recorder: Recorder) -> None:
    # The order of Module.to: children first, then a module's own parameters and buffers.
    for child in model.children():
        _add_model(child, recorder)
    recorder.add_existing((p for p in model._parameters.values() if p is not None), "parameters")
    recorder.add_existing((b for b in model._buffers.values() if b is not None), "buffers")


def region_of(policy: Policy | None) -> Callable[[], AbstractContextManager[Any]]:
    """Return what opens the region of ``policy``, its casts applied natively; what CUDA refuses is refused."""
    if policy is None or not policy.lowers:
        return nullcontext
    return Casting.of(policy.replace(arithmetic="native", accumulate=FP32.name), "cpu", stands_for_cuda=True).region


def backward_region_of(policy: Policy | None) -> Callable[[], AbstractContextManager[Any]]:
    """Return what opens the region in which checkpointed modules run again."""
    if policy is None or not policy.lowers:
        return nullcontext
    return Casting.of(policy.replace(arithmetic="native", accumulate=FP32.name), "cpu", stands_for_cuda=True).backward
