"""Locate a running operation: its name, its module, the script's line, and whether it is in a backward pass."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from mezzo.engine.matrix_units.emulation import running
from mezzo.measure.flops import OperandFormats
from mezzo.observe.nonfinite.operation_names import public_name
from mezzo.observe.source_lines import script_line
from mezzo.observe.trace import LAST_NUMBER, NOWHERE, GraphNode, RunningCall, nearest
from mezzo.observe.tracer import Flags, Tracer


class OperationPlace(NamedTuple):
    """Where an operation runs."""

    op: str
    module: nn.Module | None
    line: str
    backward: bool


class PlacingTracer(Tracer):
    """A tracer that also records where the nodes of the graph were created."""

    def __init__(self, formats: OperandFormats, *, device_type: str, flags: Flags) -> None:
        super().__init__(formats, device_type=device_type, flags=flags)
        self._created: dict[int, tuple[str, str]] = {}
        """The operation that created a graph node, and the script's line, by the node's identity."""
        self._running: tuple[Any, Sequence[Any]] = (None, ())
        """The running operation, and its arguments."""

    def _place(self, number: int, entry: RunningCall) -> None:
        super()._place(number, entry)
        self._remember()

    def _place_in_backward(self, number: int, node: GraphNode, entry: RunningCall) -> None:
        super()._place_in_backward(number, node, entry)
        self._remember()

    def _remember(self) -> None:
        if self._local.created not in self._created:
            line, callers = script_line(sys._getframe(2).f_back)
            self._created[self._local.created] = self.forward_name(callers), line

    def in_backward(self) -> bool:
        """Return whether the running operation belongs to a backward pass, but not to a recomputed forward pass."""
        if torch._C._current_autograd_node() is None:
            return False
        entry = self._local.entry
        return not (self._flags.recomputing or (entry is not None and entry.in_backward))

    def place_of_running(self) -> OperationPlace:
        """Return where the running operation is."""
        if not self.in_backward():
            entry = self._local.entry or NOWHERE
            line, callers = script_line(sys._getframe(1))
            return OperationPlace(self.forward_name(callers), entry.module, line, backward=False)
        op = self._backward_name()
        node = self._node()
        if node.number == LAST_NUMBER or not self._created:
            return OperationPlace(op, None, "", backward=True)
        number = node.number if node.number in self._created else nearest(sorted(self._created), node.number)
        return OperationPlace(op, self.trace.creator(node).module, self._created[number][1], backward=True)

    def _node(self) -> GraphNode:
        """Return the running graph node, or the node of the emulated operation in which it runs."""
        outer = self._formats.recomputing()
        if outer is not None:
            return GraphNode(self._backward_nodes.identity(outer), torch._C._current_graph_task_id())
        local, running = self._local, torch._C._current_autograd_node()
        if running is local.running:
            return local.node
        if local.results:
            self._backward_nodes.mark_known(local)
        return self._backward_nodes.describe(local, running, torch._C._current_graph_task_id())

    def forward_name(self, callers: Sequence[str] = ()) -> str:
        """Return the running operation's name in torch; ``callers`` are the functions of torch around it, the innermost first."""
        emulation = running()
        if emulation is not None:
            return emulation.name
        composed = [name for name in callers if name in torch.functional.__all__]
        func, args = self._running
        return composed[-1] if composed else public_name(func.overloadpacket.__name__, args)

    def _backward_name(self) -> str:
        node = torch._C._current_autograd_node()
        assert node is not None
        known, _ = self._created.get(self._node().number, ("", ""))
        if known and (self._formats.emulated() is not None or known.startswith("conv")):  # the name of what it emulates
            return known
        return public_name(_snake(node.name()))


def _snake(node: str) -> str:
    name = re.sub(r"Backward\d*$", "", node.split("::")[-1]).strip("_")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
