"""Check the calls of a script's GradScaler: their order, and the state of the gradients at each.

A scaler that the script itself turned off is not checked. One that a policy turned off is: without Mezzo the script makes the same
calls to a scaler that is on. A class that overrides these methods (FSDP's ShardedGradScaler does) would be recorded only in part,
so it is not checked either.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, is_dataclass
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from mezzo.engine.gradients import trained_leaves
from mezzo.formats import FP16
from mezzo.observe.lint.gradients import Gradients, GradientState, Scaled, ScaledAgain
from mezzo.observe.lint.losses import TracedLoss, found_in, scalings_in, sequences_of
from mezzo.observe.lint.misuse_log import MisuseLog
from mezzo.observe.observer import ObservedRun
from mezzo.observe.source_lines import running_line

METHODS = ("scale", "unscale_", "step", "update")
"""The calls of a GradScaler in a step."""
_MAX_PRODUCTS = 64
_MIN_SCALE = 128.0
_POWER_OF_TWO = 0.5
"""The fraction of a power of two, as ``math.frexp`` returns it."""
_NEAR = 1e-2
"""A clipping limit of at least this many times the loss scale was meant for scaled gradients."""


@dataclass
class _ScalerState:
    """The state of one GradScaler."""

    epoch: int = 0
    """Number of updates that it made."""
    stages: WeakKeyDictionary[Optimizer, Literal["unscaled", "stepped"]] = field(default_factory=WeakKeyDictionary)
    """The last call for each optimizer since the last update."""
    checked: bool = False
    """Whether anything was unscaled or stepped since the last update."""
    read: float | None = None
    """The scale that the script read last."""
    fresh: bool = False
    """Whether the script has read the scale since the last backward pass."""
    num_steps: int = 0
    divided: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By parameter: the optimizer whose gradients were unscaled since the last update, and the number of backward passes by then."""


class Scalers:
    """The calls of all GradScalers of a script."""

    def __init__(self, run: ObservedRun, gradients: Gradients, log: MisuseLog) -> None:
        self._run, self._gradients, self._log = run, gradients, log
        self._states: WeakKeyDictionary[Any, _ScalerState] = WeakKeyDictionary()
        self._requested: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        """Whether the script requested a scaler to be on: a policy turns it off."""
        self._products: OrderedDict[int, Scaled] = OrderedDict()
        """The scale of a product, by the sequence number of the node that ``scale`` created."""
        self.num_steps = 0
        """Number of steps of scalers that are on."""
        self._num_passes = 0

    def created(self, scaler: Any, *, enabled: bool) -> None:
        """Record that the script creates a scaler, and whether it requests that the scaler be on."""
        self._requested[scaler] = enabled

    def state_of(self, scaler: Any) -> _ScalerState | None:
        """Return the state of a scaler that is on and fully recorded; None for any other."""
        as_is = self._run.precision.effective is None
        on = scaler.is_enabled() if as_is else self._requested.get(scaler, scaler.is_enabled())
        if not on:
            return None
        state = self._states.get(scaler)
        if state is None and all(getattr(type(scaler), name) is getattr(GradScaler, name) for name in METHODS):
            state = self._states[scaler] = _ScalerState()
        return state

    def in_use(self) -> list[tuple[Any, float | None]]:
        """Return the scalers that have stepped, each with the scale that the script read last."""
        return [(scaler, state.read) for scaler, state in self._states.items() if state.num_steps]

    # --- what scaled a loss ------------------------------------------------------------------------------------------------------

    @property
    def multiplications(self) -> list[int]:
        """The sequence numbers of the real products: a scaler that is off returns the loss itself."""
        return [number for number, scaled in self._products.items() if scaled.scaler.is_enabled()]

    def scaled_by(self, roots: list[Tensor]) -> Scaled | None:
        """Return the scale of the losses that a backward pass starts from; None unless all are scaled."""
        found = [found_in([root], self._products) for root in roots]
        return None if None in found or not found else self._products[found[0]]  # type: ignore[index]

    def scaled_again(self, root: Tensor, loss: TracedLoss, sizes: Container[float]) -> ScaledAgain | None:
        """Return what multiplies a loss by a scale beside its GradScaler.

        A factor by hand counts if it is the scale itself, or a power of two from 128 that is no size of the model's input:
        many losses are multiplied by a batch or a length.
        """
        chain = [self._products[number].scaler for number in scalings_in(root, self.multiplications)]
        if len(chain) > 1:
            same = chain[0] is chain[1]
            return ScaledAgain(
                "a GradScaler multiplies the loss twice" if same else "two GradScalers multiply the loss",
                None if same else chain[1],
            )
        reads = [state.read for state in self._states.values() if state.read not in (None, 1.0)]
        for value in (f.value for f in loss.factors if f.value is not None and not f.divides):
            power = value >= _MIN_SCALE and math.frexp(value)[0] == _POWER_OF_TWO and value not in sizes
            if power or value in reads:
                return ScaledAgain(f"a factor of {value:g} and a GradScaler multiply the loss")
        return None

    def check_twice(self, optimizer: Optimizer, gradients: GradientState) -> None:
        """Check whether an optimizer is about to use gradients of a loss that was scaled twice, and that nothing else has divided."""
        for one in gradients.passes:
            if one.again is None or gradients.by_hand:
                continue
            other = self._states.get(one.again.scaler) if one.again.scaler is not None else None
            if other is None or optimizer not in other.stages:
                self._log.add("A634", one.again.what, parameters=trained_leaves(optimizer), line=one.line)
                return

    def scale(self, scaler: Any, result: Any) -> None:
        """Record the result of ``scale``."""
        state = self.state_of(scaler)
        if state is None:
            return
        for number in sequences_of(result):
            self._products[number] = Scaled(scaler, state.epoch)
        while len(self._products) > _MAX_PRODUCTS:
            self._products.popitem(last=False)

    def get_scale(self, scaler: Any, value: float) -> None:
        """Record that the script read the scale: it may use it to unscale by hand."""
        state = self.state_of(scaler)
        if state is not None:
            state.read, state.fresh = value, True

    def backward_begins(self) -> None:
        """Forget which scales were read."""
        self._num_passes += 1
        for state in self._states.values():
            state.fresh = False

    def may_undo(self, gradients: GradientState, *, limit: float | None = None) -> bool:
        """Return whether the script may unscale by hand: it has just read the scale, or its clipping limit is of the scale's size."""
        scalers = [self._states.get(p.scaled.scaler) for p in gradients.passes if p.scaled is not None]
        as_is = self._run.precision.effective is None  # under a policy, every scale reads as 1
        sized = [k for k in scalers if k is not None and k.read is not None and as_is and limit is not None]
        return any(k is not None and k.fresh for k in scalers) or any(limit >= _NEAR * k.read for k in sized)  # type: ignore[operator]

    # --- the calls ---------------------------------------------------------------------------------------------------------------

    def unscale(self, scaler: Any, optimizer: Optimizer, *, awake: bool) -> None:
        """Record that the script calls ``unscale_``."""
        state = self.state_of(scaler)
        if state is None:
            return
        name, stage = type(optimizer).__name__, state.stages.get(optimizer)
        if stage == "unscaled":
            self._log.add("A605", f"unscale_({name}) twice before update()", parameters=trained_leaves(optimizer))
        elif stage == "stepped":
            self._log.add("A605", f"unscale_({name}) after step({name})", parameters=trained_leaves(optimizer))
        elif awake:
            gradients = self._gradients.inspect(optimizer)
            self._check_formats(optimizer)
            self._check_epoch(scaler, optimizer, gradients, "unscale_")
            self._check_shared(state, optimizer, "unscale_")

    def unscaled(self, scaler: Any, optimizer: Optimizer, *, awake: bool) -> None:
        """Record that ``unscale_`` returned."""
        state = self.state_of(scaler)
        if state is None:
            return
        state.stages[optimizer], state.checked = "unscaled", True
        if awake:
            self._gradients.of(optimizer).unscale()
            self._gradients.settle(optimizer)

    def step(self, scaler: Any, optimizer: Optimizer, *, awake: bool) -> None:
        """Record that the script calls ``step``."""
        state = self.state_of(scaler)
        if state is None:
            return
        if state.stages.get(optimizer) == "stepped":
            name = type(optimizer).__name__
            self._log.add("A605", f"step({name}) twice without update()", parameters=trained_leaves(optimizer))
        elif awake:
            gradients = self._gradients.inspect(optimizer)
            if state.stages.get(optimizer) is None:
                self._check_formats(optimizer)
                self._check_shared(state, optimizer, "step")
            self._check_epoch(scaler, optimizer, gradients, "step")
            self._check_scaled(scaler, optimizer, gradients)
            self._check_order(state, optimizer, gradients)

    def stepped(self, scaler: Any, optimizer: Optimizer) -> None:
        """Record that ``step`` returned."""
        state = self.state_of(scaler)
        if state is None:
            return
        state.stages[optimizer], state.checked = "stepped", True
        state.num_steps += 1
        self.count_step()

    def count_step(self) -> None:
        """Count a call of ``step`` of any scaler."""
        self.num_steps += 1

    def update(self, scaler: Any, new_scale: Any) -> None:
        """Record that the script calls ``update``."""
        state = self.state_of(scaler)
        if state is None:
            return
        if not state.checked and new_scale is None:
            self._log.add("A605", "update() before any step() or unscale_() since the last one")
            return
        state.epoch, state.checked = state.epoch + 1, False
        state.stages.clear()
        state.divided.clear()

    def catch_up(self, scaler: GradScaler) -> None:
        """Read the calls since the last update from the scaler's own state: they were not reported one by one."""
        state = self._states[scaler]
        for optimizer in self._run.objects.optimizers:
            stage = scaler._per_optimizer_states.get(id(optimizer), {}).get("stage", OptState.READY)
            if stage is not OptState.READY:
                state.stages[optimizer] = "unscaled" if stage is OptState.UNSCALED else "stepped"
                state.checked = True

    # --- the state of the gradients ------------------------------------------------------------------------------------------------

    def _check_formats(self, optimizer: Optimizer) -> None:
        narrow = [p for p in trained_leaves(optimizer) if p.grad is not None and p.grad.dtype == FP16.dtype]
        ours = self._run.precision.effective is not None and self._run.precision.effective.casting == "model"
        if narrow and not ours:
            self._log.add("A616", f"{len(narrow)} gradients are FP16, as their weights are", parameters=narrow)

    def _check_shared(self, state: _ScalerState, optimizer: Optimizer, call: str) -> None:
        """Check whether another optimizer's call has already divided some of these gradients."""
        own = [p for p in trained_leaves(optimizer) if p.grad is not None]
        now = id(optimizer), self._num_passes
        before = ((p, state.divided.get(id(p), now)) for p in own)
        twice = [p for p, (other, num_passes) in before if other != now[0] and num_passes == now[1]]
        if twice:
            name, count = type(optimizer).__name__, f"{len(twice)} parameter{'s' if len(twice) > 1 else ''}"
            detail = (
                f"{call}({name}) divides the gradients of {count} that another optimizer trains, too, and has unscaled"
            )
            self._log.add("A618", detail, parameters=twice)
        state.divided.update((id(p), now) for p in own)

    def _check_epoch(self, scaler: Any, optimizer: Optimizer, gradients: GradientState, call: str) -> None:
        state = self._states[scaler]
        own = [p.scaled for p in gradients.passes if p.scaled is not None and p.scaled.scaler is scaler]
        late = [scaled for scaled in own if scaled.epoch < state.epoch]
        if not late or gradients.by_hand:
            return
        name = type(optimizer).__name__
        detail = f"update() came between scale() and {call}({name})"
        if gradients.unscaled and state.stages.get(optimizer) is None:
            detail += ", and made the scaler forget that unscale_ had been called: the gradients are divided twice"
        elif len(late) < len(gradients.passes):
            detail += f" for {len(late)} of {len(gradients.passes)} backward passes"
        self._log.add("A606", detail, parameters=trained_leaves(optimizer))

    def _check_scaled(self, scaler: Any, optimizer: Optimizer, gradients: GradientState) -> None:
        bare = [p for p in gradients.passes if p.scaled is None]
        foreign = [p for p in gradients.passes if p.scaled is not None and p.scaled.scaler is not scaler]
        if gradients.by_hand or not all(p.known for p in bare):
            return
        if bare or foreign:
            part = "" if len(bare or foreign) == len(gradients.passes) else f"{len(bare or foreign)} of "
            what = "not scaled" if bare else "scaled by another GradScaler"
            passes = f"{len(gradients.passes)} backward pass{'es' if len(gradients.passes) > 1 else ''}"
            detail = f"step({type(optimizer).__name__}) after {part}{passes} {what}"
            line = (bare or foreign)[0].line
            self._log.add("A604", detail, parameters=trained_leaves(optimizer), line=line)

    def _check_order(self, state: _ScalerState, optimizer: Optimizer, gradients: GradientState) -> None:
        if state.stages.get(optimizer) != "unscaled" or gradients.by_hand or not gradients.late:
            return
        name = type(optimizer).__name__
        detail = f"a scaled backward pass between unscale_({name}) and step({name}): its gradients stay scaled"
        self._log.add("A605", detail, parameters=trained_leaves(optimizer))


# Only what a script saves is read: dictionaries with the keys of ``Optimizer.state_dict()``. A checkpoint without an optimizer's state is
# for evaluation and needs no scaler.
_OF_AN_OPTIMIZER = {"state", "param_groups"}
_MAX_DEPTH = 4
_MAX_SAVES = 1000


class Checkpoints:
    """The checkpoints of a script, and the GradScalers whose state it has taken."""

    def __init__(self, log: MisuseLog) -> None:
        self._log = log
        self._taken: WeakSet[Any] = WeakSet()
        self._saves: list[tuple[str, int]] = []
        """The line and the step of each checkpoint with an optimizer's state."""
        self._loses: WeakSet[Any] = WeakSet()
        """The scalers that were in use at one of them."""

    def state_taken(self, scaler: Any) -> None:
        """Record that the script takes a scaler's state, with ``state_dict()`` or by pickling the scaler."""
        self._taken.add(scaler)

    def saved(self, value: Any, in_use: Callable[[], list[tuple[Any, float | None]]], *, step: int) -> None:
        """Record that the script saves ``value``.

        Args:
            value: what is written.
            in_use: returns the scalers that have stepped, each with the scale that the script read last.
            step: the number of the step.
        """
        if len(self._saves) >= _MAX_SAVES or not any(_is_of_an_optimizer(v) for v in _inside(value)):
            return
        lost = [scaler for scaler, scale in in_use() if not _keeps(value, scale)]
        if lost:
            self._saves.append((running_line(), step))
            self._loses.update(lost)

    def report(self) -> None:
        """Report the checkpoints if the state of a scaler was never taken: it may also be saved to a file of its own."""
        saves, self._saves = self._saves, []
        lost = [s for s in self._loses if s not in self._taken and type(s).state_dict is GradScaler.state_dict]
        for line, step in saves if lost else ():
            detail = "a checkpoint has an optimizer's state, and state_dict() of the GradScaler is never called"
            self._log.add("A617", detail, line=line, step=step)


def _is_of_an_optimizer(value: Any) -> bool:
    return isinstance(value, Optimizer) or (isinstance(value, dict) and value.keys() >= _OF_AN_OPTIMIZER)


def _keeps(value: Any, scale: float | None) -> bool:
    """Return whether a checkpoint contains the scale as a number."""
    return scale is not None and any(isinstance(v, float) and v == scale for v in _inside(value))


def _inside(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield a value and what is inside it, but not what is inside an optimizer's state."""
    yield value
    if depth < _MAX_DEPTH and not _is_of_an_optimizer(value):
        value = vars(value) if isinstance(value, SimpleNamespace) or is_dataclass(value) else value
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        for item in items:
            yield from _inside(item, depth + 1)
