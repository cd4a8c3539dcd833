"""How captures run on CUDA and how they fail, with a torch.cuda of stand-ins; and that the tape refuses what CUDA refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_captured_step import batches, built, captured, eager_step, everything, loss_of, tape
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.engine import captured_step
from mezzo.errors import SessionError
from tape import TapeGraphs, refuse_in_a_capture

__all__ = ["tape"]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")

ENDED_BADLY = "CUDA error: operation failed due to a previous error during capture"


class Stream:
    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class Cuda:
    """As much of torch.cuda as capturing needs; the context of a graph is torch's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outside = self.current = Stream("outside")
        self.captured_on: list[Stream] = []
        self.generator = self.saved = "state"
        owner = self

        class Graph:
            def capture_begin(self, *pool: Any, **_: Any) -> None:
                owner.captured_on.append(owner.current)
                self.failed = False

            def capture_end(self) -> None:
                if owner.fails:
                    raise RuntimeError(ENDED_BADLY)

            def pool(self) -> str:
                return "pool"

            def replay(self) -> None: ...

        self.fails = False
        replaced = {
            "Stream": Stream,
            "stream": self.stream,
            "current_stream": lambda device=None: self.current,
            "CUDAGraph": Graph,
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "get_rng_state": lambda device: self.generator,
            "set_rng_state": lambda state, device: setattr(self, "saved", state),
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        self.cleared_after: list[int] = []
        """How many captures had begun when the workspaces of cuBLAS were cleared."""
        clear = "_cuda_clearCublasWorkspaces"
        monkeypatch.setattr(torch._C, clear, lambda: self.cleared_after.append(len(self.captured_on)), raising=False)

    def stream(self, stream: Stream) -> Current:
        return Current(self, stream)


class Current:
    """The context of a stream: torch.cuda.graph enters one and does not leave it where a capture ends badly."""

    def __init__(self, cuda: Cuda, stream: Stream) -> None:
        self._cuda, self._stream = cuda, stream

    def __enter__(self) -> None:
        self._before, self._cuda.current = self._cuda.current, self._stream

    def __exit__(self, *_: Any) -> None:
        self._cuda.current = self._before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_rehearsals_and_captures_of_a_session_share_one_stream_on_its_own_device(cuda: Cuda) -> None:
    made = [captured_step.CudaGraphs(torch.device("cuda", number)) for number in (0, 1)]
    on: list[Stream] = []
    for one in made:
        with one.rehearsal():
            on.append(cuda.current)
        for _ in range(2):
            assert one.capture(lambda: "outputs")[1] == "outputs"
        assert cuda.current is cuda.outside
    assert [s.device for s in on] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert cuda.captured_on == [on[0], on[0], on[1], on[1]]
    assert cuda.cleared_after == [
        0,
        2,
    ]  # before the first of each session: later ones use what that has put into the pool
    assert on[0].waited == [cuda.outside] * 3
    assert cuda.outside.waited == [on[0]] * 3 + [on[1]] * 3


@pytest.mark.parametrize("error", [RuntimeError("the .item() in the loss"), KeyError("inputs"), KeyboardInterrupt()])
def test_a_capture_that_fails_raises_its_cause_and_restores_the_stream(cuda: Cuda, error: BaseException) -> None:
    one = captured_step.CudaGraphs(torch.device("cuda", 0))
    cuda.fails = True

    def run() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        one.capture(run)
    assert caught.value is error
    assert cuda.current is cuda.outside
    cuda.fails = False
    assert one.capture(lambda: 1)[1] == 1


def test_a_capture_that_only_ends_badly_raises_that(cuda: Cuda) -> None:
    cuda.fails = True
    with pytest.raises(RuntimeError, match=ENDED_BADLY):
        captured_step.CudaGraphs(torch.device("cuda", 0)).capture(lambda: None)
    assert cuda.current is cuda.outside


def test_a_rehearsal_that_fails_is_waited_for_and_puts_the_generator_back(cuda: Cuda) -> None:
    one = captured_step.CudaGraphs(torch.device("cuda", 0))
    cuda.saved = ""
    with pytest.raises(ValueError, match="wrong"), one.rehearsal():
        raise ValueError("wrong")
    assert cuda.saved == "state"
    assert cuda.outside.waited == [one._stream]


def test_nodes_of_an_earlier_step_go_to_the_capture_s_stream_where_torch_can(cuda: Cuda) -> None:
    if not hasattr(torch.autograd.graph, "set_override_stale_capture_stream"):
        pytest.skip("torch 2.13")
    seen = []
    captured_step.CudaGraphs(torch.device("cuda", 0)).capture(
        lambda: seen.append(torch._C._override_stale_capture_stream())
    )
    assert seen == [True]
    assert torch._C._override_stale_capture_stream() is False


HINTS = [
    # torch's or CUDA's message, what the hint says
    ("CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors might", "waits for the host"),
    ("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless", "a tensor from Python numbers"),
    ("Cannot call CUDAGeneratorImpl::get_state during CUDA graph capture.", "preserve_rng_state=False"),
    ("During CUDA graph capture, autograd node 'A' has a stale reference to the default stream (stream 0)", "del loss"),
    ("CUDA error: operation would make the legacy stream depend on a capturing blocking stream", "del loss"),
    ("Only one capture at a time is allowed in a process.", "mode='reduce-overhead'"),
    ("CUDA error: dependency created on uncaptured work in another stream", "work on another stream"),
    ("", "waits for the host"),
]


@pytest.mark.parametrize(("message", "hint"), HINTS)
def test_what_to_do_about_a_capture_that_failed(message: str, hint: str) -> None:
    error = captured_step.refusal(RuntimeError(message))
    assert isinstance(error, SessionError)
    assert hint in error.hint
    assert error.hint.endswith("start a new process for it, since a failed capture leaves memory reserved")
    assert (
        str(error).splitlines()[0]
        == f"the step could not be captured: {message.partition(chr(10))[0] or 'RuntimeError'}"
    )


# --- what a session lets through, on the tape -----------------------------------------------------


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), mezzo.PolicyError("no", hint="yes")])
def test_errors_that_speak_for_themselves_come_as_they_are(
    tape: None, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    one = built("fp32", "SGD")

    def capture(run: Callable[[], Any]) -> Any:
        raise error

    graphs_ = TapeGraphs(lambda: everything(one))
    graphs_.capture = capture  # type: ignore[method-assign,assignment]
    monkeypatch.setattr(captured_step, "graphs_for", lambda device: graphs_)
    with pytest.raises(type(error)) as caught:
        one.capture(loss_of(one), *batches(1)[0])
    assert caught.value is error


def test_an_error_of_the_step_itself_shows_in_the_rehearsal(tape: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one = built("fp32", "SGD")
    monkeypatch.setattr(captured_step, "graphs_for", lambda device: TapeGraphs(lambda: everything(one)))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        one.capture(loss_of(one), torch.ones(5, 7), torch.zeros(5, dtype=torch.long))
    assert not isinstance(caught.value, SessionError)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, preserve: bool) -> None:
        super().__init__()
        self.inner, self.preserve = inner, preserve

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=self.preserve)


@pytest.mark.parametrize("preserve", [True, False])
def test_checkpointing_that_keeps_the_generator_s_state_is_refused_with_what_to_do(
    tape: None, monkeypatch: pytest.MonkeyPatch, preserve: bool
) -> None:
    message = "Cannot call CUDAGeneratorImpl::get_state during CUDA graph capture."
    get_states = refuse_in_a_capture(torch.utils.checkpoint.get_device_states, message)
    monkeypatch.setattr(torch.utils.checkpoint, "get_device_states", get_states)
    monkeypatch.setattr(torch.cpu, "_initialized", True, raising=False)  # only then are there states to keep
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model = Checkpointed(inner, preserve=preserve)
    one = mezzo.Session(model, mezzo.AdamW(model.parameters(), lr=0.01), policy="bf16:arithmetic=emulated")
    if preserve:
        with pytest.raises(SessionError, match="CUDAGeneratorImpl") as caught:
            captured(one, monkeypatch)
        assert "preserve_rng_state=False" in caught.value.hint
    else:
        captured(one, monkeypatch)(*batches(1)[0])
    eager_step(one, *batches(1)[0])


# --- the tape -------------------------------------------------------------------------------------

REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "a boolean index": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "a comparison": lambda x: torch.equal(x, x),
    "a tensor of Python numbers": lambda x: x + torch.tensor([1.0, 2.0]),
    "unique": lambda x: torch.unique(x),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_tape_refuses_what_a_capture_refuses(what: str) -> None:
    x = torch.tensor([1.0, -1.0])
    with pytest.raises(RuntimeError, match=r"capturing|graph capture"):
        TapeGraphs(list).capture(lambda: REFUSED[what](x))
    REFUSED[what](x)


def test_the_tape_overwrites_the_pool_before_every_replay() -> None:
    kept: dict[str, Tensor] = {}
    inside, outside = TapeGraphs(list), torch.zeros(2)

    def first() -> Tensor:
        kept["pool"] = torch.ones(2)
        return kept["pool"]

    def second() -> Tensor:
        outside.add_(1)
        return kept["pool"] * 2  # what the first graph left behind

    (replay, _), (again, outputs) = inside.capture(first), inside.capture(second)
    outside.zero_()
    replay()
    again()
    assert outputs.isnan().all()
    assert outside.tolist() == [1.0, 1.0]
