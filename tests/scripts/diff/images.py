"""A residual network with batch norm and 104 modules, trained for two steps."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(x + self.norm2(self.conv2(self.act(self.norm1(self.conv1(x))))))


class Images(nn.Module):
    def __init__(self, width, depth, classes):
        super().__init__()
        self.stem, self.norm, self.pool = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.MaxPool2d(2)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.average, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(width, classes)

    def forward(self, x):
        x = self.pool(F.relu(self.norm(self.stem(x))))
        return self.head(self.average(self.blocks(x)).flatten(1))


model = Images(width=6, depth=16, classes=5)
generator = torch.Generator().manual_seed(1)
# model
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(2):
    x, y = torch.randn(6, 3, 8, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator)
    # data
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    # gradients
    optimizer.step()
