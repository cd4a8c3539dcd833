"""Read a metric from what a script prints, while it prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from mezzo.records import Metric


class MetricReader:
    """Collect the numbers that a pattern finds in a script's output, with the number of updates before each."""

    def __init__(self, pattern: str, num_updates: Callable[[], int]) -> None:
        self._pattern, self._compiled = pattern, re.compile(pattern)
        self._num_updates = num_updates
        self._steps: list[int] = []
        self._values: list[float] = []

    def line(self, text: str) -> None:
        """Look at one line of output."""
        for match in self._compiled.finditer(text):
            try:
                value = float(match.group(1))
            except (TypeError, ValueError):
                continue  # the group took no part in the match, or took in something that is no number
            self._steps.append(self._num_updates())
            self._values.append(value)

    def metric(self) -> Metric:
        """Return what was found; the metric is called by the pattern's first word."""
        word = re.match(r"\w+", self._pattern)
        name = word.group() if word else "metric"
        return Metric(name=name, pattern=self._pattern, steps=self._steps, values=self._values)


class Watched:
    """Stand in for a text stream: pass everything on, and show every whole line to a reader."""

    def __init__(self, stream: TextIO, line: Callable[[str], None]) -> None:
        self._stream, self._line = stream, line
        self._open = ""

    def write(self, text: str) -> int:
        """Write ``text``."""
        *lines, self._open = (self._open + text).replace("\r", "\n").split("\n")
        for line in lines:
            self._line(line)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for text in lines:
            self.write(text)

    def finish(self) -> None:
        """Show the last line to the reader, ended or not."""
        self._line(self._open)
        self._open = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
