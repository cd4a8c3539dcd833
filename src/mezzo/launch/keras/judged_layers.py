"""Which values of a Keras model in FP32 a policy would lower: the outputs of all layers whose dtype the script leaves open."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import Tensor, nn

from mezzo.observe.observer import ModuleTree
from mezzo.observe.ranges.off_regions import OffRegions
from mezzo.policy import Policy


class JudgedLayers:
    """The formats that values would have, if each layer computes in that of its dtype policy (``listed_formats.JudgedFormats``)."""

    def __init__(
        self, policy: Policy, own_dtypes: Container[nn.Module], tree: ModuleTree, roots: Iterable[nn.Module]
    ) -> None:
        """Judge ``policy``.

        Args:
            policy: the policy.
            own_dtypes: the layers whose dtype the script sets.
            tree: finds the layers of a model.
            roots: the models.
        """
        self._lowers, self._own_dtypes, self._tree, self._roots = policy.lowers, own_dtypes, tree, roots
        self.off = OffRegions()
        self._wide: set[int] | None = None

    def forget(self) -> None:
        """Read the layers' parameters again."""
        self._wide = None

    def is_wide(self, tensor: Tensor, module: nn.Module) -> bool:
        """Return whether ``module``'s output stays in FP32: the script sets the layer's dtype."""
        return module in self._own_dtypes

    def gradient_is_wide(self, parameter: Tensor) -> bool:
        """Return whether the parameter's layer stays in FP32."""
        if self._wide is None:
            wide = [m for root in self._roots for _, m in self._tree.modules(root) if m in self._own_dtypes]
            self._wide = {id(p) for module in wide for _, p in self._tree.parameters(module)}
        return id(parameter) in self._wide
