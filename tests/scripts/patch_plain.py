"""A plain loop at the top level: a schedule stepped with each update, and a validation without gradients."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
inputs, targets = torch.randn(8, 6, device=device), torch.randn(8, 2, device=device)

for epoch in range(2):
    model.train()
    for _ in range(6):
        optimizer.zero_grad()
        # forward
        outputs = model(inputs)
        loss = F.mse_loss(outputs, targets)

        # backward
        loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        error = F.mse_loss(model(inputs), targets)
    print(f"epoch {epoch}  loss {loss.item():.4f}  error {error.item():.4f}")
