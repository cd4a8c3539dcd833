"""Keras' loss scales, with those methods of torch's GradScaler that observers use."""

from __future__ import annotations

from typing import Any, Protocol

from mezzo.launch.keras.state import KerasRun

_BACKOFF = 0.5  # LossScaleOptimizer's own


class LayerScale(Protocol):
    """A loss scale: the policy's, or that of the script's own LossScaleOptimizer."""

    dynamic: bool
    """Whether it changes by itself."""
    key: int
    """The id of the run or of the optimizer that has the scale."""

    def get_scale(self) -> float:
        """Return the scale."""

    def get_growth_interval(self) -> int:
        """Return the number of consecutive good updates after which the scale grows."""

    def state_dict(self) -> dict[str, Any]:
        """Return the scale."""
        return {"scale": self.get_scale()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the scale."""

    def back_off(self) -> None:
        """Halve the scale after an overflow, as the optimizer does; a static one stays."""
        if self.dynamic:
            self.load_state_dict({"scale": self.get_scale() * _BACKOFF})


class PolicyScale(LayerScale):
    """The scale of a run's policy."""

    def __init__(self, run: KerasRun) -> None:
        assert run.policy is not None
        self._run, self._policy = run, run.policy
        self.dynamic, self.key = run.policy.loss_scale == "dynamic", id(run)

    def get_scale(self) -> float:
        """Return the scale."""
        return _value(self._run.scale)

    def get_growth_interval(self) -> int:
        """Return the policy's growth interval."""
        return self._policy.growth_interval

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the scale."""
        self._run.scale.assign(state["scale"])


class ScriptScale(LayerScale):
    """The scale of a script's LossScaleOptimizer."""

    dynamic = True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self.key = optimizer, id(optimizer)

    def get_scale(self) -> float:
        """Return the scale."""
        optimizer = self._optimizer
        return _value(optimizer.dynamic_scale) if optimizer.built else float(optimizer.initial_scale)

    def get_growth_interval(self) -> int:
        """Return the number of good updates after which the scale grows."""
        return int(self._optimizer.dynamic_growth_steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the scale."""
        self._optimizer.initial_scale = state["scale"]
        if self._optimizer.built:
            self._optimizer.dynamic_scale.assign(state["scale"])


def _value(variable: Any) -> float:
    """Return the value of a variable, which belongs to a replica under a strategy of TensorFlow."""
    import keras

    return float(keras.ops.convert_to_numpy(variable))
