"""Train on a batch in parts that fit into memory, with the same update as from the whole batch.

Each part's loss is a mean; the parts' gradients are averaged by the number of samples, or by the number that ``compute_loss`` returns. So
the update equals the whole batch's, apart from rounding and from operations that mix samples: batch normalisation normalises over a
part, and updates its running statistics once per part.

When a part runs out of memory, the batch begins again with parts of half the size. Nothing is lost or repeated: the batch's gradients are
dropped (the window's earlier ones were set aside), and buffers, random generators and the window's counts are restored to
their state at its beginning. The only update comes after the last part. Running out of memory in the update itself is an error: a smaller
part would not help, and the optimizer may have changed some weights.

The cost for a batch that fits: a copy of the models' buffers and of the generators' states; inside a window of several batches, also
memory for the gradients of this batch in addition to the earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from mezzo.engine.gradients import all_parameters, put_back, set_aside
from mezzo.engine.randomness import AllStates
from mezzo.engine.state import OpenRegion, SessionParts
from mezzo.errors import SessionError
from mezzo.explain import Choice

MicroBatch: TypeAlias = int | Literal["auto"] | None


class TrainingCalls(NamedTuple):
    """The methods of a session that train."""

    autocast: Callable[[], OpenRegion]
    backward: Callable[..., None]
    update: Callable[[], None]


class MicroBatches:
    """``session.train_batch``: trains on a batch, whole or in parts."""

    def __init__(self, session: SessionParts, calls: TrainingCalls, micro_batch: MicroBatch) -> None:
        """Begin with parts of at most ``micro_batch`` samples: no limit at first for ``"auto"``, the whole batch for None.

        Raises:
            SessionError: ``micro_batch`` is none of these, or the session cannot repeat a batch.
        """
        self._session, self._calls, self._chosen = session, calls, micro_batch
        counts = isinstance(micro_batch, int) and not isinstance(micro_batch, bool) and micro_batch >= 1
        if micro_batch is not None and micro_batch != "auto" and not counts:
            raise SessionError(
                f"micro_batch={micro_batch!r}; allowed: 'auto', a whole number of 1 or more, or None",
                hint="micro_batch='auto' begins with the whole batch and halves when memory runs out",
            )
        if micro_batch is not None and (session.processes.several or len(session.scales) > 1):
            what = "several processes" if session.processes.several else f"num_losses={len(session.scales)}"
            raise SessionError(
                f"micro_batch={micro_batch!r} with {what}; allowed: one process and one loss scale",
                hint="choose the micro-batch yourself: accumulate=N, and step(loss, weight=samples) for each part",
            )
        self.size: int | None = micro_batch if counts and isinstance(micro_batch, int) else None
        """The largest number of samples in a part; None while every batch has fitted whole."""
        self.halvings = 0
        """How often memory ran out."""
        self.is_running = False
        """Whether a batch is being trained on; if a part of it fails, the session returns to its state before the batch."""

    def __call__(self, compute_loss: Callable[..., Any], *batch: Any) -> Tensor:
        """Train on a batch, and update at the end of a window of ``accumulate`` batches.

        ``compute_loss`` may run more than once on the same samples, so it should compute a loss and nothing else.

        Args:
            compute_loss: takes a part of the batch and returns the mean loss over its samples; or the mean loss and the number of items
                that it averages, such as tokens, which may be 0. ``autocast`` is on in it.
            *batch: tensors, or tuples, lists and dicts of them, with as many rows as there are samples; parts are slices of rows.
                Scalars and values that are not tensors are passed to every part.

        Returns:
            The batch's mean loss, without a graph.

        Raises:
            torch.OutOfMemoryError: the update ran out of memory, or ``micro_batch`` is None.
            SessionError: a part of one sample does not fit, rows do not match, or a window was begun with ``backward``.
        """
        session = self._session
        window = session.state.window
        if window.calls and not window.batches:
            raise SessionError(
                f"train_batch() after {window.calls} backward passes of an open window",
                hint="call update() first, or train with train_batch() alone",
            )
        rows, slices = _sliced(batch)
        parameters = all_parameters(session.models, session.optimizers)
        adds = (
            window.calls > 0 or not session.scales[0].skips_overflows
        )  # otherwise the session refuses gradients not its own
        aside = set_aside(parameters) if adds else []
        session.state.loop_checks.gradients_moved()
        before = _StateBefore(session)
        loss: Tensor | None = None
        self.is_running = True
        while loss is None:
            try:
                loss, failed = self._attempt(compute_loss, slices, rows)
                if loss is None:
                    before.restore(session, parameters)
                    self._halve(rows, failed)
            except BaseException:  # an error in the script: restore the session to its state before the batch
                self.is_running = False
                before.restore(session, parameters)
                put_back(aside)
                raise
        self.is_running = False
        put_back(aside)
        if aside:
            session.processes.added()
        session.state.loop_checks.gradients_moved()
        if window.batch_ended():
            self._calls.update()
        return loss

    def _attempt(self, compute_loss: Callable[..., Any], slices: Any, rows: int) -> tuple[Tensor | None, str]:
        """Return the batch's loss; None and the error's text if memory ran out, without its frames, which would keep tensors alive."""
        try:
            return self._parts(compute_loss, slices, rows), ""
        except torch.OutOfMemoryError as error:
            if self._chosen is None:
                raise
            return None, str(error).partition("\n")[0] or "out of memory"

    def _parts(self, compute_loss: Callable[..., Any], slices: Any, rows: int) -> Tensor:
        session = self._session
        total, weights = torch.zeros((), device=session.device), 0.0
        for begin, end in _bounds(rows, self.size):
            with self._calls.autocast():
                returned = compute_loss(*slices(begin, end))
            loss, weight = returned if isinstance(returned, tuple) else (returned, end - begin)
            weight = float(weight)
            if weight == 0:
                continue
            # The weight of the whole batch if all its samples weighed as much as these: then equal parts of a full window add up to 1.
            session.state.window.set_unit(weight * rows / (end - begin))
            self._calls.backward(loss, weight=weight)
            total, weights = total + loss.detach().float() * weight, weights + weight
        if not weights:
            raise SessionError(
                "every part of a batch returned a weight of 0",
                hint="leave out batches without samples or tokens, or return the loss alone to count samples",
            )
        return total / weights

    def _halve(self, rows: int, failed: str) -> None:
        """Halve the size of a part.

        Raises:
            SessionError: it is one sample.
        """
        tried = rows if self.size is None else min(rows, self.size)
        if tried == 1:
            raise SessionError(
                f"a micro-batch of one sample does not fit: {failed}",
                hint="keep less for the backward pass: mezzo.checkpoint(model, sample, budget=...)",
            )
        self.halvings += 1
        self.size = (tried + 1) // 2
        if self._session.device.type != "cpu":
            torch.get_device_module(self._session.device).empty_cache()

    def explain(self) -> list[Choice]:
        """Return how batches are split, and what that changes."""
        if self._chosen is None:
            return []
        value = "whole batches" if self.size is None else f"at most {self.size} samples"
        times = "once" if self.halvings == 1 else f"{self.halvings} times"
        reason = f"memory ran out {times}" if self.halvings else "halved when memory runs out"
        norms = sum(isinstance(m, _BatchNorm) for model in self._session.models for m in model.modules())
        if norms == 1:
            reason += "; 1 batch normalisation normalises over a part, and updates running statistics once per part"
        elif norms:
            reason += (
                f"; {norms} batch normalisations normalise over a part, and update running statistics once per part"
            )
        return [Choice(what="micro-batches", value=value, reason=reason)]


class _StateBefore:
    """A copy of the state that a batch may change before its update."""

    def __init__(self, session: SessionParts) -> None:
        modules = [module for model in session.models for module in model.modules()]
        named = [(module, name, b) for module in modules for name, b in module._buffers.items() if b is not None]
        self._buffers = [(module, name, buffer, buffer.clone()) for module, name, buffer in named]
        self._random = AllStates.now({p.device for model in session.models for p in model.parameters()})
        self._window = session.state.window.state()

    def restore(self, session: SessionParts, parameters: list[torch.nn.Parameter]) -> None:
        """Return to the beginning of the batch."""
        for parameter in parameters:
            parameter.grad = None
        with torch.no_grad():
            for module, name, buffer, copy in self._buffers:
                module._buffers[name] = buffer.copy_(copy)
        self._random.set()
        session.state.window.set_state(self._window)
        session.state.loop_checks.gradients_moved()


def _bounds(rows: int, size: int | None) -> Iterator[tuple[int, int]]:
    """Yield the bounds of parts of at most ``size`` rows, as equal as possible."""
    count = 1 if size is None else -(-rows // size)
    for part in range(count):
        yield part * rows // count, (part + 1) * rows // count


def _sliced(batch: tuple[Any, ...]) -> tuple[int, Callable[[int, int], Any]]:
    """Return the number of samples, and a function from bounds to a part of the batch."""
    leaves, spec = tree_flatten(tuple(dict(item) if isinstance(item, Mapping) else item for item in batch))
    counts = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(counts) != 1 or 0 in counts:
        raise SessionError(
            f"train_batch() got tensors with {', '.join(map(str, sorted(counts))) or 'no'} rows; allowed: tensors with one row per sample",
            hint="pass the samples' indices, torch.arange(n), as the batch, and let compute_loss select the samples",
        )

    def part(begin: int, end: int) -> Any:
        rows = [leaf[begin:end] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves]
        return tree_unflatten(rows, spec)

    return counts.pop(), part
