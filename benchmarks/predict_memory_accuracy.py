"""Predicted against measured memory of a public table: python benchmarks/predict_memory_accuracy.py --rows FILE.

FILE has the columns of one of the gpu_memory_*.csv files. Each row is traced with its own model, batch and optimizer, and replayed
through the simulated allocator under the memory of its card. Nothing is fitted. ``wrongly fits`` is the share of jobs that
were promised to fit under a cap, with the headroom that ``mezzo predict`` keeps, and did not, over all such promises; only tables that
record caps have it.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.measure.predict.memory import DRIVER_BYTES, predict_memory
from mezzo.measure.predict.plan import HEADROOM
from mezzo.measure.predict.training import ZeroGrad, record_training
from predict_models import NotBuilt, installed
from predict_plot import plot

CNN = {
    "MobeNetV3Small": "mobilenet_v3_small",
    "MobileNetV2": "mobilenet_v2",
    "ConvNeXtTiny": "convnext_tiny",
    "VGG16": "vgg16",
    "VGG19": "vgg19",
    "ResNet152": "resnet152",
    "RegNetX400MF": "regnet_x_400mf",
    "ResNet101": "resnet101",
    "ResNet50": "resnet50",
    "RegNetY400MF": "regnet_y_400mf",
    "MobeNetV3Large": "mobilenet_v3_large",
    "MobileNetV3Large": "mobilenet_v3_large",
    "MnasNet": "mnasnet1_0",
    "ConvNeXtBase": "convnext_base",
}
CAUSAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "openai-community/gpt2": ("GPT2LMHeadModel", "GPT2Config", {}),
    "distilbert/distilgpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 6}),
    "cerebras/Cerebras-GPT-111M": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_layer": 10, "n_positions": 2048, "n_inner": 3072, "activation_function": "gelu"},
    ),
    "EleutherAI/gpt-neo-125M": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]},
    ),
    "facebook/opt-125m": ("OPTForCausalLM", "OPTConfig", {}),
    "facebook/opt-350m": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
    "mistralai/Mistral-7B-v0.1": (
        "MistralForCausalLM",
        "MistralConfig",
        {"vocab_size": 32000, "sliding_window": 4096, "use_cache": False},
    ),
    "bigcode/gpt_bigcode-santacoder": (
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        {"vocab_size": 49280, "n_positions": 2048, "n_embd": 2048, "n_layer": 24, "n_head": 16, "use_cache": False},
    ),
}
ZERO_GRAD: dict[str, ZeroGrad] = {
    "": "before_forward",  # not recorded
    "0": "before_forward",
    "1": "before_backward",
    "2": "after_step",
}


@dataclass
class Found:
    """What one row gave."""

    name: str
    predicted_bytes: int
    measured_bytes: int
    promises: int = 0
    """How many caps the job was promised to fit under."""
    broken: int = 0
    """Those under which it ran out of memory."""
    right: list[bool] = field(default_factory=list)
    """For each cap, whether the prediction was right."""


def causal(name: str) -> nn.Module:
    """Return a language model of a row."""
    if name not in CAUSAL:
        raise NotBuilt(f"no configuration of {name}")
    model, config, options = CAUSAL[name]
    transformers = installed("transformers")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return made


def _images(n: int) -> dict[str, Tensor]:
    return {"x": torch.empty(n, 3, 86, 86), "y": torch.empty(n, dtype=torch.long)}


def _image_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    outputs = model(inputs["x"])
    return nn.functional.cross_entropy(outputs, inputs["y"]), outputs


def _tokens(length: int, n: int) -> dict[str, Tensor]:
    return {name: torch.empty(n, length, dtype=torch.long) for name in ("input_ids", "labels")}


def _token_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    outputs = model(**inputs)
    return outputs.loss, outputs


def _loss_alone(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    return _token_loss(model, inputs)[0], None  # a trainer's loop keeps no outputs


def _loss_in_bf16(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """Return the loss as transformers 4.48, which the rows name, computed it for this model."""
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].contiguous()
    return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten()), None


def xmem_row(cells: Mapping[str, str]) -> Found:
    """Predict a row of gpu_memory_xmem.csv: what NVML counted above an idle process."""
    if cells["real_oom"] == "1":
        raise NotBuilt("the job ran out of memory: its peak is a lower bound")
    model, total = cells["model"], int(cells["gpu_total_bytes"])
    if cells["library"].startswith("torchvision"):
        if model not in CNN:
            raise NotBuilt(f"torchvision has no {model}")
        build: Any = getattr(installed("torchvision").models, CNN[model])
        parts: Any = (build, _images, _image_loss)
    else:
        parts = (partial(causal, model), partial(_tokens, 128), _token_loss)
    tape = record_training(
        *parts,
        batch=int(cells["batch"]),
        optimizer=partial(getattr(torch.optim, cells["optimizer"]), lr=1e-4),
        zero_grad=ZERO_GRAD[cells["zero_grad_mode"]],
    )
    found = Found(
        name=f"{model} {cells['optimizer']} b{cells['batch']} {cells['gpu']}",
        predicted_bytes=predict_memory(tape, limit_bytes=total - DRIVER_BYTES).reserved_bytes,
        measured_bytes=int(cells["measured_peak_bytes"]),
    )
    for rival in ("xmem", "dnnmem", "schedtune", "llmem"):
        estimate, oom = cells.get(f"est_{rival}", ""), cells.get(f"limited_to_{rival}_oom", "")
        share = round(float(estimate) / total, 2) if estimate else 1.0
        if oom not in ("0", "1") or share > 0.94:
            continue
        fits = predict_memory(tape, limit_bytes=int(share * total)).fits
        promised = predict_memory(tape, limit_bytes=int(share * total * (1 - HEADROOM))).fits
        found.promises += promised
        found.broken += promised and oom == "1"
        found.right.append(fits == (oom == "0"))
    return found


def fms_row(cells: Mapping[str, str]) -> Found:
    """Predict a row of gpu_memory_fms_a100.csv: the peak that torch allocated, with checkpointing and a model in BF16."""
    if cells["n_gpus"] != "1":
        raise NotBuilt("several GPUs")
    if not cells["torch_peak_alloc_bytes"] or cells["finished"] != "yes":
        raise NotBuilt("the job did not finish, or its peak was not recorded")
    if cells["method"] != "full" or cells["framework_config"] != "none":
        raise NotBuilt("adapters, quantisation or kernels that are not torch's")

    def build() -> nn.Module:
        model: Any = causal(cells["model"]).to(torch.bfloat16)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model  # type: ignore[no-any-return]

    if not cells["sequence"].endswith(" packed") or cells["torch_dtype"] != "bfloat16" or cells["bf16_amp"]:
        raise NotBuilt("sequences of lengths that are not stated, or autocast in the trainer")
    length = int(cells["sequence"].split()[0])
    if "bigcode" in cells["model"]:
        length = min(length, 2048)  # its positions
    tape = record_training(
        build,
        partial(_tokens, length),
        _loss_in_bf16 if "bigcode" in cells["model"] else _loss_alone,
        batch=int(cells["batch_per_gpu"]),
        optimizer=torch.optim.AdamW,
        zero_grad="after_step",
    )
    return Found(
        name=f"{cells['model']} b{cells['batch_per_gpu']} x {length}",
        predicted_bytes=predict_memory(tape).allocated_bytes,
        measured_bytes=int(float(cells["torch_peak_alloc_bytes"])),
    )


def row(cells: Mapping[str, str]) -> Found:
    """Predict a row of any of the tables."""
    if "measured_peak_bytes" in cells:
        return xmem_row(cells)
    if "torch_peak_alloc_bytes" in cells:
        return fms_row(cells)
    raise NotBuilt("the model zoo or the parallel program of the row is not built here")


def main() -> None:
    """Print each row, the reasons of the others and the errors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--plot", type=Path, help="write predicted against measured as a picture")
    options = parser.parse_args()
    found, reasons = [], Counter[str]()
    with options.rows.open(encoding="utf-8", newline="") as file:
        for cells in csv.DictReader(file):
            try:
                one = row(cells)
            except NotBuilt as error:
                reasons[str(error)] += 1
                continue
            error = 100 * (one.predicted_bytes / one.measured_bytes - 1)
            found.append(one)
            sizes = f"measured {one.measured_bytes / 2**20:.0f} MiB predicted {one.predicted_bytes / 2**20:.0f} MiB"
            print(f"{one.name:48} {sizes} {error:+.1f}%", flush=True)
    for reason, count in reasons.most_common():
        print(f"not predicted ({count}): {reason}")
    right = [answer for one in found for answer in one.right]
    if right:
        print(f"would it fit under a cap: right {sum(right)} of {len(right)}")
    promises, broken = sum(one.promises for one in found), sum(one.broken for one in found)
    size = np.abs([100 * (one.predicted_bytes / one.measured_bytes - 1) for one in found])
    if options.plot is not None and found:
        gib = [
            np.array([getattr(one, name) / 2**30 for one in found]) for name in ("measured_bytes", "predicted_bytes")
        ]
        title = f"{len(found)} trainings, nothing fitted: median error {np.median(size):.1f}%"
        plot(options.plot, [one.name.split()[0] for one in found], *gib, unit="GiB at the peak", title=title)
    median, p90 = (f"{np.median(size):.1f}%", f"{np.quantile(size, 0.9):.1f}%") if len(size) else ("-", "-")
    fits = f"{100 * broken / promises:.1f}%" if promises else "-"
    print(f"median {median} p90 {p90} wrongly fits {fits} of {len(found)} rows ({reasons.total()} not predicted)")


if __name__ == "__main__":
    main()
