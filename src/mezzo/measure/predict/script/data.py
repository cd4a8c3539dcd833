"""Let a script prepare its data with numbers, if that would take minutes without them.

An operation on fake tensors takes about 0.2 ms, however small it is. A loop that makes a data set sample by sample runs hundreds
of thousands of them, once for each tape. So a script that runs ``MOST_OPERATIONS`` before it builds its first module is
restarted, with real tensors up to that module. The limit counts operations instead of seconds, so that a script is always traced
in the same way.

Limit: data that a script prepares after its first module have no numbers, and may take long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

MOST_OPERATIONS = 20_000


class SlowData(BaseException):
    """Stops a script that still prepares its data: no handler of its own catches it."""


class CountedFakeMode(FakeTensorMode):
    """Fake tensors that count operations until the script has built its first module."""

    def __init__(self) -> None:
        """Start to count."""
        super().__init__(allow_non_fake_inputs=True)
        self._left: int | None = MOST_OPERATIONS

    def stop_counting(self) -> None:
        """Let the script run as many operations as it likes."""
        self._left = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation.

        Raises:
            SlowData: the script has run too many before its first module.
        """
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise SlowData
        return super().__torch_dispatch__(func, types, args, kwargs or {})


@contextmanager
def before_first_module(call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` once, before the block builds its first module."""
    original, called = nn.Module.__init__, False

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        nonlocal called
        if not called:
            called = True
            call()
        original(module, *args, **kwargs)

    with patch.object(nn.Module, "__init__", init):
        yield
