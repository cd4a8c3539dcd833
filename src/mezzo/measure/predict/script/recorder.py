"""Watch a script from inside its process and write its tape."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import Distribution
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from mezzo.engine.casts.conversion import cast_model
from mezzo.engine.optimizers.master_weights import MasterWeights
from mezzo.measure.cuda_answers import first, nothing
from mezzo.measure.predict.operations import cuda_operators
from mezzo.measure.predict.placeholder_numbers import placeholder_numbers, reading_frame
from mezzo.measure.predict.recorder import Recorder, storage_key
from mezzo.measure.predict.result_sizes import UnknownSize, largest_sizes
from mezzo.measure.predict.script.batches import (
    CountedFakeMode,
    ScriptBatches,
    before_first_module,
    longest_sequences,
    saved_in_memory,
    without_own_amp,
)
from mezzo.measure.predict.script.devices import called_by_script, gpu_on_cpu
from mezzo.measure.predict.script.loaders import DrawnFrom, first_size
from mezzo.measure.predict.script.processes import first_process_alone
from mezzo.measure.predict.script.tapes import TapeRequest
from mezzo.measure.predict.tape import MemoryKind, TrainingTape
from mezzo.measure.predict.training import STEPS, free_gradients, optimizer_state, region_of, units_of
from mezzo.policy import Policy

_MOST_STEPS = 8
"""Steps after which the recorder no longer waits for a whole batch."""
_MOST_BACKWARD = 512
"""Backward passes of one update; a script that runs more would go on forever."""
_MOST_READS = 500_000
"""Numbers that one line reads between two steps; a loop that waits for a number to change would go on forever."""
_MOST_LINES = 5


class RecordingComplete(BaseException):
    """Stops the script; none of its own handlers catches it."""


class ScriptRecorder:
    """Records the last of a few steps. A step with a smaller batch than the first, such as that at an epoch's end, is never the last."""

    def __init__(self, request: TapeRequest, *, gpu_queries: list[str] | None = None) -> None:
        """Start before the script's first line; ``gpu_queries`` receives the name of each function that reports the simulated GPU."""
        self.recorder = Recorder(batch=1, recording=False)
        self.num_events = 0
        """Events of the tape at the end of the last step. The script's end frees the rest, in an order that varies."""
        self.batches = ScriptBatches(own=request.own_batch, wanted=request.batch, loading=self._as_host_work)
        self.read_at: list[str] = []
        """Lines of the script that read a number."""
        self.sized_at: list[str] = []
        """Lines of the script where the size of a result depends on numbers."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self.sizes: list[list[int]] = []
        """Samples of each batch of each step."""
        self.loaders: list[DrawnFrom] = []
        """The loaders of the last step that drew from any."""
        self.from_loader = False
        """Whether a loader's batches gave ``sizes``; otherwise the first dimension of the model's inputs did."""
        self.channels_last = False
        """Whether a model or its inputs are stored channels-last."""
        self._request, self._policy, self._gpu_queries = request, Policy.parse(request.policy), gpu_queries
        self.compiles: list[str] = []
        """Functions with which the script compiles, which were left out."""
        self._region = region_of(self._policy)
        self._num_backward = 0
        """Backward passes since the last update."""
        self._reads = Counter[str]()
        """How often each line has read a number since the last step."""
        self._on_host = False
        """Whether a loader is preparing a batch, which is the host's work."""
        self._open = ExitStack()
        self._models: list[nn.Module] = []
        self._adopted: set[int] = set()
        self._on_gpu: dict[int, weakref.ref[Tensor]] = {}
        """What the script moved to its GPU since the model's last call, by storage."""
        self._masters: list[MasterWeights] = []

    @property
    def tape(self) -> TrainingTape:
        """The tape so far."""
        return self.recorder.tape

    @property
    def num_steps(self) -> int:
        """How many steps have ended."""
        return max(0, len(self.tape.step_starts) - self.recorder.recording)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the training in the block."""
        original_backward, original_call = torch.autograd.backward, nn.Module.__call__
        request, fake = self._request, CountedFakeMode()

        def backward(*args: Any, **kwargs: Any) -> None:
            self._backward_begins()
            original_backward(*args, **kwargs)
            self._backward_ended()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Not a hook: a hook would run only after the module's forward, which casting wraps, has been looked up.
            self._called(module, args, kwargs, fake)
            return original_call(module, *args, **kwargs)

        hooks = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ended),
        ]
        try:
            with ExitStack() as stack:
                contexts: list[AbstractContextManager[Any]] = [
                    patch.object(torch.autograd, "backward", backward),
                    patch.object(nn.Module, "__call__", call),
                    patch.object(nn.Module, "_apply", _converted),
                    patch.object(Distribution, "_validate_args", False),  # by conditions on numbers
                    placeholder_numbers(
                        self._note_line, some_are_real=request.numbers_first, whole=request.whole_number
                    ),
                    self.batches.watching(),
                    without_own_amp(),
                    gpu_on_cpu(self._gpu_queries, gpu_present=request.gpu_present, moved=self._moved),
                    first_process_alone(launched=request.launched),
                    without_compilation(self._note_compilation),
                    saved_in_memory(),
                    nullcontext() if request.on_cpu else cuda_operators(),
                    largest_sizes(self._note_size),
                    longest_sequences(self._note_size),
                    copies_without_numbers(),
                ]
                for context in contexts:
                    stack.enter_context(context)

                def without_numbers() -> None:
                    stack.enter_context(self.recorder)
                    stack.enter_context(fake)

                if request.numbers_first:
                    fake.stop_counting()  # what it counts begins with the first module
                else:
                    without_numbers()
                first = without_numbers if request.numbers_first else fake.stop_counting
                stack.enter_context(before_first_module(first))
                yield
        finally:
            self._open.close()
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _as_host_work(self) -> Iterator[None]:
        """Leave out what the block runs."""
        self._on_host = True
        try:
            with self.recorder.paused():
                yield
        finally:
            self._on_host = False

    def _called(self, module: nn.Module, args: Any, kwargs: Any, fake: FakeTensorMode) -> None:
        if self._on_host:
            return
        if not self.recorder.recording:
            if not (module.training and torch.is_grad_enabled()):
                return
            self.recorder.begin("setup")
            self._adopt(module)
            if not self.tape.step_starts:
                self._add_other_contents(fake)
            self.recorder.step_begins()
            self.sizes.append([])
        elif self.recorder.phase == "forward":
            if id(module) not in self._adopted:  # a second model of the same step
                self._adopt(module)
                self.recorder.begin("forward")
                self._open.enter_context(self.recorder.modules_named(module))
            return
        elif not torch.is_grad_enabled() or torch._C._current_autograd_node() is not None:
            return  # called while gradients are computed, for example by activation checkpointing
        self._forward_begins(module, args, kwargs)

    def _forward_begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        drawn, loaders = self.batches.restart()
        self.from_loader = self.from_loader or bool(drawn)
        known = [one for one in loaders if one[0] is not None]
        if known:
            self.loaders = known if not self.sizes[-1] else [*self.loaders, *known]
        self.sizes[-1] += drawn[-1:] if drawn else filter(None, [first_size([args, kwargs])])
        self._adopt(module)
        tensors = [t for t in (*tree_leaves((args, kwargs)), *module.parameters()) if isinstance(t, Tensor)]
        self.channels_last = self.channels_last or any(map(_is_channels_last, tensors))
        self.recorder.begin("inputs")
        self.recorder.add_existing((t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), "inputs")
        self._add_moved()
        self.recorder.begin("forward")
        self._open.enter_context(self._region())
        self._open.enter_context(self.recorder.modules_named(module))

    def _adopt(self, module: nn.Module) -> None:
        """Allocate a model that is called for the first time, cast as the policy says."""
        if id(module) in self._adopted:
            return
        self._adopted |= {id(part) for part in module.modules()}
        self._models.append(module)
        if self._policy.casting == "model":
            if self._policy.master_weights:
                self._masters.append(MasterWeights(module.parameters()))
            cast_model(module, self._policy, "cpu")
        self.recorder.begin("setup")
        for unit, size in units_of(module).items():
            self.tape.units[unit] = self.tape.units.get(unit, 0) + size
        for tensors, kind in _weights(module):
            self.recorder.add_existing(tensors, kind)

    def _moved(self, tensor: Tensor) -> Tensor:
        """Return a moved tensor as it is on the GPU: a part of a larger tensor in host memory becomes a tensor of its own there."""
        if self.recorder.recording and self.recorder.phase != "optimizer":
            return tensor  # inside a model
        known = self._on_gpu.get(storage_key(tensor))
        if self.recorder.has_block(tensor) or (known is not None and known() is not None):
            return tensor
        if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
            with self.recorder.paused():
                tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        self._on_gpu.pop(
            storage_key(tensor), None
        )  # the key may belong to a storage that is gone; take this one's order
        self._on_gpu[storage_key(tensor)] = weakref.ref(tensor)
        return tensor

    def _add_moved(self) -> None:
        """Allocate what was moved to the GPU and has no block yet, such as the labels of a batch."""
        tensors = [tensor for reference in self._on_gpu.values() if (tensor := reference()) is not None]
        self.recorder.add_existing((tensor for tensor in tensors if not self.recorder.has_block(tensor)), "inputs")
        self._on_gpu.clear()

    def _add_other_contents(self, fake: FakeTensorMode) -> None:
        """Allocate what is on the GPU besides the model: models that are not trained, such as averages and teachers, and data."""
        self.recorder.begin("setup")
        gc.collect()
        found = (one for one in gc.get_objects() if issubclass(type(one), nn.Module) and id(one) not in self._adopted)
        for module in sorted(found, key=_sort_key):  # the collector's order differs from run to run
            for tensors, kind in _weights(module):
                self.recorder.add_existing(
                    (t for t in tensors if isinstance(t, FakeTensor) and t.fake_mode is fake), kind
                )
        self._add_moved()

    def _backward_begins(self) -> None:
        self._open.close()
        self._num_backward += 1
        if self._num_backward > _MOST_BACKWARD:
            raise RuntimeError(
                f"{_MOST_BACKWARD} backward passes without an update: a condition on a number, which traced tensors lack, prevents it"
            )
        if self.recorder.recording:
            self.recorder.backward_begins()

    def _backward_ended(self) -> None:
        parameters = (p for model in self._models for p in model.parameters())
        self.recorder.label((p.grad for p in parameters if p.grad is not None), "gradients")
        if self.recorder.recording:
            self.recorder.begin("optimizer")  # clipping and the like

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._num_backward = 0
        if self.recorder.recording:
            self.recorder.update_begins()
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
            parameter_ids = {id(p) for model in self._models for p in model.parameters()}
            for masters in self._masters:
                masters.begin([optimizer])
                master_weights = (masters.master_or_self(p) for model in self._models for p in model.parameters())
                self.recorder.add_existing((p for p in master_weights if id(p) not in parameter_ids), "optimizer")
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not (group.get("fused") or self._request.on_cpu):
                group["foreach"] = True
            if group.get("capturable", False):  # for CUDA graphs, which are left out; torch refuses it on a CPU
                group["capturable"] = False
        for masters in self._masters:
            masters.pull_gradients()

    def _optimizer_ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.recorder.recording:
            return
        for masters in self._masters:
            masters.push()
            for model in self._models:
                free_gradients(masters, model)
        self.recorder.label(optimizer_state(optimizer), "optimizer")
        self._reads.clear()
        self.recorder.stop()
        self.num_events = len(self.tape.events)
        if self._is_last():
            raise RecordingComplete

    def _is_last(self) -> bool:
        if self._request.steps is not None:
            return self.num_steps == self._request.steps
        whole = self.sizes[-1] == self.sizes[0]
        return self.num_steps >= STEPS and (whole or self.num_steps == _MOST_STEPS)

    def _note_compilation(self, name: str) -> None:
        if name not in self.compiles:
            self.compiles.append(name)

    def _note_size(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self._request.script:
            frame = frame.f_back
        self._note("" if frame is None else _line_of(frame), self.sized_at)

    def _note_line(self) -> None:
        frame = reading_frame()
        if frame is None:
            return
        line = _line_of(frame)
        self._reads[line] += 1
        if self._reads[line] > _MOST_READS:
            raise UnknownSize(
                f"{line} reads numbers without end: let its loop end after a fixed number of rounds as well"
            )
        if frame.f_code.co_filename == self._request.script:
            self._note(line, self.read_at)

    @staticmethod
    def _note(line: str, lines: list[str]) -> None:
        if line not in lines and len(lines) < _MOST_LINES:
            lines.append(line)


def _line_of(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _sort_key(module: nn.Module) -> str:
    """Return a key that sorts modules in the same way in every run."""
    return f"{type(module).__qualname__} {[tuple(p.shape) for p in module.parameters()]}"


def _weights(module: nn.Module) -> tuple[tuple[list[Tensor], MemoryKind], ...]:
    """Return the parameters and the buffers of a module, with their kinds."""
    return (list(module.parameters()), "parameters"), (list(module.buffers()), "buffers")


def _is_channels_last(tensor: Tensor) -> bool:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return last and not tensor.is_contiguous()


def _converted(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Return ``module`` with ``fn`` applied to its tensors, as ``Module._apply`` does, which cannot swap fake tensors."""
    converted: dict[int, Any] = {}

    def of(tensor: Tensor) -> Any:
        if id(tensor) not in converted:
            with torch.no_grad():
                new = fn(tensor)
            same = new is tensor or not isinstance(tensor, nn.Parameter)
            converted[id(tensor)] = (new if same else nn.Parameter(new.detach(), tensor.requires_grad), tensor)
        return converted[id(tensor)][0]

    for part in module.modules() if recurse else [module]:
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = of(tensor)
    return module


# ``Tensor.__deepcopy__`` looks up where the numbers are and copies that memory. A fake tensor has none there: torch fails for some, and
# writes to memory that is not its own for others.


@contextmanager
def copies_without_numbers() -> Iterator[None]:
    """Let ``copy.deepcopy`` copy the shape of such tensors for the block."""
    original = Tensor.__deepcopy__

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if not isinstance(tensor, FakeTensor) or not tensor.is_leaf:
            return original(tensor, memo)
        if id(tensor) not in memo:
            copy: Tensor = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            needed = tensor.requires_grad
            memo[id(tensor)] = nn.Parameter(copy, needed) if is_parameter else copy.requires_grad_(needed)
        return memo[id(tensor)]

    with patch.object(Tensor, "__deepcopy__", deepcopy):
        yield


@contextmanager
def without_compilation(on_skip: Callable[[str], None]) -> Iterator[None]:
    """Let the block compile and script nothing; ``on_skip`` gets the name of each function that was to do so."""

    def noted(name: str, answer: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def uncompiled(*args: Any, **kwargs: Any) -> Any:
            if not called_by_script():  # torch scripts functions of its own when it is imported
                return original(*args, **kwargs)
            on_skip(name)
            return answer(*args, **kwargs)

        return uncompiled

    with ExitStack() as stack:
        for home, name, called, answer in (
            (torch, "compile", "torch.compile", _compiled),
            (nn.Module, "compile", "Module.compile", nothing),
            (torch.jit, "script", "torch.jit.script", first),
            (torch.jit, "trace", "torch.jit.trace", first),
        ):
            stack.enter_context(patch.object(home, name, noted(called, answer, getattr(home, name))))
        yield


def _compiled(model: Any = None, **settings: Any) -> Any:
    return (lambda function: function) if model is None else model
