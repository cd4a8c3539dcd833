"""The rows of public memory tables, each predicted as it ran: model, batch, optimizer, card and libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.prediction.zoo import litgpt, pairs
from benchmarks.prediction.zoo.trainings import (
    Inputs,
    NotBuilt,
    class_loss,
    images,
    installed,
    loss_alone,
    own_loss,
    text,
)
from benchmarks.prediction.zoo.transformers4 import transformers_4, with_causal_masks
from mezzo.errors import UsageError
from mezzo.measure.predict.configurations import ModelConfiguration, configuration
from mezzo.measure.predict.named import named_model
from mezzo.measure.predict.plan import MEMORY_HEADROOM
from mezzo.measure.predict.tape_memory import DRIVER_BYTES, predict_memory
from mezzo.measure.predict.time import HALF_FORMATS
from mezzo.measure.predict.training import ZeroGrad, record_training

Cells = Mapping[str, str]
CNN = {"MobeNetV3Small": "MobileNetV3Small", "MobeNetV3Large": "MobileNetV3Large", "MnasNet": "mnasnet1_0"}
"""Names that are not torchvision's in other letters."""
LANGUAGE: dict[str, dict[str, Any]] = {
    "ibm/PowerLM-3b": {
        "model_type": "granite", "vocab_size": 49152, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 40,
        "num_attention_heads": 36, "tie_word_embeddings": True,
    },
    "bigcode/gpt_bigcode-santacoder": {
        "model_type": "gpt_bigcode", "vocab_size": 49280, "n_positions": 2048, "n_embd": 2048, "n_layer": 24, "n_head": 16,
    },
}  # fmt: skip
"""Language models whose names Mezzo does not know."""
A100_BYTES = 80 * 2**30
ZERO_GRAD: dict[str, ZeroGrad] = {
    "": "before_forward",  # not recorded
    "0": "before_forward",
    "1": "before_backward",
    "2": "after_step",
}


@dataclass
class Found:
    """Prediction and measurement of one row."""

    name: str
    predicted_bytes: int
    measured_bytes: int
    """0 for a job that ran out of memory: its peak is a lower bound."""
    promises: int = 0
    """How many caps the job was promised to fit under."""
    broken: int = 0
    """Those under which it ran out of memory."""
    device_bytes: int = 0
    """Predicted and measured figures of nvidia-smi; 0 if the row has none."""
    measured_device_bytes: int = 0
    pair: str = ""
    """The pair of FP32 and mixed precision that the row belongs to."""
    precision: str = ""
    right: list[bool] = field(default_factory=list)
    """For the card and each cap, whether the prediction of what fits was right."""


def language_model(name: str, *, cached: bool = True) -> nn.Module:
    """Return a language model, which caches keys and values as transformers does unless a trainer turns that off."""
    library = installed("transformers")
    try:
        found = configuration(name, library) if name not in LANGUAGE else None
    except UsageError as error:
        raise NotBuilt(str(error).splitlines()[0]) from None
    if found is None:
        found = ModelConfiguration(library.AutoConfig.for_model(**LANGUAGE[name]), "causal")
    found.config.use_cache = cached
    return with_causal_masks(found.build(library))


def _xmem_row(cells: Cells) -> Found:
    """Predict a row of gpu_memory_xmem.csv: the memory that NVML counted above an idle process."""
    model, total = cells["model"], int(cells["gpu_total_bytes"])
    if cells["library"].startswith("torchvision"):
        try:
            built = named_model(f"torchvision:{CNN.get(model, model)}")
        except UsageError as error:
            raise NotBuilt(str(error).splitlines()[0]) from None
        parts: Any = (built.build, partial(images, 86), class_loss)
    else:
        parts = (partial(language_model, model), partial(text, 128), own_loss)
    optimizer = partial(getattr(torch.optim, cells["optimizer"]), lr=1e-4)
    with transformers_4():
        tape = record_training(
            *parts, batch=int(cells["batch"]), optimizer=optimizer, zero_grad=ZERO_GRAD[cells["zero_grad_mode"]]
        )
    memory = partial(predict_memory, tape, matrix_formats=(*HALF_FORMATS, "fp32"))  # torch's convolutions are in TF32
    whole, ran_out = memory(limit_bytes=total - DRIVER_BYTES), cells["real_oom"] == "1"
    found = Found(
        name=f"{model} {cells['optimizer']} b{cells['batch']} {cells['gpu']}",
        predicted_bytes=whole.reserved_bytes,
        measured_bytes=0 if ran_out else int(cells["measured_peak_bytes"]),
        right=[whole.fits != ran_out],
    )
    for estimator in ("xmem", "dnnmem", "schedtune", "llmem"):
        estimate, oom = cells.get(f"est_{estimator}", ""), cells.get(f"limited_to_{estimator}_oom", "")
        share = round(float(estimate) / total, 2) if estimate else 1.0
        if oom not in ("0", "1") or share > 0.94:
            continue
        fits = memory(limit_bytes=int(share * total)).fits
        promised = memory(limit_bytes=int(share * total * (1 - MEMORY_HEADROOM))).fits
        found.promises += promised
        found.broken += promised and oom == "1"
        found.right.append(fits == (oom == "0"))
    return found


class _Adapted(nn.Module):
    """A frozen product plus an adapter of low rank in its format, as PEFT's LoRA computes it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x)) * 2.0
        return result


def _adapted(model: nn.Module, names: str, rank: int) -> nn.Module:
    """Return ``model`` frozen, with adapters on the products whose names end as ``names`` say."""
    model.requires_grad_(False)
    for place, module in list(model.named_modules()):
        parent, _, last = place.rpartition(".")
        if last in names.split() and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), last, _Adapted(module, rank))
    return model


def _loss_in_bf16(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Any]:
    """Return the loss as transformers 4.48, which the rows name, computed it for this model."""
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].contiguous()
    return cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten()), None


def _fms_row(cells: Cells) -> Found:
    """Predict a row of gpu_memory_fms_a100.csv: allocated peak and device memory, with checkpointing and weights in 16 bits."""
    if cells["n_gpus"] != "1":
        raise NotBuilt("several GPUs")
    if not cells["torch_peak_alloc_bytes"] or cells["finished"] != "yes":
        raise NotBuilt("the job did not finish, or its peak was not recorded")
    if cells["framework_config"] != "none":
        raise NotBuilt("quantisation or kernels that are not torch's")
    if cells["bf16_amp"] or cells["fp16_amp"]:
        raise NotBuilt("autocast over 16-bit weights in the trainer")
    old, batch = "bigcode" in cells["model"], cells["batch_per_gpu"]

    def build() -> nn.Module:
        model: Any = language_model(cells["model"], cached=False).to(getattr(torch, cells["torch_dtype"]))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if cells["method"] == "lora":
            model.enable_input_require_grads()  # as PEFT does, so that checkpoints have a gradient to pass on
            return _adapted(model, cells["target_modules"], int(float(cells["lora_r"])))
        return model  # type: ignore[no-any-return]

    length = 2048 if old else 4096  # its positions; the length of packed sequences, and the longest that others have
    parts = build, partial(text, length), _loss_in_bf16 if old else loss_alone
    with transformers_4():
        tape = record_training(*parts, batch=int(batch), optimizer=torch.optim.AdamW, zero_grad="after_step")
    return Found(
        name=f"{cells['model']} {cells['method']} b{batch} x {length}",
        predicted_bytes=predict_memory(tape).allocated_bytes,
        measured_bytes=int(float(cells["torch_peak_alloc_bytes"])),
        device_bytes=predict_memory(tape, limit_bytes=A100_BYTES - DRIVER_BYTES).reserved_bytes + DRIVER_BYTES,
        measured_device_bytes=int(float(cells["nvidia_smi_mib"]) * 2**20),
    )


def _pairs_row(cells: Cells) -> Found:
    model, precision = cells["model"], cells["precision"][:4]
    short = model if len(model) < 30 else f"{model[:4]} {model[-24:].strip()}"
    return Found(
        name=f"{short} {cells['input'][:10]} b{cells['batch_per_gpu']} {precision}",
        predicted_bytes=pairs.predicted_bytes(cells),
        measured_bytes=int(float(cells["measured_mib"]) * 2**20),
        pair=cells["pair_id"],
        precision=precision,
    )


def _large_row(cells: Cells) -> Found:
    """Predict a row of gpu_memory_large.csv: allocated peak of LitGPT's trainings on one GPU."""
    if "litgpt" not in cells["source"]:
        raise NotBuilt("a program that is not built here: torchtitan, torchtune, Megatron")
    return Found(
        name=f"{cells['model'][:28]} b{cells['micro_batch_per_gpu']} x {cells['sequence']} {cells['gpu'][:10]}",
        predicted_bytes=litgpt.memory_of(cells).allocated_bytes,
        measured_bytes=int(float(cells["memory_gib"]) * 2**30),
    )


def row(cells: Cells) -> Found:
    """Predict a row of any of the tables.

    Raises:
        NotBuilt: the row's training cannot be built.
    """
    columns = {"measured_peak_bytes": _xmem_row, "torch_peak_alloc_bytes": _fms_row, "measured_mib": _pairs_row}
    return next((kind for column, kind in columns.items() if column in cells), _large_row)(cells)
