"""SyncBatchNorm where the CPU stands in for CUDA, against a batch norm of the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

from mezzo.launch.torch import training

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU stands in only where there is no CUDA device"
)
PARTS = {1: [slice(0, 8)], 2: [slice(0, 3), slice(3, 8)]}
"""The samples of each process, by the number of processes."""


def _compare(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", world_size=world_size, rank=rank)
    torch.manual_seed(0)
    images, weights = torch.randn(2, 8, 3, 4, 4)
    part = PARTS[world_size][rank]
    inputs = [images[part].clone().requires_grad_(), images.clone().requires_grad_()]
    whole = nn.BatchNorm2d(3, momentum=None)
    with training(None, seed=None, observe=None) as here:
        here.begin_stand_in()
        layer = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3, momentum=None)))
        model = nn.parallel.DistributedDataParallel(layer.cuda(), device_ids=[0])
        for _ in range(2):
            output, wanted = model(inputs[0]), whole(inputs[1])
            (output * weights[part]).sum().backward()
            (wanted * weights).sum().backward()
    torch.testing.assert_close(output, wanted[part])
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad[part])
    for got, expected in zip(layer[0].parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(got.grad * world_size, expected.grad)  # DDP takes the mean over processes
    torch.testing.assert_close(layer[0].state_dict(), whole.state_dict())
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", PARTS)
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_it_is_a_batch_norm_of_all_processes(world_size: int, tmp_path: Path) -> None:
    processes.start_processes(_compare, (world_size, str(tmp_path)), world_size, start_method="fork")
