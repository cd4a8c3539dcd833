"""NVIDIA Apex's mixed precision, which Apex itself has dropped, over Mezzo's engine.

``apex.amp`` was deprecated in October 2022 and removed after release 25.05. Scripts that say ``from apex import amp``
write ``from mezzo.compat.apex import amp`` instead, or run unchanged under ``python -m mezzo.compat.apex script.py``.

``amp``            ``initialize``, ``scale_loss`` and the rest, with the optimization levels O0 to O3
``parallel``       ``LARC``, and Apex's names for torch's distributed wrapper and synchronised batch norm
``optimizers``     ``FusedAdam``, ``FusedSGD`` over the engine's one-pass optimizers
``normalization``  ``FusedLayerNorm`` and its relatives over torch's

Loss scales, master weights, casts and emulation are the engine's; this package adds Apex's names, rules and order.
"""

import importlib
import sys

MODULES = {
    "apex": "mezzo.compat.apex",
    "apex.amp": "mezzo.compat.apex.amp",
    "apex.amp._amp_state": "mezzo.compat.apex.amp.state",
    "apex.amp.scaler": "mezzo.compat.apex.amp.state",
    "apex.normalization": "mezzo.compat.apex.normalization",
    "apex.normalization.fused_layer_norm": "mezzo.compat.apex.normalization",
    "apex.optimizers": "mezzo.compat.apex.optimizers",
    "apex.parallel": "mezzo.compat.apex.parallel",
    "apex.parallel.LARC": "mezzo.compat.apex.parallel.LARC",
}
"""The modules that a script imports, with the modules that it gets."""


def provide(*, without_amp: bool = False) -> None:
    """Make ``import apex`` find this package, in this process; ``without_amp``: with an ``apex.amp`` that has no effect."""
    for name, own in MODULES.items():
        sys.modules[name] = importlib.import_module(own)
    if without_amp:
        from mezzo.compat.apex.amp.state import _amp_state

        _amp_state.replaced_by_policy = True
