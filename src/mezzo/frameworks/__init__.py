"""What Mezzo knows of each framework beside PyTorch before a script runs: one file each, behind one description. Imports no framework.

The framework of a script is found from the imports of the script's own files, which are read and not run. It is PyTorch, unless they import
another one: torch is also a data loader for the others, and a backend of some. A framework imported under a computed name is not found.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mezzo.children.script_text import Kind, imports_of, own_trees

if TYPE_CHECKING:
    from mezzo.policy import Policy

IMPORTED_AS: Mapping[str, tuple[str, ...]] = {"keras": ("keras", "tensorflow.keras"), "paddle": ("paddle",)}
"""Each framework, a file of this package and a folder of ``launch``, with the modules by which scripts import it. A script that imports
several trains in the last."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework as commands ask for it; each file of this package has one as ``FRAMEWORK``."""

    title: str
    stages: Mapping[str, frozenset[str]]
    """Its forms, by the names that refusals write, with the commands and options that each takes of those that not all frameworks take. One
    with the title's name beside others is a script whose form is known only when it runs."""
    stage_of: Callable[[str, Kind], str]
    """Returns the form of a script, or of a module by its dotted name."""
    check: Callable[[Policy], object]
    """Raises ``PolicyError`` for a policy under which it cannot train."""
    elsewhere: str = ""
    """How to run a script in a form that takes more, with ``{command}`` and ``{target}``; empty where there is none."""
    training_call: str
    """What a script does that makes a training step, after "it never"."""
    not_seen: str
    """A way to train that is not recorded."""
    in_fp32: str
    """The value ``x`` cast to FP32."""
    lines: Mapping[str, str]
    """Lines of a script that fix a fault, by the names in ``commands.diagnose.offers``; empty where no line does it, absent where
    PyTorch's line is right."""


def framework_called(name: str) -> Framework:
    """Return the description of a framework beside PyTorch."""
    framework: Framework = importlib.import_module(f"mezzo.frameworks.{name}").FRAMEWORK
    return framework


def framework_of(target: str, *, kind: Kind) -> str:
    """Return the framework of a script or of a module (by its dotted name), from its own files' imports: ``torch``, or another's name."""
    imported = {f"{name}." for tree in own_trees(target, kind=kind) for name in imports_of(tree)}
    found = [
        framework
        for framework, modules in IMPORTED_AS.items()
        if any(name.startswith(f"{module}.") for module in modules for name in imported)
    ]
    return found[-1] if found else "torch"
