"""What a record says, as values: an answer, sections, and lines to type.

Each command turns its record into one ``Page``. The terminal, the HTML page and the index show this value, and know no kind of record. Text
from a script or a model is already cleaned of control characters; each of them escapes it for its medium.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from mezzo.records import RunRecord
from mezzo.report.charts.data import Drawn
from mezzo.report.colours import Style
from mezzo.report.source import SourceLines

Tone: TypeAlias = str
"""``good``, ``warn``, ``bad``, ``open`` for an open question, ``quiet``, or empty."""
FEW_ROWS = 8
"""How many rows the terminal shows of a table whose first ones say the most."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One line of a table: a label, its value and, if there is one, the reason."""

    what: str
    value: str
    reason: str = ""
    tone: Tone = ""
    lines: tuple[str, ...] = ()
    """Lines of code that the value names, as ``file:line``: a page links them to the source below."""
    is_code: bool = False
    """Whether the value is to be copied."""


@dataclass(frozen=True, kw_only=True)
class NextStep:
    """A command worth typing now."""

    why: str
    command: str
    """A shell line."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The answer of a record, above everything else."""

    tone: Tone
    word: str
    """The verdict in a word or two."""
    sentence: str
    detail: str = ""
    detail_follows_word: bool = False
    """Whether the terminal prints the word before the detail, because the sentence does not say it."""
    error: str = ""
    """The error of a run and, on a second line, what to do about it."""
    facts: Sequence[Fact] = ()
    """The few figures that support the answer, which the page shows beside it."""
    boxed: Sequence[Fact] = ()
    """For a decision: why, and what follows. The terminal prints them in a box, in place of details."""


# --- What a section is made of -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """Sentences."""

    form: ClassVar[str] = "paragraph"

    text: str
    faint: bool = False
    """Whether they say how to read what is above them."""


@dataclass(frozen=True, kw_only=True)
class FactTable:
    """Lines of a label, a value and a reason."""

    form: ClassVar[str] = "facts"

    rows: Sequence[Fact]
    heads: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a table that is more than a text."""

    text: str
    below: tuple[str, ...] = ()
    """Smaller lines below the text."""
    tone: Tone = ""
    style: Style | None = None
    """The colour of the policy that it names."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table."""

    form: ClassVar[str] = "grid"

    heads: tuple[str, ...]
    """A column with several quantities below each other has their names on lines of their own."""
    rows: Sequence[Sequence[str | Cell]]
    numbers: Sequence[int] = ()
    """The columns that are numbers."""
    reasons: Sequence[str] = ()
    """A sentence for each row, which needs the width of the table."""
    whole: Sequence[int] = ()
    """The columns whose cells stay on one line."""
    shown: int = 1000
    """How many rows the terminal shows."""
    wide: bool = False
    """Whether the table needs all columns of a terminal."""
    grouped: bool = False
    """Whether the terminal shows a first cell once for all rows below each other that have it."""
    sortable: bool = True


@dataclass(frozen=True, kw_only=True)
class Code:
    """Lines to copy."""

    form: ClassVar[str] = "code"

    text: str
    copies: str = "Copy the command"
    """What the button beside them says."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of one format."""

    format: str
    text: str
    percent: float
    style: str
    """Name of the format's colour."""


@dataclass(frozen=True, kw_only=True)
class FormatShares:
    """The formats that really ran under one policy, and what the policy left alone."""

    policy: str
    shares: Sequence[Share]
    emulated: bool = False
    left_alone: Sequence[Fact] = ()


@dataclass(frozen=True, kw_only=True)
class Formats:
    """The formats that really ran, by policy."""

    form: ClassVar[str] = "formats"

    policies: Sequence[FormatShares]


Block: TypeAlias = Paragraph | FactTable | Grid | Code | Formats


@dataclass(frozen=True, kw_only=True)
class Section:
    """A title and what is below it; nothing is shown of a section without content."""

    form: ClassVar[str] = "section"

    title: str
    blocks: Sequence[Block]
    shown_in: Literal["page", "terminal", "both"] = "both"
    details: bool = False
    """Whether it explains the answer: the terminal prints it after the next step, if at all."""
    folded: bool = False
    """Whether a reader opens it on the page."""
    code: str = ""
    """The code of a finding."""
    weight: str = ""
    """How much of the step a finding affects."""
    tone: Tone = ""

    @property
    def num_rows(self) -> int:
        """The number of rows of all tables."""
        return sum(len(block.rows) for block in self.blocks if isinstance(block, FactTable | Grid))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing below the title."""
        return not any(has_content(block) for block in self.blocks)


def has_content(block: Block) -> bool:
    """Return whether there is anything to show of a block."""
    if isinstance(block, FactTable | Grid):
        return bool(block.rows)
    if isinstance(block, Formats):
        return any(one.shares or one.left_alone for one in block.policies)
    return bool(block.text)


@dataclass(frozen=True, kw_only=True)
class Charts:
    """Charts, which only a page draws, when it is written."""

    draw: Callable[[SourceLines], Sequence[Drawn]]


@dataclass(frozen=True, kw_only=True)
class SourceCode:
    """The lines of code that the record names, which only a page reads, when it is written."""

    form: ClassVar[str] = "source"

    run: RunRecord
    lines: Sequence[tuple[str, str]]
    """Each as ``file:line``, with what the record says about it."""


@dataclass(frozen=True, kw_only=True)
class JudgedCase:
    """One thing that a record judges, as a report of tests shows it."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    message: str = ""
    line: str = ""
    """The line of code that it is about, as ``file:line``."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that a record says."""

    title: str
    answer: Headline
    sections: Sequence[Section | Charts | SourceCode] = ()
    steps: Sequence[NextStep] = ()
    """What to do next, the best first."""
    environment: Sequence[Fact] = ()
    cases: Sequence[JudgedCase] = ()
    """What it judges one by one; empty if that is the answer alone."""
    script: str = ""
    """The script or model; empty without one."""
    command: str = ""
    """The recorded command as a shell line."""

    def facts(self, title: str) -> list[Fact]:
        """Return the lines of a section; empty without it."""
        found = (one for one in self.sections if isinstance(one, Section) and one.title == title)
        return [fact for one in found for block in one.blocks if isinstance(block, FactTable) for fact in block.rows]

    def grid(self, title: str) -> Grid:
        """Return the first table of a section.

        Raises:
            LookupError: there is none.
        """
        for one in self.sections:
            for block in one.blocks if isinstance(one, Section) and one.title == title else ():
                if isinstance(block, Grid):
                    return block
        raise LookupError(title)


def facts_section(title: str, rows: Sequence[Fact], *, details: bool = False) -> Section:
    """Return a section of facts."""
    return Section(title=title, blocks=[FactTable(rows=rows)], details=details)
