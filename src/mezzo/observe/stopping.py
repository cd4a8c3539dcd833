"""The exception that ends a script once enough is known. Imports no torch."""

from __future__ import annotations


class StopScript(SystemExit):
    """The end of a script after its last observed or requested step: exit code 0, and silent in a thread."""
