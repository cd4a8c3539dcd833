"""What the tests of ``mezzo diff`` share: run a script of ``tests/scripts/diff``, edited, and return its values."""

from __future__ import annotations

import functools
import linecache
from typing import Any, NamedTuple

from mezzo.callables import _trained
from mezzo.commands.diff.judge import Parting, judge
from mezzo.observe.settings import ValuesSettings
from mezzo.observe.values.log import Event, ValuesLog
from mezzo.observe.values.observer import RecordedValues
from mezzo.policy import Policy
from paths import SCRIPTS

TWO_STEPS = ValuesSettings(seed=0, steps=(1, 2))


class Edit(NamedTuple):
    """A change of a script's text."""

    name: str
    script: str
    old: str
    new: str


def values_of(text: str, *, policy: str | None = "fp32", name: str = "train", **settings: Any) -> ValuesLog:
    """Return the values of two steps of a script's text."""
    path = f"/diff/{name}.py"
    code = compile(text, path, "exec")
    linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path
    chosen = None if policy is None else Policy.parse(policy)
    observe = TWO_STEPS.model_copy(update=settings)
    trained, run, error = _trained(
        lambda: exec(code, {"__name__": "__main__"}), chosen, observe, [], catches=(Exception,)
    )
    if error is not None:
        raise error
    assert isinstance(trained.observer, RecordedValues)
    assert trained.observer.problems == {}
    return trained.observer.log(run)


def text_of(script: str) -> str:
    return (SCRIPTS / "diff" / f"{script}.py").read_text(encoding="utf-8")


@functools.cache
def unedited(script: str, steps: int = 2) -> tuple[ValuesLog, ValuesLog, ValuesLog]:
    """Return the values of a script, those of its repetition, and those of its control."""
    run = functools.partial(values_of, text_of(script), steps=tuple(range(1, steps + 1)))
    return run(), run(), run(mirrored=True)


def edited(edit: Edit, steps: int = 2) -> ValuesLog:
    """Return the values of a script after a change of its text; a comment that is replaced keeps its indent."""
    text = text_of(edit.script)
    assert text.count(edit.old) == 1, edit
    before = text.partition(edit.old)[0].rpartition("\n")[2]
    indent = before if not before.strip() else ""
    return values_of(text.replace(edit.old, edit.new.replace("\n", f"\n{indent}")), steps=tuple(range(1, steps + 1)))


def judged(edit: Edit, steps: int = 2) -> tuple[ValuesLog, ValuesLog, Parting]:
    """Return the values of a script and of the edited one, and how they differ."""
    a, again, control = unedited(edit.script, steps)
    b = edited(edit, steps)
    return a, b, judge(a, b, again=again, control=control)


def place(event: Event) -> str:
    """Return where an event is: operation, module, phase, step."""
    return f"{event.op} {event.module} {event.phase} {event.step}".replace("  ", " ")
