"""Make ``torch.cuda`` and ``torch.accelerator`` answer a traced script as on a machine with one idle GPU.

All GPUs that are predicted from the trace share this stand-in. Nothing runs on it, and nothing is allocated there.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.cuda.graphs
import torch.cuda.nvtx
import torch.cuda.profiler
import torch.distributed

_NOT_THE_SCRIPT = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[3]))
MEMORY_BYTES, CAPABILITY = 80 * 2**30, (8, 0)
"""Of the GPU that a traced script sees."""
SIMULATED_GPU = f"one idle GPU with {MEMORY_BYTES >> 30} GiB and compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
_NAME, _CUDA, _CUDNN = "GPU of mezzo predict", "12.8", 91002
_GPU = torch.device("cuda")


def called_by_script() -> bool:
    """Return whether the caller's own caller belongs to the script or a library, and not to torch or Mezzo."""
    return not sys._getframe(2).f_code.co_filename.startswith(_NOT_THE_SCRIPT)


def always(answer: Any) -> Callable[..., Any]:
    """Return a function that returns ``answer`` for any arguments."""
    return lambda *args, **kwargs: answer


nothing = always(None)


def first(what: Any, *args: object, **kwargs: object) -> Any:
    """Return the first argument."""
    return what


class Idle:
    """A stream, an event, a graph or a context of an idle GPU: its methods do nothing, and what a block runs runs once."""

    device = torch.device("cuda", 0)
    cuda_stream = cuda_event = stream_id = priority = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Accept the arguments of the classes of ``torch.cuda``."""

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        """Return 1 ms: a script may divide by it."""
        return 1.0

    def query(self) -> bool:
        """Return True: nothing is under way."""
        return True

    def record_event(self, event: Idle | None = None) -> Idle:
        """Return the event, or a new one."""
        return event or Idle()

    record = synchronize = wait_stream = wait_event = wait = nothing
    capture_begin = capture_end = replay = reset = pool = enable_debug_mode = debug_dump = nothing


_zero, _one, _true, _false, _no_text = always(0), always(1), always(True), always(False), always("")
_capability, _memory = always(CAPABILITY), always((MEMORY_BYTES, MEMORY_BYTES))


def _none_of_each(*args: object, **kwargs: object) -> dict[str, int]:
    return defaultdict(int)


def _properties(*args: object, **kwargs: object) -> SimpleNamespace:
    major, minor = CAPABILITY
    return SimpleNamespace(
        name=_NAME, total_memory=MEMORY_BYTES, major=major, minor=minor, multi_processor_count=108, warp_size=32
    )


def _all(names: str, answer: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), answer)


_ANSWERS: Mapping[str, Any] = {
    **_all("init set_device synchronize empty_cache ipc_collect set_stream set_sync_debug_mode _sleep", nothing),
    **_all("reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached", nothing),
    **_all("reset_accumulated_memory_stats reset_accumulated_host_memory_stats", nothing),
    **_all("reset_peak_host_memory_stats set_per_process_memory_fraction _record_memory_history", nothing),
    **_all("_dump_snapshot set_rng_state set_rng_state_all seed seed_all caching_allocator_enable", nothing),
    **_all("memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached", _zero),
    **_all("max_memory_cached device_memory_used current_device current_blas_handle utilization", _zero),
    **_all("memory_usage temperature power_draw clock_rate initial_seed get_sync_debug_mode", _zero),
    **_all(
        "memory_stats memory_stats_as_nested_dict host_memory_stats host_memory_stats_as_nested_dict", _none_of_each
    ),
    **_all("Event Stream ExternalStream StreamContext stream device device_of CUDAGraph graph MemPool", Idle),
    **_all("current_stream default_stream get_stream_from_external use_mem_pool", Idle),
    **_all("caching_allocator_disabled", Idle),
    **_all("memory_snapshot list_gpu_processes", lambda *args, **kwargs: []),
    **_all("memory_summary", _no_text),
    **_all("get_per_process_memory_fraction", always(1.0)),
    **_all("get_allocator_backend", always("native")),
    **_all("is_current_stream_capturing can_device_access_peer", _false),
    **_all("graph_pool_handle", always((0, 0))),
    **_all("make_graphed_callables", first),
    **_all("get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
    **_all("get_rng_state_all", lambda: [torch.get_rng_state()]),
    "cudart": lambda: SimpleNamespace(**_all("cudaProfilerStart cudaProfilerStop cudaDeviceSynchronize", nothing)),
}
"""Answers of ``torch.cuda`` that do not depend on whether the script sees a GPU."""
_OF_A_GPU: Mapping[str, Any] = {
    **_all("is_available is_bf16_supported is_tf32_supported", _true),
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
    **_all("current_device_index current_device_idx memory_allocated max_memory_allocated", _zero),
    **_all("memory_reserved max_memory_reserved", _zero),
    **_all("set_device_index set_device_idx synchronize set_stream empty_cache empty_host_cache", nothing),
    **_all("reset_peak_memory_stats reset_accumulated_memory_stats", nothing),
    "memory_stats": _none_of_each,
}
"""Answers of ``torch.accelerator``. Torch itself gets the true ones: its loaders would start a thread that pins memory."""
_ELSEWHERE: Sequence[tuple[ModuleType, Mapping[str, Any]]] = (
    (torch.cuda.nvtx, _all("range_push range_pop range_start range_end mark", _zero)),
    (torch.cuda.profiler, _all("start stop", nothing)),
)
"""Answers of modules below ``torch.cuda``."""
_FACTS: Sequence[tuple[ModuleType, Mapping[str, Any]]] = (
    (torch.version, {"cuda": _CUDA}),
    (torch.backends.cuda, {"is_built": _true}),
    (torch.backends.cudnn, {"version": always(_CUDNN), "is_available": _true}),
    (torch.cuda, {"is_initialized": _true}),
    (torch.cuda.nccl, {"version": always((2, 27, 3))}),
    (torch.distributed, {"is_nccl_available": _true}),
)
"""Other facts about a machine with a GPU; torch itself gets the true ones."""
_HOMES = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs)
"""Modules in which a function of ``torch.cuda`` may be defined."""


@contextmanager
def simulated_gpu(queries: list[str], *, present: bool) -> Iterator[None]:
    """Answer the script's queries in the block.

    Args:
        queries: receives the name of each function that reported the simulated GPU to the script.
        present: whether functions about the machine report a GPU; otherwise they answer truthfully.
    """
    with ExitStack() as stack:
        for home in _HOMES:
            for name, answer in _ANSWERS.items():
                if name in vars(home):
                    stack.enter_context(patch.object(home, name, answer))
        for module, answers in _ELSEWHERE:
            for name, answer in answers.items():
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
