"""A training step as a graph of tensors, and the kernels that compute it: a tape's operations for frameworks that compile their steps.

TensorFlow and JAX write a normalisation or a loss as a dozen element-wise operations, which no GPU runs one by one. So what one layer
computes element by element in one pass, sums included, is a kernel: it reads what comes from outside, and writes what leaves it. This is
what torch's own kernels for such layers do, and less than XLA fuses, which also joins a layer with the next one.

- Products, convolutions, gathers and the like are kernels of their own. A bias that is added to a product alone costs no kernel.
- What a backward pass needs of the inside of a forward kernel is computed again from that kernel's inputs, unless it is random or small.
- Views (reshapes, transposes, broadcasts) move nothing.

Imports no framework: ``launch.keras`` builds the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from mezzo.measure.predict.tape import NO_SHAPE, CostedOperation, ProductSize, TapePhase

NodeKind = Literal["product", "kernel", "fused", "view"]
"""``kernel`` is a kernel of its own without products; ``fused`` joins its neighbours in the same layer and pass."""
_SMALL = 8
"""A value is kept, not computed again, if it is this many times as small as what it is computed from."""
_BIAS = frozenset({"add", "AddV2", "BiasAdd", "Add"})
_BESIDE_BIAS = frozenset({"convert_element_type", "Cast", "broadcast_in_dim"})


def words(text: str) -> frozenset[str]:
    """Return the names in a text."""
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class StepValue:
    """A tensor of the step."""

    size_bytes: int
    format: str
    """Empty for numbers that are not floating-point."""
    elements: int


@dataclass(slots=True)
class StepNode:
    """One operation; ``inputs`` and ``outputs`` are numbers of values."""

    kind: NodeKind
    name: str
    scope: str
    """The layer that it belongs to."""
    phase: TapePhase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int = 0
    shape: ProductSize = NO_SHAPE
    read_bytes: int | None = None
    """What a kernel reads, if that is not all of its inputs."""
    times: int = 1
    """How often it runs in a step: more than once in a loop."""
    random: bool = False


@dataclass
class StepGraph:
    """The operations of one step, each after those whose results it reads."""

    values: list[StepValue] = field(default_factory=list)
    nodes: list[StepNode] = field(default_factory=list)
    results: set[int] = field(default_factory=set)
    """Values that are written at the end of the step, such as new weights."""
    added: set[int] = field(default_factory=set)
    """Of ``results``, what is added to the values in memory, which are read for it."""
    channels: dict[str, int] = field(default_factory=dict)
    """By scope, the number of channels of a layer that normalises over the batch."""
    titles: dict[str, str] = field(default_factory=dict)
    """By scope, the layer's path as predictions show it."""

    def add_value(self, size_bytes: int, form: str, elements: int) -> int:
        """Add a tensor and return its number."""
        self.values.append(StepValue(size_bytes, form, elements))
        return len(self.values) - 1

    def operations(self) -> list[CostedOperation]:
        """Return the kernels in order."""
        nodes = _with_phases(self.nodes)
        return _Kernels(self, nodes).operations()


def _with_phases(nodes: Sequence[StepNode]) -> list[StepNode]:
    """Return the nodes with their phases: what depends on gradients without leading to others is the update."""
    from_backward: set[int] = set()
    after: set[int] = set()
    for number, node in enumerate(nodes):
        if node.phase == "backward" or from_backward.intersection(node.inputs):
            from_backward.update(node.outputs)
            if node.phase != "backward":
                after.add(number)
    to_backward: set[int] = set()
    producer = {value: number for number, node in enumerate(nodes) for value in node.outputs}
    for number in reversed(range(len(nodes))):
        node = nodes[number]
        if node.phase == "backward" or to_backward.intersection(node.outputs):
            to_backward.update(node.inputs)
            if number in after:
                after.discard(number)
                given = (nodes[producer[value]] for value in node.inputs if value in producer)
                scope = next((one.scope for one in given if one.phase == "backward"), node.scope)
                nodes[number].phase, nodes[number].scope = "backward", scope
    return [replace(node, phase="optimizer") if number in after else node for number, node in enumerate(nodes)]


class _Kernels:
    """The kernels of a graph's nodes."""

    def __init__(self, graph: StepGraph, nodes: list[StepNode]) -> None:
        self._values, self._results, self._channels = graph.values, graph.results, graph.channels
        self._titles, self._added = graph.titles, graph.added
        self._nodes = nodes
        self._producer = {value: number for number, node in enumerate(nodes) for value in node.outputs}
        self._consumers: dict[int, list[int]] = defaultdict(list)
        for number, node in enumerate(nodes):
            for value in node.inputs:
                self._consumers[value].append(number)
        self._group = self._grouped()
        self._members: dict[int, list[int]] = defaultdict(list)
        for number, group in self._group.items():
            self._members[group].append(number)
        self._folded = self._biases()

    # --- which nodes are one kernel ------------------------------------------------------------------------------------------------

    def _grouped(self) -> dict[int, int]:
        """Return the group of each fused node, named by its first member."""
        nodes, depth = self._nodes, self._depths()
        leader = {number: number for number, node in enumerate(nodes) if node.kind == "fused"}

        def find(number: int) -> int:
            while leader[number] != number:
                leader[number] = leader[leader[number]]
                number = leader[number]
            return number

        def join(one: int, other: int) -> None:
            a, b = sorted((find(one), find(other)))
            leader[b] = a

        readers: dict[tuple[int, str, str, int], int] = {}
        for number in leader:
            node = nodes[number]
            for value in node.inputs:
                made_by = self._producer.get(value)
                if made_by in leader and self._alike(made_by, number) and depth[made_by] == depth[number]:
                    join(made_by, number)
                elif self._values[value].elements > 1:  # two that read the same large tensor read it together
                    key = value, node.scope, node.phase, depth[number]
                    join(readers.setdefault(key, number), number)
        return {number: find(number) for number in leader}

    def _alike(self, one: int, other: int) -> bool:
        a, b = self._nodes[one], self._nodes[other]
        return a.kind == b.kind == "fused" and (a.scope, a.phase, a.times) == (b.scope, b.phase, b.times)

    def _depths(self) -> list[int]:
        """Return a number for each node that grows wherever a path leaves a layer's pass or a kernel: no group then needs itself."""
        nodes, depth = self._nodes, list[int]()
        for number, node in enumerate(nodes):
            givers = [self._producer[value] for value in node.inputs if value in self._producer]
            depth.append(max((depth[one] + (not self._alike(one, number)) for one in givers), default=0))
        for number in reversed(range(len(nodes))):  # what its own layer's pass reads first is computed there
            readers = [one for value in nodes[number].outputs for one in self._consumers[value]]
            alike = [depth[one] for one in readers if self._alike(number, one)]
            first = min(alike, default=0)
            if alike and all(self._alike(number, one) or depth[one] > first for one in readers):
                depth[number] = max(depth[number], first)
        return depth

    def _biases(self) -> dict[int, int]:
        """Return the products into which a group folds, by group: one that only adds a bias to the product's result."""
        found: dict[int, int] = {}
        for group, members in self._members.items():
            nodes = [self._nodes[number] for number in members]
            written = self._written(members)
            large = [value for value in self._read(members) if value in self._producer]
            products = [value for value in large if self._nodes[self._producer[value]].kind == "product"]
            if (
                len(products) == 1
                and len(written) == 1
                and all(node.name in _BIAS | _BESIDE_BIAS for node in nodes)
                and sum(node.name in _BIAS for node in nodes) == 1
                and self._values[products[0]].elements == self._values[written[0]].elements
                and all(self._group.get(one) == group for one in self._consumers[products[0]])
                and self._is_small_beside(members, products[0])
            ):
                found[group] = self._producer[products[0]]
        return found

    def _is_small_beside(self, members: Sequence[int], product: int) -> bool:
        others = [value for value in self._read(members) if value != product]
        return all(self._values[value].elements < self._values[product].elements for value in others)

    # --- what a kernel reads and writes ----------------------------------------------------------------------------------------------

    def _read(self, members: Sequence[int]) -> list[int]:
        """Return the values that a group reads from outside, each once."""
        inside = {value for number in members for value in self._nodes[number].outputs}
        read = (value for number in members for value in self._nodes[number].inputs if value not in inside)
        return list(dict.fromkeys(read))

    def _written(self, members: Sequence[int]) -> list[int]:
        """Return the values of a group that others read from memory, or that the step returns."""
        own = set(members)
        found = []
        for number in members:
            for value in self._nodes[number].outputs:
                outside = any(one not in own for one in self._consumers[value])
                if value in self._results or (outside and not self._is_computed_again(value)):
                    found.append(value)
        return found

    def _is_computed_again(self, value: int) -> bool:
        """Return whether the readers of a forward kernel's inside compute it again from what that kernel reads."""
        number = self._producer[value]
        node = self._nodes[number]
        if node.kind != "fused" or node.phase != "forward":
            return False
        readers = (self._nodes[one] for one in self._consumers[value] if self._group.get(one) != self._group[number])
        if any(one.phase != "backward" or one.kind != "fused" for one in readers):
            return False
        sources, random = self._origins(number)
        return not random and _SMALL * self._values[value].elements > max(
            (self._values[one].elements for one in sources), default=0
        )

    def _origins(self, number: int) -> tuple[list[int], bool]:
        """Return the values outside its group from which a fused node's results follow, and whether random numbers are among them."""
        group, waiting, seen = self._group[number], [number], {number}
        found: dict[int, None] = {}
        random = False
        while waiting:
            node = self._nodes[waiting.pop()]
            random = random or node.random
            for value in node.inputs:
                giver = self._producer.get(value)
                if giver is not None and self._group.get(giver) == group:
                    if giver not in seen:
                        seen.add(giver)
                        waiting.append(giver)
                else:
                    found[value] = None
        return list(found), random

    def _from_memory(self, members: Sequence[int]) -> list[int]:
        """Return the values that a group reads, with what it computes again replaced by what that follows from."""
        found: dict[int, None] = {}
        waiting = self._read(members)
        seen = set(waiting)
        for value in waiting:  # grows
            giver = self._producer.get(value)
            if giver is not None and value not in self._results and self._is_computed_again(value):
                new = [one for one in self._origins(giver)[0] if one not in seen]
                seen.update(new)
                waiting += new
            else:
                found[value] = None
        return list(found)

    def _bytes(self, values: Iterable[int]) -> int:
        return sum(self._values[value].size_bytes for value in values)

    def _format(self, values: Iterable[int]) -> str:
        floats = [self._values[value] for value in values if self._values[value].format]
        return max(floats, key=lambda one: one.size_bytes).format if floats else "other"

    # --- the kernels -----------------------------------------------------------------------------------------------------------------

    def operations(self) -> list[CostedOperation]:
        """Return the kernels in the order of the step."""
        biases = {number: group for group, number in self._folded.items()}
        found: list[CostedOperation] = []
        for number, node in enumerate(self._nodes):
            group = self._group.get(number)
            if node.kind == "fused":
                if group == number and group not in self._folded and self._is_large(self._members[number]):
                    found += [self._fused(self._members[number])] * node.times
            elif node.kind != "view" and self._is_large([number]):
                bias = self._members[biases[number]] if number in biases else []
                found += [self._own(node, bias)] * node.times
        return found

    def _is_large(self, members: Sequence[int]) -> bool:
        """Return whether a kernel computes more than single numbers, which stay on the host."""
        nodes = [self._nodes[number] for number in members]
        return any(self._values[value].elements > 1 for node in nodes for value in (*node.inputs, *node.outputs))

    def _own(self, node: StepNode, bias: Sequence[int]) -> CostedOperation:
        read = self._bytes(node.inputs) if node.read_bytes is None else node.read_bytes
        read += self._bytes(self._added.intersection(node.outputs))
        written = self._bytes(node.outputs)
        name = node.name
        if bias:
            result = set(node.outputs)
            read += self._bytes(value for value in self._read(bias) if value not in result)
            written = self._bytes(self._written(bias))
            name = "addmm" if name == "mm" else name
        floats = [value for value in (*node.inputs, *node.outputs) if self._values[value].format]
        form = self._values[floats[0]].format if floats else "other"
        return CostedOperation(name, node.phase, self._title(node), form, node.flops, read, written, node.shape)

    def _fused(self, members: Sequence[int]) -> CostedOperation:
        first = self._nodes[members[0]]
        read, written = self._from_memory(members), self._written(members)
        form = self._format(read or written)
        name = "_".join(dict.fromkeys(self._nodes[number].name for number in members))[:_NAME]
        shape = NO_SHAPE
        channels = self._channels.get(first.scope, 0)
        elements = max((self._values[value].elements for value in read), default=0)
        if channels and first.phase != "optimizer" and elements > channels:
            name = "native_batch_norm" if first.phase == "forward" else "native_batch_norm_backward"
            shape = ProductSize(1, channels, elements // channels, 0)
        moved = self._bytes(read) + self._bytes(self._added.intersection(written)), self._bytes(written)
        return CostedOperation(name, first.phase, self._title(first), form, 0, *moved, shape)

    def _title(self, node: StepNode) -> str:
        return self._titles.get(node.scope, node.scope)


_NAME = 60
