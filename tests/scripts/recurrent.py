import torch
from common import report
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
inputs, labels = torch.randn(4, 7, 5), torch.randint(0, 3, (4, 7))
losses = []
for _ in range(8):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses=losses)
