"""Count in which formats the operations of inspected steps ran: which ones a policy lowered, and which it did not reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mezzo.formats import FP32
from mezzo.measure.effective import Counted, effective
from mezzo.measure.flops import lowered
from mezzo.observe.trace import RawOperation
from mezzo.policy import Policy
from mezzo.records import Effective


class Lowering:
    """Totals of the formats in which the operations of inspected steps ran."""

    def __init__(self) -> None:
        self._by_format: Counter[str] = Counter()
        self._num_lowered = self._outside = self._switched_off = 0
        self._first_step: int | None = None

    def add(self, operations: Sequence[tuple[Any, ...]], step: int) -> None:
        """Add the operations of one step."""
        self._first_step = self._first_step or step
        for fields in operations:
            raw = RawOperation(*fields)
            self._num_lowered += any(
                dtype.is_floating_point and dtype.itemsize < FP32.dtype.itemsize
                for _, dtype, _ in (*raw.ins, *raw.outs)
            )
            if raw.product is not None:
                self._add_product(raw)

    def _add_product(self, raw: RawOperation) -> None:
        product = raw.product
        assert product is not None
        self._by_format[product.format] += product.flops
        if raw.node is not None or raw.stepping or lowered({product.format: 1}):
            return
        calls = raw.entry.calls
        if not product.nesting:  # neither in a region nor in the script's own autocast
            self._outside += product.flops
        elif calls and product.nesting > calls[-1].nesting:
            self._switched_off += product.flops

    def effective(self, before: Effective, policy: Policy | None, *, emulates: bool) -> Effective:
        """Return ``before`` with these totals.

        Args:
            before: the run's record of formats without these totals.
            policy: the run's policy as applied; None for the script's own precision.
            emulates: whether the policy's formats are emulated.
        """
        if self._first_step is None:
            return before
        counted = Counted(
            by_format=dict(self._by_format),
            num_lowered=self._num_lowered,
            outside=self._outside,
            switched_off=self._switched_off,
            step=self._first_step,
        )
        return effective(counted, policy, emulates=emulates, left_alone=before.left_alone)
