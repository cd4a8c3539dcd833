"""Run a script's code in this process, and make the record of how it ended, and of what it printed and read."""

from __future__ import annotations

import functools
import importlib
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from mezzo.children.signals import EndedBySignal
from mezzo.error_texts import advice_for
from mezzo.errors import MezzoError, NoKernelError
from mezzo.launch.patches import Patches, after_import
from mezzo.launch.request import Request, policy_text
from mezzo.launch.training import Training
from mezzo.library_files import is_library_file
from mezzo.records import FILE_CLOCK_TICK_S, AnyRecord, FileRead, Metric, Note, RankRun, RunRecord

INTERRUPTED = 130

Ending = tuple[int, BaseException | None]
"""An exit code, and the error that ended the script."""


def record_of(
    request: Request,
    training: Training,
    ending: Ending,
    *,
    shell: dict[str, Any],
    ran: tuple[float, float],
    digest: str = "",
    late_settings: Sequence[Note] = (),
    **measured: Any,
) -> AnyRecord:
    """Return the record of a run that has ended.

    Args:
        request: the run's request.
        training: what the script trained.
        ending: how the script ended.
        shell: fields of the environment as they were before the script began.
        ran: the Unix time at which the run began, and its seconds.
        digest: of the script.
        late_settings: settings that the script made too late to take effect.
        measured: further fields of the record.
    """
    exit_code, error = ending
    effective, stand_in = training.effective(), [] if request.stand_in is None else [request.stand_in.reason]
    left_alone = [*effective.left_alone, *stand_in, *late_settings]
    record = RunRecord(
        command=list(request.command),
        script=request.target,
        script_sha256=digest,
        framework=training.framework,
        policy=policy_text(request.policy),
        policy_typed=request.policy_typed,
        checkpoint="" if request.models is None else request.models.checkpoint,
        explanation=training.explanation(),
        seed=request.seed,
        environment=training.environment().model_copy(update=shell),
        steps=training.steps(),
        memory=training.memory(),
        effective=effective.model_copy(update={"left_alone": left_alone}),
        findings=training.findings(),
        watched=request.watches,
        ranks=[] if request.rank is None else [RankRun(rank=request.rank, weights=training.weights())],
        earlier_update_s=request.earlier_update_s,
        request_sha256=request.digest,
        placement=request.placement,
        started_at_s=ran[0],
        duration_s=ran[1],
        exit_code=exit_code,
        error=_sentence(error),
        hint=hint_of(error),
        **measured,
    )
    if training.observer is None:
        return record
    if error is not None:
        training.observer.failed(error)
    return training.observer.record(record)


def guarded(action: Callable[[], None], *, before: Ending = (0, None)) -> Ending:
    """Run code of the script; return the exit code that Python would give, and the error; an ending ``before`` it takes precedence."""
    ending: Ending = (0, None)
    try:
        action()
    except EndedBySignal as error:
        ending = error.exit_code, error
    except SystemExit as leaving:
        ending = _exit_code(leaving), None
    except MezzoError as error:
        ending = error.exit_code, error
    except KeyboardInterrupt as error:
        print_error(error)
        ending = INTERRUPTED, error
    except BaseException as error:
        print_error(error)
        ending = 1, error
    return ending if before == (0, None) else before


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF  # as the system truncates it
    print(leaving.code, file=sys.stderr)
    return 1


def hint_of(error: BaseException | None) -> str:
    """Return what to do about the error that ended a script; empty if there is no advice."""
    if isinstance(error, MezzoError):
        return error.hint
    return advice_for(sentence_of(error)) if error is not None else ""


def _sentence(error: BaseException | None) -> str | None:
    if error is None:
        return None
    if isinstance(error, EndedBySignal):
        return error.sentence
    if isinstance(
        error, NoKernelError
    ):  # stands for an error of torch's, and is told from others by its type as these are
        return f"{type(error).__name__}: {error.message}"
    return error.message if isinstance(error, MezzoError) else sentence_of(error)


# ``torch.multiprocessing.spawn`` raises with the process's whole traceback as its message, ``torchrun`` with a table of all
# processes. Imports no torch.

_ERROR_FILE = "error.json"
"""The name of the file in which a process reports to torchrun why it failed."""
_TRACEBACK = "Traceback (most recent call last):"


def sentence_of(error: BaseException) -> str:
    """Return the type and message of an error; if it reports a failed process, that process and its reason."""
    kind = type(error)
    if kind.__module__.startswith("torch."):
        if kind.__name__ == "ChildFailedError":
            return _first_failure(error)
        if kind.__name__ == "ProcessRaisedException":
            return f"process {getattr(error, 'error_index', '?')}: {raised(str(error))}"
        if kind.__name__ == "ProcessExitedException":
            return str(error)
    return f"{kind.__name__}: {error}".rstrip(": ")


def _first_failure(error: Any) -> str:
    """Return the first failure that torchrun reports, or how that process ended if it gave no reason."""
    rank, failure = error.get_first_failure()
    message = failure.message
    if isinstance(message, dict):  # written by torch's @record
        return f"rank {rank}: {message.get('message', '')}".rstrip(": ")
    if Path(failure.error_file).name == _ERROR_FILE:
        return f"rank {rank}: {message}"
    how = f"signal {failure.signal_name()}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return f"rank {rank}: it ended with {how}; see the output above; `torchrun ... -m mezzo` would record the reason"


def raised(text: str) -> str:
    """Return the type and message of the exception that the last traceback in ``text`` ends with."""
    lines = text.rpartition(_TRACEBACK)[2].strip("\n").splitlines()
    start = 0
    for place, line in enumerate(lines):
        if not line.startswith("  File "):
            continue
        after = place + 1
        while after < len(lines) and lines[after].startswith("    "):
            after += 1
        start = after
    return "\n".join(lines[start:]).strip() or text.strip()


_OURS = str(Path(__file__).resolve().parent.parent) + os.sep
_RUNPY = ("<frozen runpy>", "runpy.py")


def print_error(error: BaseException) -> None:
    """Print ``error`` with ``sys.excepthook``, which the script may have replaced."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            current.__traceback__ = without_ours(current.__traceback__)
            waiting += [current.__cause__, current.__context__]
    sys.excepthook(type(error), error, error.__traceback__)


def without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """Return ``traceback`` without the frames of this package and of the code that started the script."""
    entries: list[TracebackType] = []
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        starts_script = not entries and file.endswith(_RUNPY)
        if not starts_script and not file.startswith(_OURS):
            entries.append(traceback)
        traceback = traceback.tb_next
    rest: TracebackType | None = None
    for entry in reversed(entries):
        rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")
"""Escape sequences for colours and the cursor, and other invisible characters."""
_NOT_FINITE = re.compile(r"(?<![\w.])[+-]?(?:nan|inf(?:inity)?)(?![\w.])", re.IGNORECASE)
_REST = re.compile(r"[eE][+-]?\d+|(?:,\d+)+(?:\.\d+)?(?:[eE][+-]?\d+)?")
"""The possible rest of a number after its first digits: an exponent, or groups of digits after commas."""
_IN_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?(?:[eE][+-]?\d+)?")
_MAX_SHOWN = 40
"""Most characters of a match that is not a number to show."""

_TOKEN = re.compile(
    r"""
    (?P<silent> \\[bBAZ] | \(\?[aiLmsux-]+\) | \(\?(?:[aiLmsux-]*:|>|<?[=!]) | [*+?]\??\+? | \{\d*,?\d*\}\?? | [)^$] )
  | (?P<group> \((?:\?P<(?P<name>\w+)>)? )
  | (?P<wild> \\(?:x[0-9A-Fa-f]{2}|0[0-7]{0,2}|.) | \[\^?\]?(?:\\.|[^\]\\])*\] | [.|] )
  | (?P<literal> . )
    """,
    re.VERBOSE | re.DOTALL,
)
"""The parts of a regular expression: what matches no character, a capturing group, one of several characters, one given character."""


class MetricReader:
    """The numbers that a pattern finds in a script's output, with the number of updates before each."""

    def __init__(self, pattern: str, num_updates: Callable[[], int]) -> None:
        self._pattern, self._compiled = pattern, re.compile(pattern)
        self._begins_with = beginning_of(pattern)
        self._num_updates = num_updates
        self._steps: list[int] = []
        self._values: list[float] = []
        self._percent = False
        self._text: str | None = None

    def line(self, text: str) -> None:
        """Read one line of output; most lines of a script have no metric, and cost a search for the pattern's first letters."""
        if text.isprintable():
            matches = [*self._matches(text)] if self._begins_with in text else []
        else:  # a pattern may contain colour codes, so the original line comes second
            matches = [*self._matches(_CONTROLS.sub("", text))] or [*self._matches(text)]
        for number, rest in matches:
            try:
                value = _value_of(number)
            except ValueError:
                self._text = number.strip()[:_MAX_SHOWN] or None
                continue
            self._percent |= number.endswith("%") or rest.lstrip().startswith("%")
            self._text = None
            self._steps.append(self._num_updates())
            self._values.append(value)

    def _matches(self, line: str) -> Iterator[tuple[str, str]]:
        """Yield each match of the pattern's first group with the text after it; a pattern of digits also matches ``nan`` and ``inf``."""
        words, digits = dict[int, re.Match[str]](), line
        lower = line.lower()
        if "nan" in lower or "inf" in lower:
            words = {word.start(): word for word in _NOT_FINITE.finditer(line)}
            digits = _NOT_FINITE.sub(lambda word: "0." + "0" * (len(word.group()) - 2), line)
        for match in self._compiled.finditer(digits):
            start, end = match.span(1)
            if start >= 0:
                number = words[start].group() if start in words else whole_number(line, start, end)
                yield number, line[start + len(number) :]

    def metric(self) -> Metric:
        """Return the metric from the lines read until now."""
        return Metric(
            name=name_of(self._pattern),
            pattern=self._pattern,
            steps=self._steps,
            values=self._values,
            percent=self._percent,
            text=self._text,
        )


def whole_number(line: str, start: int, end: int) -> str:
    """Return what a group matched in ``line``, with the rest of the number if the pattern cut it: ``1.2`` of ``1.2e-05``."""
    matched, rest = line[start:end], _REST.match(line, end)
    if rest is None or not re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)", matched):
        return matched
    whole = matched + rest.group()
    in_thousands = _IN_THOUSANDS.fullmatch(whole) or re.match(r"[+-]?0,", whole)
    return whole if in_thousands or not rest.group().startswith(",") else matched


def _value_of(number: str) -> float:
    """Return the value of a printed number; a comma that does not group thousands makes it no number."""
    plain = number.strip().removesuffix("%")
    return float(plain.replace(",", "") if _IN_THOUSANDS.fullmatch(plain) else plain)


def name_of(pattern: str) -> str:
    """Return the words of a metric's pattern: those before its first group, else the group's name, else those after it."""
    before: list[str] = []
    after: list[str] = []
    group, words = "", before
    for token in _TOKEN.finditer(pattern):
        if token["group"] is not None and words is before:
            group, words = token["name"] or "", after
        letter = token["literal"] or " "
        words.append("" if token["silent"] is not None else letter if letter.isalnum() or letter in "_@-" else " ")
    first, last = (" ".join(word for part in "".join(w).split() if (word := part.strip("-"))) for w in (before, after))
    return first or group.replace("_", " ") or last or "metric"


def beginning_of(pattern: str) -> str:
    """Return letters with which every match of a pattern begins; empty if there are none for sure."""
    letters: list[str] = []
    if "|" in pattern or "(?" in pattern:
        return ""
    for token in _TOKEN.finditer(pattern):
        if token["literal"] is None:
            if (token["silent"] or "")[:1] in ("*", "?", "{"):  # the last letter may be missing
                del letters[-1:]
            break
        if token["literal"] in "0123456789+-.":  # as in a number, for which a line may have nan
            break
        letters.append(token["literal"])
    return "".join(letters)


class MetricStream:
    """A text stream that forwards everything and passes every complete line to a reader."""

    def __init__(self, stream: TextIO, line: Callable[[str], None]) -> None:
        self._stream, self._line = stream, line
        self._open = ""

    def write(self, text: str) -> int:
        """Write ``text``."""
        *lines, self._open = (self._open + text).replace("\r", "\n").split("\n")
        for line in lines:
            self._line(line)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for text in lines:
            self.write(text)

    def finish(self) -> None:
        """Pass the last line to the reader, even without a line end."""
        self._line(self._open)
        self._open = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# A run that resumes from another run's checkpoint is not independent. Writes need not be watched: a file's modification time,
# which survives renaming, shows in which run it was written. So an audit hook inspects files that are opened for reading, at one ``stat``
# per path. The hook does not see libraries that open files in native code: safetensors, HDF5, TensorFlow and TorchScript are
# wrapped instead. Processes that the script starts are not watched.
#
# Files that carry no training state are left out: byte code, packages, compiled kernels, the user's cache folder, and the databases
# of trackers.

_MAX_PATHS = 100_000
"""Most inspected paths that are remembered: a data set may have millions."""
_MAX_FOUND = 100


class FilesRead:
    """The files that a run has read."""

    def __init__(self, *, since_s: float, before_s: float) -> None:
        """Create an empty list; both are Unix times: when the comparison began, and when this run did."""
        self._since_s, self._before_s = since_s, before_s
        self._seen: set[str] = set()
        self._found: dict[str, float] = {}

    @property
    def found(self) -> list[FileRead]:
        """The files in the order in which they were read."""
        return [FileRead(path=path, written_at_s=written) for path, written in self._found.items()]

    def read(self, file: Any) -> None:
        """Inspect a file that is about to be read; ignore anything that is not the path of a file."""
        try:
            path = os.path.abspath(os.fsdecode(file))
            if path in self._seen:
                return
            if len(self._seen) >= _MAX_PATHS:
                self._seen.clear()
            self._seen.add(path)
            status = os.stat(path)
        except (OSError, TypeError, ValueError):  # missing, a descriptor, or a stream: opening it is up to the script
            return
        if self._is_of_another_run(status) and len(self._found) < _MAX_FOUND and not is_library_file(path):
            self._found[path] = status.st_mtime

    def _is_of_another_run(self, status: os.stat_result) -> bool:
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return False
        written = status.st_mtime
        # Some file systems have a resolution of one or two seconds: the file may have been written that much later.
        coarse = written == int(written)
        earliest = self._since_s - (2.0 if coarse else FILE_CLOCK_TICK_S)
        return earliest <= written < (int(self._before_s) if coarse else self._before_s)


_watching: FilesRead | None = None
_hooked = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Record the files that Python opens. An audit hook cannot be removed, so it first checks whether recording is on."""
    watching = _watching
    if watching is None:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and not flags & os.O_WRONLY and not flags & os.O_TRUNC and not isinstance(path, int):
            watching.read(path)
    elif event == "sqlite3.connect":
        watching.read(arguments[0])


@contextmanager
def files_read(since_s: float | None) -> Iterator[FilesRead]:
    """Record the files that the code inside reads and that were written since a Unix time; None records none."""
    global _watching, _hooked
    # The first file that the run itself writes may be dated one tick before the run began.
    files = FilesRead(since_s=0.0 if since_s is None else since_s, before_s=time.time() - FILE_CLOCK_TICK_S)
    if since_s is None:
        yield files
        return
    patches = Patches()
    for package, wrap in _NATIVE.items():
        after_import(package, functools.partial(wrap, files, patches), patches)
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    _watching = files
    try:
        yield files
    finally:
        _watching = None
        patches.undo()


def _read(files: FilesRead, position: int, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that reads the file named by its argument at ``position``."""
    files.read(args[position] if len(args) > position else next(iter(kwargs.values()), None))
    return original(*args, **kwargs)


def _wrap_safetensors(files: FilesRead, patches: Patches) -> None:
    for name in ("safetensors", "safetensors.torch", "safetensors.numpy"):
        if hasattr(sys.modules.get(name), "safe_open"):
            patches.around(sys.modules[name], "safe_open", functools.partial(_read, files, 0))


def _wrap_h5py(files: FilesRead, patches: Patches) -> None:
    patches.around(sys.modules["h5py"].File, "__init__", functools.partial(_read, files, 1))


def _wrap_torch(files: FilesRead, patches: Patches) -> None:
    torch = sys.modules["torch"]
    patches.around(torch.jit, "load", functools.partial(_read, files, 0))
    patches.around(torch, "from_file", functools.partial(_read, files, 0))


def _wrap_tensorflow(files: FilesRead, patches: Patches) -> None:
    file_io = importlib.import_module("tensorflow.python.lib.io.file_io")
    patches.around(file_io.FileIO, "__init__", functools.partial(_read, files, 1))
    checkpoints = importlib.import_module("tensorflow.python.training.py_checkpoint_reader")

    def new_reader(original: Callable[..., Any], prefix: Any) -> Any:
        files.read(f"{os.fsdecode(prefix)}.index")
        return original(prefix)

    patches.around(checkpoints, "NewCheckpointReader", new_reader)


_NATIVE: dict[str, Callable[[FilesRead, Patches], None]] = {
    "safetensors": _wrap_safetensors,
    "h5py": _wrap_h5py,
    "torch": _wrap_torch,
    "tensorflow": _wrap_tensorflow,
}
