"""The trainings behind the rows of public tables: models by their names there, with losses and batches that need no data.

timm, torchvision and transformers build them. Rows whose training cannot be built are not predicted, and the reason is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, smooth_l1_loss

from benchmarks.prediction.zoo.blocks import convolved, window
from benchmarks.prediction.zoo.transformer_xl import transformer_xl, xl_loss
from mezzo.errors import UsageError
from mezzo.measure.predict.configurations import configuration
from mezzo.measure.predict.named import import_library, own_name

Inputs = Mapping[str, Tensor]


class NotBuilt(Exception):
    """A row's training that cannot be built, with the reason."""


@dataclass(frozen=True)
class Training:
    """A training without its precision."""

    build: Callable[[], nn.Module]
    batch_of: Callable[[int], dict[str, Tensor]]
    loss_of: Callable[[nn.Module, Inputs], tuple[Tensor, Any]]
    kind: str = ""
    """The class of models: convolutional, language transformer or vision transformer."""


def installed(library: str) -> Any:
    """Return a library of models.

    Raises:
        NotBuilt: it is not installed.
    """
    try:
        return import_library(library)
    except UsageError as error:
        raise NotBuilt(str(error).splitlines()[0]) from None


# --- batches and losses ---------------------------------------------------------------------------


def numbers(*size: int) -> Tensor:
    return torch.empty(*size, dtype=torch.long)


def images(size: int, n: int) -> dict[str, Tensor]:
    return {"x": torch.empty(n, 3, size, size), "y": numbers(n)}


def text(
    length: int,
    n: int,
    *,
    words: Sequence[str] = ("input_ids", "labels"),
    masked: bool = False,
    each: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Return sequences, a number for each of their words, a mask, and numbers for ``each`` whole sequence."""
    mask = {"attention_mask": torch.empty(n, 1, 1, length)} if masked else {}
    return {name: numbers(n, length) for name in words} | mask | {name: numbers(n) for name in each}


def class_loss(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Any]:
    outputs = model(inputs["x"])
    return cross_entropy(outputs.float(), inputs["y"]), outputs


def own_loss(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Any]:
    """Return the loss that a model of transformers computes, and the outputs."""
    outputs = model(**inputs)
    return outputs.loss, outputs


def loss_alone(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Any]:
    return own_loss(model, inputs)[0], None


# --- by the names of the throughput tables --------------------------------------------------------

TORCHVISION = "torchvision:"
"""Before the names of rows whose models are torchvision's own."""
TIMM = {"resnet50v1.5": "resnet50"}
"""Names that are not timm's in other letters."""
GPT = {
    "gpt2_large": {"n_embd": 1280, "n_layer": 36, "n_head": 20, "n_positions": 1024},
    "gpt3_xl": {"n_embd": 3072, "n_layer": 24, "n_head": 24, "n_positions": 2048},
    "gpt3_27": {"n_embd": 2560, "n_layer": 32, "n_head": 32, "n_positions": 2048},
}
OPT = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
VISION_TRANSFORMERS = ("vit", "deit", "swin", "mixer")
NOT_BUILT = {
    "nnUNet-2D": "the row does not state the network's widths",
    "TF": "TensorFlow with XLA fuses operations that torch runs separately",
    "switchxl4": "a mixture of experts, whose products depend on the data",
    "llama": "eight GPUs with FSDP",
}
"""Reasons by a part of the model's name."""


def training(model: str, size: str) -> Training:
    """Return the training of a row's model at an image or sequence size."""
    if model in GPT or model.startswith(("bert", "opt")):
        return _language(model, int(size))
    if model.startswith("ssd300"):
        return Training(_Ssd, partial(images, int(size)), _ssd_loss, "convolutional")
    for part, reason in NOT_BUILT.items():
        if part in model:
            raise NotBuilt(reason)
    if (built := transformer_xl(model)) is not None:
        build, batch_of = built
        return Training(build, partial(batch_of, int(size)), xl_loss, "language transformer")
    if model.startswith(TORCHVISION):
        build = getattr(installed("torchvision").models, model.removeprefix(TORCHVISION))
        return Training(build, partial(images, int(size)), class_loss, "convolutional")
    timm = installed("timm")
    timm.layers.set_fused_attn(False)
    if (name := own_name(TIMM.get(model, model), timm.list_models())) is None:
        return _by_configuration(model, int(size))
    kind = "vision transformer" if name.startswith(VISION_TRANSFORMERS) else "convolutional"
    return Training(partial(timm.create_model, name), partial(images, int(size)), class_loss, kind)


def _by_configuration(model: str, length: int) -> Training:
    """Return the training of a language model by the name of its checkpoint, with attention as in the tables' time."""
    tr = installed("transformers")
    try:
        found = configuration(model, tr)
    except UsageError:
        raise NotBuilt(f"neither timm nor transformers has a model {model}") from None
    if found.task == "image":
        raise NotBuilt(f"{model} is a classifier of transformers, and the row's images are timm's")
    found.config._attn_implementation = "eager"
    return Training(partial(found.build, tr), partial(text, length), own_loss, "language transformer")


def _language(model: str, length: int) -> Training:
    tr = installed("transformers")

    def of(name: str, config: str, settings: Mapping[str, Any], batch_of: Any, loss_of: Any = own_loss) -> Training:
        made = getattr(tr, config)(attn_implementation="eager", **settings)
        return Training(lambda: getattr(tr, name)(made), batch_of, loss_of, "language transformer")

    if model in GPT:
        return of("GPT2LMHeadModel", "GPT2Config", GPT[model], partial(text, length))
    if model == "opt_13":
        return of("OPTForCausalLM", "OPTConfig", OPT, partial(text, length))
    settings: dict[str, Any] = LARGE if "large" in model else {}
    bert = partial(text, length, masked=True)
    whole = partial(bert, words=("input_ids",))
    if "squad" in model:
        batch_of = partial(whole, each=("start_positions", "end_positions"))
        return of("BertForQuestionAnswering", "BertConfig", settings, batch_of)
    if "seqcls" in model:
        settings = {**settings, "num_labels": 2, "problem_type": "single_label_classification"}
        return of("BertForSequenceClassification", "BertConfig", settings, partial(whole, each=("labels",)))
    if "pretraining" in model:
        masked = length * 20 // 128  # the head runs on the masked tokens alone, of which a sequence has 20 in 128
        return of("BertForMaskedLM", "BertConfig", settings, partial(_at_places, whole, masked), _masked_loss)
    return of("BertForMaskedLM", "BertConfig", settings, bert)


def _at_places(whole: Any, masked: int, n: int) -> dict[str, Tensor]:
    places = numbers(n * masked)
    return {**whole(n), "at": places, "labels": places}


def _masked_loss(model: Any, inputs: Inputs) -> tuple[Tensor, Any]:
    hidden = model.bert(inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
    scores = model.cls(hidden.flatten(0, 1).index_select(0, inputs["at"]))
    return cross_entropy(scores.float(), inputs["labels"]), None


class _Ssd(nn.Module):
    """SSD300 on ResNet-50's first three stages, the third at stride 1, with six prediction heads."""

    def __init__(self) -> None:
        super().__init__()
        backbone = installed("torchvision").models.resnet50()
        first = backbone.layer3[0]
        first.conv1.stride = first.conv2.stride = first.downsample[0].stride = (1, 1)
        self.backbone = nn.Sequential(*list(backbone.children())[:7])
        widths, middle, strides = [1024, 512, 512, 256, 256, 256], [256, 256, 128, 128, 128], [2, 2, 2, 1, 1]
        self.more = nn.ModuleList(
            nn.Sequential(convolved(a, m, 1), convolved(m, b, 3, stride=s, padding=s - 1))
            for (a, b), m, s in zip(pairwise(widths), middle, strides, strict=True)
        )
        boxes = [4, 6, 6, 6, 4, 4]
        self.places = nn.ModuleList(window(w, n * 4) for w, n in zip(widths, boxes, strict=True))
        self.classes = nn.ModuleList(window(w, n * 81) for w, n in zip(widths, boxes, strict=True))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = [self.backbone(x)]
        for block in self.more:
            features.append(block(features[-1]))
        places = [h(f).reshape(x.shape[0], 4, -1) for h, f in zip(self.places, features, strict=True)]
        classes = [h(f).reshape(x.shape[0], 81, -1) for h, f in zip(self.classes, features, strict=True)]
        return torch.cat(places, 2), torch.cat(classes, 2)


def _ssd_loss(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Any]:
    places, classes = model(inputs["x"])
    places, classes = places.float(), classes.float()
    wanted, labels = torch.empty_like(places), numbers(classes.shape[0], classes.shape[2])
    mask = labels > 0
    near = (mask * smooth_l1_loss(places, wanted, reduction="none").sum(1)).sum(1)
    errors = cross_entropy(classes, labels, reduction="none")
    _, order = errors.sort(1, descending=True)
    _, rank = order.sort(1)
    hard = rank < 3 * mask.sum(1, keepdim=True)
    return (near + (errors * (mask + hard)).sum(1)).mean(), None
