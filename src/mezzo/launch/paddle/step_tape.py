"""One real step of a Paddle script as a tape: the operations of its forward pass and of its update, and the backward pass that follows.

Paddle runs a backward pass in C++, which shows no operations. They are derived from the forward pass, by one rule for each kind::

    convolution, product      one product for each operand that needs a gradient; a bias is a sum of the result's gradient
    normalisation             reads the gradient and the input, writes the input's gradient
    view                      nothing
    sum, mean, concatenation  reads the gradient, writes the operands' gradients
    add                       the first operand's gradient is the result's; the others are written
    other element-wise        reads the gradient and what the operation keeps (operands, result or mask), writes the operands' gradients

A tensor that several operations read gets its gradients added up. Under a policy that lowers formats, a CPU computes in FP32, so formats
and casts follow from the policy's lists, as ``paddle.amp.auto_cast`` casts on a GPU: every operand, each time it is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle

from mezzo.formats import FP32
from mezzo.frameworks import paddle as paddle_policy
from mezzo.launch.paddle.operations import argument, flops_of, is_product
from mezzo.launch.paddle.state import PaddleRun, RunListener
from mezzo.launch.paddle.surveys import format_name
from mezzo.launch.paddle.tape import Tape, TapedOperation
from mezzo.launch.patches import Patches
from mezzo.measure.predict.script.observed import ObservedTape
from mezzo.measure.predict.step_graph import words
from mezzo.measure.predict.tape import NO_SHAPE, CostedOperation, ProductSize, TapePhase, TrainingTape
from mezzo.observe.settings import StopScript

_VIEWS = words(
    "reshape transpose squeeze unsqueeze flatten view view_shape view_dtype detach expand expand_as shape "
    "shape64 getitem slice strided_slice split split_with_num chunk unbind unstack as_strided t numel is_empty "
    "full_int_array data"
)
"""Operations that move nothing."""
_PARTS = words("getitem slice strided_slice split split_with_num chunk unbind unstack expand expand_as")
"""Views of a part, or of repetitions: their backward pass writes the whole gradient."""
_FROM_GRADIENT = words("add subtract scale mean mean_all sum cast concat stack pad pad3d flip roll assign add_n tile")
"""Operations whose backward pass reads the gradient alone."""
_FROM_RESULT = words("relu sigmoid tanh softmax log_softmax exp sqrt rsqrt relu6 hardsigmoid")
"""Operations whose backward pass reads the result, and no operand."""
_NORMS = {"batch_norm": "native_batch_norm", "sync_batch_norm_": "native_batch_norm"}
_TRANSPOSED = frozenset(("conv2d_transpose", "depthwise_conv2d_transpose", "conv3d_transpose"))
_UNKNOWN = {"rnn": "a recurrent layer is one operation of Paddle, whose kernels are not known"}
_WIDTHS = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of an operation, in the format in which the operation reads or writes it."""

    number: int
    shape: tuple[int, ...]
    format: str
    """Empty for numbers that are not floating-point."""
    size_bytes: int
    needs_gradient: bool
    source: str
    """The format that it is cast from; its own if it is not."""
    is_strided: bool = False
    """Whether it is copied for the operation, because it is a transposed view or a part."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Forward:
    """An operation of the forward pass, kept for its backward pass."""

    name: str
    module: str
    operands: list[_Tensor]
    results: list[_Tensor]
    sizes: ProductSize
    flops: int


class StepTape(RunListener):
    """Records the second update of a script, with the passes before it."""

    def __init__(self, run: PaddleRun, path: Path) -> None:
        """Begin a tape, to be written to ``path``."""
        self._run, self._path = run, path
        self._tape = Tape(run, self, keeps=False)
        policy = run.applied
        lowers = policy is not None and policy.lowers
        self._half = policy.storage.name if policy is not None and lowers else ""
        self._precisions = paddle_policy.precisions(policy) if policy is not None and lowers else {}
        self._phase: TapePhase = "forward"
        self._operations: list[CostedOperation] = []
        self._pending: list[_Forward] = []
        self._kept: list[Any] = []
        """Tensors of the step, so that no other gets the identity of one."""
        self._formats: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._batch: int | None = None
        self._num_backward = 0
        self._channels_last = False
        self._unknown = ""
        """Why an operation has no known cost."""
        self._observed = ObservedTape(error="it ended before its second update")

    def install(self, patches: Patches) -> None:
        """Record until ``patches`` are undone."""
        self._tape.install(patches)
        self._run.observe(self)

    def write(self) -> None:
        """Write what was recorded."""
        self._observed.write(self._path)

    # --- the events of a run -----------------------------------------------------------------------------------------------------------

    def backward_begins(self, losses: Iterable[Any]) -> None:
        """Begin a backward pass."""
        self._phase = "backward"

    def backward_ended(self) -> None:
        """Derive the operations of the backward pass that has run."""
        if self._tape.on:
            self._num_backward += 1
            self._derive()
        self._phase = "optimizer"

    def update_ended(self, optimizer: Any) -> None:
        """Begin after the first update, and end the script after the second.

        Raises:
            StopScript: the step is recorded.
        """
        if not self._tape.on:
            self._phase = "forward"
            self._tape.start(everything=True)
            return
        if not self._num_backward:
            return
        self._tape.stop()
        self._kept.clear()
        if self._unknown:
            self._observed = ObservedTape(error=self._unknown)
            raise StopScript
        self._observed = ObservedTape(
            tapes=[TrainingTape(batch=self._batch or 1, operations=self._operations)],
            num_batches=self._num_backward,
            known_batch=self._batch is not None,
            no_other_batch="one real step has shown its own batch only",
            optimizer=", ".join(dict.fromkeys(type(one).__name__ for one in self._run.optimizers)),
            channels_last=self._channels_last,
            backward="derived",
            no_memory="Paddle's allocator, and what its kernels in C++ keep, are not simulated",
        )
        raise StopScript

    def rounded(self, operation: TapedOperation, before: Any, after: Any, *, result: bool) -> None:
        """Do nothing: formats follow from the policy's lists."""

    def finished(self, operation: TapedOperation) -> None:
        """Record an operation that has run."""
        self._unknown = self._unknown or _UNKNOWN.get(operation.name, "")
        name = (
            operation.name
            if operation.name.startswith(("adam", "sgd", "momentum", "lamb"))
            else operation.name.rstrip("_")
        )
        trains = any(not t.stop_gradient for t in operation.results) and paddle.is_grad_enabled()
        if self._phase == "forward" and self._batch is None and operation.layer is None and not trains:
            return  # the script makes its data
        if trains and self._phase == "optimizer" and operation.layer is not None:
            self._phase = "forward"  # of the next batch of the same update
        if self._phase == "forward" and self._batch is None and operation.layer is not None and operation.operands:
            first = operation.operands[0]
            self._batch = int(first.shape[0]) if first.shape else None
        precision = self._precision(name)
        operands = [self._read(t, name, precision) for t in operation.operands]
        out = self._result_format(operands, precision)
        self._kept += [*operation.operands, *operation.results]
        results = [self._written(t, out, trains=trains) for t in operation.results]
        if name in _VIEWS:
            if self._phase == "forward" and trains:
                self._pending.append(_Forward(name, "", operands, results, NO_SHAPE, 0))
            return
        self._add_forward(operation, name, operands, results, trains=trains)

    def _add_forward(
        self, operation: TapedOperation, name: str, operands: list[_Tensor], results: list[_Tensor], *, trains: bool
    ) -> None:
        module = self._name_of(operation.layer)
        for t in operands:
            if t.is_strided:
                self._copy(t, self._phase, module)
            if t.source != t.format:
                self._cast(t, module, back=False)
        flops, sizes = 0, NO_SHAPE
        if is_product(name):
            flops = flops_of(operation.name, operation.result, operation.args, operation.kwargs)
            sizes = _sizes(name, operation, operands, results)
            self._channels_last = self._channels_last or _is_channels_last(operation)
        elif name in _NORMS:
            sizes = _normalised(operands)
        read, written = sum(t.size_bytes for t in operands), sum(t.size_bytes for t in results)
        if name == "embedding":
            read = written + sum(t.size_bytes for t in operands if not t.format)
        if name == "dropout":
            written += results[0].elements  # the mask
        self._add(_shown(name, sizes), self._phase, module, operands, flops, read, written, sizes)
        if self._phase == "forward" and trains:
            self._pending.append(_Forward(name, module, operands, results, sizes, flops))

    def _add(
        self,
        name: str,
        phase: TapePhase,
        module: str,
        operands: Sequence[_Tensor],
        flops: int,
        read: int,
        written: int,
        sizes: ProductSize = NO_SHAPE,
    ) -> None:
        if not flops and all(t.elements <= 1 for t in operands):
            return  # single numbers, which stay on the host
        form = next((t.format for t in operands if t.format), "other")
        self._operations.append(CostedOperation(name, phase, module, form, flops, read, written, sizes))

    def _copy(self, t: _Tensor, phase: TapePhase, module: str) -> None:
        """Add the copy of a view for an operation that needs its numbers in a row, or of the gradient of one."""
        self._add("contiguous", phase, module, [t], 0, t.size_bytes, t.size_bytes)

    def _cast(self, t: _Tensor, module: str, *, back: bool) -> None:
        """Add the cast of an operand, or of its gradient ``back``."""
        sizes = [t.elements * _WIDTHS[name] for name in (t.source, t.format)]
        source, target = reversed(sizes) if back else sizes
        form = t.format if back else t.source
        self._operations.append(
            CostedOperation("cast", "backward" if back else self._phase, module, form, 0, source, target)
        )

    # --- formats -----------------------------------------------------------------------------------------------------------------------

    def _precision(self, name: str) -> str:
        if not self._half or self._phase != "forward":
            return "fp32"
        if not self._run.lowered_here():
            return "fp32"
        return str(self._precisions.get(name, "follow"))

    def _read(self, tensor: Any, name: str, precision: str) -> _Tensor:
        stored = self._stored(tensor)
        form = stored
        if stored in ("fp32", self._half) and self._half and name not in _VIEWS:
            form = {"lower": self._half, "fp32": FP32.name}.get(precision, stored)
        strided = name not in _VIEWS and not tensor.is_contiguous()
        return self._tensor(tensor, form, stored, needs=not tensor.stop_gradient, strided=strided)

    def _result_format(self, operands: Sequence[_Tensor], precision: str) -> str:
        if precision == "lower":
            return self._half
        floats = [t.format for t in operands if t.format]
        return self._half if precision == "follow" and floats[:1] == [self._half] else ""

    def _written(self, tensor: Any, form: str, *, trains: bool) -> _Tensor:
        stored = _format(tensor)
        form = form if form and stored == FP32.name else stored
        self._formats[id(tensor)] = form
        return self._tensor(tensor, form, form, needs=trains and not tensor.stop_gradient)

    def _stored(self, tensor: Any) -> str:
        return self._formats.get(id(tensor)) or _format(tensor)

    def _tensor(self, tensor: Any, form: str, source: str, *, needs: bool, strided: bool = False) -> _Tensor:
        width = _WIDTHS.get(form, 0) or int(tensor.element_size())
        return _Tensor(id(tensor), tuple(tensor.shape), form, int(tensor.size) * width, needs, source, strided)

    def _name_of(self, layer: Any) -> str:
        if layer is None:
            return ""
        if id(layer) not in self._names:
            for root in self._tape.roots:
                self._names |= {id(one): path for path, one in root.named_sublayers(include_self=True)}
        return self._names.get(id(layer), type(layer).__name__)

    # --- the backward pass ---------------------------------------------------------------------------------------------------------------

    def _derive(self) -> None:
        """Add the operations of the backward pass of what has run forward."""
        used: Counter[int] = Counter()
        for one in reversed(self._pending):
            needing = [t for t in one.operands if t.needs_gradient]
            for t in needing:
                used[t.number] += 1
                if used[t.number] > 1:
                    self._add("add", "backward", one.module, [t], 0, 2 * t.size_bytes, t.size_bytes)
            if is_product(one.name):
                self._product_gradients(one)
            else:
                self._gradients(one, needing)
            for t in needing:
                if t.source != t.format:
                    self._cast(t, one.module, back=True)
                if t.is_strided:
                    self._copy(t, "backward", one.module)
        self._pending.clear()

    def _gradients(self, one: _Forward, needing: list[_Tensor]) -> None:
        """Add the backward pass of an operation without products."""
        name, gradient = one.name, one.results[0].size_bytes
        operands = sum(t.size_bytes for t in one.operands)
        written = sum(t.size_bytes for t in needing)
        if name in _VIEWS:
            if name in _PARTS and needing:
                self._add(f"{name}_grad", "backward", one.module, needing, 0, gradient, written)
            return
        kept = operands
        if name == "add" or name == "subtract":
            same = [t for t in needing if t.shape == one.results[0].shape]
            kept, written = 0, written - sum(t.size_bytes for t in same[:1])
            if not written:
                return
        elif name in _FROM_GRADIENT:
            kept = 0
        elif name in ("multiply", "divide"):  # each operand's gradient is of the other one
            kept = sum(t.size_bytes for t in one.operands if any(other is not t for other in needing))
        elif name in _FROM_RESULT:
            kept = one.results[0].size_bytes
        elif name == "dropout":
            kept = one.results[0].elements
        elif name == "embedding":
            kept = sum(t.size_bytes for t in one.operands if not t.format)
        elif name == "cross_entropy_with_softmax":  # the softmax is its first result, the loss its second
            kept, gradient = (
                one.results[0].size_bytes + operands - one.operands[0].size_bytes,
                one.results[-1].size_bytes,
            )
        elif name == "pool2d":
            kept = operands + one.results[0].size_bytes
        shown = f"{_NORMS[name]}_backward" if name in _NORMS else f"{name}_grad"
        self._add(shown, "backward", one.module, one.operands, 0, gradient + kept, written, one.sizes)

    def _product_gradients(self, one: _Forward) -> None:
        """Add the products of a product's backward pass, and the sum of a bias' gradient."""
        gradient, sizes = one.results[0].size_bytes, one.sizes
        first, second = _factors(one)
        convolves = one.name.endswith(("conv2d", "conv3d")) or one.name in _TRANSPOSED
        if first.needs_gradient:
            if convolves:
                name, shape = "convolution_input_gradient", _of_input(one, first)
            else:
                name, shape = _shown("matmul", sizes), sizes._replace(columns=sizes.depth, depth=sizes.columns)
            read = gradient + second.size_bytes
            self._add(name, "backward", one.module, [first], one.flops, read, first.size_bytes, shape)
        if second.needs_gradient:
            name = "convolution_weight_gradient" if convolves else _shown("matmul", sizes)
            rows, columns = (sizes.columns, sizes.depth) if convolves else (sizes.depth, sizes.columns)
            shape = sizes._replace(rows=rows, columns=columns, depth=sizes.rows)
            read = gradient + first.size_bytes
            self._add(name, "backward", one.module, [second], one.flops, read, second.size_bytes, shape)
        for bias in one.operands:
            if bias.needs_gradient and bias is not first and bias is not second:
                self._add("sum", "backward", one.module, [bias], 0, gradient, bias.size_bytes)


def _factors(one: _Forward) -> tuple[_Tensor, _Tensor]:
    """Return the two operands that are multiplied; an addend comes before them."""
    at = 1 if one.name in ("addmm", "baddbmm") else 0
    return one.operands[at], one.operands[at + 1]


def _of_input(one: _Forward, x: _Tensor) -> ProductSize:
    sizes = one.sizes
    if one.name in _TRANSPOSED:
        return sizes._replace(columns=sizes.depth, depth=sizes.columns)
    channels = sizes.products * sizes.depth // sizes.window
    return sizes._replace(
        rows=x.elements // channels, columns=channels // sizes.products, depth=sizes.columns * sizes.window
    )


def _shown(name: str, sizes: ProductSize) -> str:
    """Return torch's name for an operation of which the formulas look at names."""
    if name in _NORMS:
        return _NORMS[name]
    if name.endswith(("conv2d", "conv3d")) or name in _TRANSPOSED:
        return "convolution"
    if name in ("linear", "linear_v2", "addmm"):
        return "addmm"
    return ("bmm" if sizes.products > 1 else "mm") if is_product(name) else name


def _sizes(
    name: str, operation: TapedOperation, operands: Sequence[_Tensor], results: Sequence[_Tensor]
) -> ProductSize:
    """Return the size of a product."""
    if name == "einsum":
        return _contracted(argument(operation.args, operation.kwargs, 1, "equation"), operands)
    at = 1 if name in ("addmm", "baddbmm") else 0
    x, weight, y = operands[at].shape, operands[at + 1].shape, results[0].shape
    if name.endswith(("conv2d", "conv3d")) or name in _TRANSPOSED:
        window = math.prod(weight[2:])
        channels, out = (x[-1], y[-1]) if _is_channels_last(operation) else (x[1], y[1])
        if name in _TRANSPOSED:
            groups = max(1, out // weight[1])
            return ProductSize(groups, math.prod(x) // channels, weight[1] * window, weight[0] // groups, window)
        groups = max(1, channels // weight[1])
        return ProductSize(groups, math.prod(y) // out, out // groups, weight[1] * window, window)
    transposed = argument(operation.args, operation.kwargs, 2, "transpose_x") is True if name == "matmul" else False
    depth = x[-2 if transposed and len(x) > 1 else -1]
    if len(weight) < 3 or len(x) < 3:
        columns = y[-1] if len(weight) > 1 else 1
        return ProductSize(1, math.prod(y) // max(1, columns), columns, depth)
    return ProductSize(math.prod(y[:-2]), y[-2], y[-1], depth)


def _is_channels_last(operation: TapedOperation) -> bool:
    return any(isinstance(one, str) and one in ("NHWC", "NDHWC") for one in operation.args)


def _contracted(equation: str, operands: Sequence[_Tensor]) -> ProductSize:
    terms, _, result = equation.replace(" ", "").partition("->")
    names = terms.split(",")
    if len(names) != 2 or "." in terms:
        return ProductSize(1, operands[0].elements, 1, 1)
    size = {
        label: n for labels, t in zip(names, operands, strict=False) for label, n in zip(labels, t.shape, strict=False)
    }
    left, right = set(names[0]), set(names[1])

    def product(labels: Iterable[str]) -> int:
        return math.prod(size[one] for one in labels)

    shared = left & right
    return ProductSize(
        product(shared & set(result)), product(left - right), product(right - left), product(shared - set(result))
    )


def _normalised(operands: Sequence[_Tensor]) -> ProductSize:
    channels = operands[1].elements
    return ProductSize(1, channels, operands[0].elements // channels, 0)


def _format(tensor: Any) -> str:
    return format_name(tensor) if tensor.is_floating_point() else ""
