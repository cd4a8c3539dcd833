"""What the engine's tests share: distances in units in the last place, small models, wide references."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import mezzo
from mezzo import Session
from mezzo.engine.casts.casting import Casting
from mezzo.engine.kernels import reference
from mezzo.policy import Policy

HALVES = (torch.float16, torch.bfloat16)
REFERENCE = SimpleNamespace(
    adamw=partial(reference.apply, mezzo.AdamW._rule),
    sgd=partial(reference.apply, mezzo.SGD._rule),
    sum_of_squares=reference.sum_of_squares,
)
"""The formulas of the optimizers, called as compiled kernels are."""


def casting(policy: str) -> Casting:
    """Return the casting of a policy text on the CPU."""
    return Casting.of(Policy.parse(policy), "cpu")


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Return FP32 normal numbers that depend on the shape and the seed only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 31 * len(shape) + sum(shape)))


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """Return how many 16-bit values lie between ``a`` and ``b``, element by element; 0 where both are NaN."""
    assert a.dtype is b.dtype
    assert a.shape == b.shape
    assert a.element_size() == 2
    apart = (_ordered(a) - _ordered(b)).abs()
    return torch.where(a.isnan() & b.isnan(), torch.zeros_like(apart), apart)


def _ordered(x: Tensor) -> Tensor:
    # Sign and magnitude to a number line on which neighbours differ by one, both zeros at 0.
    bits = x.detach().contiguous().view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def to(values: Any, dtype: torch.dtype) -> Any:
    """Return ``values`` with every floating-point tensor in it cast to ``dtype``."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


def tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in ``value``, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors(v)]
    return []


def same_bits(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    """Return whether two lists of tensors have the same dtypes and values (NaN equals NaN)."""
    pairs = list(zip(a, b, strict=True))
    return all(x.dtype is y.dtype and torch.equal(x.nan_to_num(12.25), y.nan_to_num(12.25)) for x, y in pairs)


class CountCasts(TorchDispatchMode):
    """Count the casts of tensors of one shape to one dtype."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype, self.count = tuple(shape), dtype, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            self.count += kwargs.get("dtype") is self.dtype and tuple(args[0].shape) == self.shape
        return func(*args, **kwargs)


@contextmanager
def saved_bytes() -> Iterator[dict[str, int]]:
    """Count the bytes that operations keep for the backward pass, each storage once."""
    seen: dict[int, Tensor] = {}
    found = {"bytes": 0}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in seen:
            seen[tensor.untyped_storage().data_ptr()] = tensor
            found["bytes"] += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found


def mlp(*widths: int, seed: int = 0) -> nn.Sequential:
    """Return linear layers of the given widths with ReLU between them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def parameters(model: nn.Module) -> list[Tensor]:
    """Return copies of a model's parameters."""
    return [p.detach().clone() for p in model.parameters()]


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    """Return the gradients of ``loss`` with respect to a model's parameters, by ``loss.backward()``."""
    model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


Batch = tuple[Tensor, Tensor]


def batches(count: int, *, size: int = 8, width: int = 6, classes: int = 3, seed: int = 0) -> list[Batch]:
    """Return ``count`` batches of a classification task."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn((count, size, width), generator=generator)
    return list(zip(inputs, torch.randint(0, classes, (count, size), generator=generator), strict=True))


def train(session: Session, model: nn.Module, data: Iterable[Batch], *, overflow: int | None = None) -> None:
    """Train a session's model to classify, one step a batch; the gradients of batch ``overflow`` are infinite."""
    for number, (x, y) in enumerate(data):
        with session.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        session.step(spoil(loss) if number == overflow else loss)


def through_a_file(state: Any, *, weights_only: bool = True) -> Any:
    """Return what ``torch.load`` reads of what ``torch.save`` wrote."""
    torch.save(state, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def copied(thing: Any, way: str) -> Any:
    """Return a copy by ``copy.deepcopy``, by pickle or through a file."""
    if way == "deepcopy":
        return copy.deepcopy(thing)
    return pickle.loads(pickle.dumps(thing)) if way == "pickle" else through_a_file(thing, weights_only=False)


Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def spoil(x: Tensor, factor: float = float("inf")) -> Tensor:
    """Return ``x``; its gradient is multiplied by ``factor``."""
    y: Tensor = _Spoil.apply(x, factor)
    return y
