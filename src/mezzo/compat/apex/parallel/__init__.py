"""``apex.parallel``: torch's wrappers under Apex's names, and ``LARC`` in the module of that name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's ``DistributedDataParallel``; settings of Apex's own buckets have no effect.

    Args:
        module: the model, from ``amp.initialize``.
        message_size: without effect, like all that follow: torch chooses its buckets itself and reduces while the backward pass runs.
        delay_allreduce: as above.
        settings: as above: ``shared_param``, ``allreduce_trigger_params``, ``retain_allreduce_buffers`` and the others.
    """

    def __init__(
        self, module: nn.Module, message_size: int = 10_000_000, delay_allreduce: bool = False, **settings: Any
    ) -> None:
        device = next(iter(module.parameters())).device
        super().__init__(module, device_ids=[device] if device.type == "cuda" else None)


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Return the model with batch norms that compute their statistics over all processes.

    Args:
        module: the model.
        process_group: the processes; None for all.
        channel_last: without effect: torch accepts either layout.
    """
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    return converted


SyncBatchNorm = torch.nn.SyncBatchNorm
