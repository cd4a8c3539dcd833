"""Make ``torch.cuda`` and ``torch.accelerator`` answer a traced script as on a machine with one idle GPU.

All GPUs that are predicted from the trace share this stand-in. Nothing runs on it, and nothing is allocated there.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed

from mezzo.measure.cuda_answers import ANSWERS, Idle, always, answers_everywhere, each, none_of_each, nothing, zero

_NOT_THE_SCRIPT = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[3]))
MEMORY_BYTES, CAPABILITY = 80 * 2**30, (8, 0)
"""Of the GPU that a traced script sees."""
SIMULATED_GPU = f"one idle GPU with {MEMORY_BYTES >> 30} GiB and compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
_NAME, _CUDA, _CUDNN = "GPU of mezzo predict", "12.8", 91002
_GPU = torch.device("cuda")


def called_by_script() -> bool:
    """Return whether the caller's own caller belongs to the script or a library, and not to torch or Mezzo."""
    return not sys._getframe(2).f_code.co_filename.startswith(_NOT_THE_SCRIPT)


_one, _true, _no_text = always(1), always(True), always("")
_capability, _memory = always(CAPABILITY), always((MEMORY_BYTES, MEMORY_BYTES))


def _properties(*args: object, **kwargs: object) -> SimpleNamespace:
    major, minor = CAPABILITY
    return SimpleNamespace(
        name=_NAME, total_memory=MEMORY_BYTES, major=major, minor=minor, multi_processor_count=108, warp_size=32
    )


_OF_A_GPU: Mapping[str, Any] = {
    **each("is_available is_bf16_supported is_tf32_supported", _true),
    "device_count": _one,
    "get_device_name": always(_NAME),
    "get_device_capability": _capability,
    "get_device_properties": _properties,
    "mem_get_info": _memory,
    "get_arch_list": lambda: ["sm_{}{}".format(*CAPABILITY)],
    "get_gencode_flags": _no_text,
}
"""Answers of ``torch.cuda`` about the machine, which has one GPU."""
_ACCELERATOR: Mapping[str, Any] = {
    "is_available": _true,
    "current_accelerator": always(_GPU),
    "device_count": _one,
    "get_device_capability": _capability,
    "get_memory_info": _memory,
    "current_stream": Idle,
    "device_index": Idle,
    **each("current_device_index current_device_idx memory_allocated max_memory_allocated", zero),
    **each("memory_reserved max_memory_reserved", zero),
    **each("set_device_index set_device_idx synchronize set_stream empty_cache empty_host_cache", nothing),
    **each("reset_peak_memory_stats reset_accumulated_memory_stats", nothing),
    "memory_stats": none_of_each,
}
"""Answers of ``torch.accelerator``. Torch itself gets the true ones: its loaders would start a thread that pins memory."""
_FACTS: Sequence[tuple[ModuleType, Mapping[str, Any]]] = (
    (torch.version, {"cuda": _CUDA}),
    (torch.backends.cuda, {"is_built": _true}),
    (torch.backends.cudnn, {"version": always(_CUDNN), "is_available": _true}),
    (torch.cuda, {"is_initialized": _true}),
    (torch.cuda.nccl, {"version": always((2, 27, 3))}),
    (torch.distributed, {"is_nccl_available": _true}),
)
"""Other facts about a machine with a GPU; torch itself gets the true ones."""


@contextmanager
def simulated_gpu(queries: list[str], *, present: bool) -> Iterator[None]:
    """Answer the script's queries in the block.

    Args:
        queries: receives the name of each function that reported the simulated GPU to the script.
        present: whether functions about the machine report a GPU; otherwise they answer truthfully.
    """
    with ExitStack() as stack:
        for module, name, answer in answers_everywhere(ANSWERS):
            stack.enter_context(patch.object(module, name, answer))
        if present:
            _simulate(stack, queries)
        yield


def _simulate(stack: ExitStack, queries: list[str]) -> None:
    for name, answer in _OF_A_GPU.items():
        stack.enter_context(patch.object(torch.cuda, name, _noted(torch.cuda, name, answer, queries)))
    for module, answers in ((torch.accelerator, _ACCELERATOR), *_FACTS):
        for name, answer in answers.items():
            if not hasattr(module, name):
                continue  # this torch is older than the function
            substitute = _noted(module, name, answer, queries, original_for_torch=True) if callable(answer) else answer
            stack.enter_context(patch.object(module, name, substitute))


def _noted(
    module: ModuleType, name: str, answer: Callable[..., Any], queries: list[str], *, original_for_torch: bool = False
) -> Callable[..., Any]:
    """Return a function that answers as ``answer`` does, and adds its name to ``queries`` unless torch itself calls it."""
    original, query = getattr(module, name), f"{module.__name__}.{name}()"

    @functools.wraps(original)
    def answered(*args: Any, **kwargs: Any) -> Any:
        if called_by_script():
            if query not in queries:
                queries.append(query)
        elif original_for_torch:
            return original(*args, **kwargs)
        return answer(*args, **kwargs)

    return answered
