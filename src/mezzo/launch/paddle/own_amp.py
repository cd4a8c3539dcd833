"""Replace a script's own mixed precision: ``paddle.amp.auto_cast``, ``decorate`` and ``GradScaler``.

Under a policy the scaler is off and ``decorate`` returns its arguments, because the policy does their work. An
``auto_cast`` is a region of the policy (under ``fp32`` it does nothing); an ``auto_cast(enable=False)`` inside a layer keeps
its effect. Outside layers it only means that the script has no mixed precision, and the policy overrides it:
``paddle.Model`` puts one around every forward pass. Under ``as-is`` all are only recorded, and so is mixed precision that Paddle
itself turns off, as on a CPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import paddle
from paddle.amp.grad_scaler import AmpScaler, GradScaler

from mezzo.launch.paddle.forward import AUTO_CAST_MODULE, ForwardRegions
from mezzo.launch.paddle.state import PaddleRun
from mezzo.launch.patches import Patches


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
        run.script_scaler = self
    return scaled


def _record_step(run: PaddleRun, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if self._enable and bool(self._found_inf):
        run.script_skipped()
    return result


def _record_update(run: PaddleRun, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if self._enable:
        run.script_scaler, run.script_scale = None, float(self._scale.item())
    return result
