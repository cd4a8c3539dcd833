"""One real step of Keras on PyTorch as a tape, by the same recorder as a PyTorch script's, with its memory.

Limits: the step runs on the CPU with numbers. Attention is the CPU's fused kernel, which moves what CUDA's does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mezzo.launch.keras.state import KerasRun
from mezzo.measure.predict.operations import dropout_as_cuda
from mezzo.measure.predict.recorder import Recorder
from mezzo.measure.predict.script.observed import ObservedTape


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
        trained = _values(run.variables.values())
        recorder.add_existing(trained, "parameters")
        recorder.add_existing((value.grad for value in trained if value.grad is not None), "gradients")
        state = (v for one in run.optimizers.values() for v in one.variables if id(v) not in run.variables)
        recorder.add_existing(_values(state), "optimizer")
        recorder.add_existing(_values(run.tape.other_variables()), "buffers")

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
            gradients = (value.grad for value in _values(self._run.variables.values()) if value.grad is not None)
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
            channels_last=any(map(_is_channels_last, _values(self._run.variables.values()))),
        )

    def close(self) -> None:
        """Stop recording a step that has not ended."""
        self._open.close()


def _values(variables: Iterable[Any]) -> list[Tensor]:
    return [variable.value for variable in variables]


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous()
