"""Keras on PyTorch: backward passes are ``torch.autograd.backward``, and everything runs eagerly.

One step, the second, is counted by ``measure.flops`` and ``measure.memory``, as in a PyTorch script.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import keras
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.engine.gradients import ACCUMULATES
from mezzo.formats import FP16, FP32
from mezzo.launch.keras.state import Backend, CountedStep, KerasRun, reaches
from mezzo.launch.keras.updates import PolicyScale
from mezzo.launch.patches import Patches
from mezzo.launch.torch.own_amp import keep_fp32_products
from mezzo.launch.torch.update_losses import given_gradients, listed, reusable
from mezzo.measure.flops import FlopCounter
from mezzo.measure.memory import SavedTensors
from mezzo.measure.predict.operations import dropout_as_cuda
from mezzo.measure.predict.recorder import Recorder
from mezzo.measure.predict.script.observed import ObservedTape


class TorchBackend(Backend):
    """The hooks on torch as a backend of Keras (``launch.keras.state.Backend``)."""

    shares_scale = True

    def __init__(self, run: KerasRun) -> None:
        self._run = run
        self._losses: list[Tensor] = []
        self._divisor: Tensor | None = None
        """Divisor of the gradients of the running backward pass; None if they are not scaled."""
        self._in_backward = False
        self._num_inputs = 0
        """The elements of the first input of the layer that was last called from outside any layer."""
        self._trained = WeakIdKeyDictionary()
        """The values of trained variables."""
        self._count: ExitStack | None = None
        self._flops: FlopCounter | None = None
        self._saved = SavedTensors()
        self._counted = False
        self._step: TorchStep | None = None
        """Records a step for a prediction."""
        self.name = f"torch {torch.__version__}"

    def install(self, patches: Patches) -> None:
        """Patch torch's backward pass and Keras' variables."""
        patches.around(torch.autograd, "backward", self._backward)
        if self._run.observed is not None:
            self._counted = True  # only one dispatch mode at a time: the observer counts
            self._run.observed.install(patches)
        if self._run.tape is not None:
            self._counted, self._step = True, TorchStep(self._run)
            patches.around(keras.Layer, "__call__", self._called)
        variable = importlib.import_module("keras.src.backend.torch.core").Variable
        patches.around(variable, "_initialize", self._initialize)
        patches.around(torch.autograd, "grad", self._grad)
        policy = self._run.policy
        if policy is not None and not policy.lowers:
            keep_fp32_products(policy, patches, self._run.note_left_alone)

    def layer_called(self, inputs: Any) -> None:
        """Keep the size of the first input: a backward pass that follows makes it part of a step's."""
        if self._step is not None:
            self._step.inputs(keras.tree.flatten(inputs))
        first = next((x for x in keras.tree.flatten(inputs) if isinstance(x, Tensor)), None)
        self._num_inputs = 0 if first is None else first.numel()

    def norm(self, gradients: Sequence[Any], *, scale: Any) -> Any:
        """Return the norm of all gradients together; NaN where the step's operations are recorded for a prediction."""
        if self._step is not None:
            return math.nan
        known = [torch.linalg.vector_norm(_values(g).float()) for g in gradients if g is not None]
        total = torch.linalg.vector_norm(torch.stack(known))
        if scale is None:
            return total
        return total / (scale.value.detach() if isinstance(scale, keras.Variable) else scale)

    def read(self, variable: Any) -> Any:
        """Return a copy of a variable's value."""
        return variable.value.detach().clone()

    def comes_from(self, target: Any, scaled: Sequence[Any]) -> bool:
        """Return whether autograd computed a loss from one of these."""

        def inputs(node: Any) -> Iterator[Any]:
            return (inner for inner, _ in node.next_functions if inner is not None)

        return target.grad_fn is not None and reaches(target.grad_fn, {t.grad_fn for t in scaled} - {None}, inputs)

    def is_scaled(self, optimizer: Any, gradients: Sequence[Any]) -> bool:
        """Return whether the script scaled the loss of the latest backward pass."""
        return self._run.is_scaled

    def updated(self, *, norm: Any, scale: Any, before: Any, after: Any, accumulates: int, owner: int) -> None:
        """Close a step, unless its gradients are still accumulating, or no backward pass ran since the last step."""
        skipped = bool(after == before)
        if (int(after) % accumulates and not skipped) or (not self._losses and self._run.has_backward):
            return
        loss = float(sum(float(loss) for loss in self._losses)) / accumulates if self._losses else math.nan
        self._losses = []
        scales = [math.nan if scale is None else float(scale)]
        if self._run.observed is not None:
            self._run.observed.step_made(skipped=skipped, scale=None if scale is None else float(scale))
        if self._count is not None:
            self._end_count()
        if self._step is not None:
            self._step.end() if self._step.recording else self._step.begin()
        self._run.close(losses=[loss], norms=[float(norm)], scales=scales, skips=[skipped], owners=[owner])
        if not self._counted:
            self._begin_count()

    def finish(self) -> None:
        """End the count, if one is open."""
        if self._step is not None:
            self._step.close()
        if self._count is not None:
            self._count.close()
            self._count = None

    def device_type(self) -> str:
        """Return the type of the device of the trained variables."""
        return next((str(v.value.device.type) for v in self._run.variables.values()), "cpu")

    def _backward(
        self, original: Callable[..., Any], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        run = self._run
        if run.local.in_apply:
            return original(tensors, grad_tensors, *args, **kwargs)
        tensors, grad_tensors = reusable(tensors), reusable(grad_tensors)
        losses = listed(tensors)
        before_scaling = [run.unscaled(loss) for loss in losses]
        true = [u if u is not None else t for u, t in zip(before_scaling, losses, strict=True)]
        starts = given_gradients(losses, grad_tensors)
        # If the numbers of losses and gradients differ, torch itself raises.
        recorded = [_times(loss, start) for loss, start in zip(true, starts, strict=False)]
        self._losses += recorded
        self.num_inputs, self._num_inputs = self.num_inputs + self._num_inputs, 0
        for unscaled in before_scaling:
            run.backward(scaled=unscaled is not None)
        if self._count is not None:
            self._saved.backward_begins()
        scaled = any(u is not None for u in before_scaling)
        with nullcontext() if run.observed is None else self._observed(recorded, scaled=scaled):
            return self._run_engine(original, losses, tensors, grad_tensors, *args, **kwargs)

    def _run_engine(
        self, engine: Callable[..., Any], losses: list[Tensor], tensors: Any, starts: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a backward pass, which starts from the scale if the script did not scale the loss itself."""
        self._in_backward = True
        if self._step is not None:
            self._step.backward_begins()
        try:
            if not self._run.scales or self._run.is_scaled:
                return engine(tensors, starts, *args, **kwargs)
            self._divisor = self._run.scale.value.detach().clone()
            pairs = zip(losses, given_gradients(losses, starts), strict=False)
            scaled_starts = [self._scaled_start(loss, start) for loss, start in pairs]
            hooks = [leaf.register_hook(self._divided) for leaf in self._other_leaves(losses)]
            try:
                return engine(losses, scaled_starts, *args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
        finally:
            self._divisor, self._in_backward = None, False
            if self._step is not None:
                self._step.backward_ended()

    def _called(self, original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._step is not None
        return self._step.called(layer.name, functools.partial(original, layer, *args, **kwargs))

    def _other_leaves(self, losses: list[Tensor]) -> Iterator[Tensor]:
        """Yield the leaves of a graph that are no trained variables, such as a model's input: their gradients are unscaled too.

        Torch has no list of them, so each backward pass walks the graph once.
        """
        waiting: list[Any] = [loss.grad_fn for loss in losses]
        seen = set[Any]()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if type(node) is ACCUMULATES and node.variable not in self._trained:
                yield node.variable
            waiting += [inner for inner, _ in node.next_functions]

    @contextmanager
    def _observed(self, losses: list[Tensor], *, scaled: bool) -> Iterator[None]:
        """Report a backward pass to the observer; ``scaled``: whether the parameters' gradients include the scale."""
        observed = self._run.observed
        if self._run.scales and not self._run.is_scaled:
            observed.scaler_met(PolicyScale(self._run))
        observed.backward_begins(losses, scaled=scaled)
        try:
            yield
        finally:
            observed.backward_ended()

    def _scaled_start(self, loss: Tensor, start: Tensor | None) -> Tensor:
        assert self._divisor is not None
        return (torch.ones_like(loss) if start is None else start) * self._divisor.to(loss.dtype)

    def _initialize(self, original: Callable[..., Any], variable: Any, value: Any) -> None:
        original(variable, value)
        if variable._value.requires_grad and variable._value.is_floating_point():
            self._trained[variable._value] = None
            if self._run.scales:
                variable._value.register_hook(self._divided)

    def _grad(
        self,
        original: Callable[..., Any],
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Compute gradients: of variables as a backward pass does; those that continue into a running one stay scaled."""
        inputs = reusable(inputs)
        if not self._in_backward and all(tensor in self._trained for tensor in listed(inputs)):

            def engine(tensors: Any, starts: Any, *args: Any, **kwargs: Any) -> Any:
                return original(tensors, inputs, starts, *args, **kwargs)

            return self._backward(engine, outputs, grad_outputs, *args, **kwargs)
        divisor, self._divisor = self._divisor, None
        try:
            return original(outputs, inputs, grad_outputs, *args, **kwargs)
        finally:
            self._divisor = divisor

    def _divided(self, gradient: Tensor) -> Tensor:
        return gradient if self._divisor is None else gradient / self._divisor.to(gradient.dtype)

    def _begin_count(self) -> None:
        self._counted = True
        self._flops = FlopCounter(in_region=lambda: True)
        self._count = ExitStack()
        self._count.enter_context(self._flops)
        self._saved.start(v.value for v in self._run.variables.values())
        self._count.callback(self._saved.stop)

    def _end_count(self) -> None:
        assert self._flops is not None
        self.finish()
        flops = dict(self._flops.by_format)
        self.counted = CountedStep(flops, self._run.steps.num_closed + 1 if flops else None, self._saved.peak_bytes)
        policy = self._run.policy
        half = policy is not None and policy.compute == FP16.name
        if half and FP32.name in flops and self.device_type() == "cpu":
            why = "on a CPU, Keras on torch computes matrix products of FP16 operands in FP32"
            self._run.note_left_alone("fp16 products", "in fp32", why)


def _values(gradient: Tensor) -> Tensor:
    """Return a gradient's values; of a sparse one, a row that was used twice counts as its sum."""
    known = gradient.detach()
    return known.coalesce().values() if known.is_sparse else known


def _times(loss: Tensor, start: Tensor | None) -> Tensor:
    """Return the sum of a loss times the gradient from which its backward pass starts, which is 1 for every value if None."""
    value = loss.detach()
    return (value if start is None else value * start.detach()).sum()


# For a prediction the second step is recorded by the recorder of PyTorch scripts, with its memory. It runs on the CPU with numbers, so
# attention is the CPU's fused kernel, which moves what CUDA's does.


class TorchStep:
    """The recorder of one step, from the end of the update before it to the end of its own."""

    def __init__(self, run: KerasRun) -> None:
        self._run = run
        self._open = ExitStack()
        self._recorder: Recorder | None = None
        self._modules: list[str] = []
        self._batch = 0
        self._adopted = False
        """Whether the recorder knows what existed before the step."""

    @property
    def recording(self) -> bool:
        """Whether the step is being recorded."""
        return self._recorder is not None

    def begin(self) -> None:
        """Begin the step."""
        recorder = Recorder(batch=1, recording=False)
        recorder.step_begins()
        recorder.begin("forward")
        self._recorder, self._adopted = recorder, False
        original = F.dropout
        self._open.callback(functools.partial(setattr, F, "dropout", original))
        F.dropout = dropout_as_cuda
        self._open.enter_context(recorder)

    def _adopt(self, recorder: Recorder) -> None:
        """Allocate what exists: the model, its gradients and the optimizer's state, which are known once the update before is over."""
        run, self._adopted = self._run, True
        trained = _tensors(run.variables.values())
        recorder.add_existing(trained, "parameters")
        recorder.add_existing((value.grad for value in trained if value.grad is not None), "gradients")
        state = (v for one in run.optimizers.values() for v in one.variables if id(v) not in run.variables)
        recorder.add_existing(_tensors(state), "optimizer")
        recorder.add_existing(_tensors(run.tape.other_variables()), "buffers")

    def inputs(self, inputs: Iterable[Any]) -> None:
        """Note the inputs of a layer that is called from outside any layer."""
        tensors = [one for one in inputs if isinstance(one, Tensor)]
        if self._recorder is None or self._recorder.phase != "forward" or not tensors:
            return
        self._recorder.add_existing(tensors, "inputs")
        if not self._batch and tensors[0].dim():
            self._batch = int(tensors[0].shape[0])

    def called(self, layer: str, call: Callable[[], Any]) -> Any:
        """Call a layer whose operations are its own."""
        if self._recorder is not None and not self._adopted:
            self._adopt(self._recorder)
        self._modules.append(layer)
        self._name()
        try:
            return call()
        finally:
            self._modules.pop()
            self._name()

    def _name(self) -> None:
        if self._recorder is not None:
            self._recorder.name_module(".".join(self._modules[1:] or self._modules))

    def backward_begins(self) -> None:
        """Begin the backward pass."""
        if self._recorder is not None:
            self._recorder.backward_begins()

    def backward_ended(self) -> None:
        """End the backward pass: what follows belongs to the update."""
        if self._recorder is not None:
            gradients = (value.grad for value in _tensors(self._run.variables.values()) if value.grad is not None)
            self._recorder.label(gradients, "gradients")
            self._recorder.update_begins()

    def end(self) -> None:
        """End the step and keep its tape."""
        recorder, self._recorder = self._recorder, None
        self._open.close()
        assert recorder is not None
        tape = replace(recorder.finished(len(recorder.tape.events)), batch=self._batch or 1)
        self._run.tape.observed = ObservedTape(
            tapes=[tape],
            known_batch=self._batch > 0,
            no_other_batch="one real step has shown its own batch only",
            optimizer=self._run.optimizer_name,
            channels_last=any(map(_is_channels_last, _tensors(self._run.variables.values()))),
        )

    def close(self) -> None:
        """Stop recording a step that has not ended."""
        self._open.close()


def _tensors(variables: Iterable[Any]) -> list[Tensor]:
    return [variable.value for variable in variables]


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous()
