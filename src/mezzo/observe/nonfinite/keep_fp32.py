"""Keep named modules of a script's models in FP32 under the script's own precision, as a policy's ``fp32_modules`` would."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from mezzo.observe.observer import ModuleTree


def keep_fp32(patterns: Sequence[str], tree: ModuleTree) -> RemovableHandle:
    """Make modules whose names match one of ``patterns`` compute in FP32, from the first call of their model on."""
    known: set[int] = set()

    def entering(module: nn.Module, args: object) -> None:
        if id(module) in known:
            return
        known.update(id(inner) for _, inner in tree.modules(module))
        device_type = next((p.device.type for p in module.parameters()), "cpu")
        for name, inner in tree.named(module).items():
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                tree.keep_fp32(inner, device_type)

    return register_module_forward_pre_hook(entering)
