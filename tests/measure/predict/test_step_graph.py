"""The kernels of a step that a framework has compiled: which operations are one kernel, and what each reads and writes."""

from __future__ import annotations

from typing import Any

from mezzo.measure.predict.step_graph import StepGraph, StepNode
from mezzo.measure.predict.tape import CostedOperation, ProductSize

N, C = 1000, 10
"""Elements of a large tensor and of a small one."""


class Step:
    """A graph in the making."""

    def __init__(self) -> None:
        self.graph = StepGraph()

    def value(self, elements: int = N, form: str = "fp32") -> int:
        return self.graph.add_value(elements * (2 if form == "bf16" else 4), form, elements)

    def add(self, name: str, *inputs: int, scope: str = "layer", elements: int = N, **fields: Any) -> int:
        """Add an operation and return its result."""
        output = self.value(elements, fields.pop("form", "fp32"))
        settings = {"kind": "fused", "phase": "forward", **fields}
        self.graph.nodes.append(StepNode(name=name, scope=scope, inputs=inputs, outputs=(output,), **settings))
        return output

    def product(self, *inputs: int, **fields: Any) -> int:
        return self.add("mm", *inputs, kind="product", flops=2 * N, shape=ProductSize(1, 100, 10, 1), **fields)

    def kernels(self, *results: int) -> list[CostedOperation]:
        self.graph.results.update(results)
        return self.graph.operations()


def moved(operations: list[CostedOperation]) -> list[tuple[str, int, int]]:
    return [(op.name, op.read_bytes, op.written_bytes) for op in operations]


def test_a_layers_pass_is_one_kernel_and_the_next_layer_another() -> None:
    step = Step()
    x = step.value()
    mean = step.add("mean", x, elements=C)
    y = step.add("mul", step.add("sub", x, mean), step.value(C))
    z = step.add("max", y, scope="next")
    assert moved(step.kernels(z)) == [("mean_sub_mul", 4 * (N + C), 4 * N), ("max", 4 * N, 4 * N)]


def test_a_bias_folds_into_its_product_and_an_activation_does_not() -> None:
    step = Step()
    x, weight, bias = step.value(), step.value(), step.value(C)
    y = step.add("add", step.product(x, weight), step.add("broadcast_in_dim", bias))
    assert moved(step.kernels(y)) == [("addmm", 4 * (2 * N + C), 4 * N)]
    step = Step()
    y = step.add("max", step.add("add", step.product(step.value(), step.value()), step.value(C)))
    assert moved(step.kernels(y)) == [("mm", 8 * N, 4 * N), ("add_max", 4 * (N + C), 4 * N)]
    step = Step()  # a sum of two tensors of the same size is no bias
    y = step.add("add", step.product(step.value(), step.value()), step.value())
    assert [op.name for op in step.kernels(y)] == ["mm", "add"]


def test_what_the_backward_pass_needs_is_computed_again_unless_it_is_random_or_small() -> None:
    def kernels(**fields: Any) -> list[CostedOperation]:
        step = Step()
        x, gradient = step.value(), step.value()
        inner = step.add("inner", *(() if fields.get("random") else (x,)), **fields)
        step.graph.results.add(step.add("outer", x, inner))
        back = step.add("back", gradient, inner, phase="backward")
        return step.kernels(back)

    again = kernels()
    assert moved(again) == [("inner_outer", 4 * N, 4 * N), ("back", 8 * N, 4 * N)]
    assert moved(kernels(elements=C)) == [("inner_outer", 4 * N, 4 * (N + C)), ("back", 4 * (N + C), 4 * N)]
    assert moved(kernels(random=True)) == [("inner_outer", 4 * N, 8 * N), ("back", 8 * N, 4 * N)]


def test_a_kernel_does_not_wait_for_itself() -> None:
    step = Step()
    x = step.value()
    first = step.add("first", x)
    second = step.add("second", first, step.product(first, step.value()))
    assert [op.name for op in step.kernels(second)] == ["first", "mm", "second"]


def test_the_update_follows_gradients_and_sums_of_gradients_belong_to_the_backward_pass() -> None:
    step = Step()
    gradients = [step.add("dx", step.value(), phase="backward") for _ in range(2)]
    total = step.add("AddN", *gradients, scope="")
    last = step.add("dw", total, phase="backward")
    new = step.add("sub", step.value(), last, scope="sgd")
    step.graph.added.add(new)
    kernels = step.kernels(new)
    assert [(op.name, op.phase, op.module) for op in kernels] == [
        ("dx_AddN_dw", "backward", "layer"),
        ("sub", "optimizer", "sgd"),
    ]
    assert kernels[-1].read_bytes == 4 * 3 * N  # the variable is read to add to it


def test_a_normalisation_over_the_batch_has_its_name_and_its_channels() -> None:
    step = Step()
    step.graph.channels["model/norm"] = C
    step.graph.titles["model/norm"] = "norm"
    y = step.add("mul", step.value(), step.value(C), scope="model/norm")
    step.add("back", step.value(), y, scope="model/norm", phase="backward")
    found = step.kernels(y)
    assert [(op.name, op.module, op.shape) for op in found] == [
        ("native_batch_norm", "norm", ProductSize(1, C, N // C)),
        ("native_batch_norm_backward", "norm", ProductSize(1, C, N // C)),
    ]


def test_views_cost_nothing_loops_count_and_single_numbers_stay_on_the_host() -> None:
    step = Step()
    part = step.add("slice", step.value(), kind="view", elements=N // 2)
    y = step.product(part, step.value(), times=3)
    step.add("lr", step.value(1), elements=1)
    assert moved(step.kernels(y)) == [("mm", 6 * N, 4 * N)] * 3


def test_a_gather_reads_what_it_returns_and_the_format_is_the_largest_operands() -> None:
    step = Step()
    rows = step.add("embedding", step.value(100_000), kind="kernel", read_bytes=4 * N)
    half = step.add("cast", rows, form="bf16")
    out = step.add("mul", half, step.value(C), scope="next", form="bf16")
    found = step.kernels(out)
    assert moved(found) == [("embedding", 4 * N, 4 * N), ("cast", 4 * N, 2 * N), ("mul", 2 * N + 4 * C, 2 * N)]
    assert [op.format for op in found] == ["fp32", "fp32", "bf16"]
