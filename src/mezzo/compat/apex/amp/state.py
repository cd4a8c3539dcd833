"""The state that the parts of ``amp`` share, levels and loss scales too: one object per process, as in Apex. Scripts set it, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from mezzo.engine.gradients import any_not_finite
from mezzo.engine.scaling import DynamicScale, StaticScale
from mezzo.formats import FP16, FP32

if TYPE_CHECKING:
    from mezzo.compat.apex.amp.casts import PatchedFunctions
    from mezzo.engine.casts.casting import Casting


@dataclass
class Properties:
    """The properties of a level, as changed by the keywords of ``initialize``."""

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: Any = None
    """What weights and inputs are cast to; None or False casts nothing."""
    patch_torch_functions: bool = False
    """Whether torch's functions cast their operands, each by its list."""
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0

    @property
    def options(self) -> dict[str, Any]:
        """The properties by name."""
        return dataclasses.asdict(self)


class CastsOfO1(Protocol):
    """The casts of O1 on one kind of device."""

    mode: PatchedFunctions

    def is_active(self) -> bool:
        """Return whether functions are cast at the moment."""

    def _deactivate(self) -> None:
        """End the casts for good."""


class AmpState:
    """The decisions of ``initialize``; ``opt_properties`` is unset before it."""

    opt_properties: Properties

    def __init__(self) -> None:
        self.replaced_by_policy = False
        """Whether ``initialize`` does nothing, since a precision policy replaces amp."""
        self.handle: CastsOfO1 | None = None
        """The casts of O1; None before ``initialize`` and under other levels."""
        self.hard_override = False
        """Whether broken rules of ``initialize`` print a warning instead of raising."""
        self.allow_incoming_model_not_fp32 = False
        """Whether ``initialize`` accepts models with 16-bit weights."""
        self.verbosity = 1
        self.min_loss_scale: float | None = None
        self.max_loss_scale = 2.0**24
        self.loss_scalers: list[LossScaler] = []
        self.castings: list[Casting] = []
        """How the arithmetic of models with 16-bit weights is done, where it is emulated."""


_amp_state = AmpState()


def warn_or_err(message: str) -> None:
    """Raise a RuntimeError, or print it as a warning where ``hard_override`` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(message)
    print(f"Warning:  {message}")


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print unless ``verbosity`` is 0; with ``rank0`` in the first process only."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    elsewhere = rank0 and distributed and torch.distributed.get_rank() != 0
    if _amp_state.verbosity > 0 and not elsewhere:
        print(message)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Return the parameters that ``optimizer`` updates, one after the other: FP32 masters where there are any."""
    for group in optimizer.param_groups:
        yield from group["params"]


BRIEF = {
    "O0": "O0:  FP32 training, the baseline.",
    "O1": "O1:  torch's functions cast their operands; weights stay FP32.",
    "O2": "O2:  FP16 weights, FP32 batch norm and FP32 masters.",
    "O3": "O3:  FP16 throughout.",
}
"""A line about each level."""
#                                    casts model patches keeps BN masters loss scale
_LEVELS = {
    "O0": Properties(True, "O0", FP32.dtype, False, None, False, 1.0),
    "O1": Properties(True, "O1", None, True, None, None, "dynamic"),
    "O2": Properties(True, "O2", FP16.dtype, False, True, True, "dynamic"),
    "O3": Properties(True, "O3", FP16.dtype, False, False, False, 1.0),
}


def properties_of(opt_level: str) -> Properties:
    """Return fresh properties of a level.

    Raises:
        RuntimeError: there is no such level.
    """
    if opt_level not in _LEVELS:
        names = ", ".join(repr(name) for name in _LEVELS)
        raise RuntimeError(
            f"Unexpected optimization level {opt_level!r}. Options are {names}: the letter O, not the number zero."
        )
    return dataclasses.replace(_LEVELS[opt_level])


def override(properties: Properties, name: str, value: Any) -> None:
    """Change one property by a keyword of ``initialize``.

    Raises:
        RuntimeError: the level does not allow it (a printed warning under ``hard_override``).
        ValueError, TypeError: the value is none of those allowed.
    """
    setattr(properties, name, _CHECKS[name](properties, value))


def _cast_model_type(properties: Properties, value: Any) -> Any:
    if properties.opt_level == "O1" and value not in (None, False, FP32.dtype):
        warn_or_err(
            f"cast_model_type={value} with opt_level='O1', which casts around torch's functions and leaves weights in FP32. "
            "Allowed with O1: None, False, torch.float32. To cast the model choose opt_level='O2' or 'O3'."
        )
    return value


def _patch_torch_functions(properties: Properties, value: Any) -> bool:
    if value and properties.opt_level != "O1":
        warn_or_err(
            f"patch_torch_functions=True with opt_level={properties.opt_level!r}. It is set by selecting opt_level='O1' only."
        )
    return bool(value)


def _keep_batchnorm_fp32(properties: Properties, value: Any) -> bool | None:
    if properties.opt_level == "O1" and value is not None:
        warn_or_err(
            f"keep_batchnorm_fp32={value} with opt_level='O1', whose weights all stay in FP32, also batch norm's. "
            "Leave it None, or choose opt_level='O2' or 'O3'."
        )
    read = {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value
    if not isinstance(read, (bool, type(None))):
        raise TypeError(
            f"keep_batchnorm_fp32={value!r}; allowed: True, False, None and the texts 'True' and 'False'. Pass one of these."
        )
    return read


def _master_weights(properties: Properties, value: Any) -> Any:
    if properties.opt_level == "O1" and value is not None:
        warn_or_err(
            f"master_weights={value} with opt_level='O1', whose weights are FP32 already and need no masters. "
            "Leave it None, or choose opt_level='O2' or 'O3'."
        )
    return value


def _loss_scale(properties: Properties, value: Any) -> float | str:
    if value == "dynamic":
        return "dynamic"
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"loss_scale={value!r}; allowed: 'dynamic', a number, or a number as text such as '128.0'. Pass one of these."
        ) from None


_CHECKS: dict[str, Callable[[Properties, Any], Any]] = {
    "cast_model_type": _cast_model_type,
    "patch_torch_functions": _patch_torch_functions,
    "keep_batchnorm_fp32": _keep_batchnorm_fp32,
    "master_weights": _master_weights,
    "loss_scale": _loss_scale,
}


# The scale is on the CPU: whether ``optimizer.step`` is skipped is decided in Python after every backward pass, so the
# overflow flag has to reach the CPU anyway. One wait per backward pass; Apex without its CUDA extension had one per
# parameter.
#
# A static scale checks nothing and skips nothing, as in Apex.


class LossScaler:
    """A loss scale, static or dynamic.

    Args:
        loss_scale: ``"dynamic"``, or a fixed scale.
        init_scale: start of a dynamic scale, within its bounds.
        scale_factor: by how much it grows and backs off.
        scale_window: backward passes without overflow after which it grows.
        min_loss_scale: floor of a dynamic scale; None leaves it FP32's smallest normal number.
        max_loss_scale: ceiling of a dynamic scale.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._static_unskipped = 0
        self._flags: list[Tensor] = []
        self._scale: StaticScale = StaticScale(1.0 if self.dynamic else float(loss_scale))
        if self.dynamic:
            self._scale = DynamicScale(
                init_scale,
                growth_factor=scale_factor,
                backoff_factor=1.0 / scale_factor,
                growth_interval=scale_window,
                min_scale=min_loss_scale or FP32.min_normal,
                max_scale=max_loss_scale,
            )

    def loss_scale(self) -> float:
        """Return the scale."""
        return self._scale.value()

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._set(scale=float(value))

    @property
    def _unskipped(self) -> int:
        """Backward passes without overflow since the scale last changed."""
        return int(self._scale.state_dict().get("_growth_tracker", self._static_unskipped))

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._static_unskipped = value
        self._set(_growth_tracker=value)

    def _set(self, **changed: Any) -> None:
        self._scale.load_state_dict({**self._scale.state_dict(), **changed})

    @property
    def _has_overflow(self) -> bool:
        """Whether a gradient since ``clear_overflow_state`` was not finite; waits for the device."""
        if not self._flags:
            return False
        return bool(torch.stack([flag.to(self._flags[0].device) for flag in self._flags]).any())

    def clear_overflow_state(self) -> None:
        """Clear the overflow flag of the last backward pass."""
        self._flags = []

    def scaled(self, loss: Tensor) -> Tensor:
        """Return ``loss`` in FP32 times the scale."""
        return self._scale.scale(loss.float())

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        """Unscale gradients in place, and record whether one is not finite.

        Args:
            gradients: in any formats, sparse ones included.
        """
        self._divide(self._recorded(gradients))

    def unscaled(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return 16-bit gradients in FP32 without the scale, and record whether one is not finite."""
        self._recorded(gradients)
        wide = [g.float() for g in gradients]
        self._divide(wide)
        return wide

    def _divide(self, gradients: list[Tensor]) -> None:
        if gradients and self.loss_scale() != 1.0:
            torch._foreach_mul_(gradients, 1.0 / self.loss_scale())

    def _recorded(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        values = [g._values() if g.is_sparse else g for g in gradients]
        if self.dynamic and values:
            self._flags.append(any_not_finite(values))
        return values

    def update_scale(self) -> bool:
        """Update the scale; return whether the update is to be skipped. Waits for the device."""
        if not self.dynamic:
            self._static_unskipped += 1
            return False
        overflowed = self._has_overflow
        self._scale.update(torch.tensor(float(overflowed)))
        return overflowed

    def state_dict(self) -> dict[str, float | int]:
        """Return the scale and the count of backward passes without overflow, under Apex's names."""
        return {"loss_scale": self.loss_scale(), "unskipped": self._unskipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned here or in Apex."""
        self._loss_scale, self._unskipped = state["loss_scale"], state["unskipped"]
