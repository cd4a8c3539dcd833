"""Train a denoising diffusion model on MNIST (Ho et al., arXiv:2006.11239), and keep a moving average of its weights."""

import argparse
import copy
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from mnist_cnn import read_idx

NUM_TIMES = 1000


class Stage(nn.Module):
    """Two normalized convolutions, conditioned on the time."""

    def __init__(self, channels_in: int, channels: int, time_width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels_in), nn.GroupNorm(4, channels)
        self.conv1, self.conv2 = nn.Conv2d(channels_in, channels, 3, 1, 1), nn.Conv2d(channels, channels, 3, 1, 1)
        self.time = nn.Linear(time_width, channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1) if channels_in != channels else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """Two levels down and two up, with a skip connection at each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.first = nn.Conv2d(1, width, 3, 1, 1)
        sizes = [(width, width), (width, 2 * width), (2 * width, 2 * width), (4 * width, width), (2 * width, width)]
        self.stages = nn.ModuleList(Stage(inputs, outputs, 4 * width) for inputs, outputs in sizes)
        self.last = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 1, 3, 1, 1))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        angles = times[:, None] * torch.exp(
            -math.log(10_000) * torch.arange(self.width // 2, device=x.device) / (self.width // 2)
        )
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        large = self.stages[0](self.first(x), time)
        small = self.stages[1](F.avg_pool2d(large, 2), time)
        middle = self.stages[2](small, time)
        up = self.stages[3](torch.cat([middle, small], dim=1), time)
        return self.last(self.stages[4](torch.cat([F.interpolate(up, scale_factor=2.0), large], dim=1), time))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="MNIST's files")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = read_idx(args.data, "train-images-idx3-ubyte").unsqueeze(1).float() / 127.5 - 1
    loader = DataLoader(images, args.batch_size, shuffle=True, drop_last=True)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, NUM_TIMES), dim=0).to(device)
    model = UNet(args.width).to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    step = 0
    while step < args.steps:
        for clean in loader:
            clean = clean.to(device)
            times = torch.randint(0, NUM_TIMES, (len(clean),), device=device)
            noise, share = torch.randn_like(clean), kept[times].view(-1, 1, 1, 1)
            loss = F.mse_loss(model(share.sqrt() * clean + (1 - share).sqrt() * noise, times), noise)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(weight, 0.01)
            step += 1
            if step % 20 == 0 or step == args.steps:
                print(f"step {step}  loss {loss.item():.4f}", flush=True)
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
