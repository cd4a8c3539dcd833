"""Say where a running operation is: its name, its module, the script's line, in a forward or a backward pass."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from mezzo.engine.emulation import running
from mezzo.measure.flops import OperandFormats
from mezzo.observe.nonfinite.operation_names import public_name
from mezzo.observe.source_lines import script_line
from mezzo.observe.trace import LAST_NUMBER, NOWHERE, Entry, Node, nearest
from mezzo.observe.tracer import Flags, Tracer


class Place(NamedTuple):
    """Where an operation runs."""

    op: str
    module: nn.Module | None
    line: str
    backward: bool


class PlacingTracer(Tracer):
    """A tracer that also records where the nodes of the graph were made."""

    def __init__(self, formats: OperandFormats, *, device_type: str, flags: Flags) -> None:
        super().__init__(formats, device_type=device_type, flags=flags)
        self._lines: dict[int, str] = {}
        self._ops: dict[int, str] = {}
        self._running: tuple[Any, Sequence[Any]] = (None, ())
        """The operation that runs, and its arguments."""

    def enter(self, module: nn.Module, args: Any) -> None:
        """Record a module that was called before the hooks were set."""
        self._enter(module, args)

    def _place(self, number: int, entry: Entry) -> None:
        super()._place(number, entry)
        self._remember()

    def _place_again(self, number: int, node: Node, entry: Entry) -> None:
        super()._place_again(number, node, entry)
        self._remember()

    def _remember(self) -> None:
        made = self._local.made
        if made not in self._ops:
            self._lines[made], callers = script_line(sys._getframe(2).f_back)
            self._ops[made] = self.forward_name(callers)

    def in_backward(self) -> bool:
        """Return whether the running operation is one of a backward pass, and not a forward pass made again."""
        if torch._C._current_autograd_node() is None:
            return False
        entry = self._local.entry
        return not (self._flags.recomputing or (entry is not None and entry.again))

    def place_of_running(self) -> Place:
        """Return where the running operation is."""
        if not self.in_backward():
            entry = self._local.entry or NOWHERE
            line, callers = script_line(sys._getframe(1))
            return Place(self.forward_name(callers), entry.module, line, backward=False)
        op = self._backward_name()
        node = self._node()
        if node.number == LAST_NUMBER or not self._ops:
            return Place(op, None, "", backward=True)
        place = node.number if node.number in self._ops else nearest(sorted(self._ops), node.number)
        return Place(op, self.trace.maker(node).module, self._lines[place], backward=True)

    def _node(self) -> Node:
        """Return what is known of the node of the graph that runs, or of the emulated operation inside which it does."""
        outer = self._formats.recomputing()
        if outer is not None:
            return Node(self._backward_nodes.identity(outer), torch._C._current_graph_task_id())
        local, running = self._local, torch._C._current_autograd_node()
        if running is local.running:
            return local.node
        if local.results:
            self._backward_nodes.mark_known(local)
        return self._backward_nodes.describe(local, running, torch._C._current_graph_task_id())

    def forward_name(self, callers: Sequence[str] = ()) -> str:
        """Return the running operation's name in torch; ``callers`` are torch's functions that it runs in, the innermost first."""
        emulation = running()
        if emulation is not None:
            return emulation.name
        composed = [name for name in callers if name in torch.functional.__all__]
        func, args = self._running
        return composed[-1] if composed else public_name(func.overloadpacket.__name__, args)

    def _backward_name(self) -> str:
        node = torch._C._current_autograd_node()
        assert node is not None
        known = self._ops.get(self._node().number, "")
        if known and (self._formats.emulated() is not None or known.startswith("conv")):  # named by what it emulates
            return known
        return public_name(_snake(node.name()))


def _snake(node: str) -> str:
    name = re.sub(r"Backward\d*$", "", node.split("::")[-1]).strip("_")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
