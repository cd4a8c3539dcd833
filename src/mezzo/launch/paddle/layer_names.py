"""Name the layers of a Paddle script by their paths in the model, as yielded by ``model.named_sublayers()``.

Roots are the layers called from outside any layer. If there is one model, paths begin below it, like ``fp32_modules`` patterns; if there
are several, they begin with the model's class. A root without sublayers, such as a loss, is named by its class.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable
from typing import Any

from mezzo.observe.nested_names import SCRIPT

_WRAPPERS = re.compile(r"^(_layers\.)+")


def bare_name(name: str) -> str:
    """Return a sublayer's name without the prefixes that ``paddle.DataParallel`` adds."""
    return _WRAPPERS.sub("", f"{name}.").rstrip(".")


def free_title(layer: Any, taken: Container[str]) -> str:
    """Return the class of ``layer``, with a number if that name is taken: ``Linear``, ``Linear#2``."""
    name = type(layer).__name__
    return next(t for t in itertools.chain([name], (f"{name}#{k}" for k in itertools.count(2))) if t not in taken)


class LayerNames:
    """The path of every layer, and of every parameter."""

    def __init__(self, roots: Iterable[Any]) -> None:
        unique = list({id(root): root for root in roots}.values())
        inner = {id(child) for root in unique for child in root.sublayers()}
        self.outermost = [root for root in unique if id(root) not in inner]
        self._models = [root for root in self.outermost if root.sublayers()]
        self._layers: dict[int, str] = {}
        self._patterns: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        for root in self.outermost:
            self._add(root)

    def of(self, layer: Any | None) -> str:
        """Return the path of ``layer``, or its class if it is not in any root."""
        if layer is None:
            return SCRIPT
        return self._layers.get(id(layer)) or type(layer).__name__

    def pattern(self, layer: Any | None) -> str:
        """Return the name of ``layer`` in ``fp32_modules``; empty for a root and for code outside any layer."""
        return "" if layer is None else self._patterns.get(id(layer), "")

    def parameter(self, parameter: Any) -> str:
        """Return the path of a parameter."""
        return self._parameters.get(id(parameter), "a weight outside any layer")

    def patterns(self) -> list[str]:
        """Return the names of all sublayers that patterns may match, those of the first model first."""
        return list(dict.fromkeys(filter(None, self._patterns.values())))

    def _add(self, root: Any) -> None:
        title = free_title(root, set(self._layers.values()))
        prefix = "" if self._models == [root] else f"{title}."
        for path, layer in root.named_sublayers(include_self=True):
            bare = bare_name(path)
            name = f"{prefix}{bare}" if bare else title
            self._layers.setdefault(id(layer), name)
            self._patterns.setdefault(id(layer), bare)
            for parameter_name, parameter in layer.named_parameters(include_sublayers=False):
                self._parameters.setdefault(id(parameter), f"{name}.{parameter_name}" if bare else parameter_name)
