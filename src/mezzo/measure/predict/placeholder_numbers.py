"""Answer a training that reads a number while it is traced without numbers: 1.0, 0 or False. Everything is finite.

Numbers that a script wrote itself are known. An optimizer that divides by its step counter must not get 0; a script that divides by
a whole number gets 1 for each of them instead. Torch itself reads numbers too, as for ``data[i]`` with a tensor ``i``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, fake_impls
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.measure.predict.result_sizes import known_numbers, unknown_size
from mezzo.records import Note

aten: Any = torch.ops.aten
_TORCH = Path(torch.__file__).parent
_TRACING = (
    str(Path(__file__).parents[2]),
    *(
        str(_TORCH / name)
        for name in ("_ops.py", "_subclasses", "_compile.py", "_dynamo", "utils/_python_dispatch.py", "utils/_stats.py")
    ),
)
"""Files whose functions are on the stack between a line and the tensor method that it calls to read a number."""


def reading_frame() -> FrameType | None:
    """Return the frame that reads a number; for use in the ``on_read`` of ``placeholder_numbers``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_TRACING):
        frame = frame.f_back
    return frame


def numbers_read(who: str, lines: Sequence[str], *, whole: int = 0) -> Note:
    """Return a record's note on the numbers that ``who``, the script or the model, reads at ``lines``."""
    where = f", read at {', '.join(lines)}" if lines else ""
    return Note(
        what=f"numbers that the {who} reads",
        value=f"1.0, {whole} or False",
        reason=f"traced tensors have no numbers: conditions and logs run as with these{where}",
    )


@contextmanager
def placeholder_numbers(on_read: Callable[[], None], *, some_are_real: bool = False, whole: int = 0) -> Iterator[None]:
    """Answer each read of a number in the block.

    Args:
        on_read: called for each read.
        some_are_real: whether tensors that are not fake have numbers.
        whole: the placeholder of a whole number.
    """
    answers, inside = _Answers(whole), False

    def noted(answer: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        def answered(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            has_numbers = not isinstance(tensor, FakeTensor) and (some_are_real or inside)
            if (real := tensor if has_numbers else known_numbers(tensor)) is not None:
                before, inside = inside, True
                try:
                    with _disable_current_modes():
                        return original(real, *args, **kwargs)
                finally:
                    inside = before
            on_read()
            return answer(tensor, *args, **kwargs)

        return answered

    def by_torch(answer: Callable[..., Any]) -> Callable[..., Any]:
        def answered(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
            on_read()
            return answer(*args)

        return answered

    torch_operators = {
        aten._local_scalar_dense.default: by_torch(answers.number),
        aten.item.default: by_torch(answers.number),
        aten.equal.default: by_torch(_false),
        aten.allclose.default: by_torch(_false),
        aten.is_nonzero.default: by_torch(_false),
    }
    with ExitStack() as stack:
        for name in ("__add__", "__radd__"):
            stack.enter_context(patch.object(Tensor, name, answers.shifted(getattr(Tensor, name))))
        for home in (torch, Tensor):
            for name in ("isfinite", "all", "any"):
                stack.enter_context(patch.object(home, name, answers.about_finite(name, getattr(home, name))))
        for name, answer in answers.by_method().items():
            answered = noted(answer, getattr(Tensor, name))
            for kind in (Tensor, FakeTensor):
                if name in vars(kind) or kind is Tensor:
                    stack.enter_context(patch.object(kind, name, answered))
        stack.enter_context(patch.dict(fake_impls.op_implementations_dict, torch_operators))
        stack.enter_context(patch.object(torch.nn.functional, "one_hot", _one_hot(torch.nn.functional.one_hot)))
        yield


class _Answers:
    """The placeholder of each tensor."""

    def __init__(self, whole: int) -> None:
        self._placeholder = whole
        self._offsets = WeakTensorKeyDictionary()
        """What was added to a placeholder: ``x[i : i + 8]`` has 8 rows wherever it begins."""
        self._finite = WeakTensorKeyDictionary()
        """Flags that values are finite: they are true, or a script that unscales gradients itself would skip every update."""

    def by_method(self) -> dict[str, Callable[..., Any]]:
        """Return the answer to each method of a tensor that returns numbers."""
        return {
            "item": self.number,
            "__float__": lambda tensor: 1.0,
            "__int__": self._whole,
            "__index__": self._whole,
            "__bool__": self._true_if_finite,
            "tolist": self._each,
            "__format__": lambda tensor, how: format(self.number(tensor), how) if tensor.dim() == 0 else str(tensor),
            "numpy": lambda tensor, **_: np.array(self._each(tensor)),
        }

    def number(self, tensor: Tensor) -> Any:
        """Return the placeholder of a tensor with one element."""
        if tensor.dtype is torch.bool:
            return self._true_if_finite(tensor)
        return 1.0 if tensor.is_floating_point() else self._whole(tensor)

    def about_finite(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``isfinite``, or ``all`` or ``any`` of what it returned, whose result is known to be true."""

        def tracked(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(tensor, *args, **kwargs)
            if isinstance(result, FakeTensor) and (name == "isfinite" or tensor in self._finite):
                self._finite[result] = True
            return result

        return tracked

    def _true_if_finite(self, tensor: Tensor) -> bool:
        return tensor in self._finite

    def shifted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``Tensor.__add__`` that keeps what was added to a whole number."""

        def sum_of(tensor: Tensor, other: Any) -> Any:
            result = original(tensor, other)
            if type(other) is int and isinstance(result, FakeTensor) and result.dim() == 0:
                self._offsets[result] = self._whole(tensor) + other
            return result

        return sum_of

    def _whole(self, tensor: Tensor) -> int:
        found: int = self._offsets.get(tensor, self._placeholder)
        return found

    def _each(self, tensor: Tensor) -> Any:
        if tensor.dim() == 0:
            return self.number(tensor)
        return [self._each(tensor[0])] * tensor.shape[0] if len(tensor) else []


def _false(*args: object, **kwargs: object) -> bool:
    return False


def _one_hot(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``one_hot``, which without a number of classes depends on numbers."""

    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if num_classes == -1 and isinstance(tensor, FakeTensor):
            raise unknown_size("one_hot")
        return original(tensor, num_classes)

    return one_hot
