"""A whole training step as CUDA graphs: forward, backward, loss scaling, clipping and the update in one replay.

A small step spends its time launching kernels one by one. A graph launches a recorded step as a whole. Values that differ
between replays must be on the device, at fixed addresses:

* inputs are copied into the captured memory; the returned loss is a copy;
* loss scale, growth tracker, found_inf, norm, clip coefficient and step counts are there anyway (``scaling``, ``kernels``);
* learning rate and other settings of a group are at the head of the kernels' tables and are sent again when they change;
* dropout and similar operations advance, because torch's generator has a new offset for every replay.

Two graphs share a memory pool: one adds up a micro-batch's gradients, the other also updates. With ``accumulate=1`` there is
only the second, and its gradients are written, not added. Graphs that share a pool may overwrite each other's memory, so
tensors that outlive a replay (gradients of a window, tables, norm and flag) are allocated outside.

Before the capture the step is rehearsed (on the stream of ``cuda_graphs``): kernels compile and the optimizer's state is allocated,
but the update is skipped. Buffers, scales and generators are then restored, so that the first replay is the first step.

Limits: one process, one loss scale, mezzo's optimizers; random numbers from torch's default generator; no host reads in the
forward pass or the loss; module hooks and Python side effects run only at the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mezzo.engine.arguments import ONE_PASS
from mezzo.engine.gradients import all_parameters
from mezzo.engine.optimizers.one_pass import OnePass, choose, have_hooks, without_kernel
from mezzo.engine.state import OpenRegion, SessionParts, open_window
from mezzo.error_texts import capture_advice
from mezzo.errors import MezzoError, SessionError
from mezzo.explain import Choice

REHEARSALS = 3
"""Steps before a capture: cuDNN and cuBLAS choose kernels in the first, workspaces settle by the third."""


class StepCalls(NamedTuple):
    """The parts of a session's step, which ``Session`` defines."""

    autocast: Callable[[], OpenRegion]
    step: Callable[[Tensor], None]
    differentiate: Callable[[Tensor, float], None]
    """Runs a backward pass, given a loss and its share of the window."""
    update: Callable[..., Tensor | bool]
    """Enqueues the update of the given optimizers; returns a value above 0 if it is skipped."""
    close: Callable[..., None]
    """Finishes an update on the host."""


class CapturedStep:
    """A session's training step as CUDA graphs; ``Session.capture`` creates it.

    A call with a micro-batch replaces ``autocast``, the forward pass and ``step``, and returns the loss (or the results of
    ``compute_loss``, the loss first) in new memory.
    """

    def __init__(
        self,
        session: SessionParts,
        calls: StepCalls,
        compute_loss: Callable[..., Any],
        examples: tuple[Any, ...],
        *,
        other_shapes: Literal["error", "eager"],
        update_choice: Choice,
    ) -> None:
        self._session, self._calls = session, calls
        self._compute_loss, self._other_shapes = compute_loss, other_shapes
        self._graphs = graphs_for(session.device)
        leaves, self._structure = pytree.tree_flatten(examples)
        self._inputs = [x.detach().to(session.device, copy=True) if isinstance(x, Tensor) else x for x in leaves]
        self._replays: dict[bool, tuple[Callable[[], None], Any]] = {}
        """Each graph's replay, and its outputs in the memory that it writes, by whether it updates."""
        self._norm, self._flag = torch.zeros_like(session.state.progress.norm), torch.zeros((), device=session.device)
        self._window_gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._tables: list[Any] = []
        self._kernels = _kernels_of(session, update_choice)
        session.masters.follow()  # outside of the graphs
        with _restored(session):
            self._rehearse()
            try:
                self._capture()
            except (torch.OutOfMemoryError, MezzoError):
                raise  # their messages say what is wrong
            except RuntimeError as error:
                raise refusal(error) from error

    def __call__(self, *inputs: Any) -> Any:
        """Train on one micro-batch, and update at the end of the window.

        Raises:
            SessionError: inputs differ from those captured in more than their values, or settings that were compiled in changed.
        """
        leaves, structure = pytree.tree_flatten(inputs)
        difference = self._difference(leaves, structure)
        if difference is not None:
            return self._eager(inputs, difference)
        session, window = self._session, self._session.state.window
        if window.unscaled or window.weighted:
            raise SessionError(
                "captured step in a window that was unscaled, or whose micro-batches have weights",
                hint="call update() to close that window first",
            )
        if self._replaced != _replaced(session):
            raise SessionError(
                "optimizer state that the captured step refers to was replaced, for example by load_state_dict()",
                hint="load first, then capture; or capture again",
            )
        self._restore_gradients()
        for captured, new in zip(self._inputs, leaves, strict=True):
            if isinstance(captured, Tensor):
                captured.copy_(new, non_blocking=True)
        window.share(None, 0)
        if window.calls < window.accumulate:
            return self._replay(updates=False)
        session.state.schedules.settle()
        session.masters.follow()
        for table in self._tables:
            table.refresh()
        result = self._replay(updates=True)
        session.state.progress.measured(self._norm.clone())
        self._calls.close(session.optimizers, self._flag, keep_gradients=bool(self._window_gradients))
        return result

    def _restore_gradients(self) -> None:
        """Restore the gradients that the graphs add to, if an update or backward pass outside the graphs replaced them."""
        for parameter, gradient in self._window_gradients:
            if parameter.grad is not gradient:
                gradient.zero_() if parameter.grad is None else gradient.copy_(parameter.grad)
                parameter.grad = gradient

    def _replay(self, *, updates: bool) -> Any:
        replay, outputs = self._replays[updates]
        replay()
        return pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, outputs)

    def _difference(self, leaves: list[Any], structure: Any) -> str | None:
        """Return how inputs differ from the captured ones; None if only in their values."""
        if structure != self._structure:
            return f"inputs are arranged as {structure}; captured: {self._structure}"
        for captured, new in zip(self._inputs, leaves, strict=True):
            if isinstance(captured, Tensor) is not isinstance(new, Tensor):
                return f"an input is of type {type(new).__name__}; captured: {type(captured).__name__}"
            if not isinstance(captured, Tensor):
                if new is not captured and new != captured:
                    return f"an input that is not a tensor is {new!r}; captured: {captured!r}"
            elif captured.shape != new.shape or captured.dtype is not new.dtype:
                return f"an input is {new.dtype} of shape {tuple(new.shape)}; captured: {captured.dtype} of {tuple(captured.shape)}"
        return None

    def _eager(self, inputs: tuple[Any, ...], difference: str) -> Any:
        if self._other_shapes == "error":
            raise SessionError(
                f"captured step: {difference}",
                hint="pad the batch or drop the last one of an epoch (drop_last=True), capture again for this shape, "
                "or capture with other_shapes='eager' to run such batches without a graph",
            )
        device = self._session.device
        moved = pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs)
        outputs = self._forward(moved)
        self._calls.step(_loss_of(outputs))
        return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, outputs)

    def _forward(self, inputs: tuple[Any, ...]) -> Any:
        # Opened inside the capture, so that each replay casts each weight once, from its current value.
        with self._calls.autocast():
            return self._compute_loss(*inputs)

    def _run(self) -> Any:
        """Enqueue forward and backward pass of the captured inputs; return the results of the forward pass."""
        outputs = self._forward(pytree.tree_unflatten(self._inputs, self._structure))
        self._calls.differentiate(_loss_of(outputs), self._session.state.window.share(None, 0))
        return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, outputs)

    def _run_and_update(self) -> Any:
        outputs = self._run()
        skipped = self._calls.update(self._session.optimizers)
        assert isinstance(skipped, Tensor)
        self._flag.copy_(skipped)
        self._norm.copy_(self._session.state.progress.norm)
        if self._window_gradients:
            torch._foreach_zero_([gradient for _, gradient in self._window_gradients])
        else:
            _drop_gradients(self._session)
        return outputs

    def _rehearse(self) -> None:
        session = self._session
        with self._graphs.rehearsal():
            for number in range(REHEARSALS):
                open_window(session)
                outputs = self._forward(pytree.tree_unflatten(self._inputs, self._structure))
                session.processes.check_loss(_loss_of(outputs), first=number == 0)
                self._calls.differentiate(_loss_of(outputs), session.state.window.share(None, 0))
                trained = [p for p in _trained(session) if p.grad is not None]
                if number + 1 < REHEARSALS:
                    _drop_gradients(session)
            with self._kernels.recording() as rehearsed:
                self._calls.update(session.optimizers, rehearsal=True)
            self._tables = rehearsed
        if session.accumulate > 1:
            self._window_gradients = [(p, torch.zeros_like(p.grad)) for p in trained if p.grad is not None]
        _drop_gradients(session)

    def _capture(self) -> None:
        session, window = self._session, self._session.state.window
        for parameter, gradient in self._window_gradients:
            parameter.grad = gradient
        if session.accumulate > 1:
            open_window(session)
            self._replays[False] = self._graphs.capture(self._run)
        open_window(session)
        for _ in range(session.accumulate - 1):  # the earlier micro-batches: the average is over a full window
            window.share(None, 0)
        with self._kernels.recording(self._tables) as self._tables:
            self._replays[True] = self._graphs.capture(self._run_and_update)
        for table in self._tables:
            table.send()
        self._replaced = _replaced(session)
        torch._foreach_zero_([*(gradient for _, gradient in self._window_gradients), self._flag])


def _loss_of(outputs: Any) -> Any:
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


def _replaced(session: SessionParts) -> list[Any]:
    return [optimizer.replaced for optimizer in session.optimizers if isinstance(optimizer, OnePass)]


def _trained(session: SessionParts) -> list[nn.Parameter]:
    return all_parameters(session.models, session.optimizers)


def _drop_gradients(session: SessionParts) -> None:
    for parameter in _trained(session):
        parameter.grad = None


@contextmanager
def _restored(session: SessionParts) -> Iterator[None]:
    """Restore the state that rehearsing and capturing change: buffers, scales, counts and the window."""
    progress = session.state.progress
    places = [*(b for model in session.models for b in model.buffers()), *progress.in_place()]
    for scale in session.scales:
        places += [value for value in vars(scale).values() if isinstance(value, Tensor)]
    saved, norm = [place.clone() for place in places], progress.norm
    try:
        yield
    finally:
        with torch.no_grad():
            for place, value in zip(places, saved, strict=True):
                place.copy_(value)
        progress.measured(norm)
        open_window(session)
        _drop_gradients(session)


def _kernels_of(session: SessionParts, update_choice: Choice) -> ModuleType:
    """Return the kernels that can be captured.

    Raises:
        SessionError: this session's steps cannot be captured.
    """
    kernels, _ = choose(session.device.type)
    cause = None
    if session.state.window.calls:
        cause = f"{session.state.window.calls} backward passes of an open window", "call update() first"
    elif session.processes.several:
        cause = "several processes", "train with step(loss)"
    elif session.policy.world > 1:
        cause = f"an emulated reduction over {session.policy.world} processes", "train with step(loss)"
    elif session.policy.changes_gradients:
        cause = f"sums of gradients in {session.policy.gradients}", "train with step(loss)"
    elif len({p.device for p in _trained(session)}) > 1:
        cause = "parameters on several devices", "train with step(loss): a graph is captured on one device"
    elif len(session.scales) > 1:
        cause = f"num_losses={len(session.scales)}", "add the losses up, or train with backward and update"
    elif update_choice.value != ONE_PASS:
        cause = (
            update_choice.reason,
            "use mezzo.AdamW or mezzo.SGD and clip_norm: their updates need no host",
        )
    elif have_hooks(session.optimizers):
        cause = "step hooks of an optimizer", "remove them, or train with step(loss): a replay calls nothing in Python"
    elif not hasattr(kernels, "recording"):
        cause = update_choice.reason, "install a Triton that works here: its kernels take settings from the device"
    elif without_kernel(session.optimizers, session.device.type):
        cause = update_choice.reason, "use mezzo.AdamW or mezzo.SGD, or train with step(loss)"
    if cause is not None:
        what, hint = cause
        raise SessionError(
            f"capture() with {what}; allowed: one process, one loss scale, one-pass updates by Triton kernels, a closed window",
            hint=hint,
        )
    return kernels


# A session has one stream for its rehearsals and captures, on its own device. Rehearsing on the capture's stream leaves autograd's
# nodes there. torch creates its default capture stream once per process, on the device of the first capture: a second session on another
# GPU would capture nothing.
#
# cuBLAS keeps a workspace for each stream, which a graph uses by its address. If a rehearsal leaves one in ordinary memory, any code that
# clears the workspaces, such as ``torch.compile(mode="reduce-overhead")``, frees it, and a replay would write into memory that is in use
# elsewhere. So the workspaces are cleared before the first capture, which then allocates its own from the graphs' pool. Limit: if they are
# cleared again between two captures of a session, tensors of the second capture may reuse that memory.
#
# ``torch.cuda.graph`` raises two errors when a capture fails: the cause, then another because the capture cannot be ended. The
# second hides the first and leaves the capture's stream current. ``CudaGraphs.capture`` restores the stream and raises the first error.
_NEW_PROCESS = "; start a new process for it, since a failed capture leaves memory reserved"


def refusal(error: BaseException) -> SessionError:
    """Return the error for a step that could not be captured, with a hint for its cause."""
    message = str(error)
    first = (message.splitlines() or [""])[0] or type(error).__name__
    return SessionError(f"the step could not be captured: {first}", hint=f"{capture_advice(message)}{_NEW_PROCESS}")


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
