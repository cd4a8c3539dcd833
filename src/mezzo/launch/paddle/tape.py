"""Record the operations of chosen steps of a Paddle script, in order: name, layer, line, operands and results.

Every function of ``paddle._C_ops``, every arithmetic operator, indexing and ``PyLayer.apply`` is wrapped. Where the policy rounds
operands and results, the tape sees the value before and after each rounding. Evaluations (code without gradients) are not recorded,
because their tensors would be kept until the update. Cost, in observed steps only: all tensors of a step stay alive until its update.

Limits: operations inside traced programs and inside a script's own ``PyLayer`` are not seen; a ``PyLayer`` counts as one operation.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol, cast

import paddle
from paddle.autograd import PyLayer

from mezzo.errors import ScriptError
from mezzo.frameworks import paddle as paddle_policy
from mezzo.launch.paddle.state import PaddleRun, RunListener
from mezzo.launch.patches import Patches
from mezzo.observe.settings import StopScript
from mezzo.records import AnyRecord, RunRecord

_MEZZO = str(Path(__file__).parents[2]) + os.sep
_PADDLE = str(Path(paddle.__file__).parent) + os.sep
"""With a separator at the end: paddlenlp is not part of Paddle."""
_OPERATORS = {
    **paddle_policy.OPERATORS,
    "__rpow__": "elementwise_pow",
    "__rmatmul__": "matmul",
    "__sub__": "subtract",
    "__rsub__": "subtract",
    "__div__": "divide",
    "__rdiv__": "divide",
    "__rtruediv__": "divide",
    "__getitem__": "getitem",
    "__setitem__": "setitem_",
    "clone": "assign",
    "detach": "detach",
}
"""Methods of ``paddle.Tensor`` that bypass ``paddle._C_ops``."""
_RANDOM = frozenset(
    (
        *("dropout", "uniform", "gaussian", "bernoulli", "randint", "randperm", "multinomial", "rrelu", "rnn"),
        *("truncated_gaussian_random", "flash_attn", "standard_gamma", "poisson", "binomial", "fused_dropout_add"),
        *("exponential_", "uniform_inplace_", "gaussian_inplace_"),
    )
)
"""Operations whose results depend on the state of the random number generator."""
_POSSIBLE = frozenset(op for ops in paddle_policy.OPS.values() for op in ops)
"""Operations that a policy may round."""
_UNSEEN = ("legacy", "_run_custom_op", "_run_python_op")


@dataclass(eq=False)
class TapedOperation:
    """One operation of a step."""

    name: str
    """Its name in ``paddle._C_ops``."""
    layer: Any
    """The innermost layer that runs it; None outside any layer."""
    line: str
    function: Callable[..., Any]
    """Paddle's original function, which rounds nothing."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backward: bool
    """Whether it runs in a backward pass that the script itself wrote."""
    random: Any = None
    """The state of the random number generator before it, if the results depend on that."""
    results: list[Any] = field(default_factory=list)
    result: Any = None
    rounds: bool = False
    """Whether the policy rounds its operands and results."""

    @property
    def operands(self) -> list[Any]:
        """The tensors that it reads."""
        return tensors([*self.args, *self.kwargs.values()])


class Listener(Protocol):
    """An observer of operations as they run."""

    def finished(self, operation: TapedOperation) -> None:
        """Record an operation that has run."""
        return

    def rounded(self, operation: TapedOperation, before: Any, after: Any, *, result: bool) -> None:
        """Record that the policy rounded an operand of the operation, or its ``result``."""
        return


class Tape:
    """The operations that the observed step has run."""

    def __init__(self, run: PaddleRun, listener: Listener, *, keeps: bool = True) -> None:
        """Begin with nothing recorded; ``keeps`` says whether the operations are kept, with their tensors."""
        self._run, self._listener, self.keeps = run, listener, keeps
        self.on = False
        """Whether operations are recorded now."""
        self.everything = False
        """Whether code without gradients is recorded as well."""
        self.operations: list[TapedOperation] = []
        self.roots: list[Any] = []
        """The layers called from outside any layer, in order of their first call."""
        self._layers: list[Any] = []
        self._running: TapedOperation | None = None
        self._thread = threading.get_ident()
        self._count = 0
        self._original_round = run.round

    def install(self, patches: Patches) -> None:
        """Wrap Paddle's operations until ``patches`` are undone."""
        for name in dir(paddle._C_ops):
            if callable(getattr(paddle._C_ops, name)) and not name.startswith("__") and name not in _UNSEEN:
                patches.wrap(paddle._C_ops, name, functools.partial(self._around, name))
        for method, name in _OPERATORS.items():
            if hasattr(paddle.Tensor, method):
                patches.wrap(paddle.Tensor, method, functools.partial(self._around, name))
        patches.wrap(paddle.nn.Layer, "__call__", self._call)
        patches.replace(PyLayer, "apply", _Apply(self))
        self._run.round_through(
            functools.partial(self._round, result=False), functools.partial(self._round, result=True)
        )

    def start(self, *, everything: bool = False) -> None:
        """Record operations from now on; with ``everything`` also in code without gradients."""
        self.on, self.everything = True, everything

    def stop(self) -> None:
        """Record no more operations."""
        self.on = self.everything = False

    def clear(self) -> None:
        """Discard the operations."""
        self.operations = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    def next_index(self) -> int:
        """Return the next number in the order of events of a run."""
        self._count += 1
        return self._count

    # --- operations --------------------------------------------------------------------------------------------------------------

    def _around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._records():
                return original(*args, **kwargs)
            return self._recorded(name, inspect.unwrap(original), original, args, kwargs)

        return call

    def _records(self) -> bool:
        busy = self._running is not None or self._run.local.own_work
        if not self.on or busy or threading.get_ident() != self._thread:
            return False
        wanted = self.everything or self._run.local.in_backward or paddle.is_grad_enabled()
        return bool(wanted and paddle.in_dynamic_mode())

    def _recorded(
        self, name: str, function: Callable[..., Any], original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        operation = TapedOperation(
            name=name,
            layer=self._layers[-1] if self._layers else None,
            line=script_line(sys._getframe(2)),
            function=function,
            args=args,
            kwargs=kwargs,
            backward=self._run.local.in_backward and not paddle.is_grad_enabled(),
            random=paddle.get_rng_state() if self.keeps and name in _RANDOM else None,
        )
        self._running = operation
        try:
            result = original(*args, **kwargs)
        finally:
            self._running = None
        operation.result = args[0] if name == "setitem_" else result
        operation.results = tensors([operation.result])
        if self.keeps:
            self.operations.append(operation)
        with self.paused():
            self._listener.finished(operation)
        return result

    def applied(self, owner: type, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a ``PyLayer`` as one operation, named by its class."""
        if not self._records() or owner.__module__.startswith("mezzo."):
            return apply(*args, **kwargs)
        return self._recorded(owner.__name__, apply, apply, args, kwargs)

    # --- rounding ----------------------------------------------------------------------------------------------------------------

    def _round(self, value: Any, *, result: bool) -> Any:
        operation = self._running
        if operation is None or operation.name not in _POSSIBLE:
            return self._original_round(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._round(item, result=result) for item in value)
        after = self._original_round(value)
        if after is not value:
            operation.rounds = True
            with self.paused():
                self._listener.rounded(operation, value, after, result=result)
        return after

    # --- layers ------------------------------------------------------------------------------------------------------------------

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            if thread != self._thread:
                if self._layers or not paddle.is_grad_enabled() or self._run.local.in_backward:
                    return original(layer, *args, **kwargs)
                self._thread = thread  # this is the thread that trains
            if not self._layers and not self._run.local.in_backward and not any(layer is root for root in self.roots):
                self.roots.append(layer)
            self._layers.append(layer)
            try:
                return original(layer, *args, **kwargs)
            finally:
                self._layers.pop()

        return call


class _Apply:
    """``PyLayer.apply`` of every class, as an operation of the tape."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        original = cast(Any, super(PyLayer, owner)).apply
        return lambda *args, **kwargs: self._tape.applied(owner, original, args, kwargs)


def tensors(values: Any) -> list[Any]:
    """Return the initialised tensors in ``values``, also those in lists, tuples and dictionaries."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, paddle.Tensor):
            if value._is_initialized() and not value.is_selected_rows():
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors(value)
        elif isinstance(value, dict):
            found += tensors(value.values())
    return found


def script_line(frame: FrameType | None) -> str:
    """Return the innermost line outside Paddle and Mezzo as ``file:line``."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_PADDLE, _MEZZO, "<")) and "/contextlib.py" not in name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# A step's operations are those between the previous update and its own. So an observer starts right after an update, and judges its records
# before the weights change. The script is ended at the first backward pass after the last observed step.


class StepObserver(RunListener, ABC):
    """An observer of chosen steps of a Paddle run; the run calls it at each event."""

    kind = "audit"
    """The name of the command."""
    compiles = False
    """Always False: static graphs are refused."""

    def __init__(self, run: PaddleRun, *, steps: Sequence[int]) -> None:
        self.run = run
        self.watched: list[int] = []
        """Numbers of the steps that were observed to their end."""
        self._waiting = sorted(set(steps))
        self._judged = False
        """Whether the first update of the open step has begun."""

    # --- implemented by each observer ----------------------------------------------------------------------------------------------

    @abstractmethod
    def install(self, patches: Patches) -> None:
        """Patch Paddle until ``patches`` are undone."""

    @abstractmethod
    def record(self, run: RunRecord) -> AnyRecord:
        """Return the observer's record, which includes the whole run's."""

    def begin(self) -> None:
        """Begin to record."""

    def judge(self, norm: Any | None) -> None:
        """Judge what was recorded of the open step, whose gradients have this norm; the weights are still the step's."""

    def end(self) -> None:
        """Stop recording, and discard what was recorded since ``judge``."""

    def close(self) -> None:
        """Stop observing, wherever the script ended."""
        self.end()

    # --- called by the run ---------------------------------------------------------------------------------------------------------

    @property
    def open_step(self) -> int:
        """The number of the step that is open."""
        return self.run.steps.num_closed + 1

    @property
    def observing(self) -> bool:
        """Whether the open step is to be observed."""
        return self._waiting[:1] == [self.open_step]

    def start(self) -> None:
        """Begin before the script's first line, if the first step is observed."""
        if self.observing:
            self.begin()

    def update_begins(self, norm: Any | None) -> None:
        """Judge the step at its first update."""
        if self.observing and not self._judged:
            self._judged = True
            self.judge(norm)
        self.end()

    def update_ended(self, optimizer: Any) -> None:
        """Begin to record the next step, if it is observed."""
        follows = self.open_step + 1 in self._waiting[:2]
        if self.observing or follows:
            self.end()
        if follows:
            self.begin()

    def step_closed(self, num_steps: int, *, loss_finite: bool, gradients_finite: bool, skipped: bool) -> None:
        """Record that a step is over; end the script after the last observed one."""
        self._judged = False
        if self._waiting[:1] == [num_steps]:
            self._waiting.pop(0)
            self.watched.append(num_steps)
        self.decide(num_steps, loss_finite=loss_finite, gradients_finite=gradients_finite, skipped=skipped)
        if not self._waiting:
            raise StopScript

    def decide(self, step: int, *, loss_finite: bool, gradients_finite: bool, skipped: bool) -> None:
        """Draw conclusions from a step that is over."""

    def static_graph(self, what: str) -> NoReturn:
        """Refuse a static graph.

        Raises:
            ScriptError: always.
        """
        raise ScriptError(
            f"the script uses {what}, and mezzo {self.kind} observes the operations of Paddle's dynamic graph only",
            hint="leave it out; or pass a policy, such as --policy fp32, under which code given to to_static runs eagerly",
        )

    def failed(self, error: BaseException) -> None:
        """Do nothing: what raised an error is named in PyTorch only."""

    def too_short(self) -> bool:
        """Return whether the script ended before any observed step."""
        return not self.watched


def refuse_static_graphs(observer: StepObserver, patches: Patches) -> None:
    """Refuse ``paddle.enable_static`` until ``patches`` are undone."""
    patches.replace(paddle, "enable_static", lambda *args, **kwargs: observer.static_graph("paddle.enable_static()"))
