"""What ``torch.cuda`` answers where nothing runs on a GPU: in the trace of a prediction, and where a CPU stands in for one.

Waiting, streams and the allocator have nothing to do there, and random numbers come from the CPU's generator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.cuda.graphs
import torch.cuda.nvtx
import torch.cuda.profiler

CUDA_TYPES = "torch.cuda."
"""The beginning of the names of tensor types on a GPU."""


def always(answer: Any) -> Callable[..., Any]:
    """Return a function that returns ``answer`` for any arguments."""
    return lambda *args, **kwargs: answer


nothing = always(None)


def first(what: Any, *args: object, **kwargs: object) -> Any:
    """Return the first argument."""
    return what


def generators(original: Any, place: Callable[[Any], Any]) -> type:
    """Return ``torch.Generator`` whose generators are on other devices than a script asks for.

    Args:
        original: torch's class; its instances are instances of the returned class, too.
        place: returns the device for the script's argument, "cpu" without one.
    """

    class Kind(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, original)

    class Generator(original, metaclass=Kind):  # type: ignore[misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            return original(place(device))

    return Generator


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


zero, false = always(0), always(False)


def none_of_each(*args: object, **kwargs: object) -> dict[str, int]:
    """Return statistics in which every number is 0."""
    return defaultdict(int)


def each(names: str, answer: Any) -> dict[str, Any]:
    """Return ``answer`` for each of the names in a text."""
    return dict.fromkeys(names.split(), answer)


ANSWERS: Mapping[str, Any] = {
    **each("init set_device synchronize empty_cache ipc_collect set_stream set_sync_debug_mode _sleep", nothing),
    **each("reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached", nothing),
    **each("reset_accumulated_memory_stats reset_accumulated_host_memory_stats", nothing),
    **each("reset_peak_host_memory_stats set_per_process_memory_fraction _record_memory_history", nothing),
    **each("_dump_snapshot set_rng_state set_rng_state_all seed seed_all caching_allocator_enable", nothing),
    **each("memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached", zero),
    **each("max_memory_cached device_memory_used current_device current_blas_handle utilization", zero),
    **each("memory_usage temperature power_draw clock_rate initial_seed get_sync_debug_mode", zero),
    **each("memory_stats memory_stats_as_nested_dict host_memory_stats host_memory_stats_as_nested_dict", none_of_each),
    **each("Event Stream ExternalStream StreamContext stream device device_of CUDAGraph graph MemPool", Idle),
    **each("current_stream default_stream get_stream_from_external use_mem_pool", Idle),
    **each("caching_allocator_disabled", Idle),
    **each("memory_snapshot list_gpu_processes", lambda *args, **kwargs: []),
    **each("memory_summary", always("")),
    **each("get_per_process_memory_fraction", always(1.0)),
    **each("get_allocator_backend", always("native")),
    **each("is_current_stream_capturing can_device_access_peer", false),
    **each("graph_pool_handle", always((0, 0))),
    **each("make_graphed_callables", first),
    **each("get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
    **each("get_rng_state_all", lambda: [torch.get_rng_state()]),
    "cudart": lambda: SimpleNamespace(**each("cudaProfilerStart cudaProfilerStop cudaDeviceSynchronize", nothing)),
}
"""Answers of ``torch.cuda`` that do not depend on whether the script sees a GPU."""
_ELSEWHERE: Sequence[tuple[ModuleType, Mapping[str, Any]]] = (
    (torch.cuda.nvtx, each("range_push range_pop range_start range_end mark", zero)),
    (torch.cuda.profiler, each("start stop", nothing)),
)
"""Answers of modules below ``torch.cuda``."""
_HOMES = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs)
"""Modules in which a function of ``torch.cuda`` may be defined."""


def answers_everywhere(answers: Mapping[str, Any]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield the module, the name and the substitute for each place in which torch keeps a function that ``answers`` replaces."""
    for home in _HOMES:
        yield from ((home, name, answer) for name, answer in answers.items() if name in vars(home))
    for module, known in _ELSEWHERE:
        yield from ((module, name, answer) for name, answer in known.items())
