"""Two optimizers in turns; the discriminator's loss is a sum of two backward passes."""

import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
discriminator = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid()).to(device)
criterion = nn.BCELoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.01)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01)
ones, zeros = torch.ones(16, 1, device=device), torch.zeros(16, 1, device=device)

for step in range(10):
    real = torch.randn(16, 2, device=device) * 0.5 + 1

    # discriminator
    discriminator.zero_grad()
    output = discriminator(real)
    loss_real = criterion(output, ones)
    loss_real.backward()
    noise = torch.randn(16, 4, device=device)
    fake = generator(noise)
    output = discriminator(fake.detach())
    loss_fake = criterion(output, zeros)
    loss_fake.backward()
    optimizer_d.step()

    # generator
    generator.zero_grad()
    output = discriminator(fake)
    loss_g = criterion(output, ones)
    loss_g.backward()
    optimizer_g.step()
    print(step, (loss_real + loss_fake).item(), loss_g.item())
