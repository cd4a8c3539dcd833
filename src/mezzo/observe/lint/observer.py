"""Record the calls of a script's training loop and detect misuse of its own mixed precision.

Everything is derived from calls, identities and versions on the host; samples of stored numbers stay on the device until the end of the
run, so nothing waits for it while the script trains. Most checks run in the first updates only, since
a loop does the same in each. The schedule, and the order of the calls of a GradScaler that is on, are checked to the end.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from mezzo.engine.casts.conversion import HALF
from mezzo.engine.gradients import trained_leaves
from mezzo.engine.session import Session
from mezzo.formats import BF16, FP16
from mezzo.observe.lint.configured import Configured, Exchanges
from mezzo.observe.lint.gradients import Accumulation, BackwardPass, Gradients, GradientState
from mezzo.observe.lint.losses import UNKNOWN_LOSS, has_fp16_gradients, loss_of
from mezzo.observe.lint.misuse_log import MisuseLog
from mezzo.observe.lint.operations import CheckedOperations
from mezzo.observe.lint.optimizers import Averages, LearningRates, OptimizerStates, Statistics, check_average
from mezzo.observe.lint.own_code import AverageListener, OwnCode
from mezzo.observe.lint.scalers import Checkpoints, Scalers
from mezzo.observe.lint.stored_formats import StoredFormats
from mezzo.observe.observer import ObservedRun
from mezzo.observe.source_lines import own_line, own_place, running_line
from mezzo.records import Finding

_AWAKE_UPDATES = 64
_AWAKE_PASSES = 4096
"""Most backward passes that are checked, because a script may make updates that are not recorded."""
_FP16 = FP16.dtype
_WALKS = 2
"""Number of searches of the whole graph for FP16 gradients."""


class Lint:
    """The lint of one run; the launcher calls these methods from hooks that it sets anyway."""

    def __init__(self, run: ObservedRun) -> None:
        self._run = run
        self._log = MisuseLog(run)
        self._gradients = Gradients()
        self.scalers = Scalers(run, self._gradients, self._log)
        self._rates = LearningRates(self._gradients, self._log)
        self.checkpoints = Checkpoints(self._log)
        self.operations = CheckedOperations(self._log)
        self._optimizer_states = OptimizerStates(self._log)
        self._stored = StoredFormats(self._log)
        self.configured = Configured(run, self.operations, self._log)
        self._accumulation = Accumulation(self._log)
        self._averages = Averages(self._gradients, self._log)
        self._exchanges = Exchanges(run, self._log)
        self._own_code = OwnCode(
            run,
            self._gradients,
            self.scalers,
            self._averages,
            self._exchanges,
            self._log,
            heard=self._average_heard,
        )
        self._formats: Counter[torch.dtype] = Counter()
        """Number of autocast regions with gradients, by format."""
        self._pass: BackwardPass | None = None
        self._batch = 0
        self._sizes: set[int] = set()
        """Sizes of the model's last inputs, which a loss may be multiplied by: of a batch, of a sequence, of both."""
        self._num_passes = 0
        self._walks = _WALKS
        self._in_scaler = 0
        self._skipped = False
        self._needless: tuple[int, str] | None = None
        """Step and line of the first ``step`` of a scaler that is on, which BF16 regions would not need."""
        self._statistics = Statistics(self._log)
        self._on_average: AverageListener | None = None
        self.over = False
        """Whether only schedules and active scalers are checked from now on: other checks would slow the steps of a long run.

        Until then module calls matter: at them the mode that observes calls can be removed, which is impossible in a backward pass.
        """
        self._called_at = ""
        """The script's line that called a model in training."""

    @property
    def awake(self) -> bool:
        """Whether gradients are checked."""
        return self._run.update.recorder.num_closed < _AWAKE_UPDATES and self._num_passes < _AWAKE_PASSES

    @property
    def _step(self) -> int:
        return self._run.update.recorder.num_closed + 1

    @property
    def _optimizers(self) -> list[Optimizer]:
        return list(self._run.objects.optimizers)

    # --- forward -----------------------------------------------------------------------------------------------------------------

    def called(self, args: Any, kwargs: Any) -> None:
        """Record that a module is called from outside any module."""
        if self.over:
            return
        self._own_code.stop()
        if not self._statistics.done and torch.is_grad_enabled():
            self._called_at = running_line()
        if self.awake:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self._batch = next((t.shape[0] for t in tensors if t.dim() > 1), 0)
            self._sizes = {
                math.prod(t.shape[i:j]) for t in tensors for i in range(t.dim()) for j in range(i + 1, t.dim() + 1)
            }

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Report the modules with trained weights that are called in the block: no gradient will reach them."""
        called: dict[nn.Module, None] = {}

        def entering(module: nn.Module, args: object) -> None:
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                called[module] = None

        hook = register_module_forward_pre_hook(entering)
        try:
            yield
        finally:
            hook.remove()
        if called:
            weights = sum(p.requires_grad for module in called for p in module.parameters(recurse=False))
            what = f"{weights} trainable weight{'s' if weights > 1 else ''}"
            detail = f"a checkpointed block has {what}, but no input of it requires a gradient"
            self._log.add("A626", detail, modules=called)

    def compiled_called(self) -> None:
        """Record that compiled code is called."""
        self._own_code.stop()

    def region_begins(self, dtype: torch.dtype | None, *, on: bool) -> None:
        """Record that the script opens an autocast region; ``dtype`` is None for the device's default."""
        if on and dtype is not None and torch.is_grad_enabled():
            self._formats[dtype] += 1
            if self.awake:
                self.configured.region(dtype, self._step)

    @property
    def regions_matter(self) -> bool:
        """Whether a later FP16 region would justify the script's GradScaler; others are not counted after the first updates."""
        return self._needless is not None and _FP16 not in self._formats

    # --- backward ----------------------------------------------------------------------------------------------------------------

    def backward_begins(self, roots: list[Tensor], given: Any, *, keeps_graph: bool) -> None:
        """Record that a backward pass begins at ``roots``; ``given`` are the gradients that it starts from."""
        if not self.over:
            self._own_code.judge()
            self._own_code.stop()
        self._pass = None
        self.scalers.backward_begins()
        if self.over or not self.awake:
            return
        self._num_passes += 1
        frame = sys._getframe(1)
        line, library = own_line(frame)
        self._gradients.begin(self._optimizers)
        scaled = self.scalers.scaled_by(roots)
        loss = loss_of(roots[0], self.scalers.multiplications) if len(roots) == 1 else UNKNOWN_LOSS
        known = scaled is not None or (given is None and not loss.may_be_scaled)
        fp16 = False
        if scaled is None and known and self._walks and self._may_be_fp16():
            self._walks -= 1
            fp16 = has_fp16_gradients(roots)
        self._pass = BackwardPass(
            scaled=scaled,
            known=known,
            loss=loss,
            line=line,
            place=own_place(frame),
            library=library,
            divides_by=_session_divides_by(),
            batch=self._batch,
            keeps_graph=keeps_graph,
            fp16=fp16,
            again=None if scaled is None else self.scalers.scaled_again(roots[0], loss, self._sizes),
        )

    def _may_be_fp16(self) -> bool:
        """Return whether the script itself uses FP16 anywhere, so that its graph is worth searching."""
        if self._run.precision.effective is not None:
            return False
        first = self._run.update.recorder.num_closed < _WALKS
        weights = (p for o in self._optimizers for p in trained_leaves(o)) if first else ()
        return _FP16 in self._formats or any(p.dtype == FP16.dtype for p in weights)

    def backward_ended(self) -> None:
        """Record that the backward pass has ended."""
        if self._pass is None:
            return
        touched = self._gradients.touched(self._optimizers)
        for optimizer, places in touched:
            self._gradients.of(optimizer).add(replace(self._pass, touched=places))
        if self._pass.divides_by > 1:
            self._accumulation.in_session(self._pass, [p for o, _ in touched for p in trained_leaves(o)])
        self._pass = None
        self._own_code.watch_gradients([optimizer for optimizer, _ in touched])

    # --- between backward pass and update ----------------------------------------------------------------------------------------

    def clip(self, parameters: list[Tensor], limit: float, *, by_norm: bool) -> list[Optimizer]:
        """Record that torch is about to clip gradients, by their norm or by value; return the optimizers that they belong to."""
        if not self.awake or self._in_scaler or self._run.phase.in_backward:
            return []
        self._own_code.judge()
        self._own_code.stop()  # torch's own norms are no calls of the script
        owners = self._gradients.owners(parameters, self._optimizers)
        narrow = [p for p in parameters if p.grad is not None and p.grad.dtype in HALF]
        if by_norm and narrow:
            assert narrow[0].grad is not None
            what = f"torch's clipping takes the norm of {len(narrow)} gradient{'s' if len(narrow) > 1 else ''}"
            self._exchanges.norm_taken(what, narrow[0].grad.dtype, narrow)
        scaled, of = self._gradients.scaled_among(parameters, owners)
        known = any(self.scalers.may_undo(self._gradients.of(o), limit=limit) for o in scaled)
        if scaled and math.isinf(limit):
            self._own_code.read(of, running_line())
        elif scaled and not known:
            self._own_code.clipped(scaled, "torch's clipping is called before unscale_", running_line(), of)
        return owners

    def clipped(self, owners: Iterable[Optimizer]) -> None:
        """Record that torch has clipped gradients."""
        for optimizer in owners:
            self._gradients.settle(optimizer)

    def cleared(self, optimizers: Iterable[Optimizer]) -> None:
        """Record that the script has cleared the gradients of optimizers."""
        if self.awake:
            self._own_code.judge()
            for optimizer in optimizers:
                self._gradients.of(optimizer).clear()
                self._gradients.settle(optimizer)

    def model_cleared(self, model: nn.Module) -> None:
        """Record that the script has cleared the gradients of a model."""
        if self.awake:
            in_model = {id(p) for p in model.parameters()}
            self.cleared(o for o in self._optimizers if all(id(p) in in_model for p in trained_leaves(o)))

    def reduces(self, name: str, tensor: Tensor) -> None:
        """Record that the script or a library reduces a tensor over processes, with the function ``name``."""
        if not self.awake or self._run.precision.effective is not None:
            return
        optimizers = self._optimizers
        if self._run.phase.in_backward or any(self._gradients.of(o).passes for o in optimizers):
            line = running_line() or ("" if self._pass is None else self._pass.line)  # a thread of autograd has no line
            self._exchanges.reduced(name, tensor, optimizers, line=line)

    # --- the update --------------------------------------------------------------------------------------------------------------

    @contextmanager
    def scaler_unscales(self, scaler: Any, optimizer: Optimizer) -> Iterator[None]:
        """Record a call of ``GradScaler.unscale_``."""
        by_script = not self._in_scaler  # ``step`` calls it, too
        if by_script:
            self._own_code.judge()
            self.scalers.unscale(scaler, optimizer, awake=self.awake)
        yield
        if by_script:
            self.scalers.unscaled(scaler, optimizer, awake=self.awake)

    @contextmanager
    def scaler_steps(self, scaler: Any, optimizer: Optimizer) -> Iterator[None]:
        """Record a call of ``GradScaler.step``."""
        if self.scalers.state_of(scaler) is None:
            yield
            return
        self._own_code.judge()
        self.scalers.step(scaler, optimizer, awake=self.awake)
        self._begins(optimizer, raises=self._run.precision.effective is None)
        if not self.over:
            self._needless = self._needless or (self._step, running_line())
        self._skipped = False
        self._in_scaler += 1
        try:
            yield
        finally:
            self._in_scaler -= 1
        self.scalers.stepped(scaler, optimizer)
        self._ended(optimizer, skipped=self._skipped, by_scaler=True)

    def gradient_state(self, optimizer: Optimizer) -> GradientState:
        """Return the state of an optimizer's gradients and steps."""
        return self._gradients.of(optimizer)

    def scaler_skipped(self, optimizer: Optimizer) -> None:
        """Record a skipped step of the script's GradScaler in the steady state, where its calls are known to be in order."""
        self._gradients.of(optimizer).skip()
        self.scalers.count_step()

    def skipped(self) -> None:
        """Record that the script's own active GradScaler has found non-finite gradients."""
        self._skipped = True

    def perhaps_skipped(self, optimizer: Optimizer, flag: Tensor) -> None:
        """Record that a fused optimizer has skipped its step by itself if ``flag`` is above 0."""
        self._gradients.of(optimizer).perhaps_skip(flag)

    def step_begins(self, optimizer: Optimizer) -> None:
        """Record that an optimizer is about to step with the current gradients."""
        if self.over or self._in_scaler or self._run.phase.in_backward:
            return
        self._own_code.judge()
        self._check_used(optimizer)
        self._begins(optimizer, raises=False)

    def closure_ended(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has stepped with gradients that its closure computed."""
        if not self._in_scaler and not self._run.phase.in_backward:
            self._check_used(optimizer)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has stepped."""
        if not self._in_scaler and not self._run.phase.in_backward:
            self._ended(optimizer, skipped=False, by_scaler=False)

    def _check_used(self, optimizer: Optimizer) -> None:
        """Check gradients that an optimizer uses without a GradScaler."""
        if not self.awake:
            return
        name, state = type(optimizer).__name__, self._gradients.inspect(optimizer)
        if state.by_scaler:
            detail = f"{name}.step() after scaler.step({name}): the same gradients are used twice, and where the scaler skipped them"
            self._log.add("A605", detail, parameters=trained_leaves(optimizer))
        if state.scaled and not self.scalers.may_undo(state):
            detail = f"{name}.step() uses gradients that are multiplied by the loss scale"
            self._log.add("A603", detail, parameters=trained_leaves(optimizer))
        bare = next((p for p in state.passes if p.fp16), None)
        if bare is not None:
            detail = "the backward pass computes FP16 gradients, and nothing multiplied the loss"
            self._log.add("A609", detail, parameters=trained_leaves(optimizer), line=bare.line)

    def _begins(self, optimizer: Optimizer, *, raises: bool) -> None:
        self._own_code.stop()
        if not self.awake:
            return
        state = self._gradients.inspect(optimizer)
        self._rates.optimizer_steps(optimizer, state, step=self._step)
        self.scalers.check_twice(optimizer, state)
        self._accumulation.closed(optimizer, state, step=self._step)
        if state.dropped and not state.passes and not state.by_hand:
            self._without_gradients(optimizer, state, raises=raises)
        if not self._casts_model:
            self._stored.begins(optimizer, step=self._step)

    def _without_gradients(self, optimizer: Optimizer, state: GradientState, *, raises: bool) -> None:
        """Distinguish a loop that always clears gradients before the step from a loop that drops a bad batch."""
        state.step_empty(self._step, running_line())
        if raises or (state.num_empty >= 2 and 2 * state.num_empty > state.num_steps):
            step, line = state.first_empty
            detail = f"{type(optimizer).__name__} steps after zero_grad(), with no backward pass between"
            count = state.num_empty if state.num_empty <= 2 else 1
            self._log.add("A614", detail, parameters=trained_leaves(optimizer), step=step, line=line, count=count)

    def _ended(self, optimizer: Optimizer, *, skipped: bool, by_scaler: bool) -> None:
        self._stored.stop()
        self._gradients.of(optimizer).step(skipped=skipped, by_scaler=by_scaler)
        if self.over:
            return
        if self.awake:
            self._gradients.settle(optimizer)
        if not self._casts_model:
            if not skipped:
                self._statistics.inspect(self._run.objects.roots, line=self._called_at)
                self._optimizer_states.inspect(optimizer)
            self._own_code.watch_averages(self._optimizers)
        if not self.awake:
            self._own_code.remove_mode()
        self.over = not self.awake and self._statistics.done and self._own_code.over

    # --- the schedule, and copies of the weights -----------------------------------------------------------------------

    def scheduled(self, scheduler: Any) -> None:
        """Record that the script steps a scheduler."""
        self._rates.scheduler_stepped(scheduler, step=self._step)

    @contextmanager
    def averages(self, average: nn.Module, model: nn.Module) -> Iterator[None]:
        """Record that ``AveragedModel`` averages a model's weights."""
        self._own_code.stop()
        if self.awake and not self._casts_model:
            check_average(self._log, average, model)
        if self.awake:
            self._averages.model_moves(average, model, self._optimizers, step=self._step)
            line = running_line()
            for weight, mean in zip(model.parameters(), average.parameters(), strict=False):
                self._average_heard(weight, mean, line)
        yield

    @property
    def _casts_model(self) -> bool:
        """Whether the policy, not the script, keeps the weights in 16 bits."""
        return self._run.precision.effective is not None and self._run.precision.effective.casting == "model"

    @contextmanager
    def loads(self, optimizer: Optimizer, state: Any) -> Iterator[None]:
        """Record that an optimizer loads a state."""
        if self._casts_model or self.over:
            yield
        else:
            with self._stored.loads(optimizer, state, step=self._step):
                yield

    def notify_of_averages(self, listener: AverageListener) -> None:
        """Call ``listener`` with every weight that is found to be averaged, its average, and the line."""
        self._on_average = listener

    def _average_heard(self, weight: Tensor, average: Tensor, line: str) -> None:
        if self._on_average is not None:
            self._on_average(weight, average, line)

    def saves(self, value: Any) -> None:
        """Record that the script saves ``value`` to a file."""
        self.checkpoints.saved(value, self.scalers.in_use, step=self._step)

    # --- the end -----------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop watching."""
        self._own_code.stop()
        self._stored.stop()

    def findings(self) -> list[Finding]:
        """Return the misuse that was found; reads the flags of fused optimizers from the device."""
        self._rates.read_flags()
        self._averages.read_flags()
        self.checkpoints.report()
        self.operations.report()
        self._stored.report()
        self.configured.report()
        if self._needless is not None and self._formats[BF16.dtype] and _FP16 not in self._formats:
            (step, line), self._needless = self._needless, None
            detail = "every autocast region with gradients is BF16, and a GradScaler is on"
            self._log.add("A615", detail, step=step, line=line, count=self.scalers.num_steps)
        return self._log.findings()


def _session_divides_by() -> int:
    """Return the divisor of gradients in the running ``mezzo.Session``, 1 if none runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is Session.backward.__code__:
            return int(frame.f_locals["self"].accumulate)
    return 1
