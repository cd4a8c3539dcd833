"""Audit chosen steps of a Paddle script: every operation with its format, layer, phase, FLOPs and bytes.

Forward passes and updates are recorded operation by operation. Of backward passes, only the products are recorded: one for each operand
whose gradient the step computes, with the FLOPs of the forward product. Casts are those of the policy: of an operand to 16 bits, and of a
16-bit value that an operation in the FP32 list reads.

Limits: the other operations of backward passes are not recorded; nor are casts on a GPU, where Paddle casts inside its operations.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import paddle

from mezzo.formats import FP32, FP64
from mezzo.frameworks import paddle_ops
from mezzo.launch.paddle.audit.audited import Audited, of_gradient, wide_products
from mezzo.launch.paddle.audit.findings import findings
from mezzo.launch.paddle.audit.product_shapes import shape_of
from mezzo.launch.paddle.gradients.script_hooks import observe_gradient
from mezzo.launch.paddle.layer_names import LayerNames
from mezzo.launch.paddle.nonfinite.lost_values import public_name
from mezzo.launch.paddle.observing import StepObserver
from mezzo.launch.paddle.operations import flops_of, is_product, operands_that_need_gradients
from mezzo.launch.paddle.state import PaddleRun
from mezzo.launch.paddle.surveys import format_name
from mezzo.launch.paddle.tape import Tape, TapedOperation
from mezzo.launch.patches import Patches
from mezzo.observe.audit import merged
from mezzo.observe.limits import WIDE
from mezzo.observe.settings import AuditSettings
from mezzo.policy import PRESETS
from mezzo.records import AuditRecord, CastTotal, Cause, Effective, Phase, Reason, RunRecord


class Audit(StepObserver):
    """An observer that records the operations of chosen steps (``launch.paddle.tape.Listener``)."""

    kind = "audit"

    def __init__(self, settings: AuditSettings, run: PaddleRun) -> None:
        super().__init__(run, steps=settings.steps)
        self._tape = Tape(run, self)
        self._tape.keeps = False
        self._rows: list[tuple[Any, Audited]] = []
        """The operations of judged steps, each with its layer, whose name is known only at the end."""
        self._casts: list[tuple[Any, CastTotal]] = []
        self._open_rows: list[tuple[Any, Audited]] = []
        self._open_casts: list[tuple[Any, CastTotal]] = []
        self._narrow: dict[int, Any] = {}
        """Tensors of the step whose values have the policy's 16-bit format, by id."""
        self._updating = False
        policy = run.applied
        self._precisions = {} if policy is None or not policy.lowers else paddle_ops.precisions(policy)
        self._portable = paddle_ops.precisions(PRESETS["fp16"])
        self._num_lowered = self._outside = 0

    # --- recording -----------------------------------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Record Paddle's operations until ``patches`` are undone."""
        self._tape.install(patches)

    def begin(self) -> None:
        """Begin to record operations."""
        self._tape.on = True

    def end(self) -> None:
        """Stop recording, and discard what was not kept."""
        self._tape.on = self._tape.everything = self._updating = False
        self._open_rows, self._open_casts, self._narrow = [], [], {}

    def judge(self, norm: Any | None) -> None:
        """Keep the forward and backward passes of the step."""
        self._keep()

    def update_begins(self, norm: Any | None) -> None:
        """Keep the step's passes; what follows belongs to the update."""
        super().update_begins(norm)
        if self.observing:
            self._tape.on = self._tape.everything = self._updating = True

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
        if fmt not in WIDE:
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

    def _phase(self, operation: TapedOperation) -> Phase:
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
            phase: Phase = "wgrad" if weight else "dgrad"
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

    def _notes(self) -> list[Reason]:
        why = "Paddle runs them below Python: only products are counted there, from their forward pass and the gradients that flow"
        notes = [Reason(what="backward passes", value="products only", reason=why)]
        if self.run.emulates:
            why = "on a CPU only the listed operations are rounded; on a GPU the others follow their operands, which saves casts"
            notes.append(Reason(what="operations in no list", value="in fp32", reason=why))
        device = "cpu" if self.run.device is None else self.run.device.kind
        why = f"the model ran on {device}; what the operations' shapes allow is judged, not what a GPU ran"
        if device != "cpu":
            notes.append(
                Reason(what="casts", value="not recorded", reason="Paddle casts inside its operations on a GPU")
            )
            why = "no profiler ran; what the operations' shapes allow is judged"
        return [*notes, Reason(what="kernels", value="not recorded", reason=why)]
