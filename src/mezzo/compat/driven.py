"""A session whose loop belongs to another library, which decides when to run a backward pass, inspect gradients or step.

Such a library calls ``optimizer.step`` for one optimizer at a time, and zeroes and clips gradients itself. A session has
one update for all optimizers. So its only optimizer has all parameters, and the step of that one runs the optimizer that the
library is stepping. The first optimizer that steps after a backward pass closes the session's window: all gradients are unscaled
once, and whether to skip is decided once. Later optimizers follow that decision.

Unscaled gradients that an optimizer has not used are set aside while a backward pass adds scaled ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mezzo.engine import arguments, session_errors
from mezzo.engine.casts.casting import Casting
from mezzo.engine.gradients import parameters_of, put_back, set_aside, trained_by
from mezzo.engine.processes.shards import is_shared
from mezzo.engine.session import Session
from mezzo.engine.window import Reduction
from mezzo.errors import SessionError
from mezzo.launch.any_script import ScriptSchedules
from mezzo.measure import memory
from mezzo.measure.environment import environment
from mezzo.measure.steps import StepRecorder
from mezzo.policy import Policy
from mezzo.records import Effective, Memory, Note, RunRecord
from mezzo.secrets import hidden

Optimizer = torch.optim.Optimizer


class DrivenOptimizer(Optimizer):
    """The session's only optimizer: it has all parameters, and its step runs the step of the library's optimizer."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # As a group: it may be empty, for a model that only predicts.
        super().__init__([{"params": list(parameters)}], {})
        self.run: Callable[[], Any] = lambda: None
        self.result: Any = None
        self.stepped = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the library's optimizer."""
        self.stepped = True
        self.result = self.run()

    step.hooked = True  # type: ignore[attr-defined] # keeps torch from wrapping this one in hooks and its profiler as well

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Leave gradients to the library that drives the loop."""


class Observed(Session):
    """A session that unscales and checks for overflow in one pass, and computes the norm at most once per update.

    Gradients are in one process and on one device, and the library has divided losses for its window.
    """

    norm: Tensor | None = None
    """The norm of this window's gradients once it is known."""
    is_whole_loop = False
    _SETTABLE = (*Session._SETTABLE, "norm")

    def _check_parts(self) -> torch.device:
        """Return the models' device; they may be frozen or have no parameters if the library only predicts."""
        tensors = (t for model in self.models for t in (*model.parameters(), *model.buffers()))
        devices = (t.device for t in tensors)
        declared = (d for model in self.models if isinstance(d := getattr(model, "device", None), torch.device))
        return next(devices, None) or next(declared, torch.device("cpu"))

    def forget_casts(self) -> None:
        """Drop casts of weights: the library may update them inside the region that a step runs in."""
        if torch.is_autocast_enabled(self.device.type):
            torch.clear_autocast_cache()  # Mezzo's own casts compare a weight's version

    def unscale(self) -> None:
        """Unscale the gradients and decide whether the update will be skipped."""
        session_errors.check_unscale(calls=self.state.window.calls, unscaled=self.state.window.unscaled is not None)
        gradients, inverse = self._gradients(self.optimizers), self.scales[0].inverse()
        session_errors.refuse_half_gradients(gradients)
        found_inf = None
        if inverse is not None:
            found_inf = torch.zeros((), device=self.device)
            for kind in {g.dtype for g in gradients}:  # torch's kernel takes one format at a time
                alike = [g for g in gradients if g.dtype is kind]
                torch._amp_foreach_non_finite_check_and_unscale_(alike, found_inf, inverse)
        overflowed = found_inf is not None and bool(found_inf)  # the one host read of an update
        # The gradients are unscaled already, and the update takes the norm.
        self.state.window.unscale(gradients, Reduction(self.state.progress.norm, None, found_inf, overflowed))

    @property
    def overflowed(self) -> bool:
        """Whether gradients that were unscaled are not finite, so that the update will be skipped."""
        unscaled = self.state.window.unscaled
        return unscaled is not None and bool(unscaled.overflowed)

    def measure_norm(self) -> None:
        """Compute the norm now."""
        self.norm = super()._norm_here(self._gradients(self.optimizers))

    def _norm_here(self, gradients: list[Tensor]) -> Tensor:
        return super()._norm_here(gradients) if self.norm is None else self.norm


class Driven:
    """A policy, the models that are trained under it and, from their first use on, their session."""

    def __init__(self, policy: Policy | str) -> None:
        self.policy = Policy.of(policy)
        self.models: list[nn.Module] = []
        self.recorder = StepRecorder()
        self.skipped = False
        """Whether the last update was skipped."""
        self.short = 1.0
        """The factor for this window's gradients if it is shorter than the window that the library divided losses by."""
        self._session: Observed | None = None
        self._optimizer: DrivenOptimizer
        self._parameters: list[nn.Parameter] = []
        self._open = self._unscaled = False
        self.scales = False
        """Whether gradients are scaled, or in 16 bits, between a backward pass and ``unscale``."""
        self._gradients_aside: list[tuple[nn.Parameter, Tensor]] = []
        self._group_counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """How many parameter groups each optimizer had when its parameters were added."""
        self._last_optimizer: Optimizer | None = None
        self._updates = self._skips = 0
        self._schedules = ScriptSchedules(lambda scheduler: (self._updates, self._skips))

    # --- before training -------------------------------------------------------------------------------------------------------

    def add(self, model: nn.Module) -> None:
        """Add a model; all models added before the first use form one session.

        Raises:
            SessionError: the session has started without it.
        """
        if any(model is known for known in self.models):
            return
        if self._session is not None:
            raise SessionError(
                f"a {type(model).__name__} is set up after training began with {len(self.models)} other models",
                hint="set up all models before the first is called, or use one plugin for each training",
            )
        self.models.append(model)

    @property
    def session(self) -> Observed:
        """The session, which casts the models when it starts."""
        return self._session or self._begin()

    @property
    def began(self) -> bool:
        """Whether the session has started."""
        return self._session is not None

    def _begin(self) -> Observed:
        _refuse_what_needs_agreement(self.models, self.policy)
        self._parameters = parameters_of(self.models)  # frozen ones too: they may be unfrozen later
        self._optimizer = DrivenOptimizer(self._parameters)
        self._session = session = Observed(self.models, self._optimizer, policy=self.policy)
        self.scales = session.scales[0].skips_overflows or self.policy.master_weights
        self.recorder.clock.begin_on(session.device)
        self.region = session.autocast  # type: ignore[method-assign]
        updated = self._optimizer.param_groups[0]["params"]
        self._updated_tensors: dict[Tensor, Tensor] = dict(zip(self._parameters, updated, strict=True))
        return session

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer: put master weights in place of its parameters, if there are any, and add parameters of no model.

        Raises:
            SessionError: the optimizer cannot work in the format that the policy keeps weights in.
        """
        self._last_optimizer = optimizer
        if self._group_counts.get(optimizer) == len(optimizer.param_groups):
            return
        arguments.refuse_lost_eps([optimizer], self.policy)
        session, group = self.session, self._optimizer.param_groups[0]
        known = {*self._parameters, *group["params"]}
        new = [p for p in trained_by([optimizer]) if p not in known]
        session.masters.begin([optimizer])
        self._parameters += new
        self._updated_tensors = {**self._updated_tensors, **{p: session.masters.master_or_self(p) for p in new}}
        group["params"] = [*group["params"], *(self._updated_tensors[p] for p in new)]
        self._group_counts[optimizer] = len(optimizer.param_groups)

    def updated_tensors(self, parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
        """Return the tensors whose ``.grad`` has the gradients of ``parameters``: themselves, or their masters."""
        listed = [parameters] if isinstance(parameters, Tensor) else parameters
        return [self._updated_tensors.get(p, p) for p in listed]

    def region(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return self.session.autocast()  # until the session has started and replaces this method

    # --- a step ----------------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, model: Any = None, *args: Any, retain_graph: bool = False, **kwargs: Any) -> None:
        """Run a backward pass from a loss that the library may have divided for its window.

        Args:
            loss: one number.
            model: the library's argument; ignored.
            *args: refused.
            retain_graph: as in torch.
            **kwargs: refused.

        Raises:
            SessionError: more than the loss and ``retain_graph`` was passed.
        """
        if args or kwargs:
            raise SessionError(
                f"backward() got {', '.join([*map(repr, args), *kwargs])}; allowed in addition to the loss: retain_graph",
                hint="call it with a loss of one number; compute other gradients with torch.autograd.grad",
            )
        session = self._session or self._begin()
        if not self._open:
            self._open, self._unscaled = True, False
            for optimizer in [o for o, count in self._group_counts.items() if len(o.param_groups) != count]:
                self.add_optimizer(optimizer)
            if self.scales:
                self._gradients_aside = set_aside(self._parameters)
        session.norm = None  # it belonged to other gradients
        self.recorder.loss(loss)
        session.backward(loss, retain_graph=retain_graph)

    def unscale(self, optimizer: Optimizer | None = None) -> None:
        """Unscale gradients and compute their norm before the library clips them; add ``optimizer`` first, if it is new."""
        if optimizer is not None and optimizer is not self._last_optimizer:
            self.add_optimizer(optimizer)
        self.settle()
        self.measure_norm()

    def measure_norm(self) -> None:
        """Compute the norm of unscaled gradients, once per window, before the library changes them."""
        if self._open and self.session.norm is None:
            self.session.measure_norm()

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> None:
        """Clip unscaled gradients by their norm, which is also the update's if these are all parameters."""
        self.settle()
        clipped = list(parameters)
        ids = set(map(id, clipped))
        updated = self._optimizer.param_groups[0]["params"]
        if [p for p in updated if p.grad is not None and id(p) not in ids]:
            self.measure_norm()
        norm = torch.nn.utils.clip_grad_norm_(clipped, max_norm)
        if self._open and self.session.norm is None:
            self.session.norm = norm

    def settle(self) -> None:
        """Unscale gradients, move them to the masters and correct a short window; once per window."""
        if not self._open or self._unscaled:
            return
        self._unscaled = True
        if self.scales:
            self.session.unscale()
            put_back(self._gradients_aside)
            self._gradients_aside = []
        if self.short != 1.0:
            gradients = [p.grad for p in self._optimizer.param_groups[0]["params"] if p.grad is not None]
            if gradients:  # torch rejects an empty list
                torch._foreach_mul_(gradients, self.short)

    @property
    def overflowed(self) -> bool:
        """Whether this window's update, whose gradients were unscaled, will be skipped."""
        return self._unscaled and self.session.overflowed

    def step(self, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Call ``run``, the step of an optimizer, unless the update is skipped; return its result.

        Raises:
            ScaleFloorError: the loss scale is at its floor and gradients still overflow.
        """
        if optimizer is not self._last_optimizer:
            self.add_optimizer(optimizer)
        if not self._open:
            return None if self.skipped else self._follow(run)
        combined, session = self._optimizer, self._session or self._begin()
        if self.scales or self.short != 1.0:
            self.settle()
        combined.run, combined.stepped, combined.result = run, False, None
        session.update()
        session.forget_casts()
        if self.short != 1.0:
            self.recorder.weigh(self.short)
        self._open, self.short = False, 1.0
        if self._gradients_aside:
            put_back(self._gradients_aside)
            self._gradients_aside = []
        self.skipped = not combined.stepped
        self._updates += 1
        self._skips += self.skipped
        self.recorder.norm(session.state.progress.norm)
        self.recorder.close(
            skipped=self.skipped, scale=session.scales[0].on_device() if session.scales[0].skips_overflows else None
        )
        return combined.result

    def _follow(self, run: Callable[[], Any]) -> Any:
        """Step one more optimizer after the same backward pass."""
        result = run()
        self.session.masters.push()
        self.session.forget_casts()
        return result

    # --- schedules -------------------------------------------------------------------------------------------------------------

    def hold(self, scheduler: Any) -> Any:
        """Make a scheduler wait if the only update since its last step was skipped; return it.

        A schedule by update waits; one by epoch never does. The object itself gets a class derived from its own.
        """
        kind, schedules = type(scheduler), self._schedules
        if getattr(kind, "_mezzo_holds", None) is schedules:
            return scheduler

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if schedules.waits(self):
                return None
            return kind.step(self, *args, **kwargs)

        schedules.begin(scheduler)
        scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "_mezzo_holds": schedules})
        return scheduler

    # --- checkpoints and the record --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the library's own checkpoint lacks: loss scale and, by model, FP32 masters; and counts, to read."""
        session = self.session
        masters = [
            {n: v.clone() for n, p in m.named_parameters() if (v := session.masters.values(p)) is not None}
            for m in self.models
        ]
        return {
            "policy": str(self.policy),
            "scale": session.scales[0].state_dict(),
            "updates": session.updates,
            "skipped": session.skipped,
            "masters": masters,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scale and masters of a ``state_dict``, after the library has loaded models and optimizers."""
        session = self.session
        session.scales[0].load_state_dict(state["scale"])
        for model, values in zip(self.models, state["masters"], strict=True):
            for name, parameter in model.named_parameters():
                if name in values:
                    session.masters.set_values(parameter, values[name])
        session.masters.push()

    def record(self, framework: str) -> RunRecord:
        """Return the record of the training so far; ``framework`` names the library and its version."""
        session = self.session
        kept = [p for m in self.models for p in m.parameters()]
        optimizers = list(self._group_counts)
        return RunRecord(
            command=list(hidden(sys.argv)),
            script=Path(sys.argv[0]).name,
            script_sha256="",
            framework=f"torch {torch.__version__} in {framework}",
            policy=str(self.policy),
            explanation=[Note(what=c.what, value=c.value, reason=c.reason) for c in session.explain()],
            environment=environment(session.device.type),
            steps=self.recorder.steps(),
            memory=Memory(
                parameters_bytes=memory.total_bytes([*kept, *trained_by(optimizers)]),
                optimizer_bytes=sum(memory.optimizer_bytes(o) for o in optimizers),
            ),
            effective=Effective(emulated=session.casting.emulates),
        )


def _refuse_what_needs_agreement(models: Iterable[nn.Module], policy: Policy) -> None:
    """Refuse several processes unless the library averages whole gradients before an update, so that all decide the same."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    sharded = any(is_shared(p) or hasattr(p, "_is_flat_param") for model in models for p in model.parameters())
    if size > 1 and (sharded or policy.casting == "model"):
        what = "sharded parameters" if sharded else f"policy {policy!s}, which casts weights"
        raise SessionError(
            f"training in {size} processes with {what}; allowed inside another library: DistributedDataParallel under a policy that "
            "casts operations, such as fp16 and bf16",
            hint="use mezzo.Session with torch's DistributedDataParallel or fully_shard, or mezzo run on the script",
        )


class ModelRegion:
    """The region of the model's owner, which trains it; for a copy of the model, a region of the policy alone.

    A copy does not train with the original, and pickles without the original's optimizers.
    """

    def __init__(self, policy: Policy, owner: Any = None) -> None:
        """Use the ``region()`` of ``owner``; None for a copy of the model."""
        self.policy, self.owner = policy, owner

    def __call__(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the region for a call of ``model``."""
        if self.owner is None:
            self.owner = Casting.of(self.policy, next((p.device.type for p in model.parameters()), "cpu"))
        return self.owner.region()  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[type[ModelRegion], tuple[Policy]]:
        return ModelRegion, (self.policy,)
