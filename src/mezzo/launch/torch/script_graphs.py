"""Training steps in a script's own CUDA graphs, and code of torch whose backward passes are no training steps.

A capture executes nothing, and no hook records its backward pass or update: a hook may read numbers from the device or keep them there,
which breaks a capture. A replay runs neither Python nor hooks, so its steps cannot be recorded, only counted: every replay of a graph
that captured a backward pass or an update counts. Graphs of torch.compile capture neither, and those of
``torch.cuda.make_graphed_callables`` run inside the script's own passes, which are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from mezzo.errors import ScriptError
from mezzo.launch.patches import Patches
from mezzo.launch.torch.phase import Phase
from mezzo.launch.torch.precision import ScriptPrecision
from mezzo.records import Reason


class ScriptGraphs:
    """The CUDA graphs of a run that train."""

    def __init__(self, precision: ScriptPrecision, phase: Phase, *, end_steady: Callable[[], None]) -> None:
        """Begin before the first pass; ``end_steady`` lets everything be recorded in full again."""
        self._precision, self._phase, self._end_steady = precision, phase, end_steady
        self._training: WeakSet[Any] = WeakSet()
        self._capturing: Any = None
        """The graph that is being captured."""
        self._in_library = 0
        self.replays = 0
        """How often graphs that train were replayed."""
        self._replayed = False
        """Whether one was replayed since the last update of a session."""

    def install(self, patches: Patches) -> None:
        """Count replays, and leave passes of torch's own code unrecorded, until ``patches`` are undone."""
        kinds = [torch.cuda.CUDAGraph, getattr(torch.accelerator, "Graph", None)]  # the second one since torch 2.13
        for kind in filter(None, kinds):
            patches.around(kind, "capture_begin", self._begin_capture)
            patches.around(kind, "capture_end", self._end_capture)
            patches.around(kind, "replay", self._replay)
        for owner, name in (
            (torch.cuda, "make_graphed_callables"),
            (torch.cuda.graphs, "make_graphed_callables"),
            (torch.autograd, "gradcheck"),
            (torch.autograd, "gradgradcheck"),
        ):
            patches.around(owner, name, self._run_in_library)

    def note_training(self) -> None:
        """Note a backward pass or an update that is not recorded: if a graph is capturing it, its replays count as steps.

        Raises:
            ScriptError: the policy has a loss scale, which cannot be captured.
        """
        if self._capturing is None or self._in_library:
            return
        if self._precision.scale.checks:
            raise ScriptError(
                f"the script captures a training step as a CUDA graph under {self._precision.present}, whose loss scale reads a flag from "
                "the device in every step, which a graph cannot do",
                hint="try --policy bf16, which needs no scale; or train without a graph; or capture with mezzo.Session.capture, "
                "which keeps its scale on the GPU, under --policy as-is",
            )
        self._training.add(self._capturing)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Run a backward pass that is no training step of the script: under the policy, but neither scaled nor recorded."""
        casting = self._precision.main_casting
        self.note_training()
        if self._phase.in_backward or casting is None or casting.table is None:
            yield
            return
        with self._phase.as_in_backward(), casting.backward():
            yield

    def notes(self) -> list[Reason]:
        """Return what the record lacks."""
        if not self.replays:
            return []
        why = "steps that a graph of the script replays are not recorded: losses, times and verdicts are those of the other steps"
        return [Reason(what="CUDA graph", value=f"{self.replays} replay{'s' * (self.replays > 1)}", reason=why)]

    def _begin_capture(self, original: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(graph, *args, **kwargs)
        self._end_steady()
        self._phase.pause()
        self._capturing = graph
        return result

    def _end_capture(self, original: Callable[..., Any], graph: Any) -> Any:
        if self._capturing is graph:
            self._capturing = None
            self._phase.resume()
        return original(graph)

    def take_replayed(self) -> bool:
        """Return whether a graph that trains was replayed since the last call."""
        replayed, self._replayed = self._replayed, False
        return replayed

    def _replay(self, original: Callable[..., Any], graph: Any) -> Any:
        if graph in self._training:
            self.replays += 1
            self._replayed = True
        return original(graph)

    def _run_in_library(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function of torch whose backward passes train nothing."""
        self._end_steady()
        self._in_library += 1
        try:
            with self._phase.no_training():
                return original(*args, **kwargs)
        finally:
            self._in_library -= 1
