"""Compare what a script asks for with what runs: a 16-bit format that computes nothing, gradients exchanged or measured in 16 bits.

Only calls and formats are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.engine.casts.conversion import HALF
from mezzo.engine.gradients import trained_leaves
from mezzo.formats import BF16, FP16, FP32
from mezzo.observe.lint.misuse_log import MisuseLog
from mezzo.observe.lint.operations import CheckedOperations
from mezzo.observe.observer import ObservedRun
from mezzo.observe.source_lines import running_line
from mezzo.observe.tensors import format_name

_WORDS = {
    **dict.fromkeys(("bf16", "bf16-mixed", "bf16-true"), BF16.dtype),
    **dict.fromkeys(("fp16", "16", "16-mixed", "16-true"), FP16.dtype),
}
"""The words of Accelerate, Hugging Face and Lightning for a 16-bit format."""


class _Asked(NamedTuple):
    """What asked for a format first, and where."""

    what: str
    line: str
    by_region: bool
    """Whether an autocast region asked: other steps may enter it, and prove nothing of the inspected one."""


class Configured:
    """The 16-bit formats that a script asked for."""

    def __init__(self, run: ObservedRun, operations: CheckedOperations, log: MisuseLog) -> None:
        self._run, self._operations, self._log = run, operations, log
        self._asked: dict[torch.dtype, _Asked] = {}
        self._regions: set[tuple[torch.dtype, int]] = set()
        """The formats of autocast regions with gradients, and the steps in which they were entered."""

    def asked(self, wanted: Any, what: str, *, by_region: bool = False) -> None:
        """Record that the script asks for a format, by a dtype or by a word; anything but one of 16 bits is left alone."""
        dtype = wanted if isinstance(wanted, torch.dtype) else _WORDS.get(str(wanted))
        if dtype in HALF and dtype is not None and dtype not in self._asked:
            self._asked[dtype] = _Asked(what.format(wanted), running_line(), by_region)

    def region(self, dtype: torch.dtype, step: int) -> None:
        """Record that the script enters an autocast region with gradients."""
        if (dtype, step) not in self._regions:
            self._regions.add((dtype, step))
            self.asked(dtype, "torch.autocast({})", by_region=True)

    def report(self) -> None:
        """Report the formats in which the inspected step computed nothing, if its products ran in FP32 or in another 16-bit format."""
        asked, self._asked = self._asked, {}
        seen = self._operations.products
        if self._run.precision.effective is not None or self._run.phase.compiles or seen is None:
            return
        for dtype, (what, line, by_region) in asked.items():
            elsewhere = by_region and (dtype, seen.step) not in self._regions
            if dtype in seen.formats or elsewhere:
                continue
            ran = " and ".join(sorted(format_name(d).upper() for d in seen.formats if d in HALF) or ["FP32"])
            where = f"the products of step {seen.step} ran in {ran}: {seen.first}, for one"
            detail = f"{what} asks for {format_name(dtype).upper()}, and {where}"
            self._log.add("A630", detail, line=line, step=seen.step)


class Exchanges:
    """Gradients that processes exchange, or whose norm is taken."""

    def __init__(self, run: ObservedRun, log: MisuseLog) -> None:
        self._run, self._log = run, log

    def reduced(self, name: str, tensor: Tensor, optimizers: Iterable[Optimizer], *, line: str) -> None:
        """Record a reduction of gradients over processes: of one gradient, or of several in a flat buffer."""
        wide = [p for o in optimizers for p in trained_leaves(o) if p.dtype == FP32.dtype]
        own = [p for p in wide if p.shape == tensor.shape]
        if tensor.dtype not in HALF or not wide or not (own or tensor.dim() == 1):
            return
        detail = f"{name} of {tensor.numel():,} {format_name(tensor.dtype).upper()} gradients, and the weights are FP32"
        self._log.add("A631", detail, parameters=own or wide, line=line)

    def norm_taken(self, what: str, dtype: torch.dtype, parameters: Sequence[Tensor]) -> None:
        """Record that the norm of gradients is taken, or kept, in a 16-bit format; a policy that casts the model has asked for that."""
        policy = self._run.precision.effective
        if policy is None or policy.casting != "model":
            self._log.add("A632", f"{what} in {format_name(dtype).upper()}", parameters=parameters)
