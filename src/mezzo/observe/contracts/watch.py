"""Watch the formats of a run's tensors: before the first forward pass, in the first update, after a load, in files, at the end.

Between these moments nothing is read. While an update is awaited, a hook on modules notes what they return. Models and optimizers are kept
until the end, or until the script creates another optimizer after it has trained: their formats are then read a last time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer

from mezzo.engine.gradients import trained_leaves
from mezzo.observe.contracts.collected import (
    Held,
    Origins,
    Rounding,
    TensorNames,
    floats_in,
    gradients_held,
    models_hold,
    optimizer_holds,
    placed,
    reductions_by_replicas,
    saved_in,
    state_of,
    stored_format,
    weights_behind,
)
from mezzo.observe.contracts.contract import Contract, breaches
from mezzo.observe.observer import ObservedRun
from mezzo.observe.source_lines import running_line
from mezzo.records import CheckedContract, ContractMoment, ContractRole, TensorFormat

_SAMPLED_UPDATES = (2, 3)
"""The updates of an optimizer after which values are sampled: in the first, a momentum is a copy of the gradient."""
_MOST_AWAITED = 8
"""Updates after which optimizers that have not stepped are no longer waited for."""
_MOST_RELOADS = 10
"""Loads of weights in the middle of a training after which everything is read again: some scripts swap weights before each evaluation."""
_COMPILED = "the script compiles its model, and compiled code returns nothing module by module"
_CAST_BY_POLICY = "the policy casts the model, and averages are then not followed"


class ContractWatch:
    """The formats found in one process. The launcher calls ``updated`` and its neighbours as it does of any listener."""

    def __init__(
        self, run: ObservedRun, contract: Contract, *, notify: Callable[[bool], None], num_updates: Callable[[], int]
    ) -> None:
        """Watch a run.

        Args:
            run: what is watched.
            contract: what is expected.
            notify: called with whether calls of models and every update are to be told from now on.
            num_updates: returns the number of updates, including the open one.
        """
        self._run, self._contract, self._notify, self._num_updates = run, contract, notify, num_updates
        self.origins = Origins()
        self._names = TensorNames()
        self._found: dict[tuple[ContractRole, str, tuple[str, ...]], TensorFormat] = {}
        self._waiting: dict[
            tuple[ContractRole, int | str, str, tuple[str, ...]], tuple[Held, ContractMoment, int, str]
        ] = {}
        """What was found of the models that are kept, each format once, before their names are known."""
        self._roots: dict[nn.Module, None] = {}
        self._optimizers: dict[Optimizer, None] = {}
        """Those that have made updates in this training."""
        self._num_reloads = 0
        self._updates: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """How many updates of each optimizer were seen since the start or a load."""
        self._rounding = Rounding()
        self._moment: ContractMoment = "first update"
        self._awake_since = 0
        self._awake = False
        self._heard_all = False
        """Whether every optimizer has made an update: what modules return and processes exchange is known."""
        self._to_sample: list[Optimizer] = []
        self._sampled_at = 0, ""
        self._hook: Any = None
        self._backward_line = ""
        self._rank: int | None = None
        self._compiled = False

    # --- when something is awaited -------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Follow calls and updates until every optimizer has made an update."""
        self._awake, self._awake_since = True, self._run.update.recorder.num_closed
        self._heard_all = False
        self._notify(True)

    def _sleep(self) -> None:
        self._awake, self._moment = False, "first update"
        self._remove_hook()
        self._notify(False)

    @property
    def listens(self) -> bool:
        """Whether it is to be told what modules return and processes exchange."""
        return self._awake and not self._heard_all

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def done(self, optimizer: Optimizer) -> bool:
        """Return whether updates need not be told."""
        return not self._awake

    # --- what the launcher calls ---------------------------------------------------------------------------------------------------

    def called(self, module: nn.Module, args: object) -> None:
        """Record that a model is about to be called: the first time, read what it is set up with."""
        if not self._awake or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if self._hook is None and self.listens and not self._compiled:
            if self._run.phase.compiles:
                self._compiled = True
            else:
                self._hook = register_module_forward_hook(self._returned)
                self._run.phase.before_compiling.append(self._begins_compiling)
        if module in self._roots:
            return
        self._roots[module] = None
        if not self._casts_models and not self._optimizers:
            self._note_models([module], "set-up", ahead=True)

    def _begins_compiling(self) -> None:
        self._remove_hook()
        self._compiled = True

    def _returned(self, module: nn.Module, args: object, output: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and (formats := floats_in(output)):
            self._note([Held("activations", module, "", formats)], self._moment, line=running_line(), ahead=True)

    def backward_begins(self, losses: Sequence[Tensor]) -> None:
        """Note the line of a backward pass, which makes gradients and reduces them."""
        if self._awake:
            self._backward_line = running_line()

    def backward_ended(self) -> None:
        """Do nothing: gradients are read in the update."""

    compiled_ended = backward_ended

    def optimizer_created(self) -> None:
        """Record that the script creates an optimizer: after updates, one of another training, or of another part of this one."""
        if self._optimizers:
            self._let_go()
        self.wake()

    def steps_discarded(self) -> None:
        """Record that the steps so far were no training steps."""
        self._waiting, self._rounding = {}, Rounding()
        self._updates.clear()
        self.wake()

    def updated(self, optimizer: Optimizer | None) -> None:
        """Record an update: read everything that the optimizer holds, if it is the first, or the first after a load."""
        if not self._awake or self._run.update.skips:
            return
        if optimizer is None:
            self._note_models(self._known_roots(), self._moment)
            return
        self._updates[optimizer] = number = self._updates.get(optimizer, 0) + 1
        if number in _SAMPLED_UPDATES:
            self._to_sample.append(optimizer)
            self._rounding.gradients(optimizer)
            self._sampled_at = self._num_updates(), running_line()
        if number > 1:
            return
        self._rank = _rank() if self._rank is None else self._rank
        roots = self._known_roots()
        self._optimizers[optimizer] = None
        self._note_models(roots, self._moment)
        self._note(gradients_held(optimizer), self._moment, line=self._backward_line)
        self._note(reductions_by_replicas(roots), self._moment, line=self._backward_line)
        self._note(optimizer_holds(optimizer), self._moment, line=running_line())

    def step_closed(self, num_steps: int) -> None:
        """Record that a step is over: nothing is awaited once all optimizers have stepped."""
        if not self._awake:
            return
        sampled, self._to_sample = self._to_sample, []
        for optimizer in sampled:  # now, because the script may change its state after the update
            self._rounding.sample(optimizer_holds(optimizer))
        least = min((self._updates.get(optimizer, 0) for optimizer in self._run.objects.optimizers), default=0)
        if least:
            self._remove_hook()
            self._heard_all = True
        if least >= max(_SAMPLED_UPDATES) or num_steps - self._awake_since >= _MOST_AWAITED:
            self._sleep()

    def loaded(self, target: Optimizer | nn.Module, state: Any) -> None:
        """Record that a state was loaded: it is read now, and everything again in the next update."""
        if isinstance(target, nn.Module):
            trained = {id(p) for optimizer in self._run.objects.optimizers for p in trained_leaves(optimizer)}
            if not self._optimizers or not any(id(p) in trained for p in target.parameters()):
                return
            self._num_reloads += 1
            if self._num_reloads > _MOST_RELOADS:
                return
        else:
            self._note(_loaded_into(target, state), "resume", line=running_line())
            for parameter in trained_leaves(target):
                self._note(state_of(target, parameter), "resume", line=running_line())
        self._moment = "resume"
        self._updates.clear()
        self.wake()

    def saved(self, value: Any) -> None:
        """Record what the script saves to a file."""
        self._note(saved_in(value), "save", line=running_line())

    def exchanged(self, role: ContractRole, weights: Iterable[Tensor], formats: Iterable[str]) -> None:
        """Record that processes reduce gradients, or gather weights, in these formats."""
        if self.listens:
            line = self._backward_line if role == "reduction" else running_line()
            held = (Held(role, w, "", (one,)) for w, one in zip(weights, formats, strict=False))
            self._note(held, self._moment, line=line, ahead=True)

    def averaged(self, weight: Tensor, average: Tensor, line: str) -> None:
        """Record that the script averages a weight into another tensor."""
        self._note([Held("ema", weight, "", (stored_format(average),))], self._moment, line=line)

    def close(self) -> None:
        """Read everything a last time, wherever the script ended."""
        self._let_go()
        self._sleep()

    # --- what was found ------------------------------------------------------------------------------------------------------------

    @property
    def _casts_models(self) -> bool:
        policy = self._run.precision.effective
        return policy is not None and policy.casting == "model"

    def _known_roots(self) -> list[nn.Module]:
        """Return the models of this training: those called since it began, or all if none was."""
        called = [root for root in self._run.objects.roots if root in self._roots]
        roots = called or list(self._run.objects.roots)
        self._roots.update(dict.fromkeys(roots))
        self._names.learn(self._roots, self._run.objects.tree)
        return list(self._roots)

    def _note_models(self, roots: Iterable[nn.Module], moment: ContractMoment, *, ahead: bool = False) -> None:
        for held in models_hold(roots):  # a frozen weight or a buffer requires no gradient
            self._note([held], moment, line=self.origins.line(held.tensor), ahead=ahead)

    def _note(
        self, found: Iterable[Held], moment: ContractMoment, *, line: str, ahead: bool = False, step: int | None = None
    ) -> None:
        """Keep what was found in ``step``, or by default now; ``ahead``: before the update that it belongs to."""
        step = self._num_updates() + ahead if step is None else step
        for held in found:
            # The line of an update has made the state, not the parameters of the optimizer.
            line_of = self.origins.line(held.tensor) if held.tensor is not None and held.tensor.requires_grad else line
            owner = held.owner if isinstance(held.owner, str) else id(held.owner)  # which is kept, too
            self._waiting.setdefault(
                (held.role, owner, held.key, held.formats), (held._replace(tensor=None), moment, step, line_of)
            )

    def _let_go(self) -> None:
        """Read the models and optimizers that are kept a last time, name what was found of them, and keep them no longer."""
        roots = self._known_roots()
        if self._optimizers:
            self._note_models(roots, "end")
            for optimizer in self._optimizers:
                self._note(optimizer_holds(optimizer), "end", line="")
        step, line = self._sampled_at
        for held, narrow in self._rounding.found():
            rounded = held._replace(formats=(f"{narrow} in {held.formats[0]}",))
            self._note([rounded], "third update", line=line, step=step)
        self._rounding = Rounding()
        behind = weights_behind(dict.fromkeys((*self._optimizers, *self._run.objects.optimizers)), roots)
        waiting, self._waiting = self._waiting, {}
        for waited, moment, step, line in waiting.values():
            held = placed(waited, behind)
            module, tensor = self._names.of(held)
            one = TensorFormat(
                role=held.role,
                module=module,
                tensor=tensor,
                formats=list(held.formats),
                moment=moment,
                step=step,
                line=line,
            )
            self._found.setdefault((one.role, one.name, held.formats), one)
        self._roots, self._optimizers, self._names = {}, {}, TensorNames()
        self._updates.clear()

    def result(self, *, failed: bool) -> CheckedContract:
        """Return what was found and what of it breaks the contract; of a run that ``failed``, only what was found counts."""
        self._let_go()  # a process that the script started is asked while it is still watched
        found = list(self._found.values())
        unknown: dict[ContractRole, str] = {}
        if self._compiled:
            unknown["activations"] = _COMPILED
        if self._casts_models:
            unknown["ema"] = _CAST_BY_POLICY
        broken = breaches(self._contract, found, rank=self._rank, unknown=unknown)
        if failed:
            broken = [breach for breach in broken if breach.problem == "format"]
        return CheckedContract(file=self._contract.file, breaches=broken, formats=found)


def _loaded_into(optimizer: Optimizer, state: Any) -> Iterator[Held]:
    """Yield the formats of a state that an optimizer has loaded, as they were before it cast them."""
    order = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in (state.get("state", {}) if isinstance(state, dict) else {}).items():
        if isinstance(index, int) and index < len(order) and isinstance(values, dict):
            for key, value in values.items():
                if isinstance(value, Tensor) and value.dim() and value.is_floating_point():
                    yield Held("optimizer_state", order[index], str(key), (stored_format(value),))


def _rank() -> int | None:
    """Return the rank of this process; None if it is the only one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() if dist.get_world_size() > 1 else None
    return int(os.environ["RANK"]) if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ else None
