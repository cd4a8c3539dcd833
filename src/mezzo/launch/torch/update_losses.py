"""What backward passes of a script get, and which of those before an update make up its loss: their sum or their mean.

The loss of an update is the sum over its passes: a loss that is divided for accumulation, or several losses of one model, one after the
other. The sum is not what the script computes, and not what it shows, if

- the script changes its weights between the passes, as SAM does: passes at the changed weights are left out, so that losses of all
  scripts are those at the weights that an update starts from;
- the gradients of a pass are in no update, because the script cleared them, as after an attack on its inputs, or because they reach no
  weight that it trains;
- the script computes with the gradients of a pass, as MAML's inner loop does: those that ``torch.autograd.grad`` returned, if others
  come from ``backward`` and the script does not set them as gradients of its weights;
- a pass only continues another one, as gradient caching does: the root is the product of activations with their own gradients;
- one line runs all passes, each from a mean over a batch, and nothing divides it: the loss is the mean of the passes.

Where the script itself sets gradients after it cleared them, as multi-task methods do, they come from all passes, and all count. What was
decided is in the record. Passes that are the only ones before their update cost nothing after the first updates.
"""

from __future__ import annotations

import math
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from mezzo.engine.gradients import ACCUMULATES, trained_leaves
from mezzo.launch.torch.open_update import OpenUpdate
from mezzo.launch.torch.script_objects import ScriptObjects
from mezzo.observe.lint.losses import UNKNOWN_LOSS, TracedLoss, factor_of_product, loss_of
from mezzo.observe.source_lines import own_place
from mezzo.records import Note

_TRACKED_UPDATES = 8
"""Updates in which a first pass is tracked although it may be the only one: at the start, and after the last update with several."""
_SAMPLED_UPDATES = 3
"""Updates in which values of a weight are compared: only they show a change through ``.data``, and comparing them waits for the device."""
_MAX_NODES = 512
"""The loss over cached activations has a small graph; the leaves of a larger one are not looked for."""
_VERSION_BITS = 24

How: TypeAlias = Literal["all", "elsewhere", "unused", "continued", "inner"]
"""Which passes count."""
_WHY: dict[How, str] = {
    "all": "the gradients of all are in the update",
    "elsewhere": "the script changes its weights between them, as SAM does: losses at the changed weights are left out",
    "unused": "left out are those whose gradients the script clears before the update, or that reach no weight that it trains",
    "inner": "losses of torch.autograd.grad are left out, since the script computes with their gradients, as in MAML's inner loop",
    "continued": "left out are those that start from gradients of another, as in gradient caching",
}
_UNDIVIDED = "one line runs them, each from a mean over a batch, and nothing divides it by their number: the script's loss is their mean"


@dataclass(eq=False)
class _Pass:
    place: int
    """A number that identifies the chain of the script's calls that led to it."""
    loss: TracedLoss
    positions: range
    """Of its losses among the open update's."""
    elsewhere: bool
    """Whether the weights have changed since the update's first pass."""
    continues: bool
    """Whether it starts from given gradients, or from a product with an earlier pass's gradients, and not from a loss."""
    averages: bool
    """Whether it may be one of several to be averaged: of one root, with no gradient given and no graph kept."""
    touched: frozenset[int] | None = None
    """The trained parameters whose gradients it changed, by identity; None if that is not known."""
    returned: list[Callable[[], Tensor | None]] | None = None
    """The gradients that it returned instead of adding them to the parameters'; None if it added them."""
    cleared: bool = False
    """Whether the script has cleared these gradients since."""


class UpdateLosses:
    """The backward passes before the next update of a script."""

    def __init__(self, update: OpenUpdate, objects: ScriptObjects, *, end_steady_state: Callable[[], None]) -> None:
        """Begin before the first pass; ``end_steady_state`` lets everything be recorded in full again."""
        self._update, self._objects, self._end_steady_state = update, objects, end_steady_state
        self._passes: list[_Pass] = []
        self._tracks = False
        self._last_several = -_TRACKED_UPDATES
        """Number of updates closed before the last update with several passes."""
        self._num_sampled = 0
        self._changes_data = False
        """Whether the script has changed weights through ``.data``."""
        self._weights: dict[int, tuple[int, int]] = {}
        """The version and the address of each trained parameter at the update's first pass."""
        self._sample: tuple[Callable[[], Tensor | None], Tensor] | None = None
        self._before: dict[int, int] = {}
        self._after: dict[int, int] = {}
        """A mark of each gradient before and after the last pass."""
        self._inputs: list[Callable[[], Tensor | None]] = []
        """Leaves of earlier passes that no optimizer trains."""
        self._fed: set[int] = set()
        """The places of passes that returned the gradients of an update."""
        self._seen: Counter[tuple[int, int, How, int]] = Counter()
        """Number of updates by their passes, which passes count, why, and how many of these one mean covers."""

    @property
    def may_be_several(self) -> bool:
        """Whether to track the first pass of an update."""
        num = self._update.recorder.num_closed
        return num < _TRACKED_UPDATES or 0 <= num - self._last_several < _TRACKED_UPDATES

    def forget(self, *, keep: int = 0) -> None:
        """Discard the open update's passes whose losses come after the first ``keep``."""
        self._passes = [one for one in self._passes if one.positions.start < keep]

    def pass_begins(self, roots: Sequence[Tensor], given: Any, positions: range, *, keeps_graph: bool) -> None:
        """Record that a pass begins whose losses are at ``positions`` among the open update's."""
        first = positions.start == 0
        if first:
            self._passes, self._inputs = [], []
            self._tracks = self.may_be_several
        else:
            self._last_several = self._update.recorder.num_closed
            self._end_steady_state()
        if not self._tracks:
            return
        trained = self._trained()
        if first:
            self._mark_weights(trained)
        self._before = _marks(trained)
        if not first:
            self._note_cleared(trained)
        loss = loss_of(roots[0], ()) if len(roots) == 1 else UNKNOWN_LOSS
        if self._update.scaled_by_script and loss.factors:
            loss = loss._replace(factors=loss.factors[1:])
        self._passes.append(
            _Pass(
                place=own_place(sys._getframe(1)),
                loss=loss,
                positions=positions,
                elsewhere=not first and self._changed(trained),
                continues=not positions or (len(roots) == 1 and self._continues(roots[0])),
                averages=len(roots) == 1 and given is None and not keeps_graph,
            )
        )
        self._inputs += [ref(leaf) for leaf in leaves_of(roots, max_nodes=_MAX_NODES) if id(leaf) not in trained]

    def pass_ended(self) -> None:
        """Record that the pass has added its gradients to the parameters'."""
        if self._tracks and self._passes:
            self._after = after = _marks(self._trained())
            self._passes[-1].touched = frozenset(key for key, mark in after.items() if self._before.get(key) != mark)

    def are_of_update(self) -> bool:
        """Return whether gradients that the script asks for now belonged to an update when it asked here before."""
        return bool(self._fed) and own_place(sys._getframe(1)) in self._fed

    def returned(self, gradients: Sequence[Tensor]) -> None:
        """Record that the pass has returned its gradients to the script."""
        if self._tracks and self._passes:
            self._passes[-1].returned = [ref(gradient) for gradient in gradients]

    def stepping(self) -> None:
        """Record that an optimizer is about to step: gradients that the script has set itself may come from all passes."""
        if any(one.returned for one in self._passes):
            used = {id(p.grad) for p in self._trained().values() if p.grad is not None}
            fed = [one for one in self._passes if any(id(find()) in used for find in one.returned or ())]
            for one in fed:
                one.returned = None
                self._fed.add(one.place)
            if fed:
                return
        if len(self._passes) > 1 and any(one.cleared for one in self._passes):
            now = _marks(self._trained())
            last = {key: mark >> _VERSION_BITS for key, mark in self._after.items()}
            if any(mark and mark >> _VERSION_BITS != last.get(key) for key, mark in now.items()):
                for one in self._passes:
                    one.cleared = False

    def close(self) -> None:
        """Combine the losses of the open update, which is about to be closed."""
        passes, self._passes, self._inputs, self._tracks = self._passes, [], [], False
        sampled, self._sample = self._sample is not None, None
        if len(passes) < 2:
            return
        self._num_sampled += sampled
        recorder, (kept, how) = self._update.recorder, _kept(passes)
        dropped = {position for one in passes if one not in kept for position in one.positions}
        if dropped:
            recorder.choose([position for position in range(recorder.num_open) if position not in dropped])
        count = _number_to_average(kept)
        if recorder.num_open != len(kept) or recorder.open_weight != 1.0:  # not all were passes; a session has divided
            count = 1
        if count > 1:
            recorder.weigh(1.0 / count)
        self._seen[len(passes), len(kept), how, count] += 1

    def explanation(self) -> list[Note]:
        """Return what the loss of an update with several passes is, in most of them."""
        if not self._seen:
            return []
        (num, num_kept, how, averaged), _ = self._seen.most_common(1)[0]
        if averaged > 1:
            num_means = num_kept // averaged
            value = f"mean of {averaged}" if num_means == 1 else f"sum of {num_means} means of {averaged}"
        else:
            value = f"{num_kept}" if num_kept == 1 else f"sum of {num_kept}"
        value += f" of {num} backward passes" if num_kept < num else " backward passes"
        why = [_WHY[how]] if how != "all" or averaged == 1 else []
        reason = "; ".join([*why, *([_UNDIVIDED] if averaged > 1 else [])])
        return [Note(what="loss of an update", value=value, reason=reason)]

    def _trained(self) -> dict[int, Tensor]:
        return {id(p): p for optimizer in self._objects.optimizers for p in trained_leaves(optimizer)}

    # --- weights ---------------------------------------------------------------------------------------------------------------

    def _mark_weights(self, trained: dict[int, Tensor]) -> None:
        plain = {key: p for key, p in trained.items() if _keeps_its_values(p)}
        self._weights = {key: (p._version, p.data_ptr()) for key, p in plain.items()}
        self._sample = None
        if plain and (self._changes_data or self._num_sampled < _SAMPLED_UPDATES):
            smallest = min(plain.values(), key=Tensor.numel)
            self._sample = ref(smallest), smallest.detach().clone()

    def _changed(self, trained: dict[int, Tensor]) -> bool:
        """Return whether the script has changed most of the weights that its passes reached; a single one may renormalize itself."""
        reached = frozenset[int]().union(*(one.touched or () for one in self._passes))
        marked = [key for key in self._weights if key in trained and (key in reached or not reached)]
        changed = [key for key in marked if (trained[key]._version, trained[key].data_ptr()) != self._weights[key]]
        if 2 * len(changed) >= len(marked) > 0:
            return True
        if any(one.elsewhere for one in self._passes):
            return True
        leaf = None if self._sample is None else self._sample[0]()
        if self._sample is None or leaf is None:
            return False
        differs = not torch.equal(leaf.detach(), self._sample[1])
        self._changes_data |= differs
        return differs

    # --- gradients -------------------------------------------------------------------------------------------------------------

    def _note_cleared(self, trained: dict[int, Tensor]) -> None:
        """Mark earlier passes whose gradients are None or zero now; reads the device only if gradients were changed in place."""
        for one in self._passes:
            if one.cleared or not one.touched:
                continue
            left = [key for key in one.touched if self._before.get(key)]
            in_place = [trained[key].grad for key in left if self._before[key] != self._after.get(key)]
            if not left:
                one.cleared = True
            elif len(in_place) == len(left):
                one.cleared = not any(bool(gradient.any()) for gradient in in_place if gradient is not None)

    def _continues(self, root: Tensor) -> bool:
        """Return whether ``root`` is the product of activations with the gradient that an earlier pass computed for them."""
        if not self._inputs:
            return False
        factor = factor_of_product(root)
        known = [leaf.grad for find in self._inputs if (leaf := find()) is not None and leaf.grad is not None]
        return factor is not None and any(_share_values(factor, gradient) for gradient in known)


def _kept(passes: list[_Pass]) -> tuple[list[_Pass], How]:
    """Return the passes whose losses make up the update's loss, and why the others do not."""
    rules: list[tuple[How, Callable[[_Pass], bool]]] = [
        ("continued", lambda one: one.continues),
        ("elsewhere", lambda one: one.elsewhere),
        ("unused", lambda one: one.cleared),
    ]
    kept: list[_Pass] = passes
    how: How = "all"
    if any(one.returned is None and one.touched for one in passes):
        rules.insert(0, ("inner", lambda one: one.returned is not None))
    for name, left_out in rules:
        rest = [one for one in kept if not left_out(one)]
        if rest and len(rest) < len(kept):
            kept, how = rest, name
    trains = [one for one in kept if one.touched is None or one.touched]
    if how != "continued" and trains and len(trains) < len(kept):
        kept, how = trains, "unused"
    return kept, how


def _number_to_average(passes: list[_Pass]) -> int:
    """Return how many passes are micro-batches of one mean loss that nothing divided; 1 if they are to be summed.

    Several losses may be accumulated side by side: then each has a line of its own, and as many passes as the others.
    """
    by_place: dict[int, list[_Pass]] = {}
    for one in passes:
        by_place.setdefault(one.place, []).append(one)
    (count, *others) = {len(group) for group in by_place.values()}
    if others or count == 1:
        return 1
    alike = all(one.touched == group[0].touched for group in by_place.values() for one in group)
    undivided = all(one.averages and one.loss.is_mean(undivided_by=count) for one in passes)
    return count if alike and undivided else 1


def _marks(parameters: dict[int, Tensor]) -> dict[int, int]:
    """Return a number for each gradient, which changes when the gradient does; 0 for None."""
    return {key: 0 if (g := p.grad) is None else (id(g) << _VERSION_BITS) + g._version for key, p in parameters.items()}


def _keeps_its_values(parameter: Tensor) -> bool:
    """Return whether a parameter's storage is its own, and not moved and filled by a library that shards weights."""
    return type(parameter) in (Tensor, torch.nn.Parameter) and not hasattr(parameter, "_is_flat_param")


def _share_values(factor: Tensor, gradient: Tensor) -> bool:
    """Return whether a factor is a gradient, a view of it, or a copy; only comparing a copy reads the device."""
    if factor.layout is not torch.strided or gradient.layout is not torch.strided:
        return False
    if factor.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr():
        return True
    alike = (factor.numel(), factor.dtype, factor.device) == (gradient.numel(), gradient.dtype, gradient.device)
    return alike and torch.equal(factor.flatten(), gradient.flatten())


def reusable(values: Any) -> Any:
    """Return ``values``, as a list if they are an iterator or a view, such as ``model.parameters()`` and ``weights.values()``."""
    to_copy = isinstance(values, Iterable) and not isinstance(values, (Tensor, list, tuple, Mapping))
    return list(values) if to_copy else values


def listed(values: Any) -> list[Any]:
    """Return a result of ``reusable`` as a list: of a mapping, its values."""
    if isinstance(values, Mapping):
        return list(values.values())
    return list(values) if isinstance(values, (list, tuple)) else [values]


def given_gradients(outputs: Sequence[Tensor], given: Any) -> list[Any]:
    """Return the gradient that was passed for each output, None for outputs without one."""
    return [None] * len(outputs) if given is None else listed(given)


def weighted(loss: Tensor, gradient: Any) -> Tensor:
    """Return a loss times the gradient that its backward pass starts from, such as the -1 of a WGAN's critic."""
    if not isinstance(gradient, Tensor) or gradient.numel() != 1:
        return loss
    return loss.detach() * gradient.detach()


def leaves_of(outputs: Iterable[Tensor], *, max_nodes: float = math.inf) -> list[Tensor]:
    """Return the leaves that a backward pass from ``outputs`` reaches; none if its graph has more than ``max_nodes`` nodes."""
    listed_outputs = list(outputs)
    leaves = [t for t in listed_outputs if t.grad_fn is None and t.requires_grad]
    waiting = [t.grad_fn for t in listed_outputs if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if type(node) is ACCUMULATES:
            leaves.append(node.variable)
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
        if len(seen) > max_nodes:
            return []
    return leaves


# ``torch.autograd.backward``, ``Tensor.register_hook`` and others check whether a function mode is on
# (``torch.set_default_device`` sets one), pass themselves to it by the name in their module, and run with the mode off.
# If that name leads to a replacement of ours, the replacement would be called twice. A twin has the same code, but its
# check never finds a mode.

Function: TypeAlias = Callable[..., Any]

_LOOKUPS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*args: object) -> bool:
    return False


def _twin(function: types.FunctionType, never: Function = _never) -> Function:
    scope = {**function.__globals__, **dict.fromkeys(_LOOKUPS, never)}
    twin = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _python_functions() -> dict[Function, Function]:
    # Not torch.functional's: torch.compile traces none of their twins.
    scopes = [vars(torch.nn.functional), vars(Tensor)]
    functions: list[Any] = [f for scope in scopes for f in scope.values() if isinstance(f, types.FunctionType)]
    backward: Any = torch.autograd.backward
    functions += [torch.autograd.grad]
    checked = [f for f in functions if set(_LOOKUPS) & set(f.__code__.co_names)]
    twins = {f: _twin(f) for f in checked if f is not Tensor.unflatten}
    # ().count returns 0 for any argument, like ``_never``, but without a Python frame in every step of a script.
    return twins | {backward: _twin(backward, never=().count)}


WITHOUT_MODE_CHECK = _python_functions()
"""The twin of each of torch's functions that checks for a mode."""
