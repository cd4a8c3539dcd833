"""What a script is doing at the moment: which hooks count, and which leave it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mezzo.launch.torch.thread_state import ThreadState


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
