"""Import libraries of models, whose operators need not run because steps are traced without numbers."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mezzo.errors import UsageError


def import_library(library: str) -> Any:
    """Return a library of models.

    torchvision's wheel lacks its operators if torch comes from another build, and timm and transformers import torchvision if
    it is installed; so its operators are declared here.

    Raises:
        UsageError: the library is not installed, or cannot be imported.
    """
    _declare_operators()
    try:
        return import_module(library)
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"--model {library}:… needs the package {library}, which cannot be imported: {str(error).splitlines()[0]}",
            hint=f"pip install {library}, in the version that belongs to your torch",
        ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Let libraries log errors only: warnings that an optional kernel is missing do not matter to a model that never runs."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _declare_operators() -> None:
    spec = find_spec("torchvision") if "torchvision" not in sys.modules else None
    if spec is None or spec.origin is None:
        return
    try:
        import_module("torchvision")
        return
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
    text = Path(spec.origin).with_name("_meta_registrations.py").read_text(encoding="utf-8")
    declared = re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"\)', text)
    for name in sorted({"nms", "qnms", *declared}):
        if not hasattr(torch.ops.torchvision, name):
            _OPERATORS.define(f"{name}() -> ()")


_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
"""Declares the operators, which live as long as this object."""
