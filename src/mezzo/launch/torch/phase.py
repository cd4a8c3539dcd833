"""What each thread of a script is doing at the moment: which hooks count, and which leave it alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from mezzo.engine.casts.casting import Casting
from mezzo.policy import Policy


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
