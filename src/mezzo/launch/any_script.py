"""What the run of a script changes in every framework: its seeds, steps of its schedules, and the names that its models get.

Seed k adds k to the values that the script passes to ``torch.manual_seed``, ``torch.cuda.manual_seed[_all]``,
``torch.Generator.manual_seed``, ``random.seed``, ``numpy.random.seed`` and ``numpy.random.default_rng``. Before the
script begins, the global generators get seed k, so that a script that sets no seed is repeatable as well. Seeds from which a library
creates generators in other ways are not shifted (``random.Random(3)``, ``numpy.random.RandomState(3)``, scikit-learn's
``random_state=3``): data sets and their splits stay the same for all seeds.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from mezzo.launch.patches import Patches

_NAMES = ("seed", "a")  # names of the first parameter of the functions that are patched below


def shift_seeds(seed: int, patches: Patches) -> None:
    """Seed Python's, NumPy's and torch's global generators, and add ``seed`` to every seed set from now until ``patches`` are undone."""
    shift_python(seed, patches)
    shift_torch(seed, patches)


def shift_python(seed: int, patches: Patches) -> None:
    """Do the same for Python and NumPy only."""
    random.seed(seed)
    np.random.seed(seed)
    shift = Shift(seed)
    for owner, name in ((random, "seed"), (np.random, "seed"), (np.random, "default_rng")):
        patches.around(owner, name, shift.call)


def shift_torch(seed: int, patches: Patches) -> None:
    """Do the same for torch only; imports torch."""
    import torch

    # torch's class is immutable, so a subclass takes its name.
    class Generator(torch.Generator):
        def manual_seed(self, value: int) -> torch.Generator:
            return super().manual_seed(value + seed)

    torch.manual_seed(seed)
    shift = Shift(seed)
    for owner, name in (
        (torch, "manual_seed"),
        (torch.random, "manual_seed"),
        (torch.cuda, "manual_seed"),
        (torch.cuda, "manual_seed_all"),
    ):
        patches.around(owner, name, shift.call)
    patches.replace(torch, "Generator", Generator)


class Shift:
    """A shift of seeds in outermost calls only: ``torch.manual_seed`` itself calls ``torch.cuda.manual_seed_all``."""

    def __init__(self, by: int) -> None:
        self._by, self._inside = by, False

    def call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a seed function with the shift added to its first argument."""
        if self._inside:
            return original(*args, **kwargs)
        self._inside = True
        try:
            return original(
                *map(self._shifted, args[:1]),
                *args[1:],
                **{name: self._shifted(value) if name in _NAMES else value for name, value in kwargs.items()},
            )
        finally:
            self._inside = False

    def _shifted(self, value: Any) -> Any:
        return value + self._by if isinstance(value, (int, np.integer)) else value


# It is the name of the smallest model that has all of the optimizer's parameters: ``generator`` for ``Adam(generator.parameters())`` or
# ``Adam(self.generator.parameters())``.

_MAX_FRAMES = 4
_USES_COPY = {"locals", "vars", "exec", "eval"}
"""In Python below 3.13 reading ``f_locals`` makes a copy of a frame's variables; a function that calls one of these may use that copy."""


def name_in_scope(parameters: set[int], kind: type, *, libraries: tuple[str, ...]) -> str | None:
    """Return the name of a model with the given parameters in the calling frames; None if there is none.

    Args:
        parameters: the ids of the parameters.
        kind: the class of models.
        libraries: packages whose frames are skipped.
    """
    callers = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    script = (f for f in callers if str(f.f_globals.get("__name__", "")).partition(".")[0] not in libraries)
    for frame in itertools.islice(script, _MAX_FRAMES):
        sizes = _sizes_of_models(frame, kind, containing=parameters)
        if sizes:
            return min(sizes, key=lambda size: size[0])[1]
    return None


def _sizes_of_models(frame: FrameType, kind: type, *, containing: set[int]) -> list[tuple[int, str]]:
    """Return the number of parameters and the name of each model in a frame that contains the given parameters."""
    copied = sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if copied and not _USES_COPY.isdisjoint(frame.f_code.co_names):
        return []
    variables = frame.f_locals
    sizes = [
        (len(ids), name)
        for name, model in _models_in_scope(variables, kind)
        if containing <= (ids := set(map(id, model.parameters())))
    ]
    if copied:  # the frame keeps the copy, which would keep alive what the script releases
        variables.clear()
    return sizes


def _models_in_scope(variables: dict[str, Any], kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in list(variables.items()):
        if isinstance(value, kind):
            yield name, value
    owner = variables.get("self")
    if isinstance(owner, kind):
        yield from owner.named_children()  # type: ignore[attr-defined]
    else:
        yield from ((name, v) for name, v in getattr(owner, "__dict__", {}).items() if isinstance(v, kind))


# A scheduler's step is left out if the only update since its last step was skipped. That affects schedules that step after every update,
# and never one that steps after every epoch. Imports no framework: schedulers of all frameworks have a ``step``.


class ScriptSchedules:
    """The schedulers of a script, whose steps are left out after skipped updates."""

    def __init__(
        self, updates_of: Callable[[Any], tuple[int, int]], *, on_step: Callable[[Any], None] = lambda _: None
    ) -> None:
        """Create an empty list of schedulers.

        Args:
            updates_of: returns how many updates a scheduler's optimizer has made, including skipped ones, and how many were skipped.
            on_step: called with every scheduler that the script steps.
        """
        self._updates_of, self._on_step = updates_of, on_step
        self._seen: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        """The result of ``updates_of`` at a scheduler's last step."""
        self._stepping = False

    def begin(self, scheduler: Any) -> None:
        """Count a scheduler's updates from now on."""
        self._seen[scheduler] = self._updates_of(scheduler)

    def since_step(self, scheduler: Any) -> tuple[int, int] | None:
        """Return a scheduler's updates since its last step, and how many of them were skipped; None for an unknown scheduler."""
        now, then = self._updates_of(scheduler), self._seen.get(scheduler)
        return None if then is None else (now[0] - then[0], now[1] - then[1])

    def begin_after(self, scheduler: Any, since_step: tuple[int, int]) -> None:
        """Count a scheduler's updates from now on, after those that ``since_step`` returned in the run that is resumed."""
        now = self._updates_of(scheduler)
        self._seen[scheduler] = now[0] - since_step[0], now[1] - since_step[1]

    def waits(self, scheduler: Any) -> bool:
        """Return whether the only update since the last call for ``scheduler`` was skipped."""
        since = self.since_step(scheduler)
        self.begin(scheduler)
        return since == (1, 1)

    def install(self, patches: Patches, base: type[Any]) -> None:
        """Make schedulers of ``base`` and its subclasses wait at skipped updates until ``patches`` are undone."""
        for kind in dict.fromkeys(with_subclasses(base)):
            if "step" in vars(kind):
                patches.wrap(kind, "step", self._waiting_step)
            if "__init__" in vars(kind):
                patches.around(kind, "__init__", self._construct)

    def _construct(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Let a scheduler step while it is constructed: that sets the first learning rate."""
        before, self._stepping = self._stepping, True
        try:
            original(scheduler, *args, **kwargs)
        finally:
            self._stepping = before
        self.begin(scheduler)

    def _waiting_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if self._stepping:  # by an outer scheduler: a chain steps its parts, and a warm-up the schedule inside it
                return original(scheduler, *args, **kwargs)
            self._on_step(scheduler)
            if self.waits(scheduler):
                return None
            self._stepping = True
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._stepping = False

        return step


def with_subclasses(base: type[Any]) -> Iterator[type[Any]]:
    """Yield ``base`` and all its subclasses."""
    yield base
    derived: list[type[Any]] = base.__subclasses__()
    for kind in derived:
        yield from with_subclasses(kind)
