"""Check the calls of a script's GradScaler: their order, and the state of the gradients at each.

A scaler that the script itself turned off is not checked. One that a policy turned off is: the script makes the same calls
without Mezzo. A class that overrides these calls (as FSDP's ShardedGradScaler does) would be recorded only in part,
so it is not checked either.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from mezzo.engine.gradients import trained_leaves
from mezzo.formats import FP16
from mezzo.observe.lint.gradients import Gradients, Held, Scaled
from mezzo.observe.lint.losses import found_in, sequences_of
from mezzo.observe.lint.noticed import Noticed
from mezzo.observe.observer import ObservedRun

METHODS = ("scale", "unscale_", "step", "update")
"""The calls of a GradScaler in a step."""
_MOST_PRODUCTS = 64
_NEAR = 1e-2
"""A clipping limit of at least this many loss scales was meant for scaled gradients."""


@dataclass
class _Known:
    """The state of one GradScaler."""

    epoch: int = 0
    """Number of updates it made."""
    stages: WeakKeyDictionary[Optimizer, Literal["unscaled", "stepped"]] = field(default_factory=WeakKeyDictionary)
    """Calls by optimizer, since the last update."""
    checked: bool = False
    """Whether anything was unscaled or stepped since the last update."""
    read: float | None = None
    """The scale that the script read last."""
    fresh: bool = False
    """Whether the script has read the scale since the last backward pass."""


class Scalers:
    """The calls of all GradScalers of a script."""

    def __init__(self, run: ObservedRun, gradients: Gradients, noticed: Noticed) -> None:
        self._run, self._gradients, self._noticed = run, gradients, noticed
        self._known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()
        self._asked: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._products: OrderedDict[int, Scaled] = OrderedDict()
        """By the sequence number of the result of ``scale``."""
        self.num_steps = 0
        """Number of steps of scalers that are on."""

    def asked(self, scaler: Any, *, enabled: bool) -> None:
        """Record whether the script asks for a new scaler to be on."""
        self._asked[scaler] = enabled

    def known(self, scaler: Any) -> _Known | None:
        """Return the state of a scaler that is on and fully recorded; None for any other."""
        as_is = self._run.applied is None
        on = scaler.is_enabled() if as_is else self._asked.get(scaler, scaler.is_enabled())
        if not on:
            return None
        known = self._known.get(scaler)
        if known is None and all(getattr(type(scaler), name) is getattr(GradScaler, name) for name in METHODS):
            known = self._known[scaler] = _Known()
        return known

    # --- what scaled a loss ------------------------------------------------------------------------------------------------------

    @property
    def multiplications(self) -> list[int]:
        """The sequence numbers of the real products: a scaler that is off returns the loss itself."""
        return [number for number, scaled in self._products.items() if scaled.scaler.is_enabled()]

    def scaled_by(self, roots: list[Tensor]) -> Scaled | None:
        """Return the scale of the losses that a backward pass starts from; None unless all are scaled."""
        found = [found_in([root], self._products) for root in roots]
        return None if None in found or not found else self._products[found[0]]  # type: ignore[index]

    def scale(self, scaler: Any, result: Any) -> None:
        """Record the result of ``scale``."""
        known = self.known(scaler)
        if known is None:
            return
        for number in sequences_of(result):
            self._products[number] = Scaled(scaler, known.epoch)
        while len(self._products) > _MOST_PRODUCTS:
            self._products.popitem(last=False)

    def get_scale(self, scaler: Any, value: float) -> None:
        """Record that the script read the scale: it may use it to unscale by hand."""
        known = self.known(scaler)
        if known is not None:
            known.read, known.fresh = value, True

    def backward_begins(self) -> None:
        """Forget which scales were read."""
        for known in self._known.values():
            known.fresh = False

    def may_undo(self, held: Held, *, limit: float | None = None) -> bool:
        """Return whether the script may unscale by hand: it has just read the scale, or its clipping limit is of that size."""
        scalers = [self._known.get(p.scaled.scaler) for p in held.passes if p.scaled is not None]
        as_is = self._run.applied is None  # under a policy, every scale reads as 1
        sized = [k for k in scalers if k is not None and k.read is not None and as_is and limit is not None]
        return any(k is not None and k.fresh for k in scalers) or any(limit >= _NEAR * k.read for k in sized)  # type: ignore[operator]

    # --- the calls ---------------------------------------------------------------------------------------------------------------

    def unscale(self, scaler: Any, optimizer: Optimizer, *, awake: bool) -> None:
        """Record that the script calls ``unscale_``."""
        known = self.known(scaler)
        if known is None:
            return
        name, stage = type(optimizer).__name__, known.stages.get(optimizer)
        if stage == "unscaled":
            self._noticed.add("A605", f"unscale_({name}) twice before update()", parameters=trained_leaves(optimizer))
        elif stage == "stepped":
            self._noticed.add("A605", f"unscale_({name}) after step({name})", parameters=trained_leaves(optimizer))
        elif awake:
            held = self._gradients.inspect(optimizer)
            self._check_formats(optimizer)
            self._check_epoch(scaler, optimizer, held, "unscale_")

    def unscaled(self, scaler: Any, optimizer: Optimizer, *, awake: bool) -> None:
        """Record that ``unscale_`` returned."""
        known = self.known(scaler)
        if known is None:
            return
        known.stages[optimizer], known.checked = "unscaled", True
        if awake:
            self._gradients.of(optimizer).unscaled = True
            self._gradients.settle(optimizer)

    def step(self, scaler: Any, optimizer: Optimizer, *, awake: bool) -> None:
        """Record that the script calls ``step``."""
        known = self.known(scaler)
        if known is None:
            return
        if known.stages.get(optimizer) == "stepped":
            name = type(optimizer).__name__
            self._noticed.add("A605", f"step({name}) twice without update()", parameters=trained_leaves(optimizer))
        elif awake:
            held = self._gradients.inspect(optimizer)
            if known.stages.get(optimizer) is None:
                self._check_formats(optimizer)
            self._check_epoch(scaler, optimizer, held, "step")
            self._check_scaled(scaler, optimizer, held)
            self._check_order(known, optimizer, held)

    def stepped(self, scaler: Any, optimizer: Optimizer) -> None:
        """Record that ``step`` returned."""
        known = self.known(scaler)
        if known is None:
            return
        known.stages[optimizer], known.checked = "stepped", True
        self.num_steps += 1

    def update(self, scaler: Any, new_scale: Any) -> None:
        """Record that the script calls ``update``."""
        known = self.known(scaler)
        if known is None:
            return
        if not known.checked and new_scale is None:
            self._noticed.add("A605", "update() before any step() or unscale_() since the last one")
            return
        known.epoch, known.checked = known.epoch + 1, False
        known.stages.clear()

    def catch_up(self, scaler: GradScaler) -> None:
        """Read the calls since the last update from the scaler's own state: they were not reported one by one."""
        known = self._known[scaler]
        for optimizer in self._run.optimizers:
            stage = scaler._per_optimizer_states.get(id(optimizer), {}).get("stage", OptState.READY)
            if stage is not OptState.READY:
                known.stages[optimizer] = "unscaled" if stage is OptState.UNSCALED else "stepped"
                known.checked = True

    # --- the state of the gradients ------------------------------------------------------------------------------------------------

    def _check_formats(self, optimizer: Optimizer) -> None:
        narrow = [p for p in trained_leaves(optimizer) if p.grad is not None and p.grad.dtype == FP16.dtype]
        ours = self._run.applied is not None and self._run.applied.casting == "model"
        if narrow and not ours:
            self._noticed.add("A616", f"{len(narrow)} gradients are FP16, as their weights are", parameters=narrow)

    def _check_epoch(self, scaler: Any, optimizer: Optimizer, held: Held, call: str) -> None:
        known = self._known[scaler]
        own = [p.scaled for p in held.passes if p.scaled is not None and p.scaled.scaler is scaler]
        late = [scaled for scaled in own if scaled.epoch < known.epoch]
        if not late or held.by_hand:
            return
        name = type(optimizer).__name__
        detail = f"update() came between scale() and {call}({name})"
        if held.unscaled and known.stages.get(optimizer) is None:
            detail += ", and made the scaler forget that unscale_ had been called: the gradients are divided twice"
        elif len(late) < len(held.passes):
            detail += f" for {len(late)} of {len(held.passes)} backward passes"
        self._noticed.add("A606", detail, parameters=trained_leaves(optimizer))

    def _check_scaled(self, scaler: Any, optimizer: Optimizer, held: Held) -> None:
        bare = [p for p in held.passes if p.scaled is None]
        foreign = [p for p in held.passes if p.scaled is not None and p.scaled.scaler is not scaler]
        if held.by_hand or not all(p.known for p in bare):
            return
        if bare or foreign:
            part = "" if len(bare or foreign) == len(held.passes) else f"{len(bare or foreign)} of "
            what = "not scaled" if bare else "scaled by another GradScaler"
            passes = f"{len(held.passes)} backward pass{'es' if len(held.passes) > 1 else ''}"
            detail = f"step({type(optimizer).__name__}) after {part}{passes} {what}"
            line = (bare or foreign)[0].line
            self._noticed.add("A604", detail, parameters=trained_leaves(optimizer), line=line)

    def _check_order(self, known: _Known, optimizer: Optimizer, held: Held) -> None:
        if known.stages.get(optimizer) != "unscaled" or held.by_hand or not held.late:
            return
        name = type(optimizer).__name__
        detail = f"a scaled backward pass between unscale_({name}) and step({name}): its gradients stay scaled"
        self._noticed.add("A605", detail, parameters=trained_leaves(optimizer))
