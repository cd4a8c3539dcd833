"""Watch what a training script computes and return records; change nothing.

This room and one of the library's functions have one name: calling the room calls ``mezzo.diagnose``, the function.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return sys.modules["mezzo"].__getattr__("diagnose")(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
