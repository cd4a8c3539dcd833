"""What a Keras script's step computes and moves, for predictions: the graph of the step that its backend has traced, as a tape.

A graph names each operation by the layers in which it was traced. It is read at the batch of the script, and at another one, if the graph
or the function of the step leaves the batch open.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras

from mezzo.launch.patches import Patches
from mezzo.measure.predict.script.observed import ObservedTape, other_size
from mezzo.measure.predict.step_graph import StepGraph
from mezzo.measure.predict.tape import ProductSize, TrainingTape

_NUMBERED = re.compile(r"_\d+$")
"""The suffix by which TensorFlow tells scopes of the same name apart."""
_NO_MEMORY = "the compiler plans a step's buffers when it runs on the GPU, and the graph of the step does not show them"
_BY_BATCH = ("BatchNormalization",)


class Untraceable(Exception):
    """A step whose operations are not all known."""


class StepTape:
    """The tape of a Keras script, and the layers that its graph names."""

    def __init__(self, path: Path, *, numbered: bool) -> None:
        """Begin a tape.

        Args:
            path: the file to write it to.
            numbered: whether the backend tells scopes of the same name apart by numbers.
        """
        self._path, self._numbered = path, numbered
        self._layers: dict[str, Any] = {}
        self._roots: set[str] = set()
        self._depth = 0
        self.observed = ObservedTape(error="the script made no step that its backend shows")

    def install(self, patches: Patches) -> None:
        """Note every layer that is called, until ``patches`` are undone."""
        patches.wrap(keras.Layer, "__call__", self._noting)

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                self._roots.add(layer.name)
            self._layers[layer.name] = layer
            self._depth += 1
            try:
                return original(layer, *args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def other_variables(self) -> list[Any]:
        """Return the variables of the layers that are not trained, such as running statistics."""
        found = {id(v): v for layer in self._layers.values() for v in layer.non_trainable_variables}
        return list(found.values())

    # --- scopes ------------------------------------------------------------------------------------------------------------------------

    def scope(self, path: Iterable[str], graph: StepGraph) -> str:
        """Return the scope of an operation: its path down to the innermost layer, or to its last scope outside of all layers."""
        parts = list(path)
        layers = [self._layer(part) for part in parts]
        last = max((number for number, layer in enumerate(layers) if layer is not None), default=None)
        if last is None:
            return "/".join(parts)
        found = "/".join(parts[: last + 1])
        if found not in graph.titles:
            named = [layer.name for layer in layers if layer is not None]
            below = named[1:] if named[0] in self._roots else named
            graph.titles[found] = ".".join(below or named)
            layer = layers[last]
            if type(layer).__name__ in _BY_BATCH and layer.built:
                graph.channels[found] = int(layer.moving_mean.shape[0])
        return found

    def _layer(self, name: str) -> Any:
        name = _NUMBERED.sub("", name) if self._numbered else name
        found = self._layers.get(name)
        if found is not None or not self._numbered:
            return found
        same = [layer for key, layer in self._layers.items() if _NUMBERED.sub("", key) == name]
        return same[0] if len(same) == 1 else None

    # --- the tape ------------------------------------------------------------------------------------------------------------------------

    def record(
        self, graph_at: Callable[[int | None], StepGraph], *, batch: int | None, optimizer: Callable[[], str]
    ) -> None:
        """Record the step of ``graph_at``, which returns its graph at a batch size.

        Args:
            graph_at: returns the graph at a batch; None for the script's own.
            batch: the script's own batch; None if it is not known.
            optimizer: returns the name of the optimizer's class, which a first trace finds.
        """
        try:
            tapes = [TrainingTape(batch=batch or 1, operations=graph_at(batch).operations())]
        except Untraceable as error:
            self.observed = ObservedTape(error=str(error))
            return
        why = "" if batch else "the size of its batch is not known"
        if batch:
            try:
                other = TrainingTape(batch=other_size(batch), operations=graph_at(other_size(batch)).operations())
                if other.operations != tapes[0].operations:
                    tapes.append(other)
                else:
                    why = "the batch is fixed in the graph of its step"
            except Exception as error:  # the step's function may accept only its own batch
                why = f"its step cannot be traced at batch {other_size(batch)}: {str(error).partition(chr(10))[0]}"
        images = keras.config.image_data_format() == "channels_last"
        self.observed = ObservedTape(
            tapes=tapes,
            known_batch=batch is not None,
            no_other_batch="" if len(tapes) > 1 else why,
            optimizer=optimizer(),
            channels_last=images,
            no_memory=_NO_MEMORY,
            fuses=True,
        )

    def refuse(self, why: str) -> None:
        """Record why there is no tape."""
        self.observed = ObservedTape(error=why)

    def write(self) -> None:
        """Write the tape."""
        self.observed.write(self._path)


def product_size(
    shared: Iterable[int], rows: Iterable[int], columns: Iterable[int], depth: Iterable[int]
) -> tuple[str, ProductSize]:
    """Return the name and size of a product of tensors, by the sizes of its dimensions of each kind."""
    found = ProductSize(math.prod(shared), math.prod(rows), math.prod(columns), math.prod(depth))
    return ("bmm" if found.products > 1 else "mm"), found
