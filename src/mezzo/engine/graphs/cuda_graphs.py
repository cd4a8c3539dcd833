"""CUDA graphs: rehearse and capture on one stream, and report what broke a capture, with a hint.

A session has one stream for its rehearsals and captures, on its own device. Rehearsing on the capture's stream leaves autograd's
nodes there. torch creates its default capture stream once per process, on the device of the first capture: a second session on another
GPU would capture nothing.

cuBLAS keeps a workspace for each stream, which a graph uses by its address. If a rehearsal leaves one in ordinary memory, any code that
clears the workspaces, such as ``torch.compile(mode="reduce-overhead")``, frees it, and a replay would write into memory that is in use
elsewhere. So the workspaces are cleared before the first capture, which then allocates its own from the graphs' pool. Limit: if they are
cleared again between two captures of a session, tensors of the second capture may reuse that memory.

``torch.cuda.graph`` raises two errors when a capture fails: the one that broke it, then one because the capture cannot be ended. The
second hides the first and leaves the capture's stream current. ``CudaGraphs.capture`` restores the stream and raises the first error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mezzo.errors import SessionError

_HOST_READ = (
    "the forward pass or the loss waits for the host (.item(), .cpu(), print, a boolean index), creates a tensor from Python numbers, or "
    "allocates memory by a value that it reads; remove that, or train with step(loss)"
)
_HINTS = {
    "CUDAGeneratorImpl": "activation checkpointing reads the generator's state, which a capture refuses: "
    "checkpoint(..., preserve_rng_state=False); dropout inside then draws new numbers when it is recomputed",
    "stale reference": "a loss or output of an earlier step is alive and keeps autograd's nodes on another stream: del loss, then capture",
    "legacy stream": "a loss or output of an earlier step is alive and keeps autograd's nodes on the default stream: "
    "del loss, then capture; or remove work on other streams from the step",
    "Only one capture": "a model compiled with mode='reduce-overhead' captures graphs of its own: compile it without a mode",
    "uncaptured work": "the step waits for work on another stream: wait for that stream before the capture, or keep to one stream",
}
"""Hints, by a part of CUDA's or torch's message."""
_NEW_PROCESS = "; start a new process for it, since a failed capture leaves memory reserved"


def refusal(error: BaseException) -> SessionError:
    """Return the error for a step that could not be captured, with a hint for its cause."""
    message = str(error)
    hint = next((what for part, what in _HINTS.items() if part in message), _HOST_READ)
    first = (message.splitlines() or [""])[0] or type(error).__name__
    return SessionError(f"the step could not be captured: {first}", hint=f"{hint}{_NEW_PROCESS}")


class CudaGraphs:
    """CUDA graphs that share a memory pool, with a stream of their own for rehearsal and capture."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Run the block on the capture's stream, then restore the generator."""
        state = torch.cuda.get_rng_state(self._device)
        try:
            with self._on_stream():
                yield
        finally:
            self._current_stream().wait_stream(self._stream)
            torch.cuda.set_rng_state(state, self._device)

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return a function that replays the work that ``run`` enqueues, and the result of ``run``; raise what ``run`` raises."""
        raised: list[BaseException] = []

        def run_and_note() -> Any:
            try:
                return run()
            except BaseException as error:
                raised.append(error)
                raise

        with self._on_stream(), _stale_nodes_moved():
            if self._pool is None:
                torch._C._cuda_clearCublasWorkspaces()
            graph = torch.cuda.CUDAGraph()
            try:
                # thread_local: a data loader's pinning thread may allocate during the capture.
                settings = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
                with torch.cuda.graph(graph, **settings):
                    outputs = run_and_note()
            except BaseException as error:
                if raised and raised[0] is not error:  # the later error says only that the capture could not be ended
                    raise raised[0] from None
                raise
        self._current_stream().wait_stream(self._stream)
        self._pool = graph.pool()
        return graph.replay, outputs

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Make the capture's stream and device current, after it has waited for the previous stream."""
        self._stream.wait_stream(self._current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def _current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)


@contextmanager
def _stale_nodes_moved() -> Iterator[None]:
    """Move autograd nodes that an earlier step left alive to the capture's stream, where torch can (2.13)."""
    choose = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
    if choose is None:
        yield
        return
    before = torch._C._override_stale_capture_stream()
    choose(True)
    try:
        yield
    finally:
        choose(before)


def graphs_for(device: torch.device) -> CudaGraphs:
    """Return the graphs of ``device``.

    Raises:
        SessionError: the device has no graphs.
    """
    if device.type != "cuda":
        raise SessionError(
            f"capture() for a model on {device.type}; allowed: cuda, which has graphs",
            hint="train with step(loss): it runs the same kernels, launched one by one",
        )
    return CudaGraphs(device)
