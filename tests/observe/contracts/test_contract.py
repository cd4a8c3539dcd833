"""The file of a contract: its mistakes, what its patterns match, what breaks it, and the shortest text that describes what is."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from mezzo.errors import UsageError
from mezzo.observe.contracts.contract import (
    Contract,
    breaches,
    contract_of,
    formats_of_all_ranks,
    of_all_ranks,
    read_contract,
    written,
)
from mezzo.records import Breach, ContractRole, TensorFormat

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PARSED = """
[weights]
"*" = "fp32"
"head.*" = ["bf16", "fp16"]

[rank.1.weights]
"head.bias" = "fp64"
"""


def found(name: str, *formats: str, role: ContractRole = "weights", rank: int | None = None) -> TensorFormat:
    module, _, tensor = name.rpartition(".")
    return TensorFormat(
        role=role,
        module=module,
        tensor=tensor,
        formats=list(formats),
        moment="set-up",
        step=1,
        line=f"train.py:{len(name)}",
        ranks=[] if rank is None else [rank],
    )


def parsed(text: str) -> Contract:
    return contract_of(tomllib.loads(text), file="precision.toml")


# --- reading -------------------------------------------------------------------------------------------------------------------------

MISTAKES = [
    # file, what the error says
    ('[weigths]\n"*" = "fp32"', "[weigths] is no role of a tensor; did you mean weights or master_weights?"),
    ('[weights]\n"*" = "float32"', "[weights] \"*\" = 'float32' is no format; did you mean fp32?"),
    ('[weights]\n"*" = "tf32"', "[weights] \"*\" = 'tf32' is no format; did you mean"),
    ('[weights]\n"*" = ["fp32", "b16"]', "[weights] \"*\" = 'b16' is no format; did you mean"),
    ('[weights]\n"*" = 32', 'weights: "*" = 32; allowed: a format, or a list of formats'),
    ('[weights]\n"*" = []', 'weights: "*" = []; allowed: a format, or a list of formats'),
    ("weights = 1", 'weights: "*" = 1; allowed: a format, or a list of formats'),
    ('[rank.first.weights]\n"*" = "fp32"', "rank.first = {'weights': {'*': 'fp32'}}; allowed: a number"),
    ("rank = 1", "rank = 1; allowed: tables of tables, such as [rank.0.weights]"),
    ('[rank.0.weigths]\n"*" = "fp32"', "[weigths] is no role of a tensor"),
    ("", "expects nothing; allowed: tables weights, master_weights, gradients"),
    ("[weights]", "expects nothing"),
    ('[weights]\n* = "fp32"', "is not TOML"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_in_the_file_is_an_error_with_what_is_allowed(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "precision.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as error:
        read_contract(path)
    assert error.value.message.startswith(str(path))
    assert message in error.value.message


def test_a_file_that_does_not_exist_is_an_error_with_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read") as error:
        read_contract(tmp_path / "none.toml")
    assert error.value.hint == f"type: mezzo audit --write-expect {tmp_path / 'none.toml'} train.py"


def test_a_format_may_stand_for_all_tensors_of_a_role() -> None:
    (line,) = contract_of({"weights": "fp32"}).lines
    assert (line.role, line.pattern, line.formats, line.rank) == ("weights", "*", ("fp32",), None)


MATCHES = [
    # pattern, name, whether it matches: the whole name or its last part
    ("*", "a.b", True),
    ("a.*", "a.b.c", True),
    ("a", "a.b", False),
    ("b", "a.b", True),
    ("exp_avg*", "0.weight.exp_avg_sq", True),
    ("weight.exp_avg", "0.weight.exp_avg", False),
    ("*.weight.exp_avg", "0.weight.exp_avg", True),
    ("h.[0-9]", "h.7", True),
    ("h.[0-9]", "h.7.c", False),
    ("A.b", "a.b", False),
]


@pytest.mark.parametrize(("pattern", "name", "matches"), MATCHES)
def test_a_pattern_is_matched_with_the_whole_name_or_its_last_part(pattern: str, name: str, matches: bool) -> None:
    (line,) = contract_of({"weights": {pattern: "fp32"}}).lines
    assert line.matches(name) == matches


DECIDED = [
    # name, rank, formats by the last line that matches
    ("body.weight", None, ("fp32",)),
    ("head.bias", None, ("bf16", "fp16")),
    ("head.bias", 0, ("bf16", "fp16")),
    ("head.bias", 1, ("fp64",)),
    ("head.weight", 1, ("bf16", "fp16")),
]


@pytest.mark.parametrize(("name", "rank", "formats"), DECIDED)
def test_the_last_line_that_matches_decides_and_lines_for_one_rank_come_last(
    name: str, rank: int | None, formats: tuple[str, ...]
) -> None:
    line = parsed(PARSED).expects("weights", name, rank=rank)
    assert line is not None
    assert line.formats == formats
    assert parsed(PARSED).expects("buffers", name, rank=rank) is None


# --- judging -------------------------------------------------------------------------------------------------------------------------


def rows(broken: list[Breach]) -> list[tuple[object, ...]]:
    return [(b.problem, b.role, b.module or b.pattern, b.tensor, b.expected, b.found, b.ranks) for b in broken]


JUDGED: list[tuple[dict[str, object], list[TensorFormat], list[tuple[object, ...]]]] = [
    # contract, found, breaches
    ({"weights": "fp32"}, [found("a.w", "fp32")], []),
    ({"weights": "fp32"}, [found("a.w", "bf16")], [("format", "weights", "a", "w", ["fp32"], ["bf16"], [])]),
    ({"weights": ["fp32", "bf16"]}, [found("a.w", "bf16"), found("b.w", "fp32")], []),
    # a tensor that changes is a breach once, for the first time that it is wrong
    (
        {"weights": "fp32"},
        [found("a.w", "fp32"), found("a.w", "bf16"), found("a.w", "fp16")],
        [("format", "weights", "a", "w", ["fp32"], ["bf16"], [])],
    ),
    # several parts, one of them wrong
    (
        {"weights": "fp32"},
        [found("a.w", "bf16", "fp32")],
        [("format", "weights", "a", "w", ["fp32"], ["bf16", "fp32"], [])],
    ),
    # nothing has the name
    (
        {"weights": {"*": "fp32", "haed.*": "bf16"}},
        [found("head.w", "fp32")],
        [("nothing", "weights", "haed.*", "", ["bf16"], [], [])],
    ),
    ({"ema": "fp32"}, [found("a.w", "bf16")], [("nothing", "ema", "*", "", ["fp32"], [], [])]),
    # what no line is for is no breach
    ({"weights": {"b.*": "fp32"}}, [found("a.w", "bf16"), found("b.w", "fp32")], []),
]


@pytest.mark.parametrize(("tables", "seen", "broken"), JUDGED)
def test_what_breaks_a_contract(
    tables: dict[str, object], seen: list[TensorFormat], broken: list[tuple[object, ...]]
) -> None:
    assert rows(breaches(contract_of(tables), seen)) == broken


def test_what_could_not_be_observed_is_unknown_and_what_was_not_looked_at_is_left_out() -> None:
    contract = contract_of({"activations": "bf16", "checkpoints": "fp32"})
    unknown = breaches(contract, [], unknown={"activations": "it is compiled"}, roles=["activations"])
    assert [(b.problem, b.role, b.why) for b in unknown] == [("unknown", "activations", "it is compiled")]


def test_breaches_of_several_processes_name_their_ranks() -> None:
    contract = parsed(PARSED)
    by_rank = {
        rank: breaches(contract, [found("body.weight", "fp32"), found("head.bias", form)], rank=rank)
        for rank, form in enumerate(["bf16", "bf16", "fp32"])
    }
    # rank 1 has a line of its own, and rank 2 breaks the general one
    assert rows(of_all_ranks(by_rank)) == [
        ("format", "weights", "head", "bias", ["fp64"], ["bf16"], [1]),
        ("format", "weights", "head", "bias", ["bf16", "fp16"], ["fp32"], [2]),
    ]


def test_a_line_matches_nothing_only_if_it_does_so_in_every_process() -> None:
    contract = contract_of({"weights": {"a.*": "fp32", "b.*": "fp32", "c.*": "fp32"}})
    stages = {rank: breaches(contract, [found(f"{part}.w", "fp32")], rank=rank) for rank, part in enumerate("ab")}
    assert rows(of_all_ranks(stages)) == [("nothing", "weights", "c.*", "", ["fp32"], [], [0, 1])]


# --- writing -------------------------------------------------------------------------------------------------------------------------

BLOCKS = [f"h.{n}.{part}.{kind}" for n in range(12) for part in ("ln_1", "attn", "mlp") for kind in ("weight", "bias")]

WRITTEN = [
    # names with their formats, lines
    ({"a.w": "fp32", "b.w": "fp32"}, ['"*" = "fp32"']),
    ({"a.w": "fp32", "b.w": "fp32", "c.w": "bf16"}, ['"*" = "fp32"', '"c.w" = "bf16"']),
    ({n: "fp32" if "ln_1" in n else "bf16" for n in BLOCKS}, ['"*" = "bf16"', '"*.ln_1.*" = "fp32"']),
    ({n: "fp32" if "bias" in n and "mlp" not in n else "bf16" for n in BLOCKS}, None),
    # a block returns FP32, and what is in it BF16
    (
        dict.fromkeys(("h.0", "h.1"), "fp32") | {f"h.{n}.{part}": "bf16" for n in (0, 1) for part in ("attn", "mlp")},
        ['"*" = "bf16"', '"h.[0-9]" = "fp32"'],
    ),
    # the last part of other names
    (
        {"scale": "fp32", "a.scale": "bf16", "b.scale": "bf16"},
        ['"*" = "bf16"', '"scale" = "fp32"', '"a.scale" = "bf16"', '"b.scale" = "bf16"'],
    ),
    ({"a*.w": "fp32", "ab.w": "bf16", "b.w": "bf16"}, ['"*" = "bf16"', '"a[*].w" = "fp32"']),
]


@pytest.mark.parametrize(("names", "lines"), WRITTEN)
def test_the_shortest_text(names: dict[str, str], lines: list[str] | None) -> None:
    seen = [found(name, form) for name, form in names.items()]
    text = written(seen, title="train.py")
    if lines is not None:
        assert text == "\n".join(["# train.py", "", "[weights]", *lines, ""])
    assert breaches(parsed(text), seen) == []


def test_a_tensor_with_several_formats_gets_a_list() -> None:
    seen = [found("a.w", "fp32"), found("a.w", "bf16"), found("b.w", "bf16", "fp32")]
    assert written(seen, title="t") == '# t\n\n[weights]\n"*" = ["bf16", "fp32"]\n'


def test_ranks_that_differ_get_tables_of_their_own() -> None:
    by_rank = {rank: [found("a.w", form), found("b.w", "fp32")] for rank, form in enumerate(["fp32", "bf16"])}
    merged = formats_of_all_ranks(by_rank)
    text = written(merged, title="t")
    assert text == '# t\n\n[weights]\n"*" = "fp32"\n\n[rank.1.weights]\n"a.w" = "bf16"\n'
    assert [of_all_ranks({r: breaches(parsed(text), seen, rank=r) for r, seen in by_rank.items()})] == [[]]


@pytest.mark.parametrize("seed", range(40))
def test_what_was_found_keeps_the_text_that_describes_it(seed: int) -> None:
    draw = random.Random(seed)
    parts = ["a", "b", "0", "1", "12", "weight", "x*y", "q[0]", "é"]
    names = {".".join(draw.choices(parts, k=draw.randint(1, 4))) for _ in range(draw.randint(1, 60))}
    roles: list[ContractRole] = ["weights", "optimizer_state"]
    seen = [
        found(name, *sorted(draw.sample(["fp32", "bf16", "fp16"], k=draw.randint(1, 2))), role=role)
        for name in sorted(names)
        for role in roles
    ]
    text = written(seen, title="random")
    assert breaches(parsed(text), seen) == []
    # any other format is noticed
    one = draw.choice(seen)
    changed = [one.model_copy(update={"formats": ["fp64"]}) if each is one else each for each in seen]
    assert [b.found for b in breaches(parsed(text), changed)] == [["fp64"]]
