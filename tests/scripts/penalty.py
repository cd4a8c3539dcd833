"""A critic with a penalty on the norm of its gradient, as in WGAN-GP."""

import torch
from common import mlp, norm, report

critic = mlp(2, 16, 1)
optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
noise = torch.Generator().manual_seed(3)
losses, penalties, norms = [], [], []
for _ in range(10):
    real, fake = torch.randn(16, 2, generator=noise) + 1, torch.randn(16, 2, generator=noise)
    mixed = ((real + fake) / 2).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    norms.append(norm(critic.parameters()))
    optimizer.step()
    losses.append(loss.item())
    penalties.append(penalty.item())
report(losses=losses, penalties=penalties, norms=norms)
