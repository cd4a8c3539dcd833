"""NVIDIA Apex's mixed precision, which Apex itself has dropped, over Mezzo's engine.

``apex.amp`` was deprecated in October 2022 and removed after release 25.05. Scripts that say ``from apex import amp``
write ``from mezzo.compat.apex import amp`` instead, or run unchanged under ``python -m mezzo.compat.apex script.py``.

``amp``            ``initialize``, ``scale_loss`` and the rest, with the optimization levels O0 to O3
``parallel``       ``LARC``, and Apex's names for torch's distributed wrapper and synchronised batch norm
``optimizers``     ``FusedAdam``, ``FusedSGD`` over the engine's one-pass optimizers
``normalization``  ``FusedLayerNorm`` and its relatives over torch's

Loss scales, master weights, casts and emulation are the engine's; this package adds Apex's names, rules and order.
"""
