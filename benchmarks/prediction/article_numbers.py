"""Do the figures that articles on mixed precision repeat agree with measurements and predictions?

Writes ``results/article_numbers.json`` and the tables of docs/article-numbers.md. timm and transformers build the models; nothing is
downloaded, and no model is trained. ``article_measurements.csv`` contains the measurements of others, each with its source;
``results/h100/zoo.csv`` contains ours. A measurement at a claim's batch replaces the prediction of its setting.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.prediction.zoo.trainings import class_loss, images
from benchmarks.shared import RESULTS, ROOT, csv_rows
from benchmarks.shared.harness import report, table, with_table
from mezzo.gpus import gpu_named
from mezzo.measure.predict.named import NamedModel, named_model, tape_of
from mezzo.measure.predict.plan import Tapes, predict
from mezzo.measure.predict.tape_memory import CUBLAS_WORKSPACE_BYTES, DRIVER_BYTES, predict_memory
from mezzo.records import Prediction

PAGE = ROOT / "docs/article-numbers.md"
MEASUREMENTS = Path(__file__).with_name("article_measurements.csv")
OURS = RESULTS / "h100/zoo.csv"
OUR_SETTINGS = {"fp32": "FP32, TF32 off", "tf32": "TF32", "bf16": "FP16"}
"""Settings of our own rows by policy: BF16 costs what FP16 costs."""
SOURCES = {
    "lambdal/deeplearning-benchmark": "Lambda",
    "NVIDIA/DeepLearningExamples": "NVIDIA",
    "huggingface/pytorch-image-models": "timm",
    "PaddlePaddle/Perf": "Paddle",
}
"""Repositories of measurements, with their usual names."""
NEAR = 0.15
"""A claim agrees with a measurement that is at most this far from it: repeated public measurements of one setting differ by as much."""
ABOVE = 0.15
"""The share that cuDNN's workspaces and cache may add to predicted memory (docs/predict.md)."""
GIB = 2**30


@dataclass(frozen=True)
class Claim:
    """A figure as articles state it: a range, without a layout or a script with which it could be checked."""

    what: str
    model: str
    gpu: str
    batch: int
    fp32: tuple[float, float]
    half: tuple[float, float]
    size: int = 0
    """Tokens of a sequence; 0 for images of 224 pixels."""

    @property
    def gain(self) -> tuple[float, float]:
        """The speed-up that the claim's figures allow, or the share of memory that is left."""
        return self.half[0] / self.fp32[1], self.half[1] / self.fp32[0]


RESNET, MOBILENET, BERT = "timm:resnet50", "timm:mobilenetv3_large_100", "transformers:bert-base-uncased"
SPEEDS = [
    Claim("ResNet-50, A100", RESNET, "a100-80gb", 64, (500, 550), (1200, 1300)),
    Claim("ResNet-50, H100", RESNET, "h100-pcie", 64, (850, 900), (2000, 2100)),
    Claim("ResNet-50, H100", RESNET, "h100-sxm", 64, (850, 900), (2000, 2100)),
    Claim("MobileNetV3-Large, A100", MOBILENET, "a100-80gb", 512, (1200, 1300), (3400, 3600)),
    Claim("BERT-base, A100", BERT, "a100-80gb", 32, (380, 420), (1000, 1200), 128),
    Claim("BERT-base, A100", BERT, "a100-80gb", 32, (380, 420), (1000, 1200), 384),
]
"""Samples per second."""
PADDLE_GPUS = ("a100-40gb", "v100-32gb")
PADDLE = [
    Claim(what, model, gpu, batch, fp32, half, size)
    for what, model, batch, fp32, half, size in (
        ("MobileNetV3-Large", MOBILENET, 256, (1200, 1300), (3400, 3600), 0),
        ("ResNet-50", RESNET, 256, (750, 850), (2100, 2300), 0),
        ("BERT-base", BERT, 96, (380, 420), (1000, 1200), 128),
    )
    for gpu in PADDLE_GPUS
]
"""Figures of articles on Paddle, on the GPUs and with the batches of Paddle's own measurements: the articles name no batch."""
MEMORY = [
    Claim("ResNet-50, batch 64, A100", RESNET, "a100-80gb", 64, (9.5, 10), (5, 5.5)),
    Claim("ResNet-50, batch 64, H100", RESNET, "h100-sxm", 64, (9.5, 10), (4.5, 5)),
    Claim("MobileNetV3-Large, batch 512", MOBILENET, "a100-80gb", 512, (27, 29), (15, 17)),
]
"""GB, which may mean 10^9 or 2^30 bytes."""
CIFAR = Claim("ResNet-50 on CIFAR-10, RTX 4090", "", "rtx-4090", 0, (22, 23), (15, 16))
CIFAR_MASTER = (13.0, 13.5)
"""GB with FP16 weights and FP32 masters, as under Apex's O2."""
SETTINGS = {
    "FP32, TF32 off": ("fp32", False),
    "TF32": ("tf32", False),
    "TF32, channels-last": ("tf32", True),
    "FP16": ("fp16", False),
    "FP16, channels-last": ("fp16", True),
}
HALF = [name for name in SETTINGS if name.startswith("FP16")]
WIDE = [name for name in SETTINGS if name not in HALF]


def overlaps(claim: tuple[float, float], low: float, high: float) -> bool:
    return claim[0] <= high and low <= claim[1]


def said(figure: float) -> str:
    """Return a figure with three digits, or as a whole number."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def agreeing(claim: tuple[float, float], bands: dict[str, tuple[float, float]], unit: str = "") -> str:
    """Return the names of the bands that a claim overlaps; if there is none, on which side of all bands it is."""
    found = [name for name, (low, high) in bands.items() if overlaps(claim, low, high)]
    if found:
        return "; ".join(found)
    lowest, highest = min(low for low, _ in bands.values()), max(high for _, high in bands.values())
    if claim[1] < lowest:
        return f"none: all are {said(lowest)}{unit} or more"
    if claim[0] > highest:
        return f"none: all are {said(highest)}{unit} or less"
    return "none: it lies between them"


def cifar_model() -> NamedModel:
    """Return the ResNet-50 of examples/cifar_resnet.py as a model by name."""
    build = runpy.run_path(str(ROOT / "examples/cifar_resnet.py"))["build_model"]
    return NamedModel("cifar_resnet.py", "images", "32x32", partial(build, "resnet50"), partial(images, 32), class_loss)


@cache
def tapes(model: str, size: int, batch: int, channels_last: bool) -> dict[str, Tapes]:
    """Return the tapes of a training by policy: SGD with momentum for images, AdamW for text."""
    built = cifar_model() if not model else named_model(model, sequence=size) if size else named_model(model)
    policies = ("fp32", "fp16") if model else ("fp32", "fp16", "fp16-master")

    def tape(policy: str, number: int) -> Any:
        return tape_of(built, policy, number, optimizer="adamw" if size else "sgd", channels_last=channels_last)

    return {policy: Tapes.record(partial(tape, policy), batch) for policy in policies}


def predicted(claim: Claim, setting: str) -> Prediction:
    """Return the prediction for a claim in one of the ``SETTINGS``."""
    policy, channels_last = SETTINGS[setting]
    recorded = tapes(claim.model, claim.size, claim.batch, channels_last)
    return predict(recorded, gpu_named(claim.gpu, option="gpu"), policy, batch=claim.batch)


def measured() -> list[dict[str, str]]:
    """Return all measurements by model, GPU and setting: others', and ours at the claims' batches."""
    rows = list(csv_rows.read(MEASUREMENTS))
    claimed = {(claim.model, str(claim.batch)) for claim in SPEEDS}
    return rows + [
        {
            "model": row["model"],
            "gpu": "h100-sxm",
            "setting": OUR_SETTINGS[row["policy"]],
            "batch": row["batch"],
            "size": row["size"],
            "samples_per_s": row["throughput"],
            "libraries": f"PyTorch {row['torch'].partition('+')[0]}" + (", BF16" if row["policy"] == "bf16" else ""),
            "source": "",
            "commit": "",
        }
        for row in csv_rows.read(OURS)
        if (row["model"], row["batch"]) in claimed and row["status"] == "ok"
    ]


def source_of(row: dict[str, str]) -> str:
    """Return who measured a row."""
    return SOURCES[row["source"].partition(":")[0]] if row["source"] else "us"


def around(figure: float) -> tuple[float, float]:
    return figure * (1 - NEAR), figure * (1 + NEAR)


def measured_of(claim: Claim) -> list[dict[str, str]]:
    """Return the measurements of a claim's model on its GPU."""
    return [
        row
        for row in measured()
        if (row["model"], row["gpu"]) == (claim.model, claim.gpu) and (not claim.size or int(row["size"]) == claim.size)
    ]


def by_whom(row: dict[str, str]) -> str:
    return f"measured by {source_of(row)} ({row['libraries']}, batch {row['batch']})"


def measured_bands(claim: Claim) -> dict[str, tuple[float, float]]:
    """Return the ranges that agree with the measurements of a claim's model on its GPU."""
    return {f"{row['setting']}, {by_whom(row)}": around(float(row["samples_per_s"])) for row in measured_of(claim)}


def measured_gains(claim: Claim) -> dict[str, tuple[float, float]]:
    """Return the ranges that agree with measured speed-ups: both rates by the same people with the same PyTorch or Paddle."""
    found, rows = {}, measured_of(claim)
    for half, wide in product(rows, rows):
        alike = source_of(half) == source_of(wide) and half["libraries"].startswith(wide["libraries"])
        one_of_each = half["setting"] in HALF and wide["setting"] in WIDE
        if one_of_each and alike:
            gain = float(half["samples_per_s"]) / float(wide["samples_per_s"])
            found[f"{half['setting']} over {wide['setting']}, {by_whom(half)}"] = around(gain)
    return found


def speed(claim: Claim) -> dict[str, Any]:
    """Return the settings whose measurements or predictions agree with a claimed throughput, and the speed-ups that they allow."""
    settings = [name for name in SETTINGS if not (claim.size and "channels-last" in name)]
    if gpu_named(claim.gpu).tf32_flops_per_s is None:
        settings = [name for name in settings if not name.startswith("TF32")]
    found = {name: predicted(claim, name) for name in settings}
    bands = {name: (one.throughput_low, one.throughput_high) for name, one in found.items()}
    pairs = [(half, wide) for wide in WIDE for half in HALF if half in found and wide in found]
    gains = {
        f"{half} over {wide}": found[half].throughput / found[wide].throughput
        for half, wide in pairs
        if "last" in half or "last" not in wide
    }
    known = {row["setting"] for row in measured_of(claim) if int(row["batch"]) == claim.batch}
    shown = measured_bands(claim) | {f"{name}, predicted": bands[name] for name in bands if name not in known}
    both = {f"{half} over {wide}" for half in known for wide in known}
    shown_gains = measured_gains(claim) | {
        f"{name}, predicted": around(gains[name]) for name in gains if name not in both
    }
    return {
        "what": claim.what + (f", {claim.size} tokens" if claim.size else ""),
        "gpu": claim.gpu,
        "batch": claim.batch,
        "claimed": {"fp32": claim.fp32, "half": claim.half, "gain": claim.gain},
        "predicted": {name: [one.throughput, *bands[name]] for name, one in found.items()},
        "gains": gains,
        "fp32_agrees_with": agreeing(claim.fp32, {name: shown[name] for name in shown if "FP16" not in name}),
        "half_agrees_with": agreeing(claim.half, {name: shown[name] for name in shown if "FP16" in name}),
        "gain_agrees_with": agreeing(claim.gain, shown_gains),
    }


def memory(claim: Claim) -> dict[str, Any]:
    """Return the predicted memory of a claim in bytes: allocated, reserved, and as shown by nvidia-smi."""
    found = {"fp32": predicted(claim, "FP32, TF32 off"), "half": predicted(claim, "FP16")}
    kinds = {
        name: {"allocated": one.allocated_bytes, "reserved": one.reserved_bytes, "nvidia-smi": one.device_bytes}
        for name, one in found.items()
    }
    return {
        "what": claim.what,
        "claimed": {"fp32": claim.fp32, "half": claim.half, "share": claim.gain},
        "predicted": kinds,
        "share": {kind: kinds["half"][kind] / kinds["fp32"][kind] for kind in kinds["fp32"]},
        "fp32_agrees_with": memory_agreeing(claim.fp32, kinds["fp32"]),
        "half_agrees_with": memory_agreeing(claim.half, kinds["half"]),
    }


def memory_agreeing(claim: tuple[float, float], kinds: dict[str, int]) -> str:
    """Return the kinds of memory that a claim in GB agrees with: up to 15% above the prediction, in either meaning of GB."""
    bands = {name: (bytes_ / GIB, bytes_ * (1 + ABOVE) / 1e9) for name, bytes_ in kinds.items()}
    return agreeing(claim, bands, " GB")


def cifar() -> list[dict[str, Any]]:
    """Return the batch at which nvidia-smi would show the claimed memory in FP32, and the memory of 16 bits at that batch."""
    wanted = sum(CIFAR.fp32) / 2 * 1e9
    rows = []
    for pixels, model in ((32, ""), (224, RESNET)):
        own = tapes(model, 0, 64, False)

        def shown(policy: str, batch: int, own: dict[str, Tapes] = own) -> int:
            tape = own[policy].at(batch)
            return predict_memory(tape, workspace_bytes=CUBLAS_WORKSPACE_BYTES).reserved_bytes + DRIVER_BYTES

        low, high = 1, 2
        while shown("fp32", high) < wanted:
            low, high = high, 2 * high
        while high - low > max(1, low // 128):
            middle = (low + high) // 2
            low, high = (middle, high) if shown("fp32", middle) < wanted else (low, middle)
        rows.append({"pixels": pixels, "batch": low, **{policy: shown(policy, low) for policy in own}})
    return rows


def span(values: Sequence[float], unit: str = "") -> str:
    return f"{said(values[0])} to {said(values[1])}{unit}"


def speed_table(speeds: Sequence[dict[str, Any]]) -> str:
    """Return the table of the settings that each claimed throughput agrees with."""
    rows = []
    for one in speeds:
        claimed, name = one["claimed"], f"{one['what']}, batch {one['batch']} (`{one['gpu']}`)"
        rows.append((name, f"FP32: {span(claimed['fp32'])}", one["fp32_agrees_with"]))
        rows.append(("", f"FP16: {span(claimed['half'])}", one["half_agrees_with"]))
        rows.append(("", f"gain: {span(claimed['gain'])}", one["gain_agrees_with"]))
    return table(("training", "claimed", "agrees with"), rows)


def prediction_table(speeds: Sequence[dict[str, Any]]) -> str:
    """Return the predicted throughput of each claim's training."""
    rows = []
    for one in speeds:
        found = one["predicted"]
        rows.append((f"{one['what']} (`{one['gpu']}`)", *(said(found[s][0]) if s in found else "" for s in SETTINGS)))
    return table(("training", *SETTINGS), rows)


def measured_table() -> str:
    rows = []
    for row in measured():
        repository, _, path = row["source"].partition(":")
        link = f"[{source_of(row)}](https://github.com/{repository}/blob/{row['commit']}/{path})"
        link = link if repository else "[us](h100.md)"
        model = row["model"].partition(":")[2] + (f", {row['size']} tokens" if "bert" in row["model"] else "")
        speed_text = said(float(row["samples_per_s"]))
        rows.append((model, f"`{row['gpu']}`", row["setting"], row["batch"], speed_text, row["libraries"], link))
    return table(("model", "GPU", "arithmetic", "batch", "samples/s", "libraries", "source"), rows)


def memory_table(data: dict[str, Any]) -> str:
    """Return the predicted memory of each claim's training, in GB of 10^9 bytes."""
    rows = []
    for one in data["memory"]:
        for name, words in (("fp32", "FP32"), ("half", "FP16")):
            kinds = (said(bytes_ / 1e9) for bytes_ in one["predicted"][name].values())
            what = one["what"] if name == "fp32" else ""
            rows.append((what, f"{words}: {span(one['claimed'][name])}", *kinds, one[f"{name}_agrees_with"]))
        shares = (f"{share:.0%}" for share in one["share"].values())
        low, high = one["claimed"]["share"]
        rows.append(("", f"share: {low:.0%} to {high:.0%}", *shares, ""))
    return table(("training", "claimed, GB", "allocated", "reserved", "`nvidia-smi`", "agrees with"), rows)


def cifar_table(data: dict[str, Any]) -> str:
    """Return the table of the memory of 16 bits at the batch that takes the claimed memory in FP32."""
    claimed = CIFAR.half[0] / CIFAR.fp32[1], CIFAR.half[1] / CIFAR.fp32[0]
    masters = CIFAR_MASTER[0] / CIFAR.fp32[1], CIFAR_MASTER[1] / CIFAR.fp32[0]
    rows = [("claimed", "", span(CIFAR.fp32), *(f"{low:.0%} to {high:.0%}" for low, high in (claimed, masters)))]
    for row in data["cifar"]:
        shares = (f"{row[policy] / row['fp32']:.0%}" if policy in row else "" for policy in ("fp16", "fp16-master"))
        rows.append((f"{row['pixels']} x {row['pixels']} pixels", f"{row['batch']}", said(row["fp32"] / 1e9), *shares))
    return table(("pictures", "batch", "FP32, GB", "FP16 autocast, share", "FP16 weights with masters, share"), rows)


def written(page: str, data: dict[str, Any]) -> str:
    """Return the page with its tables replaced, each between ``<!-- NAME ... -->`` and ``<!-- end -->``."""
    made = {
        "speeds": speed_table(data["speeds"]),
        "predictions": prediction_table(data["speeds"]),
        "paddle": speed_table(data["paddle"]),
        "measurements": measured_table(),
        "memory": memory_table(data),
        "cifar": cifar_table(data),
    }
    for name, text in made.items():
        begin = f"<!-- {name}: generated by python -m benchmarks article_numbers -->\n"
        page = with_table(page, begin, "<!-- end -->", text)
    return page


def main() -> None:
    data = {
        "speeds": [speed(one) for one in SPEEDS],
        "paddle": [speed(one) for one in PADDLE],
        "memory": [memory(one) for one in MEMORY],
        "cifar": cifar(),
    }
    shown = [
        (f"{one['what']}, {one['gpu']}: gain {span(one['claimed']['gain'])}", one["gain_agrees_with"], "")
        for one in (*data["speeds"], *data["paddle"])
    ]
    report("article_numbers", shown, data)
    data = json.loads((RESULTS / "article_numbers.json").read_text(encoding="utf-8"))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), data), encoding="utf-8")
