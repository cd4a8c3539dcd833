"""The page about articles' numbers shows what its benchmark found, and the rule that judges a claim is right."""

from __future__ import annotations

import json
import sys

import pytest

from paths import ROOT

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks.prediction import article_numbers as articles
from benchmarks.shared import RESULTS

BANDS = {"slow": (100.0, 120.0), "fast": (200.0, 250.0)}


def results() -> dict[str, object]:
    found: dict[str, object] = json.loads((RESULTS / "article_numbers.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(
    ("claim", "agrees"),
    [
        ((110, 115), "slow"),
        ((120, 130), "slow"),
        ((110, 220), "slow; fast"),
        ((90, 99), "none: all are 100 s or more"),
        ((251, 260), "none: all are 250 s or less"),
        ((130, 190), "none: it lies between them"),
    ],
)
def test_a_claim_agrees_with_bands_that_it_shares_a_value_with(claim: tuple[float, float], agrees: str) -> None:
    assert articles.agreeing(claim, BANDS, " s") == agrees


def test_a_gigabyte_may_be_either() -> None:
    # 10.4 GB as 2^30 bytes is 11.17e9; as 10^9 bytes with 15% of workspaces a prediction of 9.05e9 still reaches it.
    assert articles.memory_agreeing((10.4, 10.4), {"reserved": 11_200_000_000}) == "none: all are 10.4 GB or more"
    assert articles.memory_agreeing((10.4, 10.4), {"reserved": 11_160_000_000}) == "reserved"
    assert articles.memory_agreeing((10.4, 10.4), {"reserved": 9_050_000_000}) == "reserved"
    assert articles.memory_agreeing((10.4, 10.4), {"reserved": 9_000_000_000}) == "none: all are 10.3 GB or less"


def test_the_gain_of_a_claim_spans_its_extremes() -> None:
    assert articles.Claim("", "", "", 1, (400, 500), (1000, 1200)).gain == (2.0, 3.0)


def test_the_page_shows_what_the_benchmark_found() -> None:
    page = articles.PAGE.read_text(encoding="utf-8")
    assert articles.written(page, results()) == page


def test_the_results_are_of_the_claims() -> None:
    data = results()
    assert data["command"] == "python -m benchmarks article_numbers"
    for name, claims in (("speeds", articles.SPEEDS), ("paddle", articles.PADDLE), ("memory", articles.MEMORY)):
        found = [(one["claimed"]["fp32"], one["claimed"]["half"]) for one in data[name]]  # type: ignore[attr-defined]
        assert found == [(list(claim.fp32), list(claim.half)) for claim in claims]


def test_every_measurement_names_its_source() -> None:
    for row in articles.measured():
        assert row["setting"] in articles.SETTINGS
        assert row["source"].count(":") == (0 if articles.source_of(row) == "us" else 1)
        assert len(row["commit"]) == (0 if articles.source_of(row) == "us" else 12)
        assert float(row["samples_per_s"]) > 0


def test_our_own_measurements_count() -> None:
    """The SXM rows said that nothing agrees, while our SXM had measured both figures at that batch."""
    claim = next(one for one in articles.SPEEDS if one.gpu == "h100-sxm")
    ours = {row["setting"]: float(row["samples_per_s"]) for row in articles.measured_of(claim) if row["batch"] == "64"}
    assert {name: round(rate) for name, rate in ours.items()} == {"FP32, TF32 off": 784, "TF32": 1689, "FP16": 2031}
    shown = next(one for one in results()["speeds"] if one["gpu"] == "h100-sxm")  # type: ignore[attr-defined]
    for what in ("fp32", "half", "gain"):
        assert "measured by us" in shown[f"{what}_agrees_with"]
    assert "FP32, TF32 off, predicted" not in shown["fp32_agrees_with"], "the measurement replaces the prediction"


def test_a_speed_up_is_of_one_source_and_of_one_library() -> None:
    claim = next(one for one in articles.PADDLE if one.gpu == "v100-32gb" and one.model == articles.RESNET)
    gains = {name: low / (1 - articles.NEAR) for name, (low, _) in articles.measured_gains(claim).items()}
    assert {name: round(gain, 2) for name, gain in gains.items()} == {
        "FP16, channels-last over FP32, TF32 off, measured by Paddle (Paddle 2.5 O2, batch 256)": 3.66,
        "FP16 over FP32, TF32 off, measured by Paddle (NGC PyTorch 21.03, batch 256)": 2.13,
    }


def test_what_is_impossible_in_paddles_rows_is_said_to_be() -> None:
    shown = {(one["what"], one["gpu"]): one for one in results()["paddle"]}  # type: ignore[attr-defined]
    for what in ("ResNet-50", "BERT-base, 128 tokens"):
        on_v100 = shown[what, "v100-32gb"]
        assert on_v100["fp32_agrees_with"].startswith("none: all are")
        assert on_v100["half_agrees_with"].startswith("none: all are")
    assert "measured by Paddle" in shown["ResNet-50", "a100-40gb"]["half_agrees_with"]


@pytest.mark.slow
def test_a_prediction_is_still_what_the_page_shows() -> None:
    bert = next(number for number, claim in enumerate(articles.SPEEDS) if claim.size)
    shown = results()["speeds"][bert]["predicted"]["FP16"][0]  # type: ignore[index]
    assert articles.predicted(articles.SPEEDS[bert], "FP16").throughput == pytest.approx(shown, rel=0.02)
