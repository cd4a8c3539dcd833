"""Swin transformers as mmdetection trains them under Mask R-CNN (``configs/swin``, ``mmdet/models/backbones/swin.py``).

Windows of 7x7 over maps that are padded to multiples of 7; every second block shifts them. Attention saves all scores: the code is
older than torch's fused attention. Nothing is frozen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SIDE = 7
_POINTS = _SIDE * _SIDE
_HEADS = (3, 6, 12, 24)
DEPTHS = {"T": (2, 2, 6, 2), "S": (2, 2, 18, 2)}
CHANNELS = (96, 192, 384, 768)
_DROPPED = 0.2


class _Attention(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (channels // heads) ** -0.5
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.bias = nn.Parameter(torch.empty((2 * _SIDE - 1) ** 2, heads))
        self.register_buffer("places", torch.zeros(_POINTS, _POINTS, dtype=torch.long))

    def forward(self, windows: Tensor, mask: Tensor | None) -> Tensor:
        count, points, channels = windows.shape
        parts = self.qkv(windows).reshape(count, points, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts[0], parts[1], parts[2]
        query = query * self.scale
        scores = query @ key.transpose(-2, -1)
        bias = self.bias[self.places.view(-1)].view(points, points, -1).permute(2, 0, 1).contiguous()
        scores = scores + bias.unsqueeze(0)
        if mask is not None:
            split = scores.view(count // len(mask), len(mask), self.heads, points, points)
            scores = (split + mask.unsqueeze(1).unsqueeze(0)).view(-1, self.heads, points, points)
        scores = scores.softmax(-1)
        return self.out((scores @ value).transpose(1, 2).reshape(count, points, channels))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, channels: int, heads: int, *, shifted: bool, dropped: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attention = _Attention(channels, heads)
        self.wide, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.shift, self.dropped = _SIDE // 2 if shifted else 0, dropped

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        x = x + self._attended(self.norm1(x), height, width)
        return x + self._kept(self.narrow(F.gelu(self.wide(self.norm2(x)))))

    def _attended(self, x: Tensor, height: int, width: int) -> Tensor:
        n, _, channels = x.shape
        down, right = -height % _SIDE, -width % _SIDE
        x = F.pad(x.view(n, height, width, channels), (0, 0, 0, right, 0, down))
        rows, columns = (height + down) // _SIDE, (width + right) // _SIDE
        mask = None
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
            where = x.new_zeros(rows * columns, _POINTS)
            apart = where.unsqueeze(1) - where.unsqueeze(2)
            mask = apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)
            del where, apart
        windows = x.view(n, rows, _SIDE, columns, _SIDE, channels).permute(0, 1, 3, 2, 4, 5).contiguous()
        found = self.attention(windows.view(-1, _POINTS, channels), mask)
        del windows, x
        found = found.view(n, rows, columns, _SIDE, _SIDE, channels).permute(0, 1, 3, 2, 4, 5).contiguous()
        found = found.view(n, rows * _SIDE, columns * _SIDE, channels)
        if self.shift:
            found = torch.roll(found, (self.shift, self.shift), (1, 2))
        if down or right:
            found = found[:, :height, :width].contiguous()
        return self._kept(found.view(n, height * width, channels))

    def _kept(self, x: Tensor) -> Tensor:
        if not self.dropped:
            return x
        return x.div(1 - self.dropped) * x.new_empty(len(x), 1, 1)


class Swin(nn.Module):
    """The backbone: stages of ``depths`` blocks, and a normalised map of each."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 96, 4, 4), nn.LayerNorm(96)
        self.stages, self.norms, self.merged = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        dropped = iter([_DROPPED * number / (sum(depths) - 1) for number in range(sum(depths))])
        for channels, heads, depth in zip(CHANNELS, _HEADS, depths, strict=True):
            blocks = [_Block(channels, heads, shifted=n % 2 == 1, dropped=next(dropped)) for n in range(depth)]
            self.stages.append(nn.ModuleList(blocks))
            self.norms.append(nn.LayerNorm(channels))
            if channels != CHANNELS[-1]:
                narrow = nn.Linear(4 * channels, 2 * channels, bias=False)
                self.merged.append(nn.Sequential(nn.LayerNorm(4 * channels), narrow))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.patches(x)
        height, width = x.shape[-2:]
        x = self.norm(x.flatten(2).transpose(1, 2))
        found = []
        for place, (stage, norm) in enumerate(zip(self.stages, self.norms, strict=True)):
            for block in stage:
                x = block(x, height, width)
            out = norm(x).view(len(x), height, width, -1)
            found.append(out.permute(0, 3, 1, 2).contiguous())
            del out
            if place < len(self.merged):
                x = x.view(len(x), height, width, -1).permute(0, 3, 1, 2)
                x = F.unfold(x, 2, stride=2).transpose(1, 2)
                x = self.merged[place](x)
                height, width = height // 2, width // 2
        return found
