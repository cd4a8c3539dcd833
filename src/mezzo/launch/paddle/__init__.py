"""Run PaddlePaddle code that knows nothing of Mezzo under a policy: every patch of Paddle is applied and undone in this folder.

Imports no torch: that would add seconds to every run of a script that does not need it.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import paddle
import paddle.distributed as dist
from paddle.amp.grad_scaler import AmpScaler, GradScaler
from paddle.jit.dy2static.program_translator import StaticFunction

from mezzo.errors import ScriptError
from mezzo.formats import FP32
from mezzo.frameworks.paddle import explain_run, to_paddle
from mezzo.launch.any_script import Shift, shift_python
from mezzo.launch.paddle.backward import BackwardPasses, Updates
from mezzo.launch.paddle.operations import CountedStep, OperationPatches
from mezzo.launch.paddle.state import PaddleRun, mapped, this_device
from mezzo.launch.paddle.surveys import is_half
from mezzo.launch.paddle.tape import StepObserver, refuse_static_graphs
from mezzo.launch.patches import Patches
from mezzo.launch.support import WithoutPyTorch
from mezzo.measure.environment import environment_without_torch, nvidia_driver
from mezzo.measure.live import Report
from mezzo.observe.settings import (
    AnySettings,
    AuditSettings,
    DiagnoseSettings,
    FallbackSettings,
    RangesSettings,
    StopScript,
)
from mezzo.policy import Policy
from mezzo.records import Effective, Environment, Memory, Note, Steps

if TYPE_CHECKING:
    from mezzo.launch.paddle.step_tape import StepTape


@contextmanager
def training(
    policy: Policy | None, *, seed: int | None, observe: AnySettings | None = None
) -> Iterator[PaddleTraining]:
    """Run the code inside under ``policy`` (None: its own precision) and record every training step.

    Args:
        policy: the policy to apply.
        seed: added to every seed that the code sets; None leaves seeds alone.
        observe: settings of the observer; with one, formats and bytes are not counted.
    """
    run, patches = PaddleRun(policy), Patches()
    operations, passes, regions = OperationPatches(run), BackwardPasses(run), ForwardRegions(run)
    counted = CountedStep(run, operations, passes)
    try:
        if seed is not None:
            shift_seeds(seed, patches)
        if policy is not None and not policy.lowers:
            _set_tf32(patches, on=policy.compute == "tf32")
        replace_amp(run, regions, patches)
        if run.scale.skips_overflows:
            refuse_split_models(patches)
        regions.install(patches)
        operations.install(patches)
        passes.install(patches)
        Updates(run).install(patches)
        observer = None if observe is None else _observer(observe, run, patches)
        if observer is None:
            counted.install(patches)
        yield PaddleTraining(run, counted, observer, patches=patches)
        with suppress(StopScript):
            run.close_update()
    finally:
        patches.undo()


def _observer(settings: AnySettings, run: PaddleRun, patches: Patches) -> StepObserver:
    """Start the observer for ``settings`` and return it; it observes until ``patches`` are undone."""
    observer = observer_for(settings, run)
    observer.install(patches)
    refuse_static_graphs(observer, patches)
    run.observe(observer)
    patches.on_undo(observer.close)
    observer.start()
    return observer


class PaddleTraining(WithoutPyTorch):
    """A Paddle script's training (``launch.training.Training``)."""

    stage = "Paddle"
    follows_processes = True

    def __init__(
        self, run: PaddleRun, counted: CountedStep, observer: StepObserver | None = None, *, patches: Patches
    ) -> None:
        self._run, self._counted, self._patches = run, counted, patches
        self._tape: StepTape | None = None
        self.observer = observer
        self.framework = f"paddle {paddle.__version__}"

    @property
    def num_updates(self) -> int:
        """The number of updates, including the open one."""
        return self._run.num_updates

    @property
    def has_any_loss(self) -> bool:
        """Whether the open step has a loss."""
        return self._run.steps.has_loss()

    def begin_tape(self, path: Path) -> None:
        """Record the operations of the second step, and end the script after it."""
        from mezzo.launch.paddle.step_tape import StepTape

        self._tape = StepTape(self._run, path)
        self._tape.install(self._patches)

    def report_to(self, report: Report, *, every_s: float) -> None:
        """Report the latest numbers that the host knows, at most every ``every_s`` seconds."""
        self._run.steps.reports.begin(report, every_s=every_s)

    def close_update(self) -> None:
        """Close the update that is open."""
        if self._tape is not None:
            self._tape.write()
        self._run.close_update()

    def steps(self) -> Steps:
        """Return the record of every step."""
        return self._run.steps.steps(self._run.names)

    def memory(self) -> Memory:
        """Return the bytes that a step uses."""
        return self._counted.memory()

    def effective(self) -> Effective:
        """Return the formats in which products actually ran."""
        return self._counted.effective()

    def explanation(self) -> list[Note]:
        """Return what the policy does on the device, with reasons."""
        if self._run.policy is None or self._run.device is None:  # nothing was trained
            return []
        choices = explain_run(self._run.policy, self._run.device)
        return [Note(what=c.what, value=c.value, reason=c.reason) for c in choices]

    def keep_weights(self, patches: Patches) -> None:
        """Keep the models that the script drops, until ``patches`` are undone, because ``weights`` is read afterwards."""
        self._run.keep_models()

    def weights(self) -> str:
        """Return a digest of the weights; empty unless ``keep_weights`` was called."""
        return self._run.weights()

    def environment(self) -> Environment:
        """Return the machine and the versions."""
        device = self._run.device or this_device()
        on_gpu = device.kind == "cuda"
        of_paddle = {
            "device": device.kind,
            "threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1,
            "gpu": device.name if on_gpu else None,
            "driver": nvidia_driver() if on_gpu else None,
            "cuda": paddle.version.cuda() if on_gpu else None,
        }
        return environment_without_torch().model_copy(update=of_paddle)


def _set_tf32(patches: Patches, *, on: bool) -> None:
    """Switch TF32 for the products and convolutions of CUDA builds, which have it on by default."""
    core = paddle.base.core
    for library in ("cublas", "cudnn"):
        if hasattr(core, f"set_{library}_switch"):
            switch = getattr(core, f"set_{library}_switch")
            patches.on_undo(functools.partial(switch, getattr(core, f"get_{library}_switch")()))
            switch(on)


def observer_for(settings: AnySettings, run: PaddleRun) -> StepObserver:
    """Return the observer for ``settings``; only its module is imported."""
    if isinstance(settings, DiagnoseSettings):
        from mezzo.launch.paddle.nonfinite_values import NonFinite

        return NonFinite(settings, run)
    if isinstance(settings, RangesSettings):
        from mezzo.launch.paddle.ranges import Ranges

        return Ranges(settings, run)
    if isinstance(settings, FallbackSettings):
        from mezzo.launch.paddle.fallback import Fallback

        return Fallback(settings, run)
    from mezzo.launch.paddle.audit import Audit

    assert isinstance(settings, AuditSettings), settings  # the command refuses what is left
    return Audit(settings, run)


def shift_seeds(seed: int, patches: Patches) -> None:
    """Seed the global generators with ``seed``, and add it to every seed set from now until ``patches`` are undone."""
    shift_python(seed, patches)
    paddle.seed(seed)
    shift = Shift(seed)
    for owner in (paddle, paddle.framework, paddle.framework.random):
        patches.around(owner, "seed", shift.call)


# With ``paddle.DataParallel`` an overflow in one process reaches the gradients of all. A process of a split model sees only the
# gradients of its part, so another could make the update that it skips.

_SPLITS = (
    (dist, ("shard_tensor", "shard_layer", "shard_optimizer", "parallelize")),
    (dist.sharding, ("group_sharded_parallel",)),
    (dist.fleet, ("distributed_model", "distributed_optimizer")),
)
"""Paddle's functions that split models or optimizers; fleet's do so if its strategy has degrees above 1."""


def refuse_split_models(patches: Patches) -> None:
    """Refuse calls that split a model until ``patches`` are undone; only for policies with a loss scale."""
    for module, names in _SPLITS:
        for name in names:
            patches.around(module, name, _fleet(name) if module is dist.fleet else _refusal(name))


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
        raise ScriptError(
            f"paddle.distributed's {name} splits the model under a policy with a loss scale; allowed: paddle.DataParallel",
            hint="use a policy without a loss scale, such as bf16, or leave the script to its own scaler with --policy as-is",
        )

    return refuse


def _fleet(name: str) -> Callable[..., Any]:
    refuse = _refusal(f"fleet.{name}")

    def check(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        groups = dist.fleet.get_hybrid_communicate_group()
        sizes = () if groups is None else (
            groups.get_model_parallel_world_size(),
            groups.get_pipe_parallel_world_size(),
            groups.get_sharding_parallel_world_size(),
            groups.get_sep_parallel_world_size(),
        )  # fmt: skip
        return refuse(original) if any(size > 1 for size in sizes) else original(*args, **kwargs)

    return check


# Under a policy the scaler is off and ``decorate`` returns its arguments, because the policy does their work. An
# ``auto_cast`` is a region of the policy (under ``fp32`` it does nothing); an ``auto_cast(enable=False)`` inside a layer keeps
# its effect. Outside layers it only means that the script has no mixed precision, and the policy overrides it:
# ``paddle.Model`` puts one around every forward pass. Under ``as-is`` all are only recorded, and so is mixed precision that Paddle
# itself turns off, as on a CPU.


def replace_amp(run: PaddleRun, regions: ForwardRegions, patches: Patches) -> None:
    """Replace or record the script's own mixed precision until ``patches`` are undone."""
    for owner in (AUTO_CAST_MODULE, paddle.amp):  # the second has its own reference to it
        patches.wrap(owner, "amp_guard", lambda original: _auto_cast(run, regions, original))
    patches.around(AUTO_CAST_MODULE, "amp_decorate", functools.partial(_decorate, run))
    patches.around(AmpScaler, "__init__", functools.partial(_scaler, run))
    if run.policy is None:
        patches.around(AmpScaler, "scale", functools.partial(_record_scale, run))
        for owner, name in ((GradScaler, "step"), (AmpScaler, "minimize")):
            patches.around(owner, name, functools.partial(_record_step, run))
        patches.around(AmpScaler, "_update", functools.partial(_record_update, run))


def _auto_cast(run: PaddleRun, regions: ForwardRegions, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def auto_cast(enable: bool = True, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        if run.policy is None:
            if enable:
                run.note_own_amp("the script's auto_cast")
            own: AbstractContextManager[Any] = original(enable, *args, **kwargs)
            return own
        if enable:
            run.begin()
            return regions.region()
        return nullcontext() if not run.local.depth or _called_by_paddle() else regions.in_fp32()

    return auto_cast


def _called_by_paddle() -> bool:
    """Return whether Paddle's own code calls auto_cast, as in activation checkpointing."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"] == AUTO_CAST_MODULE.__name__:
        frame = frame.f_back
    return bool(str(frame.f_globals["__name__"]).split(".")[0] == paddle.__name__)


def _decorate(
    run: PaddleRun, original: Callable[..., Any], models: Any, optimizers: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if run.policy is None:
        run.note_own_amp("the script's decorate")
        return original(models, optimizers, *args, **kwargs)
    return models if optimizers is None else (models, optimizers)


def _scaler(
    run: PaddleRun, original: Callable[..., Any], self: Any, enable: bool = True, *args: Any, **kwargs: Any
) -> None:
    original(self, enable and run.policy is None, *args, **kwargs)
    if enable and run.policy is None and not self._enable:
        run.note_own_amp("the script's GradScaler")


def _record_scale(run: PaddleRun, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if self._enable and run.observer is not None:
        run.observer.scaler_met(self)
    scaled = original(self, *args, **kwargs)
    if self._enable:
        run.script_scaled(self)
    return scaled


def _record_step(run: PaddleRun, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if self._enable and bool(self._found_inf):
        run.script_skipped()
    return result


def _record_update(run: PaddleRun, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if self._enable:
        run.script_scaler_updated(float(self._scale.item()))
    return result


# A layer called from outside any layer begins a region, and its return ends it: optimizer arithmetic, data preparation and
# metrics stay unchanged, and the outputs of a region are FP32. On a GPU a region is ``paddle.amp.auto_cast`` with the
# policy's lists; on a CPU, where that does nothing, ``operations`` rounds the operations in a region.
#
# Under a policy, code passed to ``paddle.jit.to_static`` runs eagerly: a traced program ignores regions,
# and in some traced programs Paddle's own AMP aborts the process on a CPU. The record says that the code ran eagerly.
#
# Not covered: forward code outside layers. It runs in FP32, and the count of FLOPs shows it.

AUTO_CAST_MODULE: Any = importlib.import_module("paddle.amp.auto_cast")  # as an attribute, this name is a function


class ForwardRegions:
    """Hooks that begin and end regions around a script's layers."""

    def __init__(self, run: PaddleRun) -> None:
        self._run = run
        self._guard = AUTO_CAST_MODULE.amp_guard

    def install(self, patches: Patches) -> None:
        """Patch Paddle until ``patches`` are undone."""
        patches.around(paddle.nn.Layer, "__call__", self._call)
        patches.around(StaticFunction, "__call__", self._static_call)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Run the code inside under the policy."""
        local = self._run.local
        before, local.depth = local.depth, 1
        try:
            with self._casting():
                yield
        finally:
            local.depth = before

    @contextmanager
    def in_fp32(self) -> Iterator[None]:
        """Run the code inside in FP32."""
        without_amp = self._guard(enable=False) if self._run.casts or self._run.policy is None else nullcontext()
        with self._run.in_fp32(), without_amp:
            yield

    def _casting(self) -> AbstractContextManager[Any]:
        run = self._run
        if not run.casts or run.applied is None or run.local.fp32_depth:
            return nullcontext()
        casting: AbstractContextManager[Any] = self._guard(**to_paddle(run.applied).auto_cast)
        return casting

    def _call(self, original: Callable[..., Any], layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Begin a region before a layer called from outside any layer, unless the script has begun one, and end it after."""
        run, local = self._run, self._run.local
        if local.in_layer or local.in_backward:
            return self._call_inner(original, layer, args, kwargs)
        run.record_root(layer)
        local.in_layer = True
        try:
            if local.depth:
                return self._call_inner(original, layer, args, kwargs)
            with self.region():
                result = original(layer, *args, **kwargs)
        finally:
            local.in_layer = False
        return _to_fp32(result) if run.casts else result

    def _call_inner(self, original: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
        """Run a layer inside a region; in FP32 if the policy keeps it there."""
        if layer not in self._run.fp32_layers:
            return original(layer, *args, **kwargs)
        with self.in_fp32():
            return original(layer, *_to_fp32(args), **_to_fp32(kwargs))

    def _static_call(self, original: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        run.begin()
        if run.policy is None:
            if run.observer is not None:
                run.observer.static_graph("paddle.jit.to_static")
            run.note_left_alone(
                "to_static", "not counted", "the operations of a traced program are not seen: no FLOPs, no formats"
            )
            return original(function, *args, **kwargs)
        why = "a traced program would not be under the policy; as-is keeps it traced"
        run.note_left_alone("to_static", "run eagerly", why)
        with self.region():
            result = function._call_dygraph_function(*args, **kwargs)
        return _to_fp32(result) if run.casts else result


def _to_fp32(value: Any) -> Any:
    """Return ``value`` with its 16-bit tensors in FP32, also those in lists, tuples and dictionaries."""
    return mapped(value, lambda tensor: tensor.astype(FP32.dtype_name) if is_half(tensor) else tensor)
