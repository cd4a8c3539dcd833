"""Name the layers of a Paddle script by their paths in the model, as yielded by ``model.named_sublayers()``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from mezzo.observe.module_names import Names

_WRAPPERS = re.compile(r"^(_layers\.)+")


def bare_name(name: str) -> str:
    """Return a sublayer's name without the prefixes that ``paddle.DataParallel`` adds."""
    return _WRAPPERS.sub("", f"{name}.").rstrip(".")


class SublayerTree:
    """The layers inside a model (``mezzo.observe.module_names.NamedTree``)."""

    def title(self, root: Any) -> str:
        """Return the name of a model."""
        return type(root).__name__

    def modules(self, root: Any) -> Iterator[tuple[str, Any]]:
        """Yield every layer with its path, which is empty for ``root`` and for wrappers around it."""
        for path, layer in root.named_sublayers(include_self=True):
            yield bare_name(path), layer

    def parameters(self, module: Any) -> Iterator[tuple[str, Any]]:
        """Yield the parameters of a layer itself with their names."""
        yield from module.named_parameters(include_sublayers=False)


class LayerNames(Names):
    """The path of every layer, and of every parameter."""

    no_path = "a weight outside any layer"

    def __init__(self, roots: Iterable[Any]) -> None:
        super().__init__(roots, SublayerTree())
