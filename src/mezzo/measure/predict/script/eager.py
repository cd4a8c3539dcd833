"""Skip a script's own compilation while it is traced, because compiled steps are not predicted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from mezzo.measure.cuda_answers import first, nothing
from mezzo.measure.predict.script.gpu import called_by_script


@contextmanager
def compilation_left_out(on_skip: Callable[[str], None]) -> Iterator[None]:
    """Let the block compile and script nothing; ``on_skip`` gets the name of each function that was to do so."""

    def noted(name: str, answer: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def left_out(*args: Any, **kwargs: Any) -> Any:
            if not called_by_script():  # torch scripts functions of its own when it is imported
                return original(*args, **kwargs)
            on_skip(name)
            return answer(*args, **kwargs)

        return left_out

    with ExitStack() as stack:
        for home, name, called, answer in (
            (torch, "compile", "torch.compile", _compiled),
            (nn.Module, "compile", "Module.compile", nothing),
            (torch.jit, "script", "torch.jit.script", first),
            (torch.jit, "trace", "torch.jit.trace", first),
        ):
            stack.enter_context(patch.object(home, name, noted(called, answer, getattr(home, name))))
        yield


def _compiled(model: Any = None, **settings: Any) -> Any:
    return (lambda function: function) if model is None else model
