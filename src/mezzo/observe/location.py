"""Locate a running operation: its name, its module, the script's line, and whether it is in a backward pass.

Its name is the one in torch's documentation: ``softmax``, not ``_softmax``; ``conv2d``, not ``convolution``. Operations in a dispatch mode
have the dispatcher's names, and graph nodes their classes' names. Most of these differ from a public name only by a prefix or a suffix; a
table has the rest.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.engine.matrix_units.emulation import running
from mezzo.measure.flops import OperandFormats
from mezzo.observe.source_lines import script_line
from mezzo.observe.trace import LAST_NUMBER, NOWHERE, GraphNode, RunningCall, nearest
from mezzo.observe.tracer import Tracer, TracerFlags

T = TypeVar("T")


class OperationPlace(NamedTuple):
    """Where an operation runs."""

    op: str
    module: nn.Module | None
    line: str
    backward: bool


class PlacingTracer(Tracer):
    """A tracer that also records where the nodes of the graph were created."""

    def __init__(
        self, formats: OperandFormats, *, device_type: str, flags: TracerFlags, problems: dict[str, str] | None = None
    ) -> None:
        super().__init__(formats, device_type=device_type, flags=flags)
        self._problems = {} if problems is None else problems
        """Operations that could not be inspected, and why."""
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

    def attempt(self, inspection: Callable[[], T]) -> T | None:
        """Let the script continue if its tensors cannot be inspected; the record says so."""
        # Not torch.autocast, which costs as much as an operation, nor torch's public functions, which Mezzo replaces for a script.
        device_type = self._device_type
        autocast = torch._C.is_autocast_enabled(device_type)
        if autocast:
            torch._C.set_autocast_enabled(device_type, False)
        try:
            with torch._C.DisableTorchFunction():
                return inspection()
        except Exception as error:
            op = public_name(self._running[0].overloadpacket.__name__)
            self._problems.setdefault(op, f"{type(error).__name__}: {error}".splitlines()[0])
            return None
        finally:
            if autocast:
                torch._C.set_autocast_enabled(device_type, True)

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


_PLACES = (torch, F, Tensor)
_NAMESPACES = ("linalg", "special", "fft")
_BEFORE = re.compile(
    r"^(native|cudnn|miopen|mkldnn|mps|foreach|fused|thnn|slow|nested|unsafe|amp|infinitely_differentiable|unique_dim)_"
)
_AFTER = re.compile(
    r"_(backward|forward|double|data|jvp|legit|no_training|functional|with_flatten|copy|dense|helper|impl|interface|kernel"
    r"|aa|cpu|math|overrideable|only|differentiable|cachemask|with_indices|consecutive|\dd_cpu_fallback)$"
)
_TABLE: tuple[tuple[str, str], ...] = (
    (r"to_copy|autocast_to_\w+|cast_[A-Z]\w+", "to"),
    (r"\w*(scaled_dot_product|flash|efficient|cudnn)\w*attention\w*", "scaled_dot_product_attention"),
    (r"(native|triton)_multi_head_attention", "multi_head_attention_forward"),
    (r"\w*lstm\w*", "lstm"),
    (r"\w*gru\w*", "gru"),
    (r"\w*upsample_\w+", "interpolate"),
    (r"(reflection_pad\dd|replication_pad\dd|constant_pad_nd|pad_circular|pad_enum)\w*", "pad"),
    (r"nll_loss\w*", "nll_loss"),
    (r"cross_entropy_loss", "cross_entropy"),
    (r"embedding_(dense|sparse)_backward", "embedding"),
    (r"embedding_bag\w*", "embedding_bag"),
    (r"(unsafe_)?(masked_)?(index|slice|select)(_backward)?", "__getitem__"),
    (r"(index_put_impl|unsafe_index_put|unsafe_masked_index_put_accumulate)_?", "index_put"),
    (r"\w*batch_norm\w*", "batch_norm"),
    (r"weight_norm\w*", "_weight_norm"),
    (r"(safe|masked)_softmax\w*", "softmax"),
    (r"log_sigmoid\w*", "logsigmoid"),
    (r"rrelu_with_noise\w*", "rrelu"),
    (r"grid_sampler_\w+", "grid_sample"),
    (r"euclidean_dist", "cdist"),
    (r"im2col", "unfold"),
    (r"col2im", "fold"),
    (r"fft_r2c", "fft.rfft"),
    (r"fft_c2r", "fft.irfft"),
    (r"fft_c2c", "fft.fft"),
    (r"(scaled_(grouped_)?mm|mkldnn_linear)\w*", "linear"),
    (r"value_selecting_reduction_backward|cummaxmin_backward", "max"),
    (r"foreach_powsum", "norm"),
    (r"trilinear", "bilinear"),
)
_CONVOLUTION = re.compile(r"\w*conv(olution)?(_|\d|$)\w*")
_RECURRENT = {"cudnn_rnn": 6, "miopen_rnn": 6, "mkldnn_rnn_layer": 9}
"""The position of the argument that says which recurrent layer an operation is."""
_LAYERS = ("rnn_relu", "rnn_tanh", "lstm", "gru")


def public_name(name: str, args: Sequence[Any] = ()) -> str:
    """Return torch's public name of an operation; an unknown one keeps its name, without the underscores around it.

    Args:
        name: the dispatcher's name (``_to_copy``), or a node's in the same spelling (``to_copy``).
        args: the operation's arguments, which determine the dimensions of a convolution and the kind of a recurrent layer.
    """
    known = _resolved(name)
    if known == "convolution":
        return _convolution(name, args)
    place = _RECURRENT.get(known.removesuffix("_backward"))
    mode = args[place] if place is not None and len(args) > place else None
    return _LAYERS[mode] if isinstance(mode, int) and 0 <= mode < len(_LAYERS) else known


@functools.cache
def _resolved(name: str) -> str:
    bare = name.strip("_")
    if name.startswith("__") and hasattr(Tensor, name):
        return name
    for pattern, public in _TABLE:
        if re.fullmatch(pattern, bare):
            return public
    if bare.removesuffix("_backward") in _RECURRENT:
        return bare
    if _CONVOLUTION.fullmatch(bare) and not re.fullmatch(r"conv(_transpose)?\dd|conv_tbc", bare):
        return "convolution"
    found, shorter = "", bare
    while shorter:
        found = _public(shorter) or _public(f"{shorter}_") or found
        last, shorter = shorter, _BEFORE.sub("", shorter)
        if shorter == last:
            shorter = _AFTER.sub("", last)
        if shorter == last:
            break
    return found or _public(bare.replace("_", "")) or bare


def _public(name: str) -> str:
    """Return the public name of torch's function or method ``name``; empty if torch has none."""
    for space in _NAMESPACES:
        inside = name.removeprefix(f"{space}_")
        if inside != name and hasattr(getattr(torch, space), inside):
            return f"{space}.{inside}"
    return name if any(callable(getattr(place, name, None)) for place in _PLACES) else ""


def _convolution(name: str, args: Sequence[Any]) -> str:
    number = 2 if "backward" in name else 1
    tensors = [a for a in args if isinstance(a, Tensor)]
    transposed = "transpose" in name or next((a for a in args if isinstance(a, bool)), False)
    kind = "conv_transpose" if transposed else "conv"
    return f"{kind}{tensors[number].dim() - 2}d" if len(tensors) > number else "convolution"


def _snake(node: str) -> str:
    name = re.sub(r"Backward\d*$", "", node.split("::")[-1]).strip("_")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
