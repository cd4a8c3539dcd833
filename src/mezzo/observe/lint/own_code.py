"""Inspect a script's own code on gradients and averages of weights, in chosen updates: norms, limits, moves of averages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.engine.casts.conversion import HALF
from mezzo.engine.gradients import trained_leaves
from mezzo.observe.lint.configured import Exchanges
from mezzo.observe.lint.gradients import Gradients, GradientState
from mezzo.observe.lint.misuse_log import MisuseLog
from mezzo.observe.lint.optimizers import Averages
from mezzo.observe.lint.scalers import Scalers
from mezzo.observe.lint.torch_calls import AverageView, CallMode, GradientView
from mezzo.observe.observer import ObservedRun
from mezzo.observe.source_lines import running_line

AverageListener: TypeAlias = Callable[[Tensor, Tensor, str], None]
"""A function that is told of a weight, the tensor that it is averaged into, and the line that does so."""
_INSPECTED = frozenset({1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100})
"""The numbers of the inspected updates: a script may average only in every tenth."""


class OwnCode:
    """A script's own code on gradients and averages, inspected in chosen updates."""

    def __init__(
        self,
        run: ObservedRun,
        gradients: Gradients,
        scalers: Scalers,
        moves: Averages,
        exchanges: Exchanges,
        log: MisuseLog,
        *,
        heard: AverageListener,
    ) -> None:
        self._exchanges, self._heard = exchanges, heard
        self._run, self._gradients, self._scalers, self._moves, self._log = run, gradients, scalers, moves, log
        self._mode = CallMode()
        self._watched: list[tuple[Optimizer, GradientState]] = []
        self._view: GradientView | None = None
        """The view of the watched optimizers' gradients."""
        self._averages_view: AverageView | None = None
        self._averages: list[Tensor] = []
        """The parameters that were averaged in 16 bits since the last update."""
        self._moved = False
        """Whether any average has moved since the last update."""
        self._average_at = 0, ""
        """The step and the first line that computed an average."""
        self._first_average: int | None = None
        """The first step in which weights were averaged."""

    @property
    def _inspects(self) -> bool:
        return self._run.update.recorder.num_closed + 1 in _INSPECTED

    @property
    def over(self) -> bool:
        """Whether no update is being inspected, and none will be."""
        return self._run.update.recorder.num_closed > max(_INSPECTED) and not (
            self._mode.on or self._watched or self._averages
        )

    def watch_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Inspect calls on scaled gradients from now on."""
        if not self._inspects:
            return
        self._watched = [(o, state) for o in optimizers if (state := self._gradients.of(o)).scaled]
        gradients = [p.grad for o in optimizers for p in trained_leaves(o) if p.grad is not None]
        scaled = [p.grad for o, _ in self._watched for p in trained_leaves(o) if p.grad is not None]
        if gradients:
            self._view = GradientView(
                gradients, scaled, norm_read=self._norm_read, limited=self._limited, narrow=self._narrow
            )
            self._mode.start(self._view)

    def watch_averages(self, optimizers: Sequence[Optimizer]) -> None:
        """Inspect averages of the updated weights from now on."""
        if self._inspects:
            weights = [p for o in optimizers for p in trained_leaves(o)]
            self._moved = False
            self._averages_view = AverageView(weights, averaged=self._averaged)
            self._mode.start(self._averages_view)

    def remove_mode(self) -> None:
        """Remove a stopped mode from the stack. Call this outside any call that the mode may be handling."""
        if not self._mode.on:
            self._mode.stop()

    def stop(self) -> None:
        """Stop, and record the averages that were found."""
        self._mode.stop()
        view, self._averages_view = self._averages_view, None
        line, weight = ("", None) if view is None else view.kept()
        for averaged_weight, average in [] if view is None else view.all_kept():
            self._heard(averaged_weight, average, line)
        if weight is not None and not self._moved:
            step = self._run.update.recorder.num_closed + 1
            self._moves.moves_by_hand(weight, self._run.objects.optimizers, step=step, line=line)
        averaged, self._averages = self._averages, []
        if not averaged:
            return
        step, line = self._average_at
        if self._first_average is None:  # a single average may be a merge of models
            self._first_average = step
            return
        detail = f"{len(averaged)} weights are averaged by hand into 16-bit tensors"
        count = 1 if "A612" in self._log else 2
        self._log.add("A612", detail, parameters=averaged, line=line, step=self._first_average, count=count)

    def judge(self) -> None:
        """Decide whether the script clipped scaled gradients or only read their norm."""
        if not self._watched:
            return
        watched, self._watched = self._watched, []
        changed = self._view is not None and self._view.changed
        self.stop()
        for optimizer, state in watched:
            self._gradients.inspect(optimizer)
            norm_read, limit_read = state.judge(changed=changed)
            if state.clipped or self._scalers.may_undo(state):
                continue
            if state.by_hand and norm_read:
                detail = "their norm is taken and they are changed by hand before unscale_"
                self.clipped([optimizer], detail, norm_read)
            elif state.by_hand and limit_read:
                self.clipped([optimizer], "gradients are clamped before unscale_", limit_read)
            elif norm_read:
                self.read(trained_leaves(optimizer), norm_read)

    def clipped(self, optimizers: Sequence[Optimizer], detail: str, line: str, of: Sequence[Tensor] = ()) -> None:
        """Record that scaled gradients of ``optimizers`` are clipped: of the parameters ``of``, or of all if it is empty."""
        for optimizer in optimizers:
            self._gradients.of(optimizer).clip()
        parameters = of or [p for o in optimizers for p in trained_leaves(o)]
        self._log.add("A601", detail, parameters=parameters, line=line)

    def read(self, parameters: Sequence[Tensor], line: str) -> None:
        """Record that the norm of scaled gradients is read."""
        detail = "the norm of gradients is taken between backward() and unscale_"
        self._log.add("A602", detail, parameters=parameters, line=line)

    # --- what the mode reports -----------------------------------------------------------------------------------------------------

    def _norm_read(self) -> None:
        for _, state in self._watched:
            state.read_norm(running_line())

    def _narrow(self, dtype: torch.dtype) -> None:
        self._exchanges.norm_taken("the script takes the norm of gradients", dtype, ())

    def _limited(self, in_place: bool) -> None:
        if not in_place:
            for _, state in self._watched:
                state.read_limit(running_line())
            return
        known = any(state.clipped or state.by_hand or self._scalers.may_undo(state) for _, state in self._watched)
        if not known:
            self.clipped([o for o, _ in self._watched], "gradients are clamped before unscale_", running_line())

    def _averaged(self, parameter: Tensor, average: Tensor, narrow: bool) -> None:
        step = self._run.update.recorder.num_closed + 1
        if narrow == (average.dtype in HALF):  # not a 16-bit copy of an FP32 average
            self._heard(parameter, average, running_line())
        if not self._moved:
            self._moved = True
            self._moves.moves_by_hand(parameter, self._run.objects.optimizers, step=step)
        if narrow:
            if not self._averages:
                self._average_at = step, running_line()
            self._averages.append(parameter)
