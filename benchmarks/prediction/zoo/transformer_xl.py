"""Transformer-XL as NVIDIA's DeepLearningExamples train it on WikiText-103: base and large, with memories and an adaptive softmax.

Each layer attends to the step's words and to as many of the step before, with learnt biases and relative positions; norms come after the
residuals. The vocabulary of 267,735 words has three clusters of rarer words; with ``shrink`` their vectors are shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ENDS = (0, 19_997, 39_997, 199_997, 267_735)
_SHARES = (0.88, 0.05, 0.06, 0.01)
"""The assumed share of a text's words in each cluster: the rows do not state it."""
_SIZES: dict[str, dict[str, Any]] = {
    "base": {"layers": 16, "width": 512, "inner": 2048, "heads": 8, "dropout": 0.1, "shrink": 1},
    "large": {
        "layers": 18,
        "width": 1024,
        "inner": 4096,
        "heads": 16,
        "dropout": 0.2,
        "attention_dropout": 0.2,
        "shrink": 4,
    },
}


def transformer_xl(name: str) -> tuple[Callable[[], nn.Module], Callable[..., dict[str, Tensor]]] | None:
    """Return what builds the network of a row and its batch of a length and a number; None for other networks."""
    plain = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    if not plain.startswith(("transformerxl", "transfoxl")):
        return None
    sizes = _SIZES["large" if "large" in plain else "base"]
    return partial(_TransformerXl, **sizes), partial(_words, sizes["layers"], sizes["width"])


def xl_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """Return the loss, and the memories for the next step."""
    return model(inputs["words"], inputs["memories"])  # type: ignore[no-any-return]


def _words(layers: int, width: int, length: int, n: int) -> dict[str, Tensor]:
    return {"words": torch.empty(length, n, dtype=torch.long), "memories": torch.empty(layers + 1, length, n, width)}


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.heads, self.rates = heads, (dropout, attention_dropout)
        self.joint, self.positions = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.output, self.norm = nn.Linear(width, width, bias=False), nn.LayerNorm(width)

    def forward(self, x: Tensor, past: Tensor, positions: Tensor, biases: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        length, n, width = x.shape
        query, key, value = (
            t.view(t.shape[0], n, self.heads, -1) for t in self.joint(torch.cat([past, x])).chunk(3, dim=-1)
        )
        places = self.positions(positions).view(len(positions), self.heads, -1)
        of_words = torch.einsum("ibnd,jbnd->bnij", query[-length:] + biases[0], key)
        of_places = torch.einsum("ibnd,jnd->bnij", query[-length:] + biases[1], places)
        padded = torch.cat([of_places.new_zeros(n, self.heads, length, 1), of_places], dim=3)
        shifted = padded.view(n, self.heads, -1, length).narrow(2, 1, len(key)).view_as(of_places)
        scores = (of_words + shifted) * (width // self.heads) ** -0.5
        scores = scores.masked_fill_(mask[None, None], -torch.inf)
        weights = F.dropout(F.softmax(scores, dim=3), self.rates[1], self.training)
        mixed = torch.einsum("bnij,jbnd->ibnd", weights, value).contiguous().view(length, n, width)
        return self.norm(x + F.dropout(self.output(mixed), self.rates[0], self.training))  # type: ignore[no-any-return]


class _TransformerXl(nn.Module):
    def __init__(
        self, *, layers: int, width: int, inner: int, heads: int, dropout: float, shrink: int,
        attention_dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dropout, each = dropout, [width // shrink**place for place in range(len(_SHARES))]
        sizes = [end - begin for begin, end in pairwise(_ENDS)]
        self.words = nn.ParameterList(torch.empty(size, short) for size, short in zip(sizes, each, strict=True))
        self.shares = nn.ParameterList(torch.empty(width, short) for short in each) if shrink > 1 else None
        self.clusters, self.cluster_bias = nn.Parameter(torch.empty(3, width)), nn.Parameter(torch.empty(3))
        self.biases = nn.ParameterList(torch.empty(size) for size in sizes)
        self.of_words, self.of_places = (nn.Parameter(torch.empty(heads, width // heads)) for _ in range(2))
        self.register_buffer("frequencies", torch.empty(width // 2))
        self.attentions = nn.ModuleList(_Attention(width, heads, dropout, attention_dropout) for _ in range(layers))
        self.inners = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, inner), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(inner, width),
                nn.Dropout(dropout),
            )
            for _ in range(layers)
        )  # fmt: skip
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, words: Tensor, memories: Tensor) -> tuple[Tensor, Tensor]:
        length, n = words.shape
        x = F.dropout(self._embedded(words).view(length, n, -1), self.dropout, self.training)
        reach = length + memories.shape[1]
        mask = torch.ones(length, reach, dtype=torch.bool, device=x.device).triu(1 + memories.shape[1])
        angles = torch.outer(torch.arange(reach, dtype=x.dtype, device=x.device), self.frequencies)  # type: ignore[arg-type]
        positions = F.dropout(torch.cat([angles.sin(), angles.cos()], -1)[:, None], self.dropout, self.training)
        states = [x]
        for place, attend in enumerate(self.attentions):
            x = attend(x, memories[place], positions, (self.of_words, self.of_places), mask)
            x = self.norms[place](x + self.inners[place](x))
            states.append(x)
        with torch.no_grad():
            kept = torch.stack(
                [torch.cat([old, new])[-memories.shape[1] :] for old, new in zip(memories, states, strict=True)]
            )
        x = F.dropout(x, self.dropout, self.training)
        return self._loss(x.flatten(0, 1)).mean(), kept

    def _embedded(self, words: Tensor) -> Tensor:
        if self.shares is None:
            return F.embedding(words, torch.cat(list(self.words)))
        found = words.new_zeros(words.numel(), len(self.shares[0]), dtype=self.words[0].dtype)
        for place, chosen in enumerate(self._chosen(words.numel())):
            found = found.index_copy(0, chosen, F.linear(F.embedding(chosen, self.words[place]), self.shares[place]))
        return found

    def _chosen(self, count: int) -> list[Tensor]:
        """Return the places of the words of each cluster."""
        return [
            torch.zeros(max(1, round(share * count)), dtype=torch.long, device=self.clusters.device)
            for share in _SHARES
        ]

    def _logits(self, hidden: Tensor, place: int) -> Tensor:
        weight, bias = self.words[place], self.biases[place]
        if self.shares is not None:
            hidden = hidden @ self.shares[place]
        if place == 0:
            weight, bias = torch.cat([weight, self.clusters]), torch.cat([bias, self.cluster_bias])
        return F.linear(hidden, weight, bias)

    def _loss(self, hidden: Tensor) -> Tensor:
        first = F.log_softmax(self._logits(hidden, 0), dim=1)
        losses = []
        for place, chosen in enumerate(self._chosen(len(hidden))):
            found = first.index_select(0, chosen)[:, -place]
            if place:
                rest = F.log_softmax(self._logits(hidden.index_select(0, chosen), place), dim=1)
                found = found + rest.gather(1, chosen[:, None]).squeeze(1)
            losses.append(-found)
        return torch.cat(losses)
