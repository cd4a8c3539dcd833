"""What the terminal and the page say about a fallback search, and how the module tree is coloured."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import pytest
from rich.console import Console

import record_builders as build
from mezzo.commands.fallback.page import error_texts
from mezzo.records import FallbackRecord, FallbackVerdict, ModuleError, Note, Verification
from mezzo.report import terminal
from mezzo.report.charts.data import Nothing, TreeChart, TreeNode
from mezzo.report.charts.modules import error_tree
from mezzo.report.html import render_html
from mezzo.report.pages import page_of

MODULES = [
    ModuleError(module="blocks.0.fault", type="Tiny", output=0.0, rounded=math.inf, kept=True),
    ModuleError(module="blocks.0", type="Block", output=0.0, dgrad=0.0, wgrad=0.0, rounded=0.03, flops=3_000),
    ModuleError(module="blocks.1", type="Block", output=0.005, dgrad=0.0, wgrad=0.0, flops=1_000),
    ModuleError(module="head", type="Linear", output=0.0004, dgrad=0.0003, wgrad=0.0005, rounded=0.0005, flops=2_000),
    ModuleError(module="odd", type="Odd", reason="RuntimeError: not by itself"),
    ModuleError(module="Net", type="Net", unnamed=True, output=0.0, flops=6_000),
]


def record(verdict: FallbackVerdict = "found", **fields: object) -> FallbackRecord:
    values: dict[str, object] = {
        "run": build.run_record(
            "fp32", num_steps=2, script="examples/train.py", command=["mezzo", "fallback", "train.py"]
        ),
        "policy": "fp16",
        "tolerance": 0.02,
        "verdict": verdict,
        "reason": "checked on 2 fresh batches",
        "kept": ["blocks.0.fault"] if verdict in ("found", "does not pay") else [],
        "suggested": "fp16:fp32_modules=blocks.0.fault",
        "policy_file": "runs/x/policy.toml" if verdict == "found" else "",
        "fp32_share": 0.012,
        "error_before": math.inf,
        "error_after": 0.0025,
        "steps": [1, 2, 3],
        "modules": MODULES,
        "verifications": [
            Verification(kept=[], error=math.inf, tensor="head.weight", allowed=0.02, init_scale=65536.0, steps=[1]),
            Verification(
                kept=["blocks.0.fault"],
                error=0.0025,
                tensor="a.bias",
                allowed=0.031,
                init_scale=32768.0,
                steps=[1],
                passed=True,
            ),
        ],
        "noise": 1e-6,
        "ignored": [Note(what="key.bias", value="1.3", reason="FP32 does not determine it")],
        "notes": [Note(what="weights", value="as at the beginning", reason="updates are held back")],
    }
    return FallbackRecord(**{**values, **fields})  # type: ignore[arg-type]


def shown(own: FallbackRecord) -> str:
    console = Console(file=io.StringIO(), width=110, color_system=None, force_terminal=False)
    terminal.render(own, console)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


HEADLINES: list[tuple[FallbackVerdict, str]] = [
    ("found", "1 module of train.py must stay in FP32 under fp16, 1.2% of the FLOPs"),
    ("not needed", "No module of train.py needs FP32 under fp16: none makes more than rounding on its own"),
    ("elsewhere", "Keeping modules of train.py in FP32 does not help under fp16"),
    ("undecided", "Single gradients of train.py cannot tell what fp16 needs; whole trainings can"),
    ("not repeatable", "train.py does not compute the same result twice, so precision cannot be judged"),
    ("fp32 fails", "train.py fails in FP32 too: precision is not the cause"),
]


CLOSE = (
    "Under fp16 a gradient of train.py is off by {}, where 0.02 is allowed; "
    "with 1 module in FP32, 1.2% of the FLOPs, every gradient passes"
)


@pytest.mark.parametrize(
    ("before", "headline"),
    [
        (0.039, CLOSE.format("0.039")),
        (0.0202, CLOSE.format("0.0202")),  # not "off by 0.02, where 0.02 is allowed"
        (0.5, HEADLINES[0][1]),
        (math.nan, HEADLINES[0][1]),
        (math.inf, HEADLINES[0][1]),
    ],
)
def test_a_module_must_stay_in_fp32_only_where_gradients_are_lost_without_it(before: float, headline: str) -> None:
    trials = [Verification(kept=[], error=before, allowed=0.02)]
    assert page_of(record("found", error_before=before, verifications=trials)).answer.sentence == headline


@pytest.mark.parametrize(("instead", "advice"), [("bf16", "use bf16"), ("fp32", "stay in FP32")])
def test_a_set_that_does_not_pay(instead: str, advice: str) -> None:
    own = record("does not pay", fp32_share=0.998, instead=instead)
    text = f"fp16 does not pay for train.py: 1 module with 99.8% of the FLOPs would have to stay in FP32; {advice}"
    page = page_of(own)
    assert page.answer.sentence == text
    facts = {fact.what: fact.value for fact in page.facts("Result")}
    assert (facts["would be kept in FP32"], facts["instead"]) == ("blocks.0.fault", instead)
    assert shown(own).startswith(text[:60])
    assert "blocks.0.fault" not in own.summary


def products(verdict: FallbackVerdict = "found", **fields: object) -> FallbackRecord:
    """Return a record of ``--per-gemm``."""
    command = ["mezzo", "fallback", "--per-gemm", "--policy", "nvfp4", "train.py"]
    run = build.run_record("fp32", num_steps=2, script="train.py", command=command)
    of_layer = [
        ModuleError(module="up.wgrad", type="Linear", wgrad=0.97, rounded=0.97, flops=2_000, kept=verdict == "found"),
        ModuleError(module="up.forward", type="Linear", output=0.14, rounded=0.14, flops=2_000),
        ModuleError(module="Net", type="Net", unnamed=True, flops=9_000),
    ]
    known: dict[str, object] = {
        "run": run,
        "policy": "nvfp4",
        "searched": "products",
        "kept": ["up.wgrad"] if verdict in ("found", "does not pay") else [],
        "suggested": "nvfp4:bf16_products=up.wgrad",
        "fp32_share": 0.0,
        "bf16_share": 0.222,
        "modules": of_layer,
    }
    return record(verdict, **{**known, **fields})


HEADLINES_OF_PRODUCTS: list[tuple[FallbackVerdict, str, str]] = [
    ("found", "1 product of train.py must stay in BF16 under nvfp4, 22.2% of the FLOPs", "run"),
    (
        "does not pay",
        "nvfp4 does not pay for train.py: 1 product with 22.2% of the FLOPs would have to stay in BF16; use bf16",
        "compare --policies fp32,bf16",
    ),
    (
        "not needed",
        "No product of train.py needs BF16 under nvfp4: none makes more than rounding on its own",
        "compare",
    ),
    ("elsewhere", "Keeping products of train.py in BF16 does not help under nvfp4", "compare --policies fp32,bf16"),
    (
        "not repeatable",
        "train.py does not compute the same result twice, so precision cannot be judged",
        "fallback --policy nvfp4 --per-gemm",
    ),
]


@pytest.mark.parametrize(("verdict", "headline", "step"), HEADLINES_OF_PRODUCTS)
def test_products_are_kept_in_bf16(verdict: FallbackVerdict, headline: str, step: str) -> None:
    page = page_of(products(verdict, instead="bf16"))
    assert page.answer.sentence == headline
    assert f"mezzo {step}" in page.steps[0].command
    assert "--per-gemm" not in page.steps[0].command or verdict == "not repeatable"


def test_the_terminal_shows_products() -> None:
    cells = [" ".join(line.split()) for line in shown(products()).splitlines()]
    assert "keep in BF16 up.wgrad" in cells
    assert "share of the FLOPs 22.2%" in cells
    assert "product error FLOPs" in cells
    assert "up.wgrad 0.97 2.00 kFLOP kept in BF16" in cells
    assert "up.forward 0.14 2.00 kFLOP" in cells
    assert "run kept in BF16 error allowed gradient of scale batches" in cells
    assert not any("FP32 modules" in cell or "Net" in cell for cell in cells)
    assert products().summary == "train.py under nvfp4: found, up.wgrad in bf16"


def test_the_tree_shows_products_below_their_layers() -> None:
    tree = error_tree(products())
    assert isinstance(tree, TreeChart)
    assert "2 products run by themselves" in tree.description
    assert tree.description.endswith("kept in BF16: up.wgrad.")
    (layer,) = tree.roots
    assert (layer.path, layer.text) == ("up", "")
    assert [(one.path, tuple(one.badges)) for one in layer.children] == [
        ("up.wgrad", ("kept in BF16",)),
        ("up.forward", ()),
    ]


def test_what_the_policy_passes_alone() -> None:
    trials = [Verification(kept=[], error=0.01, allowed=0.02, passed=True)]
    headline = "No module of train.py needs FP32 under fp16: rounding explains the error of every gradient"
    assert page_of(record("not needed", verifications=trials)).answer.sentence == headline


@pytest.mark.parametrize(
    ("error", "allowed", "texts"),
    [
        (0.024, 0.02, ("0.024", "0.02")),
        (0.0202, 0.02, ("0.0202", "0.02")),
        (0.019532, 0.019531, ("0.019532", "0.019531")),
        (0.02, 0.02, ("0.02", "0.02")),
        (math.inf, 0.02, ("Infinity", "0.02")),
        (0.5, None, ("0.5", "-")),
    ],
)
def test_an_error_and_what_is_allowed_are_told_apart(
    error: float, allowed: float | None, texts: tuple[str, str]
) -> None:
    assert error_texts(error, allowed) == texts


@pytest.mark.parametrize(("verdict", "headline"), HEADLINES)
def test_each_verdict_has_its_headline(verdict: FallbackVerdict, headline: str) -> None:
    own = record(verdict)
    assert page_of(own).answer.sentence == headline
    assert shown(own).startswith(headline)
    assert headline in render_html(own)


def test_the_terminal_shows_what_was_found() -> None:
    lines = shown(record()).splitlines()
    cells = [" ".join(line.split()) for line in lines]
    assert "keep in FP32 blocks.0.fault" in cells
    assert "error before Infinity (0.02 allowed, of head.weight)" in cells
    assert "error with them 0.0025 (0.031 allowed, of a.bias)" in cells
    assert "blocks.0.fault Tiny 0 - - Infinity 0 kept in FP32" in cells
    assert "Net (the model) Net 0 - - 0 6.00 kFLOP" in cells
    assert "1 nothing Infinity 0.02 head.weight 65536 1 fails" in cells
    assert "2 blocks.0.fault 0.0025 0.031 a.bias 32768 1 passes" in cells


def test_the_tree_shows_the_error_of_each_module() -> None:
    tree = error_tree(record())
    assert isinstance(tree, TreeChart)

    def nodes(found: Sequence[TreeNode], parent: str) -> list[tuple[str, str, str, str, tuple[str, ...]]]:
        own = [(n.path, parent, n.tone, n.numbers[0], tuple(n.badges)) for n in found]
        return own + [one for n in found for one in nodes(n.children, n.path)]

    assert nodes(tree.roots, "") == [
        ("blocks", "", "quiet", "", ()),  # a list: never called, there for its place
        ("head", "", "good", "0.0005", ()),
        ("odd", "", "quiet", "", ()),
        ("blocks.0", "blocks", "bad", "0.03", ()),
        ("blocks.1", "blocks", "warn", "0.005", ()),
        ("blocks.0.fault", "blocks.0", "bad", "Infinity", ("kept in FP32",)),
    ]
    head = next(node for node in tree.roots if node.path == "head")
    assert head.text == "Linear: output 0.0004, dgrad 0.0003, wgrad 0.0005, rounded 0.0005"
    # 5e-4 on a logarithmic scale from 1e-5 to 1: 1.699 of 5 decades.
    assert [part.share for part in head.bars] == [pytest.approx(1.69897 / 5)]
    assert tree.description == (
        "5 modules run by themselves in the lower precision; 2 of them make an error above the tolerance of 0.02; "
        "kept in FP32: blocks.0.fault."
    )


def test_without_modules_there_is_no_tree() -> None:
    own = record("not repeatable", modules=[], verifications=[])
    assert isinstance(error_tree(own), Nothing)
    assert "No module was run by itself." in render_html(own)


def test_names_cannot_drive_the_page_or_the_terminal() -> None:
    own = record(modules=[ModuleError(module="a\x1b[31m</script>", type="T", output=1.0)], reason="<b>\x1b[2J")
    page = render_html(own)
    assert "\x1b" not in page + shown(own)
    assert "<b>" not in page.split("<h1")[1].split("</section>")[0]


def test_containers_that_are_never_called_do_not_take_a_row_each() -> None:
    modules = [
        ModuleError(module=f"encoder.layers.{n}.attention", type="Attention", output=0.1 / (n + 1)) for n in range(2)
    ]
    tree = error_tree(record(modules=modules))
    assert isinstance(tree, TreeChart)
    (root,) = tree.roots
    assert (root.name, root.path, root.open) == ("encoder.layers", "encoder.layers", True)
    assert [node.name for node in root.children] == ["0.attention", "1.attention"]
