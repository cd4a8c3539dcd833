"""One training step, its order written once.

::

    backward   loss * share * scale, backward; gradients add up over the micro-batches of a window
    update     norm of the scaled gradients            one read of every gradient
               factor = clip / (scale * share)         one number: unscale, average and clip together
               gradients *= factor                     one pass
               optimizers step, or all are skipped     one host read of one flag, where the loss is scaled
               masters are rounded into the model, schedulers step (not after a skip), gradients are dropped
               the loss scale learns what was found

The norm of the scaled gradients is not finite exactly when a gradient is not finite, or when their squares leave
FP32's range; the second is told apart before anything is skipped. Scales are powers of two unless you choose others,
so multiplying by one factor gives bit for bit what unscaling and clipping one after the other give.

Host reads: the flag once an update (only with a loss scale); the loss once, at the very first ``backward``; and
whatever you read (``loss_scale``, ``grad_norm``). Nothing else waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.engine import checks
from mezzo.engine.casting import Casting
from mezzo.engine.floor import FloorWatch
from mezzo.engine.gradients import all_finite, any_not_finite, not_finite, put_back, set_aside, total_norm
from mezzo.engine.kernels.choice import choose
from mezzo.engine.optimizers import OnePass
from mezzo.engine.preparation import choose_update, prepare
from mezzo.engine.scaling import scale_for
from mezzo.engine.window import Learned, Window
from mezzo.errors import ScaleFloorError, SessionError
from mezzo.explain import Choice
from mezzo.policy import Policy

Optimizer = torch.optim.Optimizer


class Session:
    """Train a model under a precision policy.

    ::

        session = Session(model, optimizer, policy="fp16", accumulate=4, clip_norm=1.0, scheduler=scheduler)
        for inputs, targets in loader:
            with session.autocast():
                loss = criterion(model(inputs), targets)
            session.step(loss)

    ``step`` is ``backward`` and, at the end of a window of ``accumulate`` micro-batches, ``update``. With several losses or optimizers
    call these two yourself.

    Args:
        model: a module, or several.
        optimizer: any torch optimizer that needs no closure, or several without a parameter in common.
        policy: a ``Policy``, a policy text, or the path of a policy file.
        accumulate: micro-batches in a window. Their gradients are averaged by the weights given to ``step`` or ``backward``.
        clip_norm: largest norm of the gradients of one update, over all parameters of the optimizers updated.
        clip_value: largest magnitude of a gradient's element.
        scheduler: a learning rate scheduler, or several; stepped once an update of its optimizer, held on a skipped one.
        num_losses: how many losses have a scale of their own; ``backward(loss, loss_id=k)`` chooses one.

    Raises:
        PolicyError: the policy cannot be read, or names a module that the model lacks.
        UnsupportedFormatError: the device can neither compute in the format nor emulate it.
        SessionError: the model, optimizers or settings cannot be trained together.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        policy: Policy | str = "fp16",
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        scheduler: Any = None,
        num_losses: int = 1,
    ) -> None:
        self.policy = Policy.of(policy)
        self.models = _listed(model)
        self.optimizers: list[Optimizer] = _listed(optimizer)
        self.schedulers: list[Any] = [] if scheduler is None else _listed(scheduler)
        self.accumulate, self.clip_norm, self.clip_value = accumulate, clip_norm, clip_value
        checks.check_settings(
            counts={"accumulate": accumulate, "num_losses": num_losses},
            limits={"clip_norm": clip_norm, "clip_value": clip_value},
        )
        checks.check_optimizers(self.optimizers, self.schedulers)
        self.device = checks.device_of(self._parameters())
        self.casting = Casting.of(self.policy, self.device.type)
        self.scales = [scale_for(self.policy, self.device) for _ in range(num_losses)]
        self._separate = num_losses > 1
        self._one_pass, self._way_of_updating = choose_update(self.optimizers, self.device.type, clip_value)
        self.masters = prepare(self.models, self.optimizers, self.policy, self.device.type, one_pass=self._one_pass)
        self._windows = 0
        self._norm = torch.full((), math.nan, device=self.device)
        self._found: Tensor | None = None
        self._overflowed = False
        self._zero, self._one = torch.zeros((), device=self.device), torch.ones((), device=self.device)
        self._skips = torch.zeros((), device=self.device)
        self._floor = FloorWatch(self.device)
        self._open_window()
        self._watch_rounding = self.policy.casting == "model" and not self.policy.master_weights

    def explain(self) -> list[Choice]:
        """Return what the policy does here, each choice with its reason."""
        return [*self.policy.explain(self.device.type), self.casting.choice, self._way_of_updating]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward pass and the loss are computed."""
        if self.casting.way == "kernels":
            return self.casting.autocast()  # type: ignore[no-any-return]
        return self.casting.region()

    def step(self, loss: Tensor, *, weight: float | None = None, loss_id: int = 0) -> None:
        """Run a micro-batch's backward pass, and the update at the end of the window.

        Args:
            loss: the micro-batch's mean loss, no dimensions.
            weight: what the mean was taken over, samples or tokens; the window's average weights by it. 1 if left out.
            loss_id: which of ``num_losses`` scales to use.
        """
        self.backward(loss, weight=weight, loss_id=loss_id)
        if self._window.calls == self.accumulate:
            self.update()

    def backward(
        self, loss: Tensor, *, weight: float | None = None, loss_id: int = 0, retain_graph: bool = False
    ) -> None:
        """Run a backward pass and add its gradients to the window's.

        Takes what ``step`` takes, and ``retain_graph`` for several losses that share a part of the forward pass. In a window, calls
        with one ``loss_id`` are averaged by weight when ``accumulate`` is above 1 or weights are given; otherwise, and
        between different losses, gradients add up as they do in torch.

        Raises:
            NonFiniteLossError: the loss is not finite before the first update.
            SessionError: the loss cannot be differentiated, the scale is unknown, or the gradients were unscaled already.
        """
        checks.check_loss(loss, first=self._windows + self._window.calls == 0)
        checks.check_weight(weight, loss_id, len(self.scales))
        if self._window.unscaled:
            raise SessionError(
                "backward() after unscale(): scaled gradients would be added to unscaled ones",
                hint="call update() first",
            )
        share = self._window.share(weight, loss_id)
        weighted = loss if share == 1.0 else loss * share
        scale = self.scales[loss_id]
        aside = set_aside(self._trained()) if self._separate else None
        if self.casting.mode is None:
            scale.scale(weighted).backward(retain_graph=retain_graph)
        else:
            with self.casting.backward():
                scale.scale(weighted).backward(retain_graph=retain_graph)
        if aside is not None:
            self._to_first_scale(loss_id)
            put_back(aside)
        self._window.calls += 1

    def unscale(self) -> None:
        """Divide the scale and the window's weights out of the gradients now, to look at them or change them before ``update``.

        Raises:
            SessionError: there was no backward pass, or the gradients were unscaled already.
        """
        if self._window.calls == 0:
            raise SessionError(
                "unscale() without a backward pass since the last update",
                hint="call step(loss) or backward(loss) first",
            )
        if self._window.unscaled:
            raise SessionError(
                "unscale() was already called since the last update",
                hint="call it once a window; unscaling twice would divide the gradients twice",
            )
        gradients = self._gradients(self.optimizers)
        checks.refuse_half_gradients(gradients)
        self._found, factor = self._reduce(gradients), self._factor()
        if factor is not None:
            torch._foreach_mul_(gradients, factor)
        self._window.unscaled = True

    def update(self, *optimizers: Optimizer) -> None:
        """Close the window: clip, step the optimizers or skip, step the schedulers, drop the gradients.

        Args:
            *optimizers: those to update; all if none is named. Gradients of the others are dropped.

        Raises:
            SessionError: there was no backward pass since the last update, or an optimizer is not the session's.
            ScaleFloorError: the loss scale is at its floor and gradients still overflow; names the worst.
        """
        if self._window.calls == 0:
            raise SessionError(
                "update() without a backward pass since the last update",
                hint="call step(loss) or backward(loss) first; to update several optimizers from one backward pass "
                "call update() or update(first, second) once",
            )
        chosen = checks.known(optimizers, self.optimizers) or self.optimizers
        before = self._snapshot() if self._watch_rounding else None
        gradients = self._gradients(chosen)
        if self._window.unscaled:  # the gradients may have been changed since, or be more than those updated
            self._norm = self._total_norm(gradients)
        else:
            self._found = self._reduce(gradients)
        factor = self._clipped(None if self._window.unscaled else self._factor())
        learned = self._window.learned(self.scales, self._found)
        run = self._at_once if self._one_pass else self._by_step
        skipped = run(chosen, gradients, factor, learned)
        for scheduler in self.schedulers:
            if not skipped and getattr(scheduler, "optimizer", chosen[0]) in chosen:
                scheduler.step()
        for scale, one in learned:
            scale.update(one)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._windows += 1
        self._open_window()
        if before is not None and not skipped:
            self._watch_rounding = False
            checks.warn_of_lost_updates(before, self._snapshot(), self.policy)

    def _at_once(self, chosen: list[Optimizer], _: list[Tensor], factor: Tensor | None, to: Learned) -> bool:
        """Hand factor and flag to the kernels; the host reads the flag only where a scheduler has to know."""
        flag = self._zero if self._found is None else self._found
        for optimizer in chosen:
            assert isinstance(optimizer, OnePass)
            optimizer.update(self._one if factor is None else factor.float(), flag)
        if self._found is None:
            return False
        self._skips += flag
        self._floor.note(to)
        if self._floor.reached():
            raise self._floor_error()
        return bool(self.schedulers) and bool(flag)

    def _by_step(self, chosen: list[Optimizer], gradients: list[Tensor], factor: Tensor | None, to: Learned) -> bool:
        """Change the gradients and let the optimizers step, or skip."""
        if self._overflowed:
            self._skips += 1
            if any(bool(one) and scale.at_floor() for scale, one in to):
                raise self._floor_error()
            return True
        if gradients and factor is not None:
            torch._foreach_mul_(gradients, factor)
        if gradients and self.clip_value is not None:
            torch._foreach_clamp_min_(gradients, -self.clip_value)
            torch._foreach_clamp_max_(gradients, self.clip_value)
        for optimizer in chosen:
            optimizer.step()
        self.masters.push()
        return False

    @property
    def updates(self) -> int:
        """Return how many updates were made, skipped ones not counted; waits for the device."""
        return self._windows - self.skipped

    @property
    def skipped(self) -> int:
        """Return how many updates were skipped because a gradient was not finite; waits for the device."""
        return int(self._skips)

    @property
    def loss_scale(self) -> float:
        """Return the first loss's scale; waits for the device."""
        return self.scales[0].value()

    @property
    def grad_norm(self) -> float:
        """Return the norm of the last update's gradients, unscaled and before clipping; waits for the device. NaN before any update."""
        return float(self._norm)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training needs to go on: models (in FP32), optimizers, schedulers, scales and counts.

        Raises:
            SessionError: a window is open; its gradients are not part of the state.
        """
        if self._window.calls:
            raise SessionError(
                f"state_dict() after {self._window.calls} backward passes of an open window",
                hint="call update() first: gradients of an open window are not saved",
            )
        return {
            "policy": str(self.policy),
            "models": [self.masters.fp32_state(model) for model in self.models],
            "optimizers": [o.state_dict() for o in self.optimizers],
            "schedulers": [s.state_dict() for s in self.schedulers],
            "scales": [s.state_dict() for s in self.scales],
            "updates": self.updates,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state that ``state_dict`` returned, under this policy or another.

        Raises:
            SessionError: the state has other numbers of models, optimizers, schedulers or losses.
        """
        checks.check_state(state, self.state_dict())
        for model, saved in zip(self.models, state["models"], strict=True):
            model.load_state_dict(saved)
        for part in ("optimizers", "schedulers", "scales"):
            for item, saved in zip(getattr(self, part), state[part], strict=True):
                item.load_state_dict(saved)
        self.masters.load(self.models, state["models"])
        self._windows = state["updates"] + state["skipped"]
        self._skips.fill_(state["skipped"])

    def _open_window(self) -> None:
        self._window = Window(self.accumulate, len(self.scales))
        self._found = None
        self._overflowed = False

    def _gradients(self, optimizers: Iterable[Optimizer]) -> list[Tensor]:
        self.masters.pull_gradients()
        groups = [group["params"] for o in optimizers for group in o.param_groups]
        return [p.grad for group in groups for p in group if p.grad is not None]

    def _reduce(self, gradients: list[Tensor]) -> Tensor | None:
        """Take the norm of the gradients; return FP32 1 or 0, not finite or finite, where the loss is scaled."""
        self._norm = self._total_norm(gradients)
        if not self.scales[0].checks:
            return None
        found = not_finite(self._norm)
        if self._window.found:
            found = torch.maximum(found, self._window.found_any())
        if self._one_pass:
            return found
        self._overflowed = bool(found)  # the one host read of an update, where GradScaler waits as well
        if self._overflowed and all_finite(gradients):
            self._overflowed, found = False, self._zero  # only the sum of squares left FP32's range
            self._norm = total_norm([g.double() for g in gradients])
        return found

    def _total_norm(self, gradients: list[Tensor]) -> Tensor:
        if not gradients:
            return self._zero
        if not self._one_pass:
            return total_norm(gradients)
        kernels, _ = choose(self.device.type)
        squares: Tensor = kernels.sum_of_squares(gradients)
        return squares.sqrt()

    def _factor(self) -> Tensor | None:
        """Return the number that takes scale and shares out of the gradients, and take it out of the norm; None where it is 1."""
        share, inverse = self._window.total(), self.scales[0].inverse()
        factor = inverse if share == 1.0 else (self._one if inverse is None else inverse).to(self._norm.dtype) / share
        if factor is not None:
            self._norm = self._norm * factor
        return factor

    def _clipped(self, factor: Tensor | None) -> Tensor | None:
        if self.clip_norm is None:
            return factor
        # torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
        coefficient = torch.clamp(self.clip_norm / (self._norm + 1e-6), max=1.0)
        return coefficient if factor is None else coefficient * factor

    def _floor_error(self) -> ScaleFloorError:
        named = [(n, self.masters.gradient(p)) for m in self.models for n, p in m.named_parameters()]
        return checks.floor_error(self.policy, named)

    def _to_first_scale(self, loss_id: int) -> None:
        """Note whether one loss's gradients are finite and bring them from its scale to the first loss's."""
        fresh = [p.grad for p in self._trained() if p.grad is not None]
        scale = self.scales[loss_id]
        if fresh and scale.checks:
            self._window.note(loss_id, any_not_finite(fresh))
            inverse = scale.inverse()
            if loss_id and inverse is not None:
                torch._foreach_mul_(fresh, self.scales[0].scale(inverse))

    def _parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for model in self.models for p in model.parameters()))

    def _trained(self) -> list[nn.Parameter]:
        """Return the models' parameters and those that only an optimizer has."""
        groups = [group["params"] for o in self.optimizers for group in o.param_groups]
        return list(dict.fromkeys([*self._parameters(), *(p for group in groups for p in group)]))

    def _snapshot(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._parameters() if p.requires_grad]


def _listed(value: Any) -> list[Any]:
    single = isinstance(value, nn.Module) or not isinstance(value, Iterable)
    return [value] if single else list(value)
