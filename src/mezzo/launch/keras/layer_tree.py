"""Paths of the layers of Keras models on PyTorch, for observers: the layers' names in Keras, below the outermost model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from mezzo.launch.keras.layers import inner_layers, keep_fp32
from mezzo.observe.observer import ModuleTree


class LayerTree(ModuleTree):
    """The layers inside a model; a PyTorch module that a layer wraps is inside that layer."""

    def title(self, root: nn.Module) -> str:
        """Return the model's name in Keras."""
        return str(root.name) if _is_layer(root) else super().title(root)

    def modules(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield every layer once, with its path."""
        if not _is_layer(root):
            yield from super().modules(root)
            return
        seen: set[int] = set()
        for path, layer in [("", root), *inner_layers(root)]:
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            yield path, layer
            wrapped = layer.__dict__.get("_modules", {}).get("module")
            if isinstance(wrapped, nn.Module) and not _is_layer(wrapped):
                prefix = f"{path}." if path else ""
                yield from (
                    (f"{prefix}module.{below}".rstrip("."), module) for below, module in wrapped.named_modules()
                )

    def named(self, root: nn.Module) -> dict[str, nn.Module]:
        """Return the layers inside ``root`` by path."""
        return {path: layer for path, layer in self.modules(root) if path}

    def parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the values of a layer's own variables."""
        if not _is_layer(module):
            yield from super().parameters(module)
            return
        layer: Any = module
        for variable in [*layer._trainable_variables, *layer._non_trainable_variables]:
            if isinstance(variable._value, nn.Parameter):
                yield variable.name, variable._value

    def keep_fp32(self, module: nn.Module, device_type: str) -> None:
        """Give a layer, and the layers in it, Keras' dtype policy for FP32."""
        if not _is_layer(module):
            super().keep_fp32(module, device_type)
            return
        keep_fp32(module)


def _is_layer(module: Any) -> bool:
    return hasattr(module, "_flatten_layers")
