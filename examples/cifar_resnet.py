"""Train a ResNet on CIFAR-10: --data is the folder with the binary version (https://www.cs.toronto.edu/~kriz/cifar.html).

--model resnet20 is the network for 32 x 32 pixels of He et al., arXiv:1512.03385, section 4.2; resnet50 is their bottleneck network with a
stem for small pictures. Warm-up and a cosine schedule, channels_last, torch.compile; several processes under torchrun train with DDP.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    """Two 3 x 3 convolutions, or a bottleneck of 1 x 1, 3 x 3 and 1 x 1, with a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        channels_out = channels * 4 if bottleneck else channels
        if bottleneck:
            shapes = [(channels_in, channels, 1, 1), (channels, channels, 3, stride), (channels, channels_out, 1, 1)]
        else:
            shapes = [(channels_in, channels, 3, stride), (channels, channels, 3, 1)]
        layers: list[nn.Module] = []
        for inputs, outputs, kernel, step in shapes:
            layers += [
                nn.Conv2d(inputs, outputs, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def build_model(name: str) -> nn.Module:
    bottleneck = name == "resnet50"
    widths, depths = ((64, 128, 256, 512), (3, 4, 6, 3)) if bottleneck else ((16, 32, 64), (3, 3, 3))
    channels = widths[0]
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for number in range(depth):
            layers.append(Block(channels, width, 2 if stage and not number else 1, bottleneck))
            channels = width * 4 if bottleneck else width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def read_set(files: list[Path]) -> TensorDataset:
    rows = torch.cat(
        [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).view(-1, 3073) for file in files]
    )
    images = rows[:, 1:].reshape(-1, 3, 32, 32).float() / 255
    mean, deviation = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    return TensorDataset((images - mean.view(3, 1, 1)) / deviation.view(3, 1, 1), rows[:, 0].long())


def augment(images: Tensor) -> Tensor:
    """Shift all pictures of a batch by up to 4 pixels and mirror half of them."""
    padded = F.pad(images, (4, 4, 4, 4))
    top, left = torch.randint(0, 9, (2,)).tolist()
    shifted = padded[:, :, top : top + 32, left : left + 32]
    return torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, shifted.flip(3), shifted)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    correct = sum(int((model(x.to(device)).argmax(1).cpu() == y).sum()) for x, y in loader)
    return correct / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", choices=["resnet20", "resnet50"], default="resnet20")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=20, help="steps of linear warm-up")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--max-steps", type=int, default=None, help="stop an epoch after so many steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rank, world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if world > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train_set = read_set(sorted(args.data.glob("data_batch_*.bin")))
    sampler = DistributedSampler(train_set) if world > 1 else None
    train_loader = DataLoader(train_set, args.batch_size, shuffle=sampler is None, sampler=sampler, drop_last=True)
    test_loader = DataLoader(read_set([args.data / "test_batch.bin"]), 256)
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    model = build_model(args.model).to(device, memory_format=memory_format)
    if args.compile:
        model.compile()
    trained = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = args.epochs * min(len(train_loader), args.max_steps or len(train_loader))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=args.warmup)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps - args.warmup))
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[args.warmup])

    for epoch in range(1, args.epochs + 1):
        trained.train()
        if sampler is not None:
            sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(train_loader):
            if step == args.max_steps:
                break
            batch = augment(images).to(device, memory_format=memory_format)
            loss = F.cross_entropy(trained(batch), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch}  loss {loss.item():.4f}  acc {accuracy:.4f}", flush=True)
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
