import torch
from common import mlp, report
from torch.nn import functional as F

torch.manual_seed(0)
generator, discriminator = mlp(4, 16, 2), mlp(2, 16, 1, seed=1)
update_g = torch.optim.Adam(generator.parameters(), lr=0.01)
update_d = torch.optim.Adam(discriminator.parameters(), lr=0.01)
noise = torch.Generator().manual_seed(3)
losses = []
for _ in range(10):
    real = torch.randn(16, 2, generator=noise) * 0.5 + 1
    fake = generator(torch.randn(16, 4, generator=noise))
    update_d.zero_grad()
    loss_d = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
    loss_d.backward()
    update_d.step()
    update_g.zero_grad()
    loss_g = F.softplus(-discriminator(fake)).mean()
    loss_g.backward()
    update_g.step()
    losses += [loss_d.item(), loss_g.item()]
report(losses=losses)
