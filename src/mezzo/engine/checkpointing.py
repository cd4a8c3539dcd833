"""Activation checkpointing of chosen modules: discard their activations, and recompute them in the backward pass.

A checkpointed module keeps its inputs, or its inputs and the outputs of its products (``Keeps``). torch's non-reentrant
``checkpoint`` does the work: it restores autocast and torch's random generators for the second forward pass. It leaves two things to the
model; they are done here, so that a step ends as it would without checkpointing:

- Buffers that the forward pass changes (running statistics, power iterations) have the same values at the start of both passes, and
  the second pass does not change them. Their copies take as many bytes as the buffers.
- Python's and NumPy's random generators are restored, too.

Under ``torch.compile`` the compiler recomputes parts of its graph, which has no side effects, so neither is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from mezzo.engine.casts.autocast_kernels import weight_casts
from mezzo.engine.casts.conversion import unwrap, wrap
from mezzo.engine.matrix_units.accumulation import OPERATION
from mezzo.engine.randomness import HostStates
from mezzo.errors import SessionError

Keeps: TypeAlias = Literal["inputs", "products"]
"""What a checkpointed module keeps for its backward pass: its inputs alone, or also the outputs of its products."""

Contexts: TypeAlias = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

aten: Any = torch.ops.aten
PRODUCT_OVERLOADS = tuple(
    packet.default
    for packet in (
        OPERATION,
        *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addbmm, aten.mv, aten.addmv, aten.dot),
        *(aten._scaled_mm, aten._int_mm, aten._grouped_mm, aten._scaled_grouped_mm),
        *(aten.convolution, aten._trilinear, aten._cdist_forward),
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
    )
)
"""Products, convolutions and attention: slow to recompute, compared with the bytes of their outputs."""
_PRODUCTS = frozenset(PRODUCT_OVERLOADS)


class Checkpointed:
    """How a module is checkpointed."""

    def __init__(self, module: nn.Module) -> None:
        """Begin with checkpointing off."""
        self.module = module
        self.keeps: Keeps | None = None
        """None while the module runs as it would without checkpointing."""
        self.changed: list[tuple[nn.Module, str]] = []
        """The buffers that its forward pass changes: their modules, and their names there."""

    def contexts(self) -> Contexts:
        """Return the contexts of the first forward pass and of the second."""
        if self.keeps == "inputs":
            return nullcontext(), _Recompute(nullcontext(), self.module, self.changed)
        products: dict[Any, list[Any]] = {}
        return KeptProducts(products), _Recompute(_Reuse(products), self.module, self.changed)


def apply(model: nn.Module, regions: Mapping[str, Keeps], *, changed: Collection[str] = ()) -> None:
    """Checkpoint the modules of ``model`` that ``regions`` names, and no others.

    Names, parameters, hooks and the state dict stay as they are: only the module's ``forward`` is wrapped.

    Args:
        model: the model.
        regions: what each module keeps, by its name in ``model.named_modules()``.
        changed: names of the buffers that a forward pass changes.
    """
    remove(model)
    for name, keeps in regions.items():
        module = model.get_submodule(name)
        checkpointed = _checkpointed(module)
        if checkpointed is None:
            checkpointed = Checkpointed(module)
            wrap(module, _forward, checkpointed)
        prefix = f"{name}." if name else ""
        inside = (buffer.removeprefix(prefix).rpartition(".") for buffer in changed if buffer.startswith(prefix))
        checkpointed.keeps = keeps
        checkpointed.changed = [(module.get_submodule(path), leaf) for path, _, leaf in inside]


def remove(model: nn.Module) -> None:
    """Undo ``apply`` in every module of ``model``."""
    for module in model.modules():
        checkpointed = _checkpointed(module)
        if checkpointed is not None:
            checkpointed.keeps = None  # a session may have wrapped the module since
            unwrap(module, _forward)


def _checkpointed(module: nn.Module) -> Checkpointed | None:
    """Return how ``module`` is checkpointed, also if its forward was wrapped again; None if it never was."""
    forward = vars(module).get("forward")
    while isinstance(forward, partial):
        if forward.func is _forward:
            checkpointed: Checkpointed = forward.args[1]
            return checkpointed
        forward = forward.args[0] if forward.args else None
    return None


def _forward(call: Callable[..., Any], checkpointed: Checkpointed, *args: Any, **kwargs: Any) -> Any:
    if checkpointed.keeps is None or not torch.is_grad_enabled():
        return call(*args, **kwargs)
    run = partial(call, **kwargs) if kwargs else call  # checkpoint has keywords of its own
    checkpoint = torch.utils.checkpoint.checkpoint  # looked up at each call: ``mezzo run`` replaces it
    if not torch.compiler.is_compiling():
        return checkpoint(run, *args, use_reentrant=False, context_fn=checkpointed.contexts)
    if checkpointed.keeps == "products":  # Dynamo needs a plain function
        return checkpoint(run, *args, use_reentrant=False, context_fn=_keeping_products)
    return checkpoint(run, *args, use_reentrant=False)


def _keeping_products() -> Contexts:
    contexts: Contexts = create_selective_checkpoint_contexts(list(PRODUCT_OVERLOADS))
    return contexts


class KeptProducts(TorchDispatchMode):
    """Keeps the results of products in the order in which they run.

    torch's own pair of modes counts every operation, and refuses a second pass that casts a weight whose cast the first pass found in
    autocast's cache.
    """

    def __init__(self, products: dict[Any, list[Any]]) -> None:
        super().__init__()
        self._products = products

    def tensors(self) -> list[Tensor]:
        """Return the results kept so far."""
        return [leaf.result for leaf in tree_leaves(self._products) if isinstance(leaf, _Kept)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            # Detached tensors have no graph that would refer to itself; they share the version counter.
            self._products.setdefault(func, []).append(tree_map_only(Tensor, _with_version, result))
        return result


class _Reuse(TorchDispatchMode):
    """Returns the results that ``KeptProducts`` kept, each once."""

    def __init__(self, products: dict[Any, list[Any]]) -> None:
        super().__init__()
        self._products = products

    def __enter__(self) -> Any:
        self._left = {func: iter(results) for func, results in self._products.items()}
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        kept = next(self._left.get(func, iter(())), None)
        if kept is None:
            raise SessionError(
                f"{func} runs more often when a checkpointed module is recomputed than it did at first",
                hint='checkpoint the module without its products: plan="full", or leave it out',
            )
        return tree_map_only(_Kept, _Kept.tensor, kept)


@dataclass(frozen=True)
class _Kept:
    """A product's result, and its version when it was computed."""

    result: Tensor
    version: int

    def tensor(self) -> Tensor:
        if self.result._version != self.version:
            raise SessionError(
                "a product's result was changed in place after it was kept for the backward pass",
                hint='checkpoint the module without its products: plan="full"',
            )
        return self.result


def _with_version(tensor: Tensor) -> _Kept:
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return _Kept(tensor.detach(), tensor._version)


class _Recompute(AbstractContextManager[None]):
    """The context of a second forward pass; entered once per backward pass through the module."""

    def __init__(
        self, inner: AbstractContextManager[Any], module: nn.Module, changed: list[tuple[nn.Module, str]]
    ) -> None:
        """Copy the state at the beginning of the first forward pass."""
        self._inner, self._module = inner, module
        self._copies = [(owner, name, owner._buffers[name].detach().clone()) for owner, name in changed]  # type: ignore[union-attr]
        self._random = HostStates.now()

    def __enter__(self) -> None:
        self._now = [(owner, name, owner._buffers[name]) for owner, name, _ in self._copies]
        for owner, name, copy in self._copies:
            owner._buffers[name] = copy.clone()  # a second backward pass through the graph needs the copy again
        self._versions, self._casts = self._other_buffers(), weight_casts().keys()
        self._random_now = HostStates.now()
        self._random.set()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        # Otherwise the region of the backward pass would keep the casts of every module to its end.
        weight_casts().keep_only(self._casts)
        self._random_now.set()
        changed = [name for name, state in self._other_buffers().items() if self._versions.get(name) != state]
        for owner, name, buffer in self._now:
            owner._buffers[name] = buffer
        if changed:
            raise SessionError(
                f"{type(self._module).__name__} changed its buffer {changed[0]!r} when it was recomputed, but not when "
                "the plan was made",
                hint="call mezzo.checkpoint with the model as it trains, on a sample like those it trains on",
            )

    def _other_buffers(self) -> dict[str, tuple[int, int]]:
        replaced = {id(owner._buffers[name]) for owner, name, _ in self._copies}
        named = self._module.named_buffers()
        return {name: (id(buffer), _version(buffer)) for name, buffer in named if id(buffer) not in replaced}


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
