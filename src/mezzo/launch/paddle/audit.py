"""Audit chosen steps of a Paddle script: every operation with its format, layer, phase, FLOPs and bytes.

Forward passes and updates are recorded operation by operation. Of backward passes, only the products are recorded: one for each operand
whose gradient the step computes, with the FLOPs of the forward product. Casts are the policy's: of an operand to 16 bits, and of a
16-bit value that an operation in the FP32 list reads.

Limits: the other operations of backward passes are not recorded; nor are casts on a GPU, where Paddle casts inside its operations.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import paddle

from mezzo.formats import FORMATS, FP32, FP64
from mezzo.frameworks import paddle as paddle_policy
from mezzo.launch.paddle.backward import observe_gradient
from mezzo.launch.paddle.nonfinite_values import public_name
from mezzo.launch.paddle.operations import argument, flops_of, is_product, operands_that_need_gradients
from mezzo.launch.paddle.state import LayerNames, PaddleRun
from mezzo.launch.paddle.surveys import format_name
from mezzo.launch.paddle.tape import StepObserver, Tape, TapedOperation
from mezzo.launch.patches import Patches
from mezzo.observe.audit import merged
from mezzo.observe.audit.merged import AuditRow, ProductShape, grouped, largest
from mezzo.observe.settings import IMAGE_CHANNELS, MOST_LISTED, TENSOR_CORE_MULTIPLE, WIDE_FORMATS, AuditSettings
from mezzo.policy import PRESETS
from mezzo.records import AuditRecord, CastTotal, Cause, Effective, Finding, Note, PassKind, RunRecord, WideProduct


class Audit(StepObserver):
    """An observer that records the operations of chosen steps (``launch.paddle.tape.Listener``)."""

    kind = "audit"

    def __init__(self, settings: AuditSettings, run: PaddleRun) -> None:
        super().__init__(run, steps=settings.steps)
        self._tape = Tape(run, self, keeps=False)
        self._rows: list[tuple[Any, Audited]] = []
        """The operations of judged steps, each with its layer, whose name is known only at the end."""
        self._casts: list[tuple[Any, CastTotal]] = []
        self._open_rows: list[tuple[Any, Audited]] = []
        self._open_casts: list[tuple[Any, CastTotal]] = []
        self._narrow: dict[int, Any] = {}
        """Tensors of the step whose values have the policy's 16-bit format, by id."""
        self._updating = False
        policy = run.applied
        self._precisions = {} if policy is None or not policy.lowers else paddle_policy.precisions(policy)
        self._portable = paddle_policy.precisions(PRESETS["fp16"])
        self._num_lowered = self._outside = 0

    # --- recording -----------------------------------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Record Paddle's operations until ``patches`` are undone."""
        self._tape.install(patches)

    def begin(self) -> None:
        """Begin to record operations."""
        self._tape.start()

    def end(self) -> None:
        """Stop recording, and discard what was not kept."""
        self._tape.stop()
        self._updating = False
        self._open_rows, self._open_casts, self._narrow = [], [], {}

    def judge(self, norm: Any | None) -> None:
        """Keep the forward and backward passes of the step."""
        self._keep()

    def update_begins(self, norm: Any | None) -> None:
        """Keep the step's passes; what follows belongs to the update."""
        super().update_begins(norm)
        if self.observing:
            self._tape.start(everything=True)
            self._updating = True

    def update_ended(self, optimizer: Any) -> None:
        """Keep the update's operations."""
        if self._updating:
            self._keep()
        super().update_ended(optimizer)

    def _keep(self) -> None:
        self._rows += self._open_rows
        self._casts += self._open_casts
        self._open_rows, self._open_casts = [], []

    # --- operations ----------------------------------------------------------------------------------------------------------------------

    def rounded(self, operation: TapedOperation, before: Any, after: Any, *, result: bool) -> None:
        """Record the cast of an operand; a result needs none, because it is computed in the format."""
        if result:
            self._narrow[id(after)] = after
        elif id(before) not in self._narrow:
            self._cast(operation, before, FP32.name, self._storage)

    def finished(self, operation: TapedOperation) -> None:
        """Record an operation that has run."""
        name = operation.name
        self._num_lowered += operation.rounds
        if not operation.rounds and self._precisions.get(name) == "fp32":
            for tensor in operation.operands:
                if id(tensor) in self._narrow:
                    self._cast(operation, tensor, self._storage, FP32.name)
        sensitive = operation.rounds and self._portable.get(name) == "fp32" and bool(operation.operands)
        row = Audited(
            op=public_name(name),
            module="",
            phase=self._phase(operation),
            inputs=tuple(dict.fromkeys(self._format(operation, t) for t in operation.operands)),
            outputs=tuple(dict.fromkeys(self._format(operation, t, is_result=True) for t in operation.results)),
            bytes=sum(self._bytes(operation, t) for t in (*operation.operands, *operation.results)),
            line=operation.line,
            sensitive=sensitive,
        )
        if is_product(name) and any(t.is_floating_point() for t in operation.results):
            self._product(operation, row)
        else:
            self._open_rows.append((operation.layer, row))

    def _product(self, operation: TapedOperation, row: Audited) -> None:
        name, args, kwargs, result = operation.name, operation.args, operation.kwargs, operation.result
        fmt = row.outputs[0]
        shape = shape_of(name, operation.results[0], args, kwargs)
        flops = flops_of(name, result, args, kwargs)
        row = replace(row, format=fmt, flops=flops, shape=shape, cause=self._cause(operation, fmt))
        self._open_rows.append((operation.layer, row))
        are_weights = [self._is_weight(t) for t in operands_that_need_gradients(name, args, kwargs)]
        if are_weights and not operation.results[0].stop_gradient:
            observe_gradient(operation.results[0], functools.partial(self._gradient, operation.layer, row, are_weights))
        if not self.run.local.depth and row.phase == "forward":
            self._outside += flops * (1 + len(are_weights))

    def _gradient(self, layer: Any, row: Audited, are_weights: list[bool], gradient: Any) -> None:
        """Record the products in the backward pass of a forward product, when the backward pass has reached its result."""
        if gradient is not None and self._tape.on:
            self._open_rows += [(layer, of_gradient(row, weight=weight)) for weight in are_weights]

    def _cause(self, operation: TapedOperation, fmt: str) -> tuple[Cause, str] | None:
        if fmt not in WIDE_FORMATS:
            return None
        if fmt == FP64.name:
            return "float64", "its operands are FP64, and FP64 is never cast"
        policy = self.run.applied
        if policy is None or not policy.lowers:
            return "off", "nothing in the step lowers precision"
        if not self.run.emulates and not self.run.casts:
            return "off", "Paddle's mixed precision has no effect on this device"
        if self.run.local.fp32_depth:
            return "excluded", "the policy keeps the layer in FP32, or the script turns auto_cast off there"
        if not self.run.local.depth and not self.run.local.in_backward:
            return "off", "it runs outside any layer and auto_cast region"
        return "list", f"the policy does not list {public_name(operation.name)} in lower precision"

    def _phase(self, operation: TapedOperation) -> PassKind:
        if self._updating:
            return "optimizer"
        if operation.backward:
            return "dgrad"
        return "recompute" if self.run.local.in_backward else "forward"

    # --- formats -------------------------------------------------------------------------------------------------------------------------

    @property
    def _storage(self) -> str:
        return FP32.name if self.run.policy is None else self.run.policy.storage.name

    def _format(self, operation: TapedOperation, tensor: Any, *, is_result: bool = False) -> str:
        stored = format_name(tensor)
        if stored == FP32.name and (operation.rounds or (not is_result and id(tensor) in self._narrow)):
            return self._storage
        if stored == FP32.name and self.run.policy is not None and self.run.policy.compute == "tf32":
            on_gpu = self.run.device is not None and self.run.device.kind == "cuda"
            return "tf32" if on_gpu and is_product(operation.name) else stored
        return stored

    def _bytes(self, operation: TapedOperation, tensor: Any) -> int:
        narrow = operation.rounds and format_name(tensor) == FP32.name
        return int(tensor.size) * (2 if narrow else int(tensor.element_size()))

    def _cast(self, operation: TapedOperation, tensor: Any, source: str, target: str) -> None:
        weight = self._is_weight(tensor)
        cast = CastTotal(
            module="",
            phase=self._phase(operation),
            of="weight" if weight else "activation",
            source=source,
            target=target,
            bytes=int(tensor.size) * (4 + 2),
            line=operation.line,
        )
        self._open_casts.append((operation.layer, cast))
        if not tensor.stop_gradient and paddle.is_grad_enabled():
            phase: PassKind = "wgrad" if weight else "dgrad"
            back = cast.model_copy(update={"of": "gradient", "source": target, "target": source, "phase": phase})
            self._open_casts.append((operation.layer, back))

    @staticmethod
    def _is_weight(tensor: Any) -> bool:
        return isinstance(tensor, paddle.base.framework.EagerParamBase)

    # --- the record ----------------------------------------------------------------------------------------------------------------------

    def record(self, run: RunRecord) -> AuditRecord:
        """Return the record of the audited steps."""
        names = LayerNames(self._tape.roots)
        rows = [replace(row, module=names.of(layer)) for layer, row in self._rows]
        casts = [cast.model_copy(update={"module": names.of(layer)}) for layer, cast in self._casts]
        flops = merged.flops_by_phase(rows)
        return AuditRecord(
            run=run.model_copy(update={"effective": self._effective(run.effective, flops)}),
            steps=self.watched,
            operations=merged.operations(rows),
            flops_by_phase=flops,
            casts=merged.casts(casts),
            wide_products=wide_products(rows),
            products=merged.products((row, row.shape) for row in rows if row.shape is not None),
            findings=[*run.findings, *findings(rows)],
            notes=self._notes(),
        )

    def _effective(self, before: Effective, flops: dict[str, dict[str, int]]) -> Effective:
        total: Counter[str] = Counter()
        for by_format in flops.values():
            total.update(by_format)
        left = [*before.left_alone, *self.run.code_outside(self._outside, total.total())]
        return Effective(
            flops_by_format=total,
            emulated=self.run.emulates and self._num_lowered > 0,
            num_lowered=self._num_lowered,
            counted_on_step=self.watched[0] if self.watched else None,
            left_alone=left,
        )

    def _notes(self) -> list[Note]:
        why = "Paddle runs them below Python: only products are counted there, from their forward pass and the gradients that flow"
        notes = [Note(what="backward passes", value="products only", reason=why)]
        if self.run.emulates:
            why = "on a CPU only the listed operations are rounded; on a GPU the others follow their operands, which saves casts"
            notes.append(Note(what="operations in no list", value="in fp32", reason=why))
        device = "cpu" if self.run.device is None else self.run.device.kind
        why = f"the model ran on {device}; what the operations' shapes allow is judged, not what a GPU ran"
        if device != "cpu":
            notes.append(Note(what="casts", value="not recorded", reason="Paddle casts inside its operations on a GPU"))
            why = "no profiler ran; what the operations' shapes allow is judged"
        return [*notes, Note(what="kernels", value="not recorded", reason=why)]


_SMALL = 0.01
"""Share of the step's FLOPs or bytes below which there is no finding, except for FP64 and range-sensitive operations."""

TITLES = {
    "A101": "no mixed precision",
    "A102": "autocast is off around products",
    "A103": "a module opts out of autocast",
    "A104": "products kept in FP32 by an op list or a kernel",
    "A107": "products in FP64",
    "A201": "shapes that do not suit Tensor Cores",
    "A203": "convolutions in channels-first layout",
    "A402": "range-sensitive operations in 16 bits",
}
"""The titles of the codes, as for PyTorch."""
_FIXES = {
    "A101": "run it under a policy: mezzo run --policy bf16 (or fp16), or paddle.amp.auto_cast in the script. Call models as "
    "model(x), not model.forward(x)",
    "A102": "move this code into a layer, or into the auto_cast region",
    "A103": "remove the layer from fp32_modules, or its auto_cast(enable=False), if FP32 is not needed there",
    "A104": "list the family in lower precision (policy field lower), or in custom_white_list of paddle.amp.auto_cast",
    "A107": 'find where float64 comes in (numpy arrays, paddle.set_default_dtype) and call .astype("float32") there',
    "A201": "choose multiples of 8 (vocabulary, channels, head width); give groups at least 8 channels each",
    "A203": 'give the convolutions data_format="NHWC", and the images too',
    "A402": 'run under a policy with portable op lists, or call .astype("float32") before the operation',
}
_GAINS = {
    "A201": "would run with full-width loads and without padding",
    "A203": "would run without a transposition before and after",
}


def findings(rows: Sequence[Audited]) -> list[Finding]:
    """Return the findings on audited operations, the largest share first."""
    lowers = any(row.flops and row.format not in WIDE_FORMATS for row in rows)
    found = [
        _of(rows, "A102" if lowers else "A101", lambda r: _wide_by(r, "off")),
        _of(rows, "A103", lambda r: _wide_by(r, "excluded")),
        _of(rows, "A104", lambda r: _wide_by(r, "list")),
        _of(rows, "A107", lambda r: _wide_by(r, "float64"), always=True),
        _of(rows, "A201", lambda r: _has(r, "dimension", "groups")),
        _of(rows, "A203", lambda r: _has(r, "layout")),
        _of(rows, "A402", lambda r: r.sensitive and r.format in ("", *FORMATS), always=True),
    ]
    return sorted((finding for finding in found if finding is not None), key=lambda finding: -finding.share)


def _wide_by(row: Audited, cause: Cause) -> bool:
    return row.cause is not None and row.cause[0] == cause


def _has(row: Audited, *kinds: str) -> bool:
    """Return whether a 16-bit product has a problem of one of these kinds."""
    problems = () if row.shape is None or row.format in WIDE_FORMATS else row.shape.problems
    return any(kind in problems for kind in kinds)


def _of(
    rows: Sequence[Audited], code: str, concerns: Callable[[Audited], bool], *, always: bool = False
) -> Finding | None:
    """Return the finding on the rows that it concerns; None if there are none or, unless ``always``, if their share is small."""
    concerned = [row for row in rows if concerns(row)]
    flops, size = sum(row.flops for row in concerned), sum(row.bytes for row in concerned)
    whole, part = (sum(r.flops for r in rows), flops) if flops else (sum(r.bytes for r in rows), size)
    share = part / whole if whole else 0.0
    if not concerned or (share < _SMALL and not always):
        return None
    return Finding(
        code=code,
        title=TITLES[code],
        modules=list(dict.fromkeys(row.module for row in concerned))[:MOST_LISTED],
        detail=_detail(concerned, code),
        gain=_gain(code, share),
        fix=_FIXES[code],
        share=share,
        flops=flops,
        bytes=0 if flops else size,
        lines=[line for line in dict.fromkeys(row.line for row in concerned) if line][:MOST_LISTED],
    )


def _detail(rows: Sequence[Audited], code: str) -> str:
    most = max(rows, key=lambda row: row.flops)
    if most.cause is not None:
        return f"{most.cause[1]}; most of it: {most.op} in {most.module}, {most.format}"
    if code == "A402":
        ops = ", ".join(dict.fromkeys(row.op for row in rows))
        return f"{ops} ran on {rows[0].inputs[0]} operands; the portable op lists keep them in FP32"
    kinds = ("layout",) if code == "A203" else ("dimension", "groups")
    problems = [] if most.shape is None else most.shape.listed()
    problem = next(problem for problem in problems if problem.split(":")[0] in kinds)
    return f"most of it: {most.op} in {most.module} ({most.phase}), {problem}"


def _gain(code: str, share: float) -> str:
    if code == "A402":
        return "no speed: what leaves FP16's range here becomes infinite or zero, and long sums lose their small terms"
    return f"{share:.1%} of the step's product FLOPs {_GAINS.get(code, 'would run in 16 bits')}"


# The rules are NVIDIA's, as for PyTorch (``mezzo.observe.audit.eligibility``): innermost dimensions of 16-bit operands are multiples of 8,
# and convolutions take channels last. An FP32 product is judged as if its operands had 16 bits.

_CONVOLUTIONS = ("conv2d", "depthwise_conv2d", "conv3d")


def shape_of(op: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProductShape | None:
    """Return the shape of a product; None for an operation of several products, such as a recurrent layer."""
    if op in _CONVOLUTIONS:
        return _convolution(result, args, kwargs)
    if op in ("matmul", "linear", "linear_v2", "bmm"):
        return _matmul(op, result, args, kwargs)
    return None


def _matmul(op: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProductShape | None:
    x, y = argument(args, kwargs, 0, "x"), argument(args, kwargs, 1, "y", "weight")
    if x is None or y is None or len(x.shape) < 2 or len(y.shape) < 2:
        return None
    transposed = op == "matmul" and argument(args, kwargs, 2, "transpose_x")
    k, n = x.shape[-2 if transposed else -1], result.shape[-1]
    batch = math.prod(result.shape[:-2]) if len(y.shape) > 2 else 1
    uneven = [f"{name} = {size}" for name, size in (("n", n), ("k", k)) if size % TENSOR_CORE_MULTIPLE]
    problems = {"dimension": f"{', '.join(uneven)}: not a multiple of {TENSOR_CORE_MULTIPLE}"} if uneven else {}
    return ProductShape(m=result.size // n // batch, n=n, k=k, batch=batch, problems=problems)


def _convolution(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProductShape:
    x, weight = argument(args, kwargs, 0, "x", "input"), argument(args, kwargs, 1, "filter")
    words = [word for word in (*args, *kwargs.values()) if isinstance(word, str)]
    layout = next((word for word in words if word.startswith("N")), "NCHW")
    channels = x.shape[-1] if layout in _CHANNELS_LAST else x.shape[1]
    groups, outputs = channels // weight.shape[1], weight.shape[0]
    in_group = weight.shape[1], outputs // groups
    allowed = 0 if groups > 1 else IMAGE_CHANNELS
    uneven = [
        f"{n} {what} channels"
        for n, what in zip(in_group, ("input", "output"), strict=True)
        if n % TENSOR_CORE_MULTIPLE and n > allowed
    ]
    problems = {}
    if groups > 1 and uneven:
        problems["groups"] = f"{' and '.join(uneven)} in each of {groups} groups: too few for a Tensor Core's tile"
    elif uneven:
        problems["dimension"] = f"{' and '.join(uneven)}: not a multiple of {TENSOR_CORE_MULTIPLE}, to which cuDNN pads"
    if layout not in _CHANNELS_LAST and channels > 1:
        problems["layout"] = "its input is channels-first; the kernels take channels-last"
    return ProductShape(
        m=result.size // outputs, n=in_group[1], k=math.prod(weight.shape[1:]), batch=groups, problems=problems
    )


_CHANNELS_LAST = ("NHWC", "NDHWC")
"""Names of the layouts whose channels come last."""


# The format of an operation is the one in which it computes: where the policy rounds operands and results on a CPU, the values are kept in
# FP32 tensors, but formats, casts and bytes are the policy's.

OF_GRADIENT = "_grad"
"""Suffix of a product that computes a gradient."""


@dataclass(kw_only=True)
class Audited(AuditRow):
    """One operation, or the part of its backward pass that computes one gradient."""

    line: str = ""
    shape: ProductShape | None = None
    cause: tuple[Cause, str] | None = None
    """Why a product ran in FP32 or wider."""
    sensitive: bool = False
    """Whether it ran in 16 bits although the portable lists keep it in FP32."""


def wide_products(rows: Iterable[Audited]) -> list[WideProduct]:
    """Return the products that ran in FP32 or wider, by cause, the largest first; forward and backward together."""
    groups = grouped(rows, lambda r: (r.op.removesuffix(OF_GRADIENT), r.module, r.format, r.cause, r.line))
    products = [
        WideProduct(
            op=first.op,
            module=first.module,
            format=first.format,
            cause=first.cause[0],
            reason=first.cause[1],
            flops=sum(row.flops for row in group),
            line=first.line,
        )
        for group in groups
        if (first := group[0]).cause is not None
    ]
    return largest(products, lambda product: product.flops)


def of_gradient(row: Audited, *, weight: bool) -> Audited:
    """Return the part of a product's backward pass that computes the gradient of a weight, or of another operand."""
    shape = row.shape
    if shape is not None:
        shape = replace(shape, m=shape.k, k=shape.m) if weight else replace(shape, n=shape.k, k=shape.n)
    return replace(row, phase="wgrad" if weight else "dgrad", shape=shape, op=f"{row.op}{OF_GRADIENT}")
