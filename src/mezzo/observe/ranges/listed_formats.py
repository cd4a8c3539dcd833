"""Which values of an FP32 step a policy's op lists would have in 16 bits, read off the graph that autograd keeps.

A loss, a softmax and a norm are computed in FP32 under a policy, and so are their gradients: the gradient of the loss itself
is the loss scale, which FP16 could not hold. What a matrix product returns has 16 bits, and so has what is made of that
alone. A parameter's gradient comes in 16 bits from a product that reads it, in FP32 from anything else.

Limits: what runs without gradients has no graph and counts as 16-bit, and so does what the script casts by itself: in FP32
such a cast leaves no trace.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo import oplists
from mezzo.oplists import Precision
from mezzo.policy import Policy

_OF_FIRST = ("batchnorm", "instancenorm")
"""Operations whose result has the format of their first operand, whatever their weights have."""


class ListedFormats:
    """Which tensors of a graph a policy lowers."""

    def __init__(self, policy: Policy) -> None:
        chosen = oplists.assign(policy.lower, policy.fp32, policy.widest)
        self._precisions = {_plain(oplists.python_name(op)): precision for op, precision in chosen.items()}
        self._by_lists = policy.casting == "ops" or not policy.lowers
        self._wide: dict[Any, bool] = {}
        """By node of the graphs of this step, whether its result is FP32. The nodes are kept, or others would get their ids."""
        self._lowered = WeakTensorKeyDictionary()
        """Parameters whose gradient comes from a product."""
        self._met = WeakTensorKeyDictionary()

    def forget(self) -> None:
        """Forget the nodes of a step that is over."""
        self._wide.clear()

    def is_wide(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` stays in FP32 under the policy."""
        return self._by_lists and tensor.grad_fn is not None and self._of(tensor.grad_fn)

    def gradient_is_wide(self, parameter: Tensor) -> bool:
        """Return whether a parameter's gradient is FP32 from the start: no product that was met reads it."""
        return self._by_lists and parameter in self._met and parameter not in self._lowered

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
            self._met[variable] = None
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


def _leaves(node: Any) -> list[Tensor]:
    """Return the parameter that ``node`` is, or a view of."""
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
