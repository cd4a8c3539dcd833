"""Record two steps of an unmodified script on fake tensors: ``python -m mezzo.measure.predict.scripted TAPE POLICY SCRIPT [ARGS]...``.

The script runs from its first line under a fake-tensor mode, so its model and its data take no memory and have no numbers. Where
it asks for a number (``loss.item()``, a condition, ``tolist``), it gets 1.0, 0 or False: the stand-in is said in the record. Recording
begins when a model in training mode is called and ends after the second optimizer step, where the script stops. What happens
between a step and the next call of the model is data preparation, which belongs to the host and is not recorded.
"""

from __future__ import annotations

import pickle
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from mezzo.errors import UsageError
from mezzo.measure.predict.cuda_operators import cuda_operators
from mezzo.measure.predict.recorder import Recorder
from mezzo.measure.predict.tape import Tape
from mezzo.measure.predict.training import STEPS, modules_named, optimizer_state, region_of, units_of
from mezzo.policy import Policy


class _Enough(BaseException):
    """Stops the script: no handler of its own catches it."""


class ScriptRecorder:
    """What watches a script from inside its process."""

    def __init__(self, policy: Policy) -> None:
        """Start before the script's first line."""
        self.recorder = Recorder(batch=1)
        self.recorder.recording = False
        self._region = region_of(policy)
        self._open = ExitStack()
        self._models: list[nn.Module] = []

    @property
    def tape(self) -> Tape:
        """The tape so far."""
        return self.recorder.tape

    @property
    def num_steps(self) -> int:
        """How many steps have ended."""
        return max(0, len(self.tape.step_starts) - self.recorder.recording)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what the block trains."""
        own_backward = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            self._backward_begins()
            own_backward(*args, **kwargs)
            self._backward_ended()

        hooks = [
            register_module_forward_pre_hook(self._called),
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ended),
        ]
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with ExitStack() as stack:
                stack.enter_context(patch.object(torch.autograd, "backward", backward))
                stack.enter_context(patch.object(nn.Module, "_apply", _converted))
                for one in (_stand_ins(), cuda_operators(), self.recorder, fake):
                    stack.enter_context(one)
                yield
        finally:
            self._open.close()
            for hook in hooks:
                hook.remove()

    def _called(self, module: nn.Module, inputs: Any) -> None:
        if self.recorder.recording or not (module.training and torch.is_grad_enabled()):
            return
        self.recorder.recording = True
        if module not in self._models:
            self._models.append(module)
            self.recorder.phase = "setup"
            self.tape.units.update(units_of(module))
            self.recorder.own(module.parameters(), "parameters")
            self.recorder.own(module.buffers(), "buffers")
        self.recorder.step_begins()
        self.recorder.phase = "inputs"
        self.recorder.own((t for t in tree_leaves(inputs) if isinstance(t, Tensor)), "inputs")
        self.recorder.phase = "forward"
        self._open.enter_context(self._region())
        self._open.enter_context(modules_named(module, self.recorder))

    def _backward_begins(self) -> None:
        self._open.close()
        if self.recorder.recording:
            self.recorder.phase = "backward"
            self.tape.backward_starts.append(len(self.tape.events))

    def _backward_ended(self) -> None:
        parameters = (p for model in self._models for p in model.parameters())
        self.recorder.label((p.grad for p in parameters if p.grad is not None), "gradients")
        if self.recorder.recording:
            self.recorder.phase = "optimizer"  # clipping and the like

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.recorder.phase = "optimizer"
        if self.recorder.recording:
            self.tape.optimizer_starts.append(len(self.tape.events))
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True

    def _optimizer_ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.recorder.recording:
            return
        self.recorder.label(optimizer_state(optimizer), "optimizer")
        self.recorder.recording = False
        if self.num_steps == STEPS:
            raise _Enough


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Answer each question for a number with 1.0, 0 or False; an optimizer that divides by its step counter must not get 0."""

    def number(tensor: Tensor) -> Any:
        return 1.0 if tensor.is_floating_point() else False if tensor.dtype is torch.bool else 0

    def zeros(tensor: Tensor) -> Any:
        return number(tensor) if tensor.dim() == 0 else [zeros(tensor[0])] * tensor.shape[0] if len(tensor) else []

    answers: dict[str, Callable[[Tensor], Any]] = {
        "item": number,
        "__float__": lambda tensor: 1.0,
        "__int__": lambda tensor: 0,
        "__index__": lambda tensor: 0,
        "__bool__": lambda tensor: False,
        "tolist": zeros,
        "numpy": lambda tensor, **_: __import__("numpy").array(zeros(tensor)),
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            for kind in (Tensor, torch._subclasses.FakeTensor):
                if name in vars(kind) or kind is Tensor:
                    stack.enter_context(patch.object(kind, name, answer))
        yield


def _converted(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Return ``module`` with ``fn`` applied to its tensors, as ``Module._apply`` does, which cannot swap fake tensors."""
    made: dict[int, Any] = {}

    def of(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            with torch.no_grad():
                new = fn(tensor)
            same = new is tensor or not isinstance(tensor, nn.Parameter)
            made[id(tensor)] = (new if same else nn.Parameter(new.detach(), tensor.requires_grad), tensor)
        return made[id(tensor)][0]

    for part in module.modules() if recurse else [module]:
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = of(tensor)
    return module


def record_script(script: str, arguments: list[str], policy: Policy) -> Tape | None:
    """Run ``script`` as ``python script`` would, and return its tape; None if it never finished two steps."""
    watch = ScriptRecorder(policy)
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    try:
        with watch.watching():
            runpy.run_path(script, run_name="__main__")
    except _Enough:
        pass
    finally:
        sys.argv, sys.path[:] = argv, path
    return watch.tape if watch.num_steps >= STEPS else None


def tape_of_script(script: str, arguments: list[str], policy: str) -> Tape:
    """Return the tape of ``script`` under ``policy``, recorded in a process of its own.

    Raises:
        UsageError: the policy casts the model itself, there is no such file, or the script failed or ended before its second
            step.
    """
    if "-" in policy:
        raise UsageError(f"{policy} cannot be predicted for a script", hint="predict fp32, tf32, fp16 or bf16")
    if not Path(script).is_file():
        raise UsageError(f"there is no script {script!r}", hint="check the path")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "tape"
        words = [sys.executable, "-m", __name__, str(place), policy, script, *arguments]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if not place.exists():
            last = "\n".join(done.stdout.splitlines()[-4:])
            raise UsageError(
                f"{script} cannot be traced without numbers; it ended with:\n{last}",
                hint="predict its model by name with --model, or keep what reads numbers out of the first two steps",
            )
        tape: Tape | None = pickle.loads(place.read_bytes())
    if tape is None:
        raise UsageError(
            f"{script} ended before its second optimizer step on a model in training mode: there is no step to predict",
            hint="name the script that trains, with the arguments that make it train",
        )
    return tape


def main(words: list[str]) -> None:
    """Record the script and write its tape."""
    place, policy, script, *arguments = words
    Path(place).write_bytes(pickle.dumps(record_script(script, arguments, Policy.parse(policy))))


if __name__ == "__main__":
    main(sys.argv[1:])
