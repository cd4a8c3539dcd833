"""The products that have to stay in BF16 in layers in blocks: planted ones are found, no more and no fewer; refusals."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn

import mezzo
from helpers_values import existing
from mezzo.cli import main
from mezzo.errors import MezzoError, PolicyError, ScriptError
from mezzo.policy import Policy
from mezzo.records import FallbackRecord
from mezzo.report.pages import page_of
from mezzo.report.sections import Grid, Section
from paths import SCRIPTS

FRAGILE = str(SCRIPTS / "fragile_products.py")
EVERY_LAYER = ":end_layers=compute"
LARGE, HUGE = 2.0**10, 2.0**20  # more than E2M1 spans, 12, and than E4M3 spans, 2**18, by powers of two


def searched(
    policy: str, *plants: str, width: int = 64, outlier: float = LARGE, per_gemm: bool = True
) -> FallbackRecord:
    def train() -> None:
        with mock.patch.object(sys, "argv", [FRAGILE, str(outlier), str(width), *plants]):
            runpy.run_path(FRAGILE)

    return mezzo.fallback(train, policy=policy + EVERY_LAYER, per_gemm=per_gemm, fresh=1)


PLANTED: list[tuple[str, float, int, list[str], list[str]]] = [
    ("mxfp4", LARGE, 64, ["none", "wgrad"], ["1.linear.wgrad"]),
    ("mxfp4", LARGE, 64, ["forward", "wgrad", "none"], ["0.linear.forward", "1.linear.wgrad"]),
    ("mxfp4", LARGE, 64, ["none", "all"], ["1.linear.dgrad", "1.linear.forward", "1.linear.wgrad"]),
    ("mxfp4", LARGE, 64, ["dgrad", "none"], []),  # nothing reads the gradient of the data, so there is no such product
    ("mxfp4:hadamard=wgrad", LARGE, 64, ["none", "wgrad"], ["1.linear.wgrad"]),
    ("nvfp4", LARGE, 32, ["none", "dgrad"], ["1.linear.dgrad"]),
    ("nvfp4", LARGE, 32, ["wgrad", "forward"], ["0.linear.wgrad", "1.linear.forward"]),
    ("mxfp8", HUGE, 32, ["forward", "none"], ["0.linear.forward"]),
    ("mxfp8", LARGE, 32, ["forward", "wgrad"], []),  # E4M3 holds both
    ("fp8-block", HUGE, 128, ["none", "wgrad"], ["1.linear.wgrad"]),
]


@pytest.mark.parametrize(
    ("policy", "outlier", "width", "plants", "expected"),
    PLANTED,
    ids=lambda one: "+".join(one) if isinstance(one, list) else str(one),
)
def test_planted_products_are_found(
    policy: str, outlier: float, width: int, plants: list[str], expected: list[str]
) -> None:
    record = searched(policy, *plants, width=width, outlier=outlier)

    assert record.verdict == ("found" if expected else "not needed")
    assert (record.searched, record.kept, record.operations) == ("products", expected, [])
    kept = Policy.parse(policy + EVERY_LAYER).replace(bf16_products=tuple(expected))
    assert Policy.parse(record.suggested) == kept
    # each layer has three products of as many FLOPs, the first two: nothing reads the gradient of the data
    assert record.bf16_share == pytest.approx(len(expected) / (3 * len(plants) + 2))
    assert record.fp32_share == 0
    tried = {tuple(trial.kept): trial.passed for trial in record.verifications}
    for left_out in expected:  # 1-minimal
        assert tried[tuple(name for name in expected if name != left_out)] is False
    wrong = [one.module for one in record.modules if max(one.output or 0, one.dgrad or 0, one.wgrad or 0) > 0.3]
    assert sorted(wrong) == expected
    assert all(one.kept == (one.module in expected) for one in record.modules)


def test_what_a_product_is_in_the_record() -> None:
    record = searched("mxfp4", "forward", "none")
    errors = {one.module: (one.output, one.dgrad, one.wgrad) for one in record.modules if not one.unnamed}
    has = {name: [error is not None for error in of_one] for name, of_one in errors.items()}
    assert has == {
        f"{layer}.{product}": [product == name for name in ("forward", "dgrad", "wgrad")]
        for layer in ("0.linear", "1.linear", "2")
        for product in ("forward", "dgrad", "wgrad")
        if (layer, product) != ("0.linear", "dgrad")
    }
    assert errors["0.linear.forward"][0] == 1.0  # every block has an outlier: all else becomes zero
    assert {one.flops for one in record.modules if not one.unnamed} == {2 * 64**3}
    assert record.verifications[0].error == pytest.approx(1.0, abs=0.05)


def test_products_that_the_policy_keeps_are_no_candidates() -> None:
    record = searched("mxfp4:bf16_products=1.linear.*+*.dgrad", "none", "all")
    named = [one.module for one in record.modules if not one.unnamed]
    assert sorted(named) == ["0.linear.forward", "0.linear.wgrad", "2.forward", "2.wgrad"]
    assert record.verdict == "not needed"


@pytest.mark.parametrize("policy", ["mxfp8", "mxfp4", "nvfp4"])
def test_what_rounding_does_to_healthy_layers_is_measured(policy: str) -> None:
    record = searched(policy, "none", "none")
    assert record.verdict == "not needed"
    assert existing(record.rounding) * 0.5 < existing(record.error_before) < existing(record.rounding) * 0.9


@pytest.mark.parametrize(("plant", "kept"), [("none", []), ("wgrad", ["1.linear"])])
def test_modules_are_searched_for_under_the_same_policies(plant: str, kept: list[str]) -> None:
    record = searched("mxfp4", "none", plant, per_gemm=False)
    assert (record.searched, record.kept, record.bf16_share) == ("modules", kept, None)
    assert record.fp32_share == pytest.approx(3 / 8 if kept else 0)


def in_blocks(width: int) -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(4, width)).sum().backward()
        optimizer.step()

    return train


REFUSED: list[tuple[str, int, type[MezzoError], str, str]] = [
    (
        "fp16",
        32,
        PolicyError,
        "per-gemm asks for products in blocks, and policy fp16 computes none; allowed: fp8-block, mxfp8, mxfp4, nvfp4",
        "choose one of them, or leave per-gemm out, which searches for modules to keep in FP32",
    ),
    (
        "mxfp8",
        32,
        ScriptError,
        "no product of in_blocks.<locals>.train that has a name computes in blocks under mxfp8",
        "mezzo run --policy mxfp8 says why each layer stays in BF16; end_layers=compute includes first and last",
    ),
    (
        "mxfp8:end_layers=compute",
        24,
        ScriptError,
        "no product of in_blocks.<locals>.train that has a name computes in blocks under mxfp8:end_layers=compute",
        "mezzo run --policy mxfp8:end_layers=compute says why each layer stays in BF16; end_layers=compute includes first and last",
    ),
]


@pytest.mark.parametrize(("policy", "width", "kind", "message", "hint"), REFUSED)
def test_refused(policy: str, width: int, kind: type[MezzoError], message: str, hint: str) -> None:
    with pytest.raises(kind) as refused:
        mezzo.fallback(in_blocks(width), policy=policy, per_gemm=True)
    assert (refused.value.message, refused.value.hint) == (message, hint)


def test_the_command_refuses_before_anything_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fallback", "--per-gemm", FRAGILE, "1024", "32", "none"]) == PolicyError.exit_code
    assert "per-gemm asks for products in blocks, and policy fp16 computes none" in capfd.readouterr().err


def test_the_page_names_products_and_bf16() -> None:
    page = page_of(searched("mxfp4", "none", "wgrad"))
    name = "searched.<locals>.train"
    assert page.title == f"BF16 products of {name}"
    assert (
        page.answer.sentence
        == f"1 product of {name} must stay in BF16 under mxfp4:end_layers=compute, 12.5% of the FLOPs"
    )
    facts = {fact.what: fact.value for fact in page.answer.facts}
    assert facts["products in BF16"] == "1"
    assert "modules in FP32" not in facts
    titles = [section.title for section in page.sections if isinstance(section, Section)]
    assert titles[2:4] == ["Products on their own, most suspect first", "Verifications"]
    rows = next(block.rows for block in page.sections[3].blocks if isinstance(block, Grid))  # type: ignore[union-attr]
    assert [str(cell) for cell in rows[0]] == ["1.linear.wgrad", "1", "524 kFLOP", "kept in BF16"]
