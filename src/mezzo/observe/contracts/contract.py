"""A contract on formats: what a file expects of each tensor, what breaks it, and the shortest file that describes what is.

A contract is TOML: a table for each role, and in it a line ``pattern = format`` for tensors. A pattern is matched with a tensor's whole
name, or with its last part; the last line that matches decides, and lines for one rank come after those for all. Imports no torch.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict

from mezzo.errors import UsageError, nearest
from mezzo.formats import BF16, FORMATS, FP16, FP32, TF32
from mezzo.records import Breach, ContractRole, TensorFormat

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROLES: tuple[ContractRole, ...] = get_args(ContractRole)
_STORED = tuple(name for name in FORMATS if name != TF32.name)
EXPECTED_FORMATS = (*_STORED, "int8", "uint8", *(f"{narrow.name} in {FP32.name}" for narrow in (BF16, FP16)))
"""What a tensor can be stored in; TF32 is stored as FP32. ``bf16 in fp32``: FP32 of which each value is a BF16 number."""
_OF_RANK = "rank"
_ANY = "*"


class ContractLine(BaseModel):
    """What tensors of one role with matching names are expected to be stored in."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: ContractRole
    pattern: str
    formats: tuple[str, ...]
    """Any of these is as expected."""
    rank: int | None = None
    """The only rank that it holds for; None for all."""

    def matches(self, name: str) -> bool:
        """Return whether a tensor of this name is meant."""
        return _matches(self.pattern, name)


class Contract(BaseModel):
    """All lines, in the order in which they are tried: the last that matches decides."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str = ""
    """The file that it was read from, for messages; empty without one."""
    lines: tuple[ContractLine, ...] = ()

    def roles(self) -> set[ContractRole]:
        """Return the roles that it has lines for."""
        return {line.role for line in self.lines}

    def expects(self, role: ContractRole, name: str, *, rank: int | None) -> ContractLine | None:
        """Return the line that decides on a tensor; None if no line is for it."""
        meant = (line for line in reversed(self.lines) if line.role == role and line.rank in (None, rank))
        return next((line for line in meant if line.matches(name)), None)


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


# --- reading -----------------------------------------------------------------------------------------------------------------------


def read_contract(path: str | Path) -> Contract:
    """Return the contract in a file.

    Raises:
        UsageError: there is no such file, it is no TOML, or a line in it means nothing.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}; allowed: a file that --write-expect has written, or one like it",
            hint=f"type: mezzo audit --write-expect {path} train.py",
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{path} is not TOML: {error}; allowed: tables such as [weights] with lines such as {_EXAMPLE}",
            hint=f"write patterns in quotes: {_EXAMPLE}",
        ) from None
    return contract_of(tables, file=str(path))


_EXAMPLE = '"*" = "fp32"'


def contract_of(tables: Mapping[str, Any], *, file: str = "") -> Contract:
    """Return the contract of tables by role, as in a file.

    Args:
        tables: by role, lines of a pattern and a format or a list of formats, or one of these for all tensors of the role.
        file: where the tables are from, for messages.

    Raises:
        UsageError: a table or a format has a name that does not exist, or nothing is expected.
    """
    where = file or "expect()"
    general = {name: table for name, table in tables.items() if name != _OF_RANK}
    lines = list(_lines(general, where, rank=None))
    ranks = tables.get(_OF_RANK, {})
    if not isinstance(ranks, Mapping):
        _refuse_value(where, _OF_RANK, ranks, "tables of tables, such as [rank.0.weights]")
    for rank, table in ranks.items():
        if not str(rank).isdecimal() or not isinstance(table, Mapping):
            _refuse_value(where, f"{_OF_RANK}.{rank}", table, "a number and tables in it, such as [rank.0.weights]")
        lines += _lines(table, where, rank=int(rank))
    if not lines:
        raise UsageError(
            f"{where} expects nothing; allowed: tables {', '.join(ROLES)} with lines such as {_EXAMPLE}",
            hint="type: mezzo audit --write-expect precision.toml train.py",
        )
    return Contract(file=file, lines=tuple(lines))


def _lines(tables: Mapping[str, Any], where: str, *, rank: int | None) -> Iterator[ContractLine]:
    for name, table in tables.items():
        role = next((role for role in ROLES if role == name), None)
        if role is None:
            raise UsageError(
                f"{where}: [{name}] is no role of a tensor; {nearest(name, ROLES)}",
                hint="name the table after a role, or leave it out",
            )
        entries = table.items() if isinstance(table, Mapping) else [(_ANY, table)]
        for pattern, formats in entries:
            listed = [formats] if isinstance(formats, str) else formats
            if not (isinstance(listed, (list, tuple)) and listed and all(isinstance(one, str) for one in listed)):
                _refuse_value(where, f'{name}: "{pattern}"', formats, "a format, or a list of formats")
            for one in listed:
                if one not in EXPECTED_FORMATS:
                    raise UsageError(
                        f'{where}: [{name}] "{pattern}" = {one!r} is no format; {nearest(one, EXPECTED_FORMATS)}',
                        hint="write the format's name in Mezzo; TF32 is stored as fp32",
                    )
            yield ContractLine(role=role, pattern=str(pattern), formats=tuple(listed), rank=rank)


def _refuse_value(where: str, what: str, value: Any, allowed: str) -> NoReturn:
    raise UsageError(f"{where}: {what} = {value!r}; allowed: {allowed}", hint=f"write a line such as {_EXAMPLE}")


# --- judging -----------------------------------------------------------------------------------------------------------------------


def breaches(
    contract: Contract,
    found: Sequence[TensorFormat],
    *,
    rank: int | None = None,
    unknown: Mapping[ContractRole, str] | None = None,
    roles: Iterable[ContractRole] = ROLES,
) -> list[Breach]:
    """Return what breaks a contract: of each tensor the first time, then the lines that match no tensor.

    Args:
        contract: what is expected.
        found: what was found, in the order of time; a tensor may be there several times.
        rank: the process; None for the only one.
        unknown: why a role could not be observed, for those that could not.
        roles: the roles that were looked at.
    """
    broken: dict[tuple[ContractRole, str], Breach] = {}
    for one in found:
        line = contract.expects(one.role, one.name, rank=rank)
        if line is not None and not set(one.formats) <= set(line.formats):
            wrong = Breach(
                problem="format",
                role=one.role,
                pattern=line.pattern,
                module=one.module,
                tensor=one.tensor,
                expected=list(line.formats),
                found=one.formats,
                moment=one.moment,
                step=one.step,
                line=one.line,
                ranks=[] if rank is None else [rank],
            )
            broken.setdefault((one.role, one.name), wrong)
    looked_at, names = set(roles), defaultdict(set)
    for one in found:
        names[one.role].add(one.name)
    absent = [
        _absent(line, (unknown or {}).get(line.role, ""), rank)
        for line in contract.lines
        if line.role in looked_at and line.rank in (None, rank) and not any(map(line.matches, names[line.role]))
    ]
    return [*broken.values(), *absent]


def _absent(line: ContractLine, why_unknown: str, rank: int | None) -> Breach:
    return Breach(
        problem="unknown" if why_unknown else "nothing",
        role=line.role,
        pattern=line.pattern,
        expected=list(line.formats),
        why=why_unknown,
        of_rank=line.rank,
        ranks=[] if rank is None else [rank],
    )


def of_all_ranks(by_rank: Mapping[int, Sequence[Breach]]) -> list[Breach]:
    """Return the breaches of several processes, equal ones once with their ranks.

    A line that matches nothing is a breach only if it does so in every process that it holds for: a rank may have a part of the model.
    """
    alike: dict[str, list[tuple[int, Breach]]] = defaultdict(list)
    for rank, some in sorted(by_rank.items()):
        for breach in some:
            alike[breach.model_copy(update={"ranks": []}).model_dump_json()].append((rank, breach))
    return [
        same[0][1].model_copy(update={"ranks": [rank for rank, _ in same]})
        for same in alike.values()
        if same[0][1].problem == "format" or same[0][1].of_rank is not None or len(same) == len(by_rank)
    ]


def formats_of_all_ranks(by_rank: Mapping[int, Sequence[TensorFormat]]) -> list[TensorFormat]:
    """Return what several processes found, equal entries once with their ranks."""
    alike: dict[tuple[str, str, tuple[str, ...]], tuple[TensorFormat, list[int]]] = {}
    for rank, some in sorted(by_rank.items()):
        for one in some:
            alike.setdefault((one.role, one.name, tuple(one.formats)), (one, []))[1].append(rank)
    return [one.model_copy(update={"ranks": ranks}) for one, ranks in alike.values()]


# --- writing -----------------------------------------------------------------------------------------------------------------------

_Formats: TypeAlias = tuple[str, ...]
_Lines: TypeAlias = dict[str, _Formats]
"""Formats by pattern, in the order in which the lines are written."""


def written(found: Iterable[TensorFormat], *, title: str) -> str:
    """Return the text of a contract that what was found keeps: a table for each role, its usual format first, then the others.

    Args:
        found: what was found, of one process or of all.
        title: what the contract describes, for the comment above it.
    """
    seen: dict[ContractRole, dict[str, dict[int, set[str]]]] = {role: {} for role in ROLES}
    for one in found:
        of_name = seen[one.role].setdefault(one.name, {})
        for rank in one.ranks or [0]:
            of_name.setdefault(rank, set()).update(one.formats)
    tables: list[tuple[str, _Lines]] = []
    of_ranks: list[tuple[str, _Lines]] = []
    for role, names in seen.items():
        usual = {name: tuple(sorted(by_rank[min(by_rank)])) for name, by_rank in names.items()}
        if usual:
            tables.append((role, _shortest(usual)))
        for rank in sorted({rank for by_rank in names.values() for rank in by_rank}):
            other = {n: tuple(sorted(r[rank])) for n, r in names.items() if rank in r and set(usual[n]) != r[rank]}
            if other:
                of_ranks.append((f"{_OF_RANK}.{rank}.{role}", {_escaped(n): other[n] for n in sorted(other)}))
    blocks = [f"# {title}", *(_table(name, lines) for name, lines in [*tables, *of_ranks])]
    return "\n\n".join(blocks) + "\n"


def _table(name: str, lines: _Lines) -> str:
    rows = [f"{_quoted(pattern)} = {_value(formats)}" for pattern, formats in lines.items()]
    return "\n".join([f"[{name}]", *rows])


def _value(formats: _Formats) -> str:
    return _quoted(formats[0]) if len(formats) == 1 else f"[{', '.join(map(_quoted, formats))}]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a basic string of TOML


def _shortest(names: Mapping[str, _Formats]) -> _Lines:
    """Return few lines that give each name its formats: the most frequent for all, then patterns of the others, sorted."""
    counts = Counter(names.values())
    usual = min(counts, key=lambda formats: (-counts[formats], formats))
    others: _Lines = {}
    for formats in counts:
        if formats != usual:
            others.update(dict.fromkeys(_patterns_of(formats, names), formats))
    lines: _Lines = {_ANY: usual, **dict(sorted(others.items()))}
    for _ in range(len(names)):  # a name without a dot may be the last part of others
        wrong = [name for name in sorted(names) if _decided(lines, name) != names[name]]
        if not wrong:
            break
        for name in wrong:
            lines.pop(_escaped(name), None)
            lines[_escaped(name)] = names[name]
    return lines


def _decided(lines: _Lines, name: str) -> _Formats:
    return next(formats for pattern, formats in reversed(lines.items()) if _matches(pattern, name))


def _patterns_of(formats: _Formats, names: Mapping[str, _Formats]) -> list[str]:
    """Return patterns that match all names with these formats and no others, the widest first."""
    left = {name for name, its in names.items() if its == formats}
    count = Counter(pattern for name in left for pattern in _candidates(name))
    shared = [pattern for pattern in count if count[pattern] > 1]
    chosen = []
    for pattern in sorted(shared, key=lambda one: (-count[one], len(one), one)):
        if not any(_matches(pattern, name) for name in left):
            continue
        if all(its == formats for name, its in names.items() if _matches(pattern, name)):
            chosen.append(pattern)
            left -= {name for name in left if _matches(pattern, name)}
    return [*chosen, *map(_escaped, left)]


def _candidates(name: str) -> set[str]:
    """Return patterns that match a name: its beginnings, its ends, each word in it, with and without its numbers."""
    parts = [_escaped(part) for part in name.split(".")]
    found = {parts[-1]}
    for n in range(1, len(parts)):
        head, tail = ".".join(parts[:n]), ".".join(parts[n:])
        found |= {f"{head}.*", f"*.{tail}"}
        if n < len(parts) - 1 and not parts[n].isdecimal():
            found.add(f"*.{parts[n]}.*")
    whole = {*found, ".".join(parts)}
    any_number = {re.sub(r"(?<![^.])\d+(?![^.])", "*", pattern) for pattern in whole}
    same_digits = {re.sub(r"(?<![^.])\d+(?![^.])", lambda n: "[0-9]" * len(n[0]), pattern) for pattern in whole}
    return {
        p for p in found | any_number | same_digits if re.search(r"[^\W\d_]", p)
    }  # one without a letter says nothing


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
