"""An LSTM over two halves of a sequence, trained for two steps."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Sequences(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.words, self.lstm = nn.Embedding(words, width), nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids):
        first, state = self.lstm(self.words(ids[:, :6]))
        # state
        second, _ = self.lstm(self.words(ids[:, 6:]), state)
        return self.head(self.norm(torch.cat([first, second], 1)))


model = Sequences(words=17, width=16)
generator = torch.Generator().manual_seed(1)
# model
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(2):
    ids = torch.randint(0, 17, (4, 12), generator=generator)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    # gradients
    optimizer.step()
