"""Read a metric from a script's output while it runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from mezzo.records import Metric

_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")
"""Escape sequences for colours and the cursor, and other invisible characters."""
_NOT_FINITE = re.compile(r"(?<![\w.])[+-]?(?:nan|inf(?:inity)?)(?![\w.])", re.IGNORECASE)
_REST = re.compile(r"[eE][+-]?\d+|(?:,\d+)+(?:\.\d+)?(?:[eE][+-]?\d+)?")
"""The possible rest of a number after its first digits: an exponent, or groups of digits after commas."""
_IN_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?(?:[eE][+-]?\d+)?")
_MAX_SHOWN = 40
"""Most characters of a match that is not a number to show."""

_TOKEN = re.compile(
    r"""
    (?P<silent> \\[bBAZ] | \(\?[aiLmsux-]+\) | \(\?(?:[aiLmsux-]*:|>|<?[=!]) | [*+?]\??\+? | \{\d*,?\d*\}\?? | [)^$] )
  | (?P<group> \((?:\?P<(?P<name>\w+)>)? )
  | (?P<wild> \\(?:x[0-9A-Fa-f]{2}|0[0-7]{0,2}|.) | \[\^?\]?(?:\\.|[^\]\\])*\] | [.|] )
  | (?P<literal> . )
    """,
    re.VERBOSE | re.DOTALL,
)
"""The parts of a regular expression: what matches no character, a capturing group, one of several characters, one given character."""


class MetricReader:
    """The numbers that a pattern finds in a script's output, with the number of updates before each."""

    def __init__(self, pattern: str, num_updates: Callable[[], int]) -> None:
        self._pattern, self._compiled = pattern, re.compile(pattern)
        self._begins_with = beginning_of(pattern)
        self._num_updates = num_updates
        self._steps: list[int] = []
        self._values: list[float] = []
        self._percent = False
        self._text: str | None = None

    def line(self, text: str) -> None:
        """Read one line of output; most lines of a script have no metric, and cost a search for the pattern's first letters."""
        if text.isprintable():
            matches = [*self._matches(text)] if self._begins_with in text else []
        else:  # a pattern may contain colour codes, so the original line comes second
            matches = [*self._matches(_CONTROLS.sub("", text))] or [*self._matches(text)]
        for number, rest in matches:
            try:
                value = _value_of(number)
            except ValueError:
                self._text = number.strip()[:_MAX_SHOWN] or None
                continue
            self._percent |= number.endswith("%") or rest.lstrip().startswith("%")
            self._text = None
            self._steps.append(self._num_updates())
            self._values.append(value)

    def _matches(self, line: str) -> Iterator[tuple[str, str]]:
        """Yield each match of the pattern's first group with the text after it; a pattern of digits also matches ``nan`` and ``inf``."""
        words, digits = dict[int, re.Match[str]](), line
        lower = line.lower()
        if "nan" in lower or "inf" in lower:
            words = {word.start(): word for word in _NOT_FINITE.finditer(line)}
            digits = _NOT_FINITE.sub(lambda word: "0." + "0" * (len(word.group()) - 2), line)
        for match in self._compiled.finditer(digits):
            start, end = match.span(1)
            if start >= 0:
                number = words[start].group() if start in words else whole_number(line, start, end)
                yield number, line[start + len(number) :]

    def metric(self) -> Metric:
        """Return the metric from the lines read until now."""
        return Metric(
            name=name_of(self._pattern),
            pattern=self._pattern,
            steps=self._steps,
            values=self._values,
            percent=self._percent,
            text=self._text,
        )


def whole_number(line: str, start: int, end: int) -> str:
    """Return what a group matched in ``line``, with the rest of the number if the pattern cut it: ``1.2`` of ``1.2e-05``."""
    matched, rest = line[start:end], _REST.match(line, end)
    if rest is None or not re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)", matched):
        return matched
    whole = matched + rest.group()
    in_thousands = _IN_THOUSANDS.fullmatch(whole) or re.match(r"[+-]?0,", whole)
    return whole if in_thousands or not rest.group().startswith(",") else matched


def _value_of(number: str) -> float:
    """Return the value of a printed number; a comma that does not group thousands makes it no number."""
    plain = number.strip().removesuffix("%")
    return float(plain.replace(",", "") if _IN_THOUSANDS.fullmatch(plain) else plain)


def name_of(pattern: str) -> str:
    """Return the words of a metric's pattern: those before its first group, else the group's name, else those after it."""
    before: list[str] = []
    after: list[str] = []
    group, words = "", before
    for token in _TOKEN.finditer(pattern):
        if token["group"] is not None and words is before:
            group, words = token["name"] or "", after
        letter = token["literal"] or " "
        words.append("" if token["silent"] is not None else letter if letter.isalnum() or letter in "_@-" else " ")
    first, last = (" ".join(word for part in "".join(w).split() if (word := part.strip("-"))) for w in (before, after))
    return first or group.replace("_", " ") or last or "metric"


def beginning_of(pattern: str) -> str:
    """Return letters with which every match of a pattern begins; empty if there are none for sure."""
    letters: list[str] = []
    if "|" in pattern or "(?" in pattern:
        return ""
    for token in _TOKEN.finditer(pattern):
        if token["literal"] is None:
            if (token["silent"] or "")[:1] in ("*", "?", "{"):  # the last letter may be missing
                del letters[-1:]
            break
        if token["literal"] in "0123456789+-.":  # as in a number, for which a line may have nan
            break
        letters.append(token["literal"])
    return "".join(letters)


class MetricStream:
    """A text stream that forwards everything and passes every complete line to a reader."""

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
        """Pass the last line to the reader, even without a line end."""
        self._line(self._open)
        self._open = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
