"""Scripts in which FP32 itself ends: squares of numbers near 1e20 are infinite, also in BF16; and twins in which that is harmless."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from faults import net, train

LOWEST = torch.finfo(torch.float32).min
BF16_LOWEST = torch.finfo(torch.bfloat16).min


# --- the range of FP32 ---------------------------------------------------------------------------


def beyond_rmsnorm():
    """x / sqrt(mean(x * x)) with an infinite square: the quotient is 0."""
    train(net(lambda h: h * 1e20 * (h * 1e20 * (h * 1e20)).mean(-1, keepdim=True).rsqrt()))


def beyond_arctangent():
    """atan(1e-40 * x * x): the infinity makes a constant of it."""
    train(net(lambda h: torch.atan(h * 1e20 * (h * 1e20) * 1e-40) + 0 * h))


def beyond_distance():
    """A similarity of 1 / (1 + distance) is 0 for all pairs."""
    train(net(lambda h: 1e20 / (1e20 + (h * 1e20).square().sum(-1, keepdim=True).sqrt()) + h))


def beyond_bf16():
    """BF16 ends where FP32 does."""

    def normed(h):
        with torch.autocast("cpu", enabled=False):
            wide = h.bfloat16() * 1e20
            return (wide / (wide * wide).sum(-1, keepdim=True).sqrt()).float()

    train(net(normed))


def healthy_own_gaussian_of_far():
    """exp(-x * x) of an infinite square is 0, as it is of the true one."""
    train(net(lambda h: torch.exp(-(h.detach() * 1e22 * (h.detach() * 1e22))) + h))


def healthy_own_tanh_of_square():
    train(net(lambda h: torch.tanh(h * 1e20 * (h * 1e20)) + h))


def healthy_own_sigmoid_by_hand():
    """1 / (1 + exp(-x)) is 0 where the exponential is infinite, and 1e-60 in truth."""
    train(net(lambda h: 1 / (1 + torch.exp(-h.detach() * 300)) * h))


def healthy_own_clamped():
    train(net(lambda h: (h.detach().abs() * 1e30 * 1e30).clamp(max=10.0) * h))


class MaskedTwice(nn.Module):
    """Attention whose two masks add up to -inf."""

    def __init__(self, lowest):
        super().__init__()
        self.lowest = lowest

    def forward(self, h):
        scores = h @ h.mT / math.sqrt(h.shape[-1])
        mask = torch.full_like(scores, self.lowest).triu(1)
        return F.softmax(scores + mask + mask, -1) @ h


def healthy_own_masked_twice():
    train(net(None, module=MaskedTwice(LOWEST)))


def healthy_own_masked_twice_in_bf16():
    model = net(None, module=MaskedTwice(BF16_LOWEST))

    def call(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float()

    train(model, call=call)
