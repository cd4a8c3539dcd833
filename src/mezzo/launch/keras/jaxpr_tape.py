"""A traced step of JAX as a graph of tensors (``measure.predict.step_graph``), through the functions that it calls.

JAX names operations by the layers in which they were traced, and operations of the backward pass ``transpose(...)`` around them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jax.interpreters import partial_eval

from mezzo.formats import FORMAT_NAMES, STORED_BYTES
from mezzo.launch.keras.step_tape import StepTape, Untraceable, product_size
from mezzo.measure.predict.step_graph import NodeKind, StepGraph, StepNode, words
from mezzo.measure.predict.tape import NO_SHAPE, ProductSize

_ALIASES = words(
    "reshape squeeze expand_dims transpose copy copy_p stop_gradient rev random_wrap "
    "random_unwrap optimization_barrier bitcast_convert_type sharding_constraint reduce_precision mesh_cast"
)
"""Primitives that move nothing: views, and copies that XLA leaves out."""
_VIEWS = words("slice dynamic_slice split unstack")
_KERNELS = words(
    "gather scatter scatter_add scatter_mul scatter_min scatter_max dynamic_update_slice concatenate pad "
    "reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_scatter_add "
    "select_and_gather_add select_and_scatter sort top_k approx_top_k cumsum cumprod cummax cummin "
    "cumlogsumexp custom_call ffi_call triangular_solve cholesky fft"
)
"""Primitives that no other is fused with."""
_RANDOM = words("random_bits random_seed random_fold_in random_split threefry2x32 rng_uniform rng_bit_generator")
_NOTHING = words("iota debug_callback io_callback pure_callback")
_WRAPPERS = re.compile(r"\w+\(|\)")
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "body_jaxpr")


def step_graph(closed: Any, tape: StepTape) -> StepGraph:
    """Return the graph of a step.

    Raises:
        Untraceable: a product is in a loop of unknown length.
    """
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    found = StepGraph()
    walk = _Walk(tape, found)
    known = {variable: walk.value(variable) for variable in (*jaxpr.constvars, *jaxpr.invars)}
    given = {number for number in known.values() if number is not None}
    walk.through(jaxpr, known, path="", times=1)
    returned = {known.get(variable) for variable in jaxpr.outvars if not hasattr(variable, "val")}
    found.results.update({number for number in returned if number is not None} - given)
    return found


class _Walk:
    """A walk through a jaxpr and those inside it, which writes a ``StepGraph``."""

    def __init__(self, tape: StepTape, found: StepGraph) -> None:
        self._tape, self._found = tape, found
        self._num_products = 0

    def value(self, variable: Any) -> int | None:
        """Add the value of a variable and return its number; None for what is not an array."""
        shape, name = getattr(variable.aval, "shape", None), str(getattr(variable.aval, "dtype", ""))
        if shape is None:
            return None
        elements = math.prod(shape)
        width = STORED_BYTES.get(name) or getattr(variable.aval.dtype, "itemsize", 0) or 0
        return self._found.add_value(elements * width, FORMAT_NAMES.get(name, ""), elements)

    def through(self, jaxpr: Any, known: dict[Any, int | None], *, path: str, times: int) -> None:
        """Add the operations of a jaxpr; ``known`` has the numbers of the values of its variables, and gets new ones."""
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            inner = _bodies(equation)
            where = f"{path}/{equation.source_info.name_stack}"
            if name in _NOTHING:
                known |= dict.fromkeys(equation.outvars)
            elif inner and name not in _KERNELS:
                self._call(equation, inner, known, path=where, times=times)
            elif name in _ALIASES or (name == "broadcast_in_dim" and _is_of_one_number(equation)):
                source = next((known.get(v) for v in equation.invars if not hasattr(v, "val")), None)
                known |= dict.fromkeys(equation.outvars, source)
            else:
                self._add(equation, known, path=where, times=times)

    def _call(
        self, equation: Any, inner: Sequence[Any], known: dict[Any, int | None], *, path: str, times: int
    ) -> None:
        """Add the operations of a function that an equation calls, or of the longest branch."""
        name = equation.primitive.name
        body = max(inner, key=lambda one: len(one.eqns))
        arguments = equation.invars[-len(body.invars) :] if body.invars else []
        inside: dict[Any, int | None] = {
            variable: None if hasattr(given, "val") else known.get(given)
            for variable, given in zip(body.invars, arguments, strict=False)
        }
        inside |= {variable: self.value(variable) for variable in body.constvars}
        if name == "scan":  # each iteration reads its part of what the loop runs over
            num_fixed = equation.params["num_consts"] + equation.params["num_carry"]
            inside |= {variable: self.value(variable) for variable in body.invars[num_fixed:]}
        before = self._num_products
        self.through(body, inside, path=path, times=times * (equation.params["length"] if name == "scan" else 1))
        if name == "while" and self._num_products > before:
            raise Untraceable(
                "the step computes products in a loop whose number of iterations is not known: use keras.ops.scan"
            )
        returned = [None if hasattr(variable, "val") else inside.get(variable) for variable in body.outvars]
        known |= dict(zip(equation.outvars, returned, strict=False))
        if name == "scan":
            num_carry = equation.params["num_carry"]
            self._found.results.update(number for number in returned[num_carry:] if number is not None)
            for variable in equation.outvars[num_carry:]:
                known[variable] = self.value(variable)

    def _add(self, equation: Any, known: dict[Any, int | None], *, path: str, times: int) -> None:
        """Add one operation."""
        outputs = [self.value(variable) for variable in equation.outvars]
        known |= dict(zip(equation.outvars, outputs, strict=True))
        given = (known.get(variable) for variable in equation.invars if not hasattr(variable, "val"))
        kind, backward = equation.primitive.name, "transpose(" in path
        name, shape, flops = measured(equation, backward=backward)
        gathered = sum(self._found.values[n].size_bytes for n in outputs if n is not None)
        node = StepNode(
            kind=_kind(kind),
            name=name,
            scope=self._tape.scope(filter(None, _WRAPPERS.sub("", path).split("/")), self._found),
            phase="backward" if backward else "forward",
            inputs=tuple(number for number in given if number is not None),
            outputs=tuple(number for number in outputs if number is not None),
            flops=flops,
            shape=shape,
            read_bytes=gathered if kind == "gather" else None,
            times=times,
            random=kind in _RANDOM,
        )
        self._num_products += node.kind == "product"
        self._found.nodes.append(node)


def measured(equation: Any, *, backward: bool = False) -> tuple[str, ProductSize, int]:
    """Return an operation's name in tapes, the size of its product, and its FLOPs: two for each multiplication and addition."""
    name = equation.primitive.name
    if name == "dot_general":
        (shown, shape), flops = _dot(equation)
    elif name == "conv_general_dilated":
        (shown, shape), flops = _convolution(equation, backward=backward)
    else:
        return ("embedding" if name == "gather" else name), NO_SHAPE, 0
    return shown, shape, flops


def is_product(equation: Any) -> bool:
    """Return whether an equation is a product."""
    return equation.primitive.name in _PRODUCTS


def _kind(name: str) -> NodeKind:
    if name in _PRODUCTS:
        return "product"
    if name in _KERNELS or name.startswith("scatter"):
        return "kernel"
    return "view" if name in _VIEWS else "fused"


def _is_of_one_number(equation: Any) -> bool:
    return bool(math.prod(equation.invars[0].aval.shape) == 1)


def _bodies(equation: Any) -> list[Any]:
    """Return the jaxprs that an equation may run."""
    params = equation.params
    found = params.get("branches") or [params[name] for name in _BODIES if params.get(name) is not None][:1]
    return [getattr(one, "jaxpr", one) for one in found]


def _dot(equation: Any) -> tuple[tuple[str, ProductSize], int]:
    (left_depth, right_depth), (left_shared, right_shared) = equation.params["dimension_numbers"]
    left, right = (variable.aval.shape for variable in equation.invars)
    measured = product_size(
        (left[k] for k in left_shared),
        _others(left, (*left_depth, *left_shared)),
        _others(right, (*right_depth, *right_shared)),
        (left[k] for k in left_depth),
    )
    size = measured[1]
    return measured, 2 * size.products * size.rows * size.columns * size.depth


def _others(shape: Sequence[int], without: Iterable[int]) -> list[int]:
    left_out = set(without)
    return [size for k, size in enumerate(shape) if k not in left_out]


def _convolution(equation: Any, *, backward: bool) -> tuple[tuple[str, ProductSize], int]:
    """Return a convolution of Keras, or one of its gradients, which JAX writes as convolutions with dimensions swapped."""
    x, kernel, y = (variable.aval.shape for variable in (*equation.invars, *equation.outvars))
    numbers = equation.params["dimension_numbers"]
    groups = max(equation.params["feature_group_count"], equation.params["batch_group_count"])
    batch, features, *spatial = numbers.lhs_spec
    if batch != 0:  # the gradient of the kernel: summed over the batch and the positions of the output's gradient
        depth = x[features] * math.prod(kernel[k] for k in numbers.rhs_spec[2:])
        window = math.prod(y[k] for k in numbers.out_spec[2:])
        out = y[numbers.out_spec[1]]
        size = ProductSize(groups, out // groups, math.prod(y) // out, depth, window)
        return ("convolution_weight_gradient", size), 2 * depth * math.prod(y)
    window = math.prod(kernel[k] for k in numbers.rhs_spec[2:])
    of_input = numbers.rhs_spec[0] < numbers.rhs_spec[1]  # or a transposed convolution
    rows = y[numbers.out_spec[0]] * math.prod(y[k] for k in numbers.out_spec[2:])
    columns = y[numbers.out_spec[1]] // groups
    size = ProductSize(groups, rows, columns, math.prod(kernel) // (columns * groups), window)
    counted = [x[k] for k in spatial] if of_input else [y[k] for k in numbers.out_spec[2:]]
    flops = 2 * x[batch] * math.prod(counted) * math.prod(kernel)
    name = "convolution_input_gradient" if of_input and backward else "convolution"
    return (name, size), flops
