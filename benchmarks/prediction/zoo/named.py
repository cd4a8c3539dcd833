"""The trainings behind the rows of public tables, as tapes: models by their names there, in the precision and layout of the row.

timm, torchvision and transformers are needed. Rows whose training cannot be built are not predicted, and the reason is printed.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.errors import UsageError
from mezzo.measure.predict.named import import_library
from mezzo.measure.predict.tape import CostedOperation, MemoryBlock, TrainingTape
from mezzo.measure.predict.training import record_training
from mezzo.policy import Policy

BATCHES = 8, 16
"""The batch sizes that are recorded; costs at others follow."""


_FIELDS = [field.name for kind in (TrainingTape, MemoryBlock, CostedOperation) for field in fields(kind)]
"""The fields of a tape; a stored tape without one of them is recorded again."""


class NotBuilt(Exception):
    """A row's training that cannot be built, with the reason."""


@dataclass(frozen=True)
class Training:
    """A training without its precision."""

    build: Callable[[], nn.Module]
    batch_of: Callable[[int], dict[str, Tensor]]
    loss_of: Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, Any]]
    kind: str
    """The class of models: convolutional, language transformer or vision transformer."""


TIMM = {"resnet50v1.5": "resnet50", "resnext101-32x4d": "resnext101_32x4d", "efficientnet-b0": "efficientnet_b0"}
GPT = {
    "gpt2_large": {"n_embd": 1280, "n_layer": 36, "n_head": 20, "n_positions": 1024},
    "gpt3_xl": {"n_embd": 3072, "n_layer": 24, "n_head": 24, "n_positions": 2048},
    "gpt3_27": {"n_embd": 2560, "n_layer": 32, "n_head": 32, "n_positions": 2048},
}
VISION_TRANSFORMERS = ("vit", "deit", "swin", "mixer")


def installed(library: str) -> Any:
    """Return a library of models.

    Raises:
        NotBuilt: it is not installed.
    """
    try:
        return import_library(library)
    except UsageError as error:
        raise NotBuilt(str(error).splitlines()[0]) from None


def training(model: str, size: str) -> Training:
    """Return the training of a row's model at an image or sequence size."""
    if model in GPT or model.startswith(("bert", "opt")):
        return _language(model, int(size))
    if model.startswith("ssd300"):
        return _images(_Ssd, int(size), "convolutional", _ssd_loss)
    if model == "nnUNet-2D":
        raise NotBuilt("the row does not state the network's widths")
    if "TF" in model:
        raise NotBuilt("TensorFlow with XLA fuses operations that torch runs separately")
    if model == "switchxl4":
        raise NotBuilt("a mixture of experts, whose products depend on the data")
    if model.startswith("llama"):
        raise NotBuilt("eight GPUs with FSDP")
    timm = installed("timm")

    timm.layers.set_fused_attn(False)
    name = TIMM.get(model, model)
    if name not in timm.list_models():
        raise NotBuilt(f"timm has no model {name}")
    kind = "vision transformer" if name.startswith(VISION_TRANSFORMERS) else "convolutional"
    return _images(partial(timm.create_model, name), int(size), kind, _class_loss)


def _images(build: Callable[[], nn.Module], size: int, kind: str, loss_of: Callable[..., Any]) -> Training:
    def batch_of(n: int) -> dict[str, Tensor]:
        return {"x": torch.empty(n, 3, size, size), "y": torch.empty(n, dtype=torch.long)}

    return Training(build, batch_of, loss_of, kind)


def _class_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    outputs = model(inputs["x"])
    return nn.functional.cross_entropy(outputs.float(), inputs["y"]), outputs


def _language(model: str, length: int) -> Training:
    tr = installed("transformers")

    def ids(n: int) -> Tensor:
        return torch.empty(n, length, dtype=torch.long)

    def of(build: Callable[[], nn.Module], *labels: str, masked: bool = False) -> Training:
        def batch_of(n: int) -> dict[str, Tensor]:
            found = {"input_ids": ids(n)}
            if masked:
                found["attention_mask"] = torch.empty(n, 1, 1, length)
            for label in labels:
                found[label] = ids(n) if label == "labels" else torch.empty(n, dtype=torch.long)
            return found

        def loss_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
            outputs = model(**inputs)
            return outputs.loss, outputs

        return Training(build, batch_of, loss_of, "language transformer")

    if model in GPT:
        return of(lambda: tr.GPT2LMHeadModel(tr.GPT2Config(attn_implementation="eager", **GPT[model])), "labels")
    if model == "opt_13":
        config = tr.OPTConfig(
            hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, ffn_dim=8192, attn_implementation="eager"
        )
        return of(lambda: tr.OPTForCausalLM(config), "labels")
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    config = tr.BertConfig(attn_implementation="eager", **(large if "large" in model else {}))
    if "squad" in model:
        return of(lambda: tr.BertForQuestionAnswering(config), "start_positions", "end_positions", masked=True)
    if "seqcls" in model:

        def classifier() -> nn.Module:
            config.num_labels = 2
            config.problem_type = "single_label_classification"
            return tr.BertForSequenceClassification(config)

        found = of(classifier, masked=True)

        def batch_of(n: int) -> dict[str, Tensor]:
            return {**found.batch_of(n), "labels": torch.empty(n, dtype=torch.long)}

        return Training(found.build, batch_of, found.loss_of, found.kind)
    if "pretraining" in model:
        return _pretraining(lambda: tr.BertForMaskedLM(config), length, ids)
    return of(lambda: tr.BertForMaskedLM(config), "labels", masked=True)


def _pretraining(build: Callable[[], nn.Module], length: int, ids: Callable[[int], Tensor]) -> Training:
    """The head runs on the masked tokens alone, of which a sequence has 20 in 128."""
    masked = length * 20 // 128

    def batch_of(n: int) -> dict[str, Tensor]:
        places = torch.empty(n * masked, dtype=torch.long)
        return {"input_ids": ids(n), "attention_mask": torch.empty(n, 1, 1, length), "at": places, "labels": places}

    def loss_of(model: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
        hidden = model.bert(inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
        scores = model.cls(hidden.flatten(0, 1).index_select(0, inputs["at"]))
        return nn.functional.cross_entropy(scores.float(), inputs["labels"]), None

    return Training(build, batch_of, loss_of, "language transformer")


class BertAdam(torch.optim.Optimizer):
    """Adam as in BERT's FP32 scripts of that time: one parameter after another, each clipped separately."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update each parameter separately."""
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
            p.grad.norm()
            p.grad.mul_(0.5)
            state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
            update = state["m"] / (state["v"].sqrt() + 1e-6)
            update += 0.01 * p
            p.add_(-(1e-4 * update))


class _Ssd(nn.Module):
    """SSD300 on ResNet-50's first three stages, the third at stride 1, with six prediction heads."""

    def __init__(self) -> None:
        super().__init__()
        backbone = installed("torchvision").models.resnet50()
        first = backbone.layer3[0]
        first.conv1.stride = first.conv2.stride = first.downsample[0].stride = (1, 1)
        self.backbone = nn.Sequential(*list(backbone.children())[:7])
        widths = [1024, 512, 512, 256, 256, 256]
        middle = [256, 256, 128, 128, 128]
        self.more = nn.ModuleList()
        for i, (a, b, m) in enumerate(zip(widths, widths[1:], middle, strict=False)):
            stride, padding = (2, 1) if i < 3 else (1, 0)
            self.more.append(
                nn.Sequential(
                    nn.Conv2d(a, m, 1, bias=False),
                    nn.BatchNorm2d(m),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(m, b, 3, stride=stride, padding=padding, bias=False),
                    nn.BatchNorm2d(b),
                    nn.ReLU(inplace=True),
                )
            )
        boxes = [4, 6, 6, 6, 4, 4]
        self.places = nn.ModuleList(nn.Conv2d(w, n * 4, 3, padding=1) for w, n in zip(widths, boxes, strict=True))
        self.classes = nn.ModuleList(nn.Conv2d(w, n * 81, 3, padding=1) for w, n in zip(widths, boxes, strict=True))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = [self.backbone(x)]
        for block in self.more:
            features.append(block(features[-1]))
        places = [h(f).reshape(x.shape[0], 4, -1) for h, f in zip(self.places, features, strict=True)]
        classes = [h(f).reshape(x.shape[0], 81, -1) for h, f in zip(self.classes, features, strict=True)]
        return torch.cat(places, 2), torch.cat(classes, 2)


def _ssd_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    places, classes = model(inputs["x"])
    places, classes = places.float(), classes.float()
    wanted = torch.empty_like(places)
    labels = torch.empty(classes.shape[0], classes.shape[2], dtype=torch.long)
    mask = labels > 0
    near = (mask * nn.functional.smooth_l1_loss(places, wanted, reduction="none").sum(1)).sum(1)
    errors = nn.functional.cross_entropy(classes, labels, reduction="none")
    _, order = errors.sort(1, descending=True)
    _, rank = order.sort(1)
    hard = rank < 3 * mask.sum(1, keepdim=True)
    return (near + (errors * (mask + hard)).sum(1)).mean(), None


# --- a row of the table ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The training of a row of gpu_training_throughput.csv."""

    model: str
    size: str
    precision: str
    """``fp32``, ``tf32``, ``fp16`` (autocast), ``fp16-half`` (the model in FP16) or ``bf16``."""
    layout: str
    optimizer: str

    def tape(self, batch: int, cache: Path | None = None) -> TrainingTape:
        """Return the tape at ``batch``; recorded tapes are stored in ``cache``."""
        low, high = (self._recorded(n, cache) for n in BATCHES)
        return low.at_batch(high, batch)

    @property
    def recorded(self) -> Row:
        """The row whose tape this one shares: TF32 runs the same operations as FP32."""
        return replace(self, precision={"tf32": "fp32"}.get(self.precision, self.precision))

    def _recorded(self, batch: int, cache: Path | None) -> TrainingTape:
        one = self.recorded
        path = None
        if cache is not None:
            path = cache / (hashlib.sha256(repr((one, batch, _FIELDS)).encode()).hexdigest()[:16] + ".pickle")
            if path.exists():
                found: TrainingTape = pickle.loads(path.read_bytes())
                return found
        tape = one._record(batch)
        if path is not None:
            path.write_bytes(pickle.dumps(tape))
        return tape

    def _record(self, batch: int) -> TrainingTape:
        found = training(self.model, self.size)
        half = self.precision == "fp16-half"
        channels_last = self.layout == "nhwc" and found.kind != "language transformer"

        def build() -> nn.Module:
            model = found.build()
            if half:
                model.half()
            return model.to(memory_format=torch.channels_last) if channels_last else model

        def batch_of(n: int) -> dict[str, Tensor]:
            inputs = found.batch_of(n)
            if half:
                inputs = {k: v.half() if v.is_floating_point() else v for k, v in inputs.items()}
            if channels_last:
                inputs["x"] = inputs["x"].contiguous(memory_format=torch.channels_last)
            return inputs

        policy = Policy.parse(self.precision) if self.precision in ("fp16", "bf16") else None
        tape = record_training(
            build, batch_of, found.loss_of, batch=batch, optimizer=OPTIMIZERS[self.optimizer], policy=policy, steps=1
        )
        tape.operations = [op for op in tape.operations if self.optimizer != "none" or op.phase != "optimizer"]
        if half:
            tape.operations += _master_weights(tape)
        return tape


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "none": partial(torch.optim.SGD, lr=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-4, foreach=True),
    "fused-adam": partial(torch.optim.Adam, lr=1e-4, fused=True),
    "bert-adam": BertAdam,
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.9),
}


def _master_weights(tape: TrainingTape) -> list[CostedOperation]:
    # An FP32 copy of each weight: gradients are cast and unscaled, the result is cast back.
    half_bytes = sum(block.size_bytes for block in tape.blocks if block.kind == "parameters")
    extra = 2 * half_bytes
    return [
        CostedOperation("unscale", "optimizer", "", "fp32", 0, half_bytes, extra),
        CostedOperation("master_update", "optimizer", "", "fp32", 0, extra, half_bytes),
    ]


def row_of(cells: Mapping[str, str]) -> tuple[Row, int, str]:
    """Return the training of a row, its batch size and the kind of its model.

    Raises:
        NotBuilt: the training cannot be built.
    """
    if int(cells["n_gpus"]) != 1:
        raise NotBuilt("several GPUs")
    if "ckpt" in cells["notes"] or "checkpointing" in cells["notes"]:
        raise NotBuilt("activation checkpointing in the row")
    model, size = cells["model"], cells["img_or_seq"]
    math = cells["effective_math"]
    if "O2" in math or math == "fp16 pure":
        precision = "fp16-half" if "bert" in model else "fp16"
    else:
        precision = re.match(r"fp32|tf32|fp16|bf16", math).group()  # type: ignore[union-attr]
    optimizer = {
        "SGD-momentum": "sgd",
        "FusedAdam/BertAdam": "fused-adam",
        "FusedAdam": "fused-adam",
        "RMSprop": "rmsprop",
    }
    made = optimizer.get(
        cells["optimizer"], "none" if cells["optimizer"] in ("none (fwd+bwd)", "FusedLAMB") else "adam"
    )
    if cells["optimizer"] == "FusedAdam/BertAdam" and precision != "fp16-half":
        made = "bert-adam"
    if "adafactor" in cells["notes"] or "8-bit" in cells["notes"]:
        raise NotBuilt("an optimizer that is not torch's")
    layout = {"nhwc": "nhwc", "nhwc(AMP)": "nhwc" if precision == "fp16" else "nchw"}.get(cells["layout"], "nchw")
    batch = cells["batch_per_gpu"] or ("64" if model.startswith("ssd") else "")
    if not batch:
        batch = "128"
    return Row(model, size, precision, layout, made), int(batch), training(model, size).kind
