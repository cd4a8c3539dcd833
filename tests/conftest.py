"""One thread a process: on machines with few cores, threads of parallel tests would wait for each other. And Triton without a GPU."""

import functools
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in child processes

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from helpers_backward import WAYS, backward_in
from mezzo.engine.matrix_units.native_units import fp32_products_as_they_were
from optional_libraries import LIBRARIES

if not torch.cuda.is_available():
    # Its interpreter runs kernels on a CPU. Triton decides when it is imported, so before any test does.
    os.environ["TRITON_INTERPRET"] = "1"

# A job in the background, or under nohup, ignores these, and so would the processes that tests start and interrupt.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


_MARKED = "slow"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file for ``-m slow`` that has no slow test: the word is in it, or in a helper that it names."""
    if config.option.markexpr != _MARKED or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if any(word in text for word in (_MARKED, *_helpers_that_mark())) else True


@functools.cache
def _helpers_that_mark() -> list[str]:
    helpers = [path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith(("conftest", "test_"))]
    return [path.stem for path in helpers if _MARKED in path.read_text(encoding="utf-8")]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Leave a test out, by name, that imports a library that ``make test`` does not install."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in LIBRARIES and importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}: make test-all")
        raise


gc.disable()  # until everything is imported: nothing of it is garbage


def pytest_collection_finish() -> None:
    """Keep the million objects that were imported out of garbage collection, and of the walks over all objects that runs make."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after the fixtures of the file
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Do so again after each file: its tests have imported a compiler, or a library of models."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Undo it: when the interpreter ends, native libraries report objects that were never collected as leaks."""
    gc.unfreeze()


_EXCEPTHOOK = sys.excepthook
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _interpreter_as_it_was() -> Iterator[None]:
    """Restore what outlives a test: a process group's hook for tracebacks, a training's handler of SIGTERM, Accelerate's precision."""
    handlers = [signal.getsignal(number) for number in _STOPPING]
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)
    sys.excepthook = _EXCEPTHOOK
    for number, handler in zip(_STOPPING, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPUs of this machine from what expects a CPU's answer."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture(autouse=True)
def _no_mode_stays() -> Iterator[None]:
    """Fail a test that leaves a mode on, and remove it: all later tests of its process would run under it."""
    yield
    left = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    while _get_current_function_mode_stack():
        _pop_mode()
    assert left == []


@pytest.fixture(autouse=True)
def _fp32_products_stay() -> Iterator[None]:
    """Restore torch's switches for FP32 products: a session under tf32 or fp32 sets them for its whole process."""
    with fp32_products_as_they_were():
        yield


@pytest.fixture(autouse=True)
def _nothing_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction beside every comparison would trace its script four times; a test that wants it puts the function back."""
    for place in ("predict.traced", "check.command"):
        monkeypatch.setattr(f"mezzo.commands.{place}.predicted_for", lambda *_, **__: None)


@pytest.fixture(params=WAYS)
def backward_way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test twice: with its backward passes in the script's thread, as on a CPU, and in a second one, as with a GPU."""
    with backward_in(request.param):
        yield request.param


@pytest.fixture(params=[WAYS[0], pytest.param(WAYS[1], marks=pytest.mark.slow)])
def slow_backward_way(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same for files that take long."""
    with backward_in(request.param):
        yield request.param
