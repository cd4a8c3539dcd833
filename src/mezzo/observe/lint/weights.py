"""Find 16-bit copies of values that change slowly: averages of weights, running statistics."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mezzo.engine.casts.half import HALF
from mezzo.observe.lint.misuse_log import MisuseLog
from mezzo.observe.tensors import format_name

_STATISTIC = re.compile(r"(^|_)(running|moving|ema|avg|average|mean|var|std|momentum)(_|$)")
"""Names of statistics: a buffer that changes may also be a cache, a queue or a seed."""


class Statistics:
    """Running statistics in 16 bits: those of torch's norms, and buffers that have such names and change in training."""

    def __init__(self, log: MisuseLog) -> None:
        self._log = log
        self._num_inspections = 0
        self.done = False
        """Whether nothing is left to inspect."""
        self._marks: dict[tuple[nn.Module, str], tuple[int, int]] = {}

    def inspect(self, roots: Iterable[nn.Module], *, line: str) -> None:
        """Inspect all modules, which the script calls in ``line``, after an update; the second call finds the buffers that changed."""
        if self.done:
            return
        self._num_inspections += 1
        self.done = self._num_inspections == 2
        modules = [module for root in roots for module in root.modules() if module.training]
        norms = [module for module in modules if isinstance(module, _NormBase) and _is_half(module.running_mean)]
        if self._num_inspections == 1 and norms:
            mean = norms[0].running_mean
            assert mean is not None
            count = f"{len(norms)} module{'s' if len(norms) > 1 else ''}"
            detail = f"running_mean and running_var of {count} are {format_name(mean.dtype).upper()}, and training updates them"
            self._log.add("A613", detail, modules=norms, line=line)
        before, self._marks = self._marks, {}
        changed = []
        for module in modules:
            for name, buffer in () if isinstance(module, _NormBase) else module.named_buffers(recurse=False):
                if _is_half(buffer) and _STATISTIC.search(name):
                    mark = self._marks[module, name] = id(buffer), buffer._version
                    if before.get((module, name), mark) != mark:
                        changed.append((module, name, buffer))
        if changed:
            module, name, buffer = changed[0]
            detail = (
                f"{name} of {type(module).__name__} is {format_name(buffer.dtype).upper()}, and training updates it"
            )
            self._log.add("A613", detail, modules=[module for module, _, _ in changed], line=line)


def check_average(log: MisuseLog, average: nn.Module, model: nn.Module) -> None:
    """Check the format of the weights that ``torch.optim.swa_utils.AveragedModel`` averages into."""
    pairs = zip(average.parameters(), model.parameters(), strict=False)
    half = [(mean, weight) for mean, weight in pairs if _is_half(mean)]
    if half:
        detail = f"AveragedModel keeps {len(half)} averages in {format_name(half[0][0].dtype).upper()}"
        log.add("A612", detail, parameters=[weight for _, weight in half])


def _is_half(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in HALF
