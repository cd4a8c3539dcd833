"""Name the modules of a script by their paths in the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from mezzo.engine.casts.conversion import in_fp32, module_names, wrap
from mezzo.observe.nested_names import SCRIPT

_WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+")


class ModuleTree:
    """The modules inside a model, as PyTorch knows them; a framework on top of PyTorch may know them by other names."""

    def title(self, root: nn.Module) -> str:
        """Return the name of a model."""
        return type(root).__name__

    def modules(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield every module with its path, which is empty for ``root`` and for wrappers around it."""
        for path, module in root.named_modules():
            yield _WRAPPERS.sub("", f"{path}.").rstrip("."), module

    def named(self, root: nn.Module) -> dict[str, nn.Module]:
        """Return the modules inside ``root`` by the names that ``fp32_modules`` patterns are matched with."""
        return module_names(root)

    def parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of ``module`` itself, without those of modules inside it, with their names."""
        yield from module.named_parameters(recurse=False)

    def keep_fp32(self, module: nn.Module, device_type: str) -> None:
        """Make ``module`` compute in FP32 from its next call on."""
        wrap(module, in_fp32, device_type)


class Names:
    """The paths of modules and parameters.

    Roots are the modules called from outside any module. With one root that has children, paths begin below it, as ``fp32_modules``
    patterns do; with several, they begin with the root's class.
    """

    def __init__(self, roots: Iterable[nn.Module], tree: ModuleTree | None = None) -> None:
        self._tree = tree or ModuleTree()
        self._modules: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        self._patterns: dict[int, str] = {}
        self._weights: dict[int, str] = {}
        self.roots = list(dict.fromkeys(roots))
        inner = {id(child) for root in self.roots for _, child in self._tree.modules(root) if child is not root}
        tops = [root for root in self.roots if id(root) not in inner]
        models = [root for root in tops if any(child is not root for _, child in self._tree.modules(root))]
        for root in tops:
            title = self._title(root)
            self._add(root, title, prefix="" if models == [root] else f"{title}.")

    def of(self, module: nn.Module | None) -> str:
        """Return the path of ``module``, or its class if it is in no root."""
        if module is None:
            return SCRIPT
        return self._modules.get(id(module)) or type(module).__name__

    def pattern(self, module: nn.Module | None) -> str:
        """Return the name of ``module`` in ``fp32_modules``; empty for the model itself and for code outside any module."""
        return "" if module is None else self._patterns.get(id(module), "")

    def of_parameter(self, identity: int) -> str:
        """Return the path of the module with the parameter of this identity."""
        return self._parameters.get(identity, SCRIPT)

    def parameter(self, parameter: Tensor) -> str:
        """Return the path of a parameter."""
        return self._weights.get(id(parameter), "a weight outside any module")

    def _title(self, root: nn.Module) -> str:
        name, taken = self._tree.title(root), set(self._modules.values())
        return next(t for t in (name, *(f"{name}#{k}" for k in range(2, 10_000))) if t not in taken)

    def _add(self, root: nn.Module, title: str, *, prefix: str) -> None:
        for bare, module in self._tree.modules(root):
            name = f"{prefix}{bare}" if bare else title
            self._modules.setdefault(id(module), name)
            self._patterns.setdefault(id(module), bare)
            for local_name, parameter in self._tree.parameters(module):
                self._parameters.setdefault(id(parameter), name)
                self._weights.setdefault(id(parameter), f"{name}.{local_name}" if bare else local_name)
