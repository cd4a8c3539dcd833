"""Derive from the autograd graph which values of an FP32 step would have 16 bits under a policy's op lists.

A loss, a softmax and a norm are computed in FP32 under a policy, and so are their gradients: the gradient of the loss itself
is the loss scale, which FP16 could not represent. The result of a matrix product has 16 bits, and so does everything computed
only from such results. A parameter's gradient has 16 bits if it comes from a product that reads the parameter, else 32. Code in
which the script itself turns autocast off runs in FP32, and so does a Function with ``custom_fwd(cast_inputs=torch.float32)``.

Limits: code that runs without gradients has no graph and counts as 16-bit, unless autocast is off around it. So do the script's own
casts: in FP32 they leave no trace.

In the FP32 run that ranges observes, such a region has no effect, so it is recognised by time: autograd numbers its nodes in the order of
their creation, so the numbers at both ends of a region show which nodes were created inside it.

A region that is opened outside any module ends where a module is called: a policy opens its own region there.

Limits: everything computed in a region counts as FP32, even if it is computed from 16-bit values without a cast; nodes of other threads can
have the same numbers.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo import oplists
from mezzo.oplists import Precision
from mezzo.policy import Policy

_OF_FIRST = ("batchnorm", "instancenorm")
"""Operations whose result has the format of their first operand, whatever the format of their weights."""


class JudgedFormats(Protocol):
    """Which values of an FP32 step a policy lowers."""

    off: OffRegions
    """Where the script turns autocast off itself."""

    def forget(self) -> None:
        """Discard the data of a step that is over."""

    def is_wide(self, tensor: Tensor, module: nn.Module) -> bool:
        """Return whether ``tensor``, which ``module`` returned, stays in FP32 under the policy."""

    def gradient_is_wide(self, parameter: Tensor) -> bool:
        """Return whether a parameter's gradient is FP32 from the start."""


class ListedFormats:
    """A classifier of the tensors of a graph: which ones a policy lowers."""

    def __init__(self, policy: Policy) -> None:
        chosen = oplists.assign(policy.lower, policy.fp32, policy.widest)
        self._precisions = {_plain(oplists.python_name(op)): precision for op, precision in chosen.items()}
        self._by_lists = policy.casting == "ops" or not policy.lowers
        self.off = OffRegions()
        """Where the script turns autocast off itself."""
        self._wide: dict[Any, bool] = {}
        """Whether the result of each node of this step's graphs is FP32. The nodes are kept alive, since new ones would reuse their ids."""
        self._lowered = WeakTensorKeyDictionary()
        """Parameters whose gradient comes from a product."""
        self._parameters_seen = WeakTensorKeyDictionary()

    def forget(self) -> None:
        """Discard the nodes of a step that is over."""
        self._wide.clear()

    def is_wide(self, tensor: Tensor, module: nn.Module) -> bool:
        """Return whether ``tensor`` stays in FP32 under the policy, whichever module returned it."""
        if tensor.grad_fn is None:
            return self._by_lists and self.off.now
        return self._by_lists and self._of(tensor.grad_fn)

    def gradient_is_wide(self, parameter: Tensor) -> bool:
        """Return whether a parameter's gradient is FP32 from the start: no product found so far reads the parameter."""
        return self._by_lists and parameter in self._parameters_seen and parameter not in self._lowered

    def _of(self, root: Any) -> bool:
        waiting = [root]
        while waiting:  # no recursion: a recurrent loop's graph is deep
            node = waiting[-1]
            parents = [p for p, _ in node.next_functions if p is not None]
            open_parents = [p for p in parents if p not in self._wide]
            if node not in self._wide and open_parents:
                waiting.extend(open_parents)
                continue
            waiting.pop()
            if node not in self._wide:
                self._wide[node] = self._judge(node, parents)
        return self._wide[root]

    def _judge(self, node: Any, parents: list[Any]) -> bool:
        variable = getattr(node, "variable", None)
        if variable is not None:
            self._parameters_seen[variable] = None
            return True
        if self.off.cover(node) or _casts_inputs_to_fp32(node):
            return True
        name = _plain(re.sub(r"Backward\d*$", "", node.name().split("::")[-1]))
        precision = self._precision(name)
        if precision == "lower":
            self._lowered.update({leaf: None for parent in parents for leaf in _leaves(parent)})
            return False
        if precision == "fp32":
            return True
        judged = parents[:1] if any(name.endswith(kind) for kind in _OF_FIRST) else parents
        return any(self._wide[p] for p in judged)

    def _precision(self, name: str) -> Precision:
        if "attention" in name:
            name = "scaleddotproductattention"
        elif "rnnlayer" in name or name.endswith("rnn"):
            name = "lstm"
        elif name in ("mvmul", "sparseaddmm"):
            name = "mm"
        return self._precisions.get(name.removeprefix("native").removesuffix("kernel"), "follow")


def _casts_inputs_to_fp32(node: Any) -> bool:
    """Return whether a node is a Function whose forward is decorated with ``custom_fwd(cast_inputs=torch.float32)``."""
    forward: Any = getattr(getattr(type(node), "_forward_cls", None), "forward", None)
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    if "cast_inputs" not in names:
        return False
    return forward.__closure__[names.index("cast_inputs")].cell_contents is torch.float32


def _leaves(node: Any) -> list[Tensor]:
    """Return the parameter into whose gradient ``node`` accumulates, or of which it is a view, if any."""
    while True:
        variable = getattr(node, "variable", None)
        if variable is not None:
            return [variable]
        parents = [p for p, _ in node.next_functions if p is not None]
        if len(parents) != 1 or not _VIEW.match(node.name()):
            return []
        node = parents[0]


_VIEW = re.compile(
    r"(T|Transpose|Permute|View|Reshape\w*|Unsafe\w*View|Unsqueeze|Squeeze|Expand|Slice|Select|Split\w*|Unbind|Narrow|Clone)Backward"
)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


class OffRegions:
    """The script's open autocast regions, and which graph nodes were created where autocast is off."""

    def __init__(self) -> None:
        self._open: list[tuple[bool, nn.Module | None]] = []
        """For each open region, whether autocast is off in it, and the module if a policy would open the region for its call."""
        self._ends_at_module: list[bool] = []
        self._numbers: list[int] = []
        """The number of the next node at each change, in ascending order."""
        self._off: list[bool] = []
        """Whether autocast was off from that node on."""

    @property
    def now(self) -> bool:
        """Whether autocast is off now."""
        return bool(self._open) and self._open[-1][0]

    def enter(self, *, off: bool, in_module: bool) -> int:
        """Open a region; return its depth, for ``leave``."""
        depth = len(self._open)
        self._open.append((off, None))
        self._ends_at_module.append(not in_module)
        self._note_change()
        return depth

    def leave(self, depth: int) -> None:
        """Close a region, and those that an error left open inside it."""
        del self._open[depth:], self._ends_at_module[depth:]
        self._note_change()

    def module_called(self, module: nn.Module) -> None:
        """Open the policy's region if the script opened its own outside any module and calls a module in it."""
        if self._open and self._open[-1][0] and self._ends_at_module[-1]:
            self._open.append((False, module))
            self._ends_at_module.append(False)
            self._note_change()

    def module_returned(self, module: nn.Module) -> None:
        """Close the region that was opened for ``module``."""
        if self._open and self._open[-1][1] is module:
            self.leave(len(self._open) - 1)

    def cover(self, node: Any) -> bool:
        """Return whether a graph node was created where autocast is off."""
        place = bisect_right(self._numbers, node._sequence_nr()) - 1
        return place >= 0 and self._off[place]

    def forget(self) -> None:
        """Discard the regions that are over, so that a long run does not accumulate them."""
        self._numbers, self._off = [], []
        if self._open:
            self._note_change()

    def _note_change(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._off.append(self.now)
