"""What each thread of a script is doing at the moment: which hooks count, and which leave it alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import nn

from mezzo.engine.casts.casting import Casting
from mezzo.errors import ScriptError
from mezzo.launch.patches import Patches
from mezzo.launch.torch.precision import ScriptPrecision
from mezzo.policy import Policy
from mezzo.records import Note


class Phase:
    """The passes, compiled functions and autocasts that are open."""

    def __init__(self) -> None:
        self.local = ThreadState()
        self.in_backward = False
        self.inside: Any = None
        """The emulated graph node that is running a backward pass of its own, if any."""
        self.recomputing = False
        """Whether activation checkpointing is recomputing a forward pass."""
        self.in_compiled = False
        """Whether an outermost compiled function is running."""
        self.compiles = False
        """Whether the script has called torch.compile."""
        self.before_compiling: list[Callable[[], Any]] = []
        """Callbacks to run once, before the script first compiles code with torch.compile."""
        self.own_autocast_on = False
        """Whether the script has turned an outermost autocast on."""
        self.autocasts_off = False
        """Whether the policy has turned an autocast of the script off, in any thread."""
        self.not_training = 0
        """Above 0 while passes are no training steps: during a capture, and in torch's own code that runs passes."""

    def pause(self) -> None:
        """Begin passes that are no training steps."""
        self.not_training += 1

    def resume(self) -> None:
        """End passes that are no training steps."""
        self.not_training -= 1

    @contextmanager
    def no_training(self) -> Iterator[None]:
        """Run passes that are no training steps."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    @contextmanager
    def as_in_backward(self) -> Iterator[None]:
        """Run code that hooks leave alone, as they do inside a backward pass."""
        before, self.in_backward = self.in_backward, True
        try:
            yield
        finally:
            self.in_backward = before

    @contextmanager
    def inside_node(self, node: Any) -> Iterator[None]:
        """Run a backward pass of an emulated node; of the outermost one, if it is inside another; None for no node."""
        before = self.inside
        self.inside = before or node
        try:
            yield
        finally:
            self.inside = before

    @contextmanager
    def recomputed(self) -> Iterator[None]:
        """Run a checkpointed function, which is recomputed if a backward pass is running."""
        before = self.recomputing
        self.recomputing = before or torch._C._current_autograd_node() is not None
        try:
            yield
        finally:
            self.recomputing = before

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Run an outermost compiled function."""
        self.in_compiled = True
        try:
            yield
        finally:
            self.in_compiled = False

    def begin_compiling(self) -> None:
        """Run the callbacks that must come before the script compiles."""
        self.compiles = True
        while self.before_compiling:
            self.before_compiling.pop()()

    def autocast_turned_on(self) -> None:
        """Note that the script has turned an outermost autocast on."""
        self.own_autocast_on = True

    def autocast_turned_off(self) -> None:
        """Note that the policy has turned an autocast of the script off."""
        self.autocasts_off = True


class Root(NamedTuple):
    """A module called from outside any module, and what its next call in the same thread needs."""

    module: ref[nn.Module]
    parameter: ref[nn.Parameter]
    """Its first parameter; for a module without parameters a dead reference, so that every call looks its device up again."""
    device: torch.device | None
    """That parameter's device."""
    policy: Policy | None
    """The policy as applied to the script at that call."""
    casting: Casting | None
    region: AbstractContextManager[Any] | None


class OwnSwitch(NamedTuple):
    """The script's outermost autocast, which is off: its own switch if it calls a model that it trains inside."""

    device_type: str
    regions: list[AbstractContextManager[Any] | None]
    """The regions that the autocast closes at its end, one for each time that it was entered."""

    def turn_on(self, casting: Casting) -> None:
        """Open the policy's region until the autocast ends."""
        region = casting.region()
        region.__enter__()
        self.regions[-1] = region


class ThreadState(threading.local):
    """The state of one thread."""

    depth = 0
    """1 inside a module or a compiled function, else 0."""
    outermost: nn.Module | None = None
    """The module that was called from outside any module, while it runs under a policy."""
    root: Root | None = None
    """The module that was last called from outside any module: usually the next call is of the same one."""
    stepping = False
    """Whether an optimizer is stepping."""
    own_switch: OwnSwitch | None = None
    """The script's outermost autocast, if that is off."""
    keeps_format = False
    """Whether the result of the outermost module keeps its format, because the script's own autocast is on around it."""
    autocasts_off = 0
    """Number of the script's open autocasts that the policy turned off."""


# A capture executes nothing, and no hook records its backward pass or update: a hook may read numbers from the device or keep them there,
# which breaks a capture. A replay runs neither Python nor hooks, so its steps cannot be recorded, only counted: every replay of a graph
# that captured a backward pass or an update counts. Graphs of torch.compile capture neither, and graphs of
# ``torch.cuda.make_graphed_callables`` run inside the script's own passes, which are recorded.


class ScriptGraphs:
    """The CUDA graphs of a run that train."""

    def __init__(self, precision: ScriptPrecision, phase: Phase, *, end_steady_state: Callable[[], None]) -> None:
        """Begin before the first pass; ``end_steady_state`` lets everything be recorded in full again."""
        self._precision, self._phase, self._end_steady_state = precision, phase, end_steady_state
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
        if self._precision.scale.skips_overflows:
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

    def notes(self) -> list[Note]:
        """Return what the record lacks."""
        if not self.replays:
            return []
        why = "steps that a graph of the script replays are not recorded: losses, times and verdicts cover the other steps"
        return [Note(what="CUDA graph", value=f"{self.replays} replay{'s' * (self.replays > 1)}", reason=why)]

    def _begin_capture(self, original: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(graph, *args, **kwargs)
        self._end_steady_state()
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
        self._end_steady_state()
        self._in_library += 1
        try:
            with self._phase.no_training():
                return original(*args, **kwargs)
        finally:
            self._in_library -= 1
