"""Name the modules of a script by their paths in the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import nn

from mezzo.engine.casts.conversion import in_fp32, module_names, wrap
from mezzo.observe.nested_names import PathNames

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


class Names(PathNames):
    """The paths of PyTorch's modules and parameters."""

    def __init__(self, roots: Iterable[nn.Module], tree: ModuleTree | None = None) -> None:
        super().__init__(roots, tree or ModuleTree())
