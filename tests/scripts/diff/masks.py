"""A U-Net, trained for two steps."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


def stage(inside, outside):
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(2, outside), nn.SiLU())


class Masks(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down1, self.down2, self.middle = stage(1, width), stage(width, 2 * width), stage(2 * width, 4 * width)
        self.up2, self.up1 = stage(6 * width, 2 * width), stage(3 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.avg_pool2d(one, 2))
        middle = self.middle(F.avg_pool2d(two, 2))
        up = self.up2(torch.cat([self.larger(middle), two], 1))
        return self.out(self.up1(torch.cat([self.larger(up), one], 1)))

    def larger(self, x):
        return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


model = Masks(width=4)
generator = torch.Generator().manual_seed(1)
# model
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for step in range(2):
    x = torch.randn(3, 1, 16, 16, generator=generator)
    y = (x > 0.5).float()
    optimizer.zero_grad()
    loss = F.binary_cross_entropy_with_logits(model(x), y)
    loss.backward()
    # gradients
    optimizer.step()
