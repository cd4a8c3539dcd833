"""Trace a training: its state before the first forward pass of every update, and the files that it writes.

An uninterrupted and a resumed run pass that moment at the same place in the code: the batch is loaded, and the optimizer, the scheduler,
the scaler and an EMA have finished the previous update.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mezzo.launch.patches import Patches, after_import
from mezzo.launch.request import TraceRequest
from mezzo.launch.torch import digests
from mezzo.launch.torch.digests import ScriptState, is_below, is_own_file, script_folder, text_digest
from mezzo.launch.torch.state import TorchRun
from mezzo.measure.state_trace import Point, WrittenFile, line_of


class StateTrace:
    """The trace of a run, written line by line."""

    def __init__(self, run: TorchRun, request: TraceRequest) -> None:
        self._run, self._request = run, request
        self._process = os.getpid()
        self._file = os.open(request.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._patches, self._samples = Patches(), DrawnSamples()
        self._files = FilesWritten(self._wrote)
        self._schedulers: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self._scalers: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self._roots: dict[int, nn.Module] = {}
        self._variables = ScriptState(lambda module: False)
        """The script's variables at the last point; they keep the models alive until the end."""
        self._last = -1
        self._generators: dict[str, str] = {}
        self._default_end = signal.getsignal(signal.SIGTERM)

    def install(self) -> None:
        """Trace until ``close``."""
        if self._request.first_seed is not None:
            random.seed(self._request.first_seed)
            np.random.seed(self._request.first_seed)
            torch.manual_seed(self._request.first_seed)
        self._run.objects.notify_of_calls(self._called)
        self._run.listeners.all.append(self)
        for kind in (LRScheduler, ReduceLROnPlateau):
            self._patches.around(kind, "__init__", functools.partial(_register, self._schedulers))
        self._patches.around(torch.amp.GradScaler, "__init__", functools.partial(_register, self._scalers))
        self._samples.install(self._patches)
        self._files.install(self._patches)

    def close(self) -> None:
        """Trace the state at the end."""
        if os.getpid() != self._process or self._run.objects.on_root_call is None:
            return
        self._run.objects.end_notices()
        self._run.listeners.all.remove(self)
        self._patches.undo()
        self._write("end", self._state(self._run.update.num_updates, []))
        os.close(self._file)

    # --- a watcher of the run ----------------------------------------------------------------------------------------------

    def updated(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Record which generators the passes of this update drew from."""
        now = digests.generator_digests()
        drew = [name for name, state in now.items() if name in self._generators and self._generators[name] != state]
        if drew and self._last >= 0:
            self._write("drew", {"updates": self._last, "generators": drew})

    def steps_discarded(self) -> None:
        """Trace from the first step again: the passes so far were no training steps."""
        self._last = -1

    def step_closed(self, *_: object) -> None:
        """Do nothing: the state is recorded later, before the next forward pass."""

    backward_begins = backward_ended = compiled_ended = step_closed

    def done(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return False: every update is traced."""
        return False

    # --- points ------------------------------------------------------------------------------------------------------------

    def _called(self, module: nn.Module, inputs: Any) -> None:
        updates = self._run.update.num_updates
        if updates == self._last or not (module.training and torch.is_grad_enabled()) or os.getpid() != self._process:
            return
        if threading.current_thread() is not threading.main_thread():
            return
        self._roots.setdefault(id(module), module)
        if updates == self._request.stop_after:
            self._last = updates
            self._stop()
            return
        frames, _ = frames_of_script()
        self._variables = ScriptState(is_below(script_folder()))
        entries = [self._variables.frame(frame.f_locals) for frame in frames]
        values = [value for frame in entries for value in digests.flat(frame)]
        self._last = updates
        samples, batch = self._samples.take()
        point = self._state(updates, values).model_copy(
            update={"samples": samples, "batch": batch, "inputs": digests.tensors_digest(inputs)}
        )
        self._generators = point.generators
        self._write("point", point)

    def _state(self, updates: int, values: list[tuple[str, str, Any]]) -> Point:
        named: dict[str, Any] = self._variables.objects
        modules = {name: obj for name, obj in named.items() if isinstance(obj, nn.Module)}
        modules |= {f"{type(root).__name__} {n}": root for n, root in enumerate(self._roots.values())}
        trained = digests.trained_by(self._run.objects.optimizers, modules)
        weights = {id(parameter) for _, parameter in trained}
        models = {name: m for name, m in modules.items() if any(id(p) in weights for p in m.parameters())}
        buffers: dict[int, tuple[str, Tensor]] = {}
        for model in models.values():
            for name, buffer in model.named_buffers():
                buffers.setdefault(id(buffer), (name, buffer))
        inner = {id(part) for model in models.values() for part in model.modules()}
        others = {name: m for name, m in modules.items() if name not in models and id(m) not in inner}
        copies = {name: digests.tensors_digest([*m.parameters(), *m.buffers()]) for name, m in others.items()}
        grouped = digests.copies_of([parameter for _, parameter in trained], values)
        return Point(
            updates=updates,
            weights=[digests.tensors_digest(parameter) for _, parameter in trained],
            names=[name for name, _ in trained],
            buffers=digests.by_name(buffers.values()),
            optimizers=[digests.optimizer_state(optimizer) for optimizer in self._run.objects.optimizers],
            schedulers=[digests.object_state(scheduler) for scheduler in self._schedulers],
            scalers=[digests.object_state(scaler) for scaler in self._scalers],
            generators=digests.generator_digests() | self._script_generators(),
            copies={name: digest for name, digest in copies.items() if digest}
            | {name: digests.tensors_digest(tensors) for name, tensors in grouped.items()},
            counters={path: n for _, path, n in values if isinstance(n, int) and not isinstance(n, bool)},
        )

    def _script_generators(self) -> dict[str, str]:
        """Return digests of the generators among the script's variables."""
        found: dict[str, str] = {}
        for name, obj in self._variables.objects.items():
            if isinstance(obj, torch.Generator):
                found[name] = digests.tensors_digest(obj.get_state())
            elif isinstance(obj, np.random.Generator):
                found[name] = digests.text_digest(obj.bit_generator.state)
            elif isinstance(obj, random.Random):
                found[name] = digests.text_digest(obj.getstate())
        return found

    def _wrote(self, path: str, *, is_checkpoint: bool) -> None:
        if os.getpid() == self._process:
            updates = self._run.update.num_updates
            self._write("wrote", WrittenFile(path=path, updates=updates, is_checkpoint=is_checkpoint))

    def _write(self, kind: str, entry: Any) -> None:
        os.write(self._file, line_of(kind, entry).encode())

    # --- the stop ------------------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """End the process like pre-emption: by SIGTERM and, after the notice, SIGKILL; without a handler for SIGTERM immediately."""
        if signal.getsignal(signal.SIGTERM) in (self._default_end, signal.SIG_DFL):
            os.kill(os.getpid(), signal.SIGKILL)
        killer = threading.Timer(self._request.notice_s, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
        os.kill(os.getpid(), signal.SIGTERM)


def _register(
    known: WeakKeyDictionary[Any, None], original: Callable[..., Any], created: Any, *args: Any, **kwargs: Any
) -> None:
    known[created] = None
    original(created, *args, **kwargs)


# --- The frames of a running script ---------------------------------------------------------------------------------------------


def frames_of_script() -> tuple[list[Any], str]:
    """Return the script's frames from the outermost to the loop, and the library whose code runs the loop; empty without one."""
    folder = script_folder()
    frames, libraries = [], []
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        name = str(frame.f_globals.get("__name__", ""))
        if name == "runpy":
            break
        if is_own_file(frame.f_code.co_filename, folder):
            frames.append(frame)
        elif name.split(".")[0] not in ("mezzo", "torch", "tqdm", "rich", "contextlib", "functools"):
            libraries.append(name)
    return frames[::-1], libraries[0] if libraries else ""


class DrawnSamples:
    """The samples of the last batch."""

    def __init__(self) -> None:
        self._drawn: WeakKeyDictionary[Any, deque[str]] = WeakKeyDictionary()
        """Digests of drawn indices whose batches are not delivered yet: workers draw ahead."""
        self._delivered: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._last = ("", 0)

    def install(self, patches: Patches) -> None:
        """Follow all loaders until ``patches`` are undone."""
        patches.around(_BaseDataLoaderIter, "_next_index", self._draw)
        patches.around(_BaseDataLoaderIter, "__next__", self._deliver)

    def take(self) -> tuple[str, int]:
        """Return the batch delivered since the last call: its digest, and its number in its pass; empty and 0 without one."""
        last, self._last = self._last, ("", 0)
        return last

    def _draw(self, original: Callable[..., Any], iterator: Any) -> Any:
        indices = original(iterator)
        known = isinstance(indices, int) or (isinstance(indices, list) and None not in indices)
        self._drawn.setdefault(iterator, deque()).append(text_digest(indices) if known else "")
        return indices

    def _deliver(self, original: Callable[..., Any], iterator: Any) -> Any:
        batch = original(iterator)
        drawn = self._drawn.get(iterator)
        self._delivered[iterator] = number = self._delivered.get(iterator, 0) + 1
        self._last = drawn.popleft() if drawn else "", number
        return batch


# The latter two write in native code.

_MAX_FILES = 1000
_IGNORED = ("/dev/", "/proc/", "/sys/")


class FileListener(Protocol):
    """A function that is called with each file that the script writes."""

    def __call__(self, path: str, *, is_checkpoint: bool) -> None:
        """Record the file."""


class FilesWritten:
    """The files that a run writes."""

    def __init__(self, listener: FileListener) -> None:
        self._listener, self._num, self._calling = listener, 0, False

    def install(self, patches: Patches) -> None:
        """Report writes until ``patches`` are undone."""
        global _active, _hooked
        if not _hooked:
            sys.addaudithook(_audit)
            _hooked = True
        _active = self
        patches.on_undo(_forget)
        patches.around(torch, "save", self._save)
        patches.around(torch.jit, "save", self._save)
        after_import("safetensors.torch", functools.partial(self._wrap_safetensors, patches), patches)

    def _wrap_safetensors(self, patches: Patches) -> None:
        for name in ("save_file", "save_model"):
            patches.around(sys.modules["safetensors.torch"], name, self._save)

    def _save(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        file = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
        is_path = isinstance(file, (str, bytes, os.PathLike))  # a Path, too, has a name: its last part
        self._report(file if is_path else getattr(file, "name", None), is_checkpoint=True)
        return result

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Report the file that an audit event writes, if it writes one."""
        if self._calling:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                self._report(path, is_checkpoint=False)
        elif event == "os.rename":
            self._report(arguments[1], is_checkpoint=False)

    def _report(self, file: Any, *, is_checkpoint: bool) -> None:
        if self._num >= _MAX_FILES or not isinstance(file, (str, bytes, os.PathLike)):
            return
        path = os.path.abspath(os.fsdecode(file))
        if path.startswith(_IGNORED) or "__pycache__" in path:
            return
        self._num += 1
        self._calling = True
        try:
            self._listener(path, is_checkpoint=is_checkpoint)
        finally:
            self._calling = False


_active: FilesWritten | None = None
_hooked = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Pass events on while a run is traced; an audit hook cannot be removed."""
    if _active is not None:
        _active.on_event(event, arguments)


def _forget() -> None:
    global _active
    _active = None
