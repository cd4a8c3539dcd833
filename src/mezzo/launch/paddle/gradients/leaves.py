"""The leaves of a Paddle script's graphs: the tensors whose gradients a backward pass leaves in ``.grad``.

Paddle has no list of them, and a graph names its leaves only by number. So every tensor that is told to take gradients is remembered
from then on, besides the parameters of layers and optimizers that existed before; each graph is then searched for a leaf that is not
among them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import paddle

from mezzo.errors import ScriptError
from mezzo.launch.paddle.state import PaddleRun, parameters_of
from mezzo.launch.patches import Patches

_CREATION: Any = importlib.import_module("paddle.tensor.creation")
_ACCUMULATION = "GradNodeAccumulation"
"""Paddle's name for the end of a graph, which adds a gradient to the ``.grad`` of a leaf."""


class Leaves:
    """The leaves that are known, of which none is kept alive."""

    def __init__(self, run: PaddleRun) -> None:
        self._run = run
        self._told: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._paddles_own: set[int] = set()
        """Leaves that ``paddle.grad`` itself makes, which no script can read."""
        self._of_layers: list[Any] = []
        self._num_roots = 0

    def install(self, patches: Patches) -> None:
        """Remember tensors that are told to take gradients until ``patches`` are undone."""
        original = vars(paddle.Tensor)["stop_gradient"]

        def tell(tensor: Any, stop: bool) -> None:
            original.__set__(tensor, stop)
            self._told_to(tensor)

        patches.replace(paddle.Tensor, "stop_gradient", property(original.__get__, tell))
        patches.around(_CREATION, "_to_tensor_non_static", self._create)

    def _create(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a tensor from data, which may be told in compiled code to take gradients."""
        tensor = original(*args, **kwargs)
        self._told_to(tensor)
        return tensor

    def _told_to(self, tensor: Any) -> None:
        if (
            not tensor.stop_gradient and not self._run.local.in_backward
        ):  # there, Paddle cuts graphs for activation checkpointing
            self._told[id(tensor)] = tensor

    def __iter__(self) -> Iterator[Any]:
        """Yield every leaf that takes gradients now, each once."""
        run = self._run
        if len(run.roots) != self._num_roots:  # a large model takes milliseconds to list
            self._num_roots, self._of_layers = len(run.roots), run.parameters()
        of_optimizers = [p for optimizer in list(run.optimizers) for p in parameters_of(optimizer)]
        known = {id(tensor): tensor for tensor in [*self._told.values(), *self._of_layers, *of_optimizers]}
        return (tensor for tensor in known.values() if not tensor.stop_gradient and tensor.is_leaf)

    def ignore(self, gradients: Iterable[Any]) -> None:
        """Know the leaves that ``paddle.grad`` has made for these results."""
        self._paddles_own.update(_accumulations(gradients))

    def check(self, roots: Iterable[Any], known: Iterable[Any]) -> None:
        """Refuse a graph that has an unknown leaf: its gradient would stay multiplied by the loss scale.

        Raises:
            ScriptError: it has one.
        """
        nodes = {tensor.grad_fn.node_ptr() for tensor in known} | self._paddles_own
        for pointer in _accumulations(roots):
            if pointer not in nodes:
                raise ScriptError(
                    "the loss depends on a tensor that takes gradients and that Mezzo has not seen, so its gradient cannot be unscaled; "
                    "allowed: parameters of layers and optimizers, and tensors whose stop_gradient the script sets",
                    hint="set stop_gradient = False on the tensor in the script, or use a policy without a loss scale, such as bf16",
                )


def _accumulations(roots: Iterable[Any]) -> Iterator[int]:
    """Yield the number of each leaf of a graph once."""
    waiting, seen = [tensor.grad_fn for tensor in roots if tensor is not None], set[int]()
    while waiting:
        node = waiting.pop()
        if node is None or node.node_ptr() in seen:
            continue
        seen.add(node.node_ptr())
        if node.name() == _ACCUMULATION:
            yield node.node_ptr()
        waiting += node.next_functions
