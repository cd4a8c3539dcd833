"""Check values that change slowly: averages of weights and running statistics in 16 bits, averages that move at skipped updates.

A fused optimizer skips by itself: these flags are read once, at the end, as ``schedules`` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from mezzo.engine.casts.half import HALF
from mezzo.engine.gradients import trained_leaves
from mezzo.observe.lint.gradients import MAX_FLAGS, Gradients
from mezzo.observe.lint.misuse_log import ENOUGH, MisuseLog
from mezzo.observe.source_lines import running_line
from mezzo.observe.tensors import format_name

_STATISTIC = re.compile(r"(^|_)(running|moving|ema|avg|average|mean|var|std|momentum)(_|$)")
"""Names of statistics: a buffer that changes may also be a cache, a queue or a seed."""


class Averages:
    """The moves of averages of weights, in ``AveragedModel`` or by hand."""

    def __init__(self, gradients: Gradients, log: MisuseLog) -> None:
        self._gradients, self._log = gradients, log
        self._begun: WeakSet[nn.Module] = WeakSet()
        self._seen: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
        """Number of steps at the last move, and how many of them were skipped."""
        self._flagged: list[tuple[Tensor, str, int]] = []
        """Moves after a step that may have been skipped: its flag, the line, the step."""
        self._num_by_hand = 0
        self._by_hand: list[tuple[str, int]] = []
        """Moves by hand after skipped updates: reported once there are several moves, since a single one may be a merge of models."""

    def model_moves(self, average: nn.Module, model: nn.Module, optimizers: Iterable[Optimizer], *, step: int) -> None:
        """Record that ``AveragedModel`` averages a model's weights; the first time, it copies them."""
        line = running_line()
        moves = self._after_skip(model.parameters(), optimizers, step=step, line=line)
        if average in self._begun and moves:
            self._report(line, step)
        self._begun.add(average)

    def moves_by_hand(self, weight: Tensor, optimizers: Iterable[Optimizer], *, step: int, line: str = "") -> None:
        """Record that the script's own code moves an average of a weight, in ``line`` or the running one."""
        self._num_by_hand += 1
        line = line or running_line()
        if self._after_skip([weight], optimizers, step=step, line=line):
            self._by_hand.append((line, step))
        if self._num_by_hand >= ENOUGH:
            moves, self._by_hand = self._by_hand, []
            for move in moves:
                self._report(*move)

    def read_flags(self) -> None:
        """Report the moves after updates that fused optimizers have skipped."""
        flagged, self._flagged = self._flagged, []
        for flag, line, step in flagged:
            if flag.item():
                self._report(line, step)

    def _after_skip(self, weights: Iterable[Tensor], optimizers: Iterable[Optimizer], *, step: int, line: str) -> bool:
        """Return whether all updates of ``weights`` since the last move were skipped, as far as the host knows."""
        ids = {id(p) for p in weights}
        made = skipped = 0
        flag = None
        for optimizer in optimizers:
            if any(id(p) in ids for p in trained_leaves(optimizer)):
                state = self._gradients.of(optimizer)
                now, before = (state.num_steps, state.num_skipped), self._seen.get(optimizer, (0, 0))
                self._seen[optimizer] = now
                skipped += now[1] - before[1]
                made += now[0] - before[0] - (now[1] - before[1])
                flag = state.last_flag
        if flag is not None and (made, skipped) == (1, 0) and len(self._flagged) < MAX_FLAGS:
            self._flagged.append((flag, line, step))
        return skipped > 0 and made == 0

    def _report(self, line: str, step: int) -> None:
        self._log.add("A619", "the average moves after an update that the GradScaler skipped", line=line, step=step)


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
