"""Which framework a script trains in, and the interface of each framework to the process that runs the script.

The framework is found from the imports of the script's own files, which are read and not run. It is PyTorch, unless they import
Keras (on any backend) or PaddlePaddle: torch is also a backend of Keras and a data loader for the others, and TensorFlow
without Keras is often imported only for its data sets or summaries. A framework imported under a computed name is
not found. Imports neither torch nor any other framework.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mezzo.observe.stopping import StopScript

if TYPE_CHECKING:
    from mezzo.errors import MezzoError
    from mezzo.launch.patches import Patches
    from mezzo.launch.request import GuardRequest, ModelChanges, ScriptFile, SnapshotRequest, TraceRequest
    from mezzo.measure.live import Report
    from mezzo.observe.settings import AnySettings
    from mezzo.policy import Policy
    from mezzo.records import (
        AnyRecord,
        Bottleneck,
        Effective,
        Environment,
        Finding,
        Guardrails,
        Memory,
        OutOfMemory,
        Reason,
        RunRecord,
        SnapshotsTaken,
        Steps,
    )


Framework = Literal["torch", "keras", "paddle"]

MAX_FILES = 200
_NAMES_CUDA = re.compile(r"cuda|nccl|pin_memory")
"""Most files of a script that are read: a large project imports its framework in one of the first."""


class Watching(Protocol):
    """The part of an observer's interface that the process running the script uses."""

    @property
    def compiles(self) -> bool:
        """Whether the script compiles code, whose operations cannot be seen one by one."""

    def too_short(self) -> bool:
        """Return whether the script ended before anything was observed."""

    def failed(self, error: BaseException) -> None:
        """Note the error that ended the script."""

    def record(self, run: RunRecord) -> AnyRecord:
        """Return the observer's record, which includes that of the whole run."""


class Training(Protocol):
    """A running training, recorded step by step."""

    @property
    def framework(self) -> str:
        """The framework and its version, with the backend if it has several: ``keras 3.15.1 on tensorflow 2.21.0``."""

    @property
    def num_updates(self) -> int:
        """The number of updates, including skipped ones and the open one."""

    @property
    def has_any_loss(self) -> bool:
        """Whether a loss was seen, even if no update followed."""

    @property
    def observer(self) -> Watching | None:
        """The observer of the training; None if only its steps are recorded."""

    def report_to(self, report: Report, *, every_s: float) -> None:
        """Pass the latest numbers that the host knows to ``report`` at the end of steps, at most every ``every_s`` seconds."""

    def stop_after(self, limit: StepLimit) -> None:
        """Stop the script at ``limit``.

        Raises:
            ScriptError: scripts of this framework cannot be stopped after a step.
        """

    not_resumed: MezzoError | None
    """Why a run that was to be resumed was not; known after ``end_snapshots``."""

    def begin_stand_in(self) -> None:
        """Let the CPU stand in for CUDA from now on, if this machine has no CUDA device; only of PyTorch scripts."""

    run_file: Callable[[ScriptFile], dict[str, Any]] | None
    """Runs the script's file instead of Python and returns its global variables; None lets Python run it."""

    def begin_snapshots(self, request: SnapshotRequest | None, script: ScriptFile) -> None:
        """Save the state of a script's file from now on as requested, or restore a saved one; None for neither.

        Raises:
            ScriptError: scripts of this framework cannot be saved.
            SnapshotError: the folder cannot be used, or has nothing to resume.
        """

    def begin_trace(self, request: TraceRequest | None) -> None:
        """Trace the state of the training from now on, as requested; None for no trace.

        Raises:
            ScriptError: scripts of this framework cannot be traced.
        """

    def end_snapshots(self) -> SnapshotsTaken | None:
        """Wait for the last snapshot, and return which were taken; None if none were requested."""

    def begin_guard(self, request: GuardRequest) -> None:
        """Watch the recorded numbers for alarms from now on.

        Raises:
            ScriptError: scripts of this framework are not watched.
        """

    def guardrails(self) -> Guardrails | None:
        """Return what the guard noticed in all steps; None without one."""

    @property
    def stopped_by_guard(self) -> MezzoError | None:
        """Why a guard ended the script; known after ``guardrails``."""

    def out_of_memory(self, error: BaseException | None) -> OutOfMemory | None:
        """Return what filled the memory if ``error`` is an out-of-memory error; None otherwise."""

    def change_models(self, changes: ModelChanges) -> Callable[[], float | None]:
        """Change every model at its first call; return a function that returns the number of input elements of a step.

        Raises:
            ScriptError: models of this framework cannot be changed.
        """

    def close_update(self) -> None:
        """Close the update that is still open at the end of the script."""

    def steps(self) -> Steps:
        """Return the record of every step."""

    def memory(self) -> Memory:
        """Return the memory that a step uses."""

    def effective(self) -> Effective:
        """Return which operations actually ran in which format, and what the policy left alone."""

    def bottleneck(self) -> Bottleneck | None:
        """Return what limits the script's speed; None if that is not measured in this framework."""

    def findings(self) -> list[Finding]:
        """Return misuse of the script's own mixed precision; empty if it is not checked in this framework."""

    def explanation(self) -> list[Reason]:
        """Return what the policy does in this framework on this device, with reasons; empty for ``as-is``."""

    def environment(self) -> Environment:
        """Return the machine and the versions."""

    def keep_weights(self, patches: Patches) -> None:
        """Let ``weights`` return a digest even after the script has dropped its model, until ``patches`` are undone."""

    def weights(self) -> str:
        """Return a digest of the weights, for comparison with other processes; empty unless ``keep_weights`` was called."""


class Switch(Protocol):
    """A context that runs the code inside under a policy (None: its own precision) and records every training step."""

    def __call__(
        self, policy: Policy | None, *, seed: int | None, observe: AnySettings | None
    ) -> AbstractContextManager[Training]:
        """Return the context."""


def training_in(framework: Framework) -> Switch:
    """Return the context that trains in ``framework``; imports that framework."""
    switch: Switch = importlib.import_module(f"mezzo.launch.{framework}").training
    return switch


def framework_of(target: str, *, kind: Literal["script", "module"]) -> Framework:
    """Return the framework of a script or of a module (by its dotted name), from its own files' imports."""
    imported = _imported_packages(target, kind=kind)
    others: tuple[Framework, ...] = ("paddle", "keras")
    return next((framework for framework in others if framework in imported), "torch")


def _imported_packages(target: str, *, kind: Literal["script", "module"]) -> set[str]:
    """Return the packages that a script and its own files import; TensorFlow's Keras counts as ``keras``."""
    packages = set()
    for _, tree in _own_files(target, kind):
        for name in _imports_of(tree):
            parts = name.split(".")
            packages.add("keras" if parts[:2] == ["tensorflow", "keras"] else parts[0])
    return packages


def needs(package: str, target: str, *, kind: Literal["script", "module"]) -> Literal["no", "perhaps", "surely"]:
    """Return whether a script imports a package, and whether it would fail without it."""
    trees = [tree for _, tree in _own_files(target, kind)]
    if any(_imports(tree, package, conditionally=False) for tree in trees):
        return "surely"
    return "perhaps" if any(_imports(tree, package, conditionally=True) for tree in trees) else "no"


def own_sources(target: str, *, kind: Literal["script", "module"]) -> Iterator[str]:
    """Yield the text of a script and of the files next to it that it imports."""
    for source, _ in _own_files(target, kind):
        yield source.decode(errors="replace")


def own_trees(target: str, *, kind: Literal["script", "module"]) -> Iterator[ast.AST]:
    """Yield the syntax tree of a script and of the files next to it that it imports."""
    for _, tree in _own_files(target, kind):
        yield tree


def names_cuda(target: str, *, kind: Literal["script", "module"]) -> bool:
    """Return whether a script, or a file next to it that it imports, names CUDA, its communication or its pinned memory."""
    return any(map(_NAMES_CUDA.search, own_sources(target, kind=kind)))


def spec_of(module: str) -> ModuleSpec | None:
    """Return where Python would find a module from this folder, None if nowhere; runs no code of its packages."""
    first, *below = module.split(".")
    if not first or not all(below):
        return None
    sys.path.insert(0, "")
    try:
        spec = importlib.util.find_spec(first)  # a name without a dot has no package to run
        for name in below:
            places = None if spec is None else spec.submodule_search_locations
            spec = None if places is None else PathFinder.find_spec(name, list(places))
        return spec
    except (ImportError, ValueError):
        return None
    finally:
        sys.path.pop(0)


def _source_of(module: str) -> Path | None:
    spec = spec_of(module)
    if spec is not None and spec.submodule_search_locations:
        spec = spec_of(f"{module}.__main__")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _own_files(target: str, kind: Literal["script", "module"]) -> Iterator[tuple[bytes, ast.AST]]:
    """Yield the script, and the files next to it that it imports, each as source and syntax tree."""
    script = _source_of(target) if kind == "module" else Path(target)
    waiting, seen = [] if script is None else [script], set[Path]()
    folder = Path() if script is None else script.resolve().parent
    while waiting and len(seen) < MAX_FILES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            source = path.read_bytes()
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):  # the script's own error, which appears when it runs
            continue
        yield source, tree
        for name in _imports_of(tree):
            waiting += [p for p in _files_of(folder, name.split(".")) if p.is_file()]


def _imports(node: ast.AST, package: str, *, conditionally: bool) -> bool:
    """Return whether code imports a package; with ``conditionally``, also in a function or under a condition."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        return not relative and package in (name.partition(".")[0] for name in _imports_of(node))
    if not conditionally and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.If)):
        return False
    inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Try) and any(_catches_import_errors(handler) for handler in node.handlers):
        inner = [*node.orelse, *node.finalbody]
    return any(_imports(part, package, conditionally=conditionally) for part in inner)


def _catches_import_errors(handler: ast.ExceptHandler) -> bool:
    caught = "Exception" if handler.type is None else ast.unparse(handler.type)
    reraises = any(isinstance(inner, ast.Raise) for inner in ast.walk(handler))
    return not reraises and any(name in caught for name in ("ImportError", "ModuleNotFoundError", "Exception"))


def _files_of(folder: Path, parts: list[str]) -> list[Path]:
    """Return the files that a name may be imported from: a module, a package, or a module that defines the name's last part."""
    path = folder.joinpath(*parts)
    module = [path.parent.with_suffix(".py")] if len(parts) > 1 else []  # never a file outside the folder
    return [path.with_suffix(".py"), path / "__init__.py", *module]


def _imports_of(tree: ast.AST) -> Iterator[str]:
    tensorflow = {"tensorflow"}
    """TensorFlow's names in this file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            tensorflow |= {alias.asname for alias in node.names if alias.name == "tensorflow" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):  # from . import model
            yield from (alias.name for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "keras":
            owner = node.value
            if isinstance(owner, ast.Name) and owner.id in tensorflow:
                yield "tensorflow.keras"


# --- Run only a script's first steps, if the whole script would take too long. Imports no torch ---------------------------------

_AFTER_FIRST = 0.1
"""Share of the limit granted after the first step, however long that took: it may be mostly compilation, with short steps to follow."""


class StepLimit:
    """The number of steps, or the time, after which a script is stopped; an open step is finished first."""

    def __init__(self, *, steps: int | None, seconds: float | None) -> None:
        self._steps, self._seconds = steps, seconds
        self._began_s = time.monotonic()
        self._least_end_s: float | None = None
        self.stopped = False
        """Whether the limit has stopped the script."""

    def check(self, num_closed: int) -> None:
        """Stop the script if it has made enough steps, or used up its time.

        Raises:
            StopScript: the limit is reached.
        """
        enough = self._steps is not None and num_closed >= self._steps
        if enough or (self._seconds is not None and self._is_over(self._seconds)):
            self.stopped = True
            raise StopScript

    def _is_over(self, seconds: float) -> bool:
        now = time.monotonic()
        if self._least_end_s is None:
            self._least_end_s = now + _AFTER_FIRST * seconds
        return now >= max(self._began_s + seconds, self._least_end_s)
