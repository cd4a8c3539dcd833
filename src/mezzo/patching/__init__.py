"""A policy as a change to the user's own script: a unified diff, derived from the script's text. Imports no torch and runs nothing.

``mezzo.commands.check.patches`` tries a patch before it is offered.
"""

from __future__ import annotations

from mezzo.patching.make import make_patch
from mezzo.patching.text import LoopKind, Patch, PatchStyle, Refused

__all__ = ["LoopKind", "Patch", "PatchStyle", "Refused", "make_patch"]
