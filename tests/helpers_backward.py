"""Run backward passes in a second, lasting thread, as autograd does with a GPU; a pass that a node makes stays in that thread.

The thread numbers the nodes that are made in it by itself, and has its own thread-local values. torch's state is passed on as its engine
does it: dispatch and function modes, autocast, hooks of saved tensors.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

WAYS = ("the script's thread", "autograd's thread")
BOTH_WAYS = pytest.mark.usefixtures("slow_backward_way")
"""For tests of what the thread of backward passes could change."""
_KINDS = ("cpu", "cuda", "maia", "ipu")


class LastingThread:
    """Call functions in one thread, one after the other."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Any:
        """Return what ``function`` returns; at once where this is the thread."""
        if threading.current_thread() is self._thread:
            return function()
        done: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
        within = handed_over()

        def job() -> None:
            try:
                with within():
                    done.put((function(), None))
            except BaseException as error:
                done.put((None, error))

        self._jobs.put(job)
        result, error = done.get()
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """End the thread: the launcher waits for a script's threads, and ends a process that has daemon threads at once."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def handed_over() -> Callable[[], Any]:
    """Return a context that has the state of the thread that calls this."""
    modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]
    cache, hooks = torch.is_autocast_cache_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)

    @contextmanager
    def within() -> Iterator[None]:
        with ExitStack() as stack:
            for kind, enabled, dtype in casts:
                _set_autocast(stack, kind, enabled, dtype)
            torch.set_autocast_cache_enabled(cache)
            if hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            for mode in modes:
                kind = TorchDispatchMode if isinstance(mode, TorchDispatchMode) else TorchFunctionMode
                kind.__enter__(mode)  # not the subclass's own: the mode is only passed on
                stack.callback(kind.__exit__, mode, None, None, None)
            yield

    return within


def _set_autocast(stack: ExitStack, kind: str, enabled: bool, dtype: torch.dtype) -> None:
    stack.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
    stack.callback(torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind))
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)


def in_ways(name: str, cases: Iterable[Any], *, both: Callable[[Any], bool], ids: Callable[[Any], str]) -> Any:
    """Parametrize a test with ``slow_backward_way`` by ``cases``: those that ``both`` chooses also run in autograd's thread."""
    chosen = [pytest.param(case, WAYS[0], id=ids(case)) for case in cases]
    chosen += [
        pytest.param(case, WAYS[1], id=f"{ids(case)}-{WAYS[1]}", marks=pytest.mark.slow) for case in cases if both(case)
    ]
    parametrized = pytest.mark.parametrize((name, "slow_backward_way"), chosen, indirect=["slow_backward_way"])
    return lambda test: BOTH_WAYS(parametrized(test))


@contextmanager
def backward_in(way: str, thread: LastingThread | DeviceThread | None = None) -> Iterator[None]:
    """Run backward passes in one of ``WAYS``; in ``thread`` where it is given."""
    if way == WAYS[0]:
        yield
        return
    original, own = torch.autograd._engine_run_backward, None if thread is not None else LastingThread()
    second = thread or own
    assert second is not None

    def run(*args: Any, **kwargs: Any) -> Any:
        return second.call(lambda: original(*args, **kwargs))

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.autograd, "_engine_run_backward", run)
            yield
    finally:
        if own is not None:
            own.end()


class DeviceThread:
    """Autograd's own thread of an accelerator that has no operations: it runs backward passes on CPU tensors from inside a node of its own.

    To be made before this process' first backward pass, and for good: for a child process.
    """

    def __init__(self) -> None:
        acc = torch._C._acc

        class Hooks(acc.PrivateUse1Hooks):  # type: ignore[name-defined, misc]
            def is_available(self) -> bool:
                return True

            def has_primary_context(self, index: int) -> bool:
                return True

            def is_built(self) -> bool:
                return True

        class Guard(acc.DeviceGuard):  # type: ignore[name-defined, misc]
            def type_(self) -> Any:
                return torch._C._autograd.DeviceType.PrivateUse1

        self._kept = Hooks(), Guard()
        torch.utils.rename_privateuse1_backend("second")
        acc.register_python_privateuseone_hook(self._kept[0])
        acc.register_python_privateuseone_device_guard(self._kept[1])
        facts: dict[str, Any] = {"is_initialized": True, "is_available": True, "current_device": 0, "device_count": 1}
        facts |= {"_is_in_bad_fork": False, "get_amp_supported_dtype": [torch.float16, torch.bfloat16]}
        module = {name: staticmethod(lambda value=value: value) for name, value in facts.items()}
        torch._register_device_module("second", type("second", (), module))
        self.ident = self.call(threading.get_ident)

    def call(self, function: Callable[[], Any]) -> Any:
        """Return what ``function`` returns; at once where this is the thread."""
        if threading.get_ident() == getattr(self, "ident", None):
            return function()
        results: list[Any] = []
        there = _There.apply(_empty().requires_grad_(), lambda: results.append(function()))
        _ENGINE.run_backward((there,), (_empty(),), False, False, (), allow_unreachable=True, accumulate_grad=True)
        return results[0]


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, job: Callable[[], None]) -> torch.Tensor:
        ctx.job = job
        return _empty()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        ctx.job()
        return None, None


def _empty() -> torch.Tensor:
    made: torch.Tensor = torch._C._acc.create_empty_tensor((1,), torch.float32)
    return made


_ENGINE = torch.autograd.Variable._execution_engine
