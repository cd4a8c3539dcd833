"""Texts and paths in which Python has not understood bytes, such as a file name in a locale without UTF-8. Imports no package."""

from __future__ import annotations

import os
from pathlib import Path


def readable(text: str) -> str:
    """Return a text in which Python has not understood bytes, such as a file's name in a locale without UTF-8, read as UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # half of a character
        return text.encode("utf-8", "replace").decode("utf-8")


def as_path(text: str) -> Path:
    """Return the path that a ``readable`` text names here.

    Raises:
        ValueError: it holds half of a character.
    """
    return Path(os.fsdecode(text.encode("utf-8", "surrogateescape")))
