"""Find out from a script's files what trains in it: a loop, with or without its own mixed precision, or a library. Imports no torch."""

from __future__ import annotations

from typing import Literal

from mezzo.launch.frameworks import own_sources
from mezzo.observe.nonfinite.where import Caller
from mezzo.patching.outcome import Unclear
from mezzo.patching.reading import ScriptFacts
from mezzo.patching.styles import frameworks, own_amp
from mezzo.patching.text import Text

_LIBRARIES: tuple[Caller, ...] = ("lightning", "fabric", "accelerate", "transformers")


def caller_of(target: str, *, kind: Literal["script", "module"]) -> Caller:
    """Return what trains in a script and the files next to it."""
    callers: set[Caller] = set()
    for source in own_sources(target, kind=kind):
        try:
            script = ScriptFacts(Text(source))
            trainer = frameworks.trainer_of(script)
        except (SyntaxError, ValueError, RecursionError, Unclear):  # a library's arguments come from the command line
            continue
        callers |= {library for library in _LIBRARIES if trainer is not None and trainer.kind == library}
        callers |= {"session"} if script.uses("mezzo.Session") else set()
        callers |= {"own_amp"} if own_amp.is_there(script) else set()
    order: tuple[Caller, ...] = (*_LIBRARIES, "session", "own_amp")
    return next((caller for caller in order if caller in callers), "loop")
