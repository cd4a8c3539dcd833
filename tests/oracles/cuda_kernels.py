"""Which operations CUDA computes in FP16 and BF16, by torch's own test database, against what an emulated policy refuses on a CPU.

An entry of ``op_db`` counts as refused if one of its samples is, which is how torch's own test reads ``dtypesIfCUDA``::

    python tests/oracles/cuda_kernels.py fp16 bf16 fp16-pure bf16-pure    # all entries: half a minute
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mezzo.engine.casts.casting import Casting
from mezzo.errors import NoKernelError
from mezzo.policy import Policy

NEEDS_CUDA = {
    "jiterator_": "compiled for a GPU",
    "torch.ops.aten._efficient_attention_forward": "a kernel for GPUs",
    "torch.ops.aten._flash_attention_forward": "a kernel for GPUs",
    "torch._scaled_mm": "operands in FP8",
}
"""Entries whose samples cannot run on a CPU in any format, by how their names begin."""
NO_OPERAND = {
    "signal.windows.": "takes a number and a dtype, and refuses 16 bits on every device",
    "broadcast_shapes": "takes sizes",
    "sparse.sampled_addmm": "sparse operands: torch refuses them on every device",
}
"""Entries without a dense 16-bit operand."""
BY_TORCH = {
    "norm.nuc": "linalg.matrix_norm checks the format itself, for some orders only",
    "svd_lowrank": "its Python code multiplies 16 bits with FP32 before it comes to the kernel",
    "pca_lowrank": "as svd_lowrank",
}
"""Entries that torch's code for all devices may refuse by itself, in its own words and without our hint."""
MIXES_FORMATS = {
    "matrix_exp": "its C++ code calls sum, which autocast computes in FP32, and writes the result into 16 bits"
}
"""Entries that fail under op lists in torch's code for all devices, CUDA included."""
IN_FP32 = ("cdist", "norm.nuc", "nn.functional.pdist")
"""Entries without a 16-bit kernel on CUDA that its autocast computes in FP32: under a policy with op lists, nothing is refused."""


MOST_ELEMENTS = 100_000
"""Of a sample's operands together: those of grid_sampler_3d with more take seconds each, and its others ask the same of it."""


@dataclass
class Outcome:
    """What happened to the samples of one entry, up to the end of one pass."""

    refused: list[str] = field(default_factory=list)
    """Mezzo's refusals."""
    failed: list[str] = field(default_factory=list)
    """Any other error."""

    def note(self, error: Exception) -> None:
        """Note how a sample ended."""
        if isinstance(error, NoKernelError):
            self.refused.append(error.message)
        else:
            self.failed.append(f"{type(error).__name__}: {error}".partition("\n")[0])


@functools.cache
def database() -> dict[str, Any]:
    """Return the entries of ``op_db`` that CUDA computes in FP32, by name, as for a GPU of compute capability 8.0."""
    from helpers_torch import op_db

    named = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
    return {name: op for name, op in named.items() if torch.float32 in op.dtypesIfCUDA}


def cuda_has(op: Any, low: torch.dtype, *, backward: bool) -> bool:
    """Return whether CUDA computes an entry, and its gradients, in a format."""
    return low in op.dtypesIfCUDA and (not backward or low in op.backward_dtypesIfCUDA)


def samples(op: Any, low: torch.dtype) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield an entry's samples with 16-bit operands; they are made in FP32 where torch cannot make them in 16 bits."""
    made = []
    for dtype in (low, torch.float32):
        random.seed(0)
        torch.manual_seed(0)
        try:
            made = list(op.sample_inputs_func(op, "cpu", dtype, op.supports_autograd))
            break
        except Exception:  # torch makes some samples with the operations in question
            continue

    def narrow(t: Tensor) -> Tensor:
        return t.detach().to(low).requires_grad_(t.requires_grad) if t.dtype is torch.float32 else t

    for sample in made:
        operands = ((sample.input, *sample.args), sample.kwargs)
        if sum(t.numel() for t in tree_leaves(operands) if isinstance(t, Tensor)) <= MOST_ELEMENTS:
            yield tree_map_only(Tensor, narrow, operands)


def outcomes(op: Any, casting: Casting, *, most: int | None = None) -> tuple[Outcome, Outcome]:
    """Run the first ``most`` samples of an entry in a region of ``casting``; return their outcome forward, and with backward."""
    forward, backward = Outcome(), Outcome()
    for args, kwargs in itertools.islice(samples(op, casting.policy.storage.dtype), most):
        try:
            with casting.region():
                out = op.op(*args, **kwargs)
        except Exception as error:
            forward.note(error)
            backward.note(error)
            continue
        leaves = [
            t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad and t.layout is torch.strided
        ]
        try:
            if leaves:
                torch.autograd.backward(leaves, [torch.ones_like(t) for t in leaves])
        except Exception as error:
            backward.note(error)
    return forward, backward


def expected(name: str, op: Any, casting: Casting, *, backward: bool) -> bool:
    """Return whether an entry is refused under a policy."""
    if casting.policy.casting == "ops" and name in IN_FP32:
        return False
    return not cuda_has(op, casting.policy.storage.dtype, backward=backward)


@dataclass
class Agreement:
    """How many entries agree with CUDA, by what both do, and a line for each that does not."""

    refused: int = 0
    computed: int = 0
    apart: list[str] = field(default_factory=list)

    def add(self, name: str, found: Outcome, *, refuses: bool) -> None:
        """Compare the outcome of an entry with whether CUDA refuses it."""
        refused = found.refused or (found.failed if name in BY_TORCH else [])
        if refuses and refused:
            self.refused += 1
        elif not refuses and not refused and not found.failed:
            self.computed += 1
        else:
            says = (found.refused or found.failed or ["computed"])[0]
            self.apart.append(f"{name}: CUDA {'refuses' if refuses else 'computes'} it; here: {says}")


def agreement(
    policy: str, *, names: Callable[[str], bool] = lambda _: True, most: int | None = None
) -> tuple[Agreement, Agreement]:
    """Return how the entries agree with CUDA under a policy in their forward passes, and those with gradients with backward."""
    casting = Casting.of(Policy.parse(policy).replace(arithmetic="emulated"), "cpu")
    forward, backward = Agreement(), Agreement()
    for name, op in database().items():
        if not names(name) or name.startswith((*NEEDS_CUDA, *NO_OPERAND)):
            continue
        if name in MIXES_FORMATS and casting.policy.casting == "ops":
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first, both = outcomes(op, casting, most=most)
        forward.add(name, first, refuses=expected(name, op, casting, backward=False))
        if op.supports_autograd:
            backward.add(name, both, refuses=expected(name, op, casting, backward=True))
    return forward, backward


if __name__ == "__main__":
    for text in sys.argv[1:]:
        for passes, found in zip(("forward", "forward and backward"), agreement(text), strict=True):
            print(
                f"{text}, {passes}: {found.refused} refused, {found.computed} computed, {len(found.apart)} apart",
                *found.apart,
                sep="\n  ",
            )
