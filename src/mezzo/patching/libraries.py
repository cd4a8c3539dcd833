"""The names of the functions and classes that a training loop calls in PyTorch and in Paddle."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library's names, as dotted names or as regular expressions that match the beginning of one."""

    package: str
    layer: re.Pattern[str]
    """Creates a layer, a loss function or a model."""
    layer_bases: str
    """The package of the classes that a model inherits from."""
    layer_suffix: str
    """How the name of a class that is a model ends, wherever it comes from."""
    functional: str
    """The package of layers as functions."""
    products: tuple[str, ...]
    optimizer: re.Pattern[str]
    """Creates an optimizer."""
    schedule: re.Pattern[str]
    """Is found in the name of what creates a schedule."""
    clears: tuple[str, ...]
    """Methods of an optimizer that clear the gradients."""
    updates: tuple[str, ...]
    """Methods of an optimizer that update the weights."""
    gradients_off: tuple[str, ...]
    autocast: str
    """Matches the whole name of a region of mixed precision."""
    compiler: str
    """Compiles a model or a function."""
    backward: str
    """Is passed what to differentiate."""


TORCH = Library(
    package="torch",
    layer=re.compile(r"torch\.nn\.(?!functional|utils|init|Parameter)|torch\.compile$"),
    layer_bases="torch.nn.",
    layer_suffix="Module",
    functional="torch.nn.functional.",
    products=("torch.matmul", "torch.bmm", "torch.mm", "torch.einsum"),
    optimizer=re.compile(
        r"(torch\.optim|mezzo|transformers\.optimization)\.(?!lr_scheduler)(\w+\.)?(?!(Session|Policy)$)[A-Z]"
    ),
    schedule=re.compile(r"lr_scheduler"),
    clears=("zero_grad",),
    updates=("step",),
    gradients_off=("torch.no_grad", "torch.inference_mode"),
    autocast=r"torch\.(cuda\.|cpu\.)?(amp\.)?(autocast_mode\.)?autocast",
    compiler="torch.compile",
    backward="torch.autograd.backward",
)
PADDLE = Library(
    package="paddle",
    layer=re.compile(r"paddle\.(nn\.(?!functional|utils|initializer|Clip)|vision\.models\.|DataParallel$)"),
    layer_bases="paddle.nn.",
    layer_suffix="Layer",
    functional="paddle.nn.functional.",
    products=("paddle.matmul", "paddle.bmm", "paddle.mm", "paddle.einsum"),
    optimizer=re.compile(r"paddle\.(incubate\.)?optimizer\.(?!lr\.)(\w+\.)*[A-Z]"),
    schedule=re.compile(r"^paddle\.optimizer\.lr\."),
    clears=("clear_grad", "clear_gradients"),
    updates=("step", "minimize"),
    gradients_off=("paddle.no_grad",),
    autocast=r"paddle\.amp\.(auto_cast\.)?(auto_cast|autocast|amp_guard)",
    compiler="paddle.jit.to_static",
    backward="paddle.autograd.backward",
)
LIBRARIES = (TORCH, PADDLE)
