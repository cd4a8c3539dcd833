"""How well does a CPU's own calibration predict the steps of ten models that it does not contain?

Times are the CPU time of one thread, the smallest of several repeats. Each model is traced without values and predicted, then built and
measured, one after another. None of them is among the calibration's probes. timm, torchvision and transformers are needed.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shared import options
from mezzo.measure.predict.calibrate import calibrate, device_name, least_seconds, saved_calibration
from mezzo.measure.predict.named import import_library
from mezzo.measure.predict.training import record_training

Inputs = Mapping[str, Tensor]


def _class_loss(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Any]:
    outputs = model(inputs["x"])
    return F.cross_entropy(outputs, inputs["y"]), outputs


def _own_loss(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Any]:
    outputs = model(**inputs)
    return outputs.loss, outputs


def _images(size: int, n: int) -> dict[str, Tensor]:
    return {"x": torch.rand(n, 3, size, size), "y": torch.zeros(n, dtype=torch.long)}


def _tokens(length: int, n: int) -> dict[str, Tensor]:
    return {name: torch.ones(n, length, dtype=torch.long) for name in ("input_ids", "labels")}


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.head = (
            nn.Embedding(2000, 128),
            nn.LSTM(128, 192, 2, batch_first=True),
            nn.Linear(192, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layer(self.words(x))[0][:, -1])
        return found


def _dense() -> nn.Module:
    widths = (784, 1500, 800, 400, 10)
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def _vectors(n: int) -> dict[str, Tensor]:
    return {"x": torch.rand(n, 784), "y": torch.zeros(n, dtype=torch.long)}


def _sentences(n: int) -> dict[str, Tensor]:
    return {"x": torch.ones(n, 24, dtype=torch.long), "y": torch.zeros(n, dtype=torch.long)}


def models() -> dict[str, tuple[Callable[[], nn.Module], Callable[[int], Inputs], Any, int]]:
    """Return the models: how they are built, their inputs, their loss and the batch size."""
    timm, tr, tv = import_library("timm"), import_library("transformers"), import_library("torchvision").models
    bert = tr.BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=8000
    )
    gpt = tr.GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=8000)

    def timed(name: str, size: int, **options: Any) -> tuple[Any, Any, Any]:
        return partial(timm.create_model, name, **options), partial(_images, size), _class_loss

    return {
        "resnet18": (*timed("resnet18", 96), 8),
        "resnet50": (*timed("resnet50", 64), 4),
        "vgg11": (lambda: tv.vgg11(num_classes=10), partial(_images, 64), _class_loss, 4),
        "mobilenetv3": (*timed("mobilenetv3_small_100", 128), 8),
        "efficientnet": (*timed("efficientnet_b0", 64), 8),
        "vit": (*timed("vit_tiny_patch16_224", 96, img_size=96), 8),
        "bert": (lambda: tr.BertForMaskedLM(bert), partial(_tokens, 64), _own_loss, 8),
        "gpt2": (lambda: tr.GPT2LMHeadModel(gpt), partial(_tokens, 96), _own_loss, 4),
        "mlp": (_dense, _vectors, _class_loss, 128),
        "lstm": (_Recurrent, _sentences, _class_loss, 16),
    }


def main(argv: Sequence[str] = ()) -> None:
    """Calibrate if there is no calibration or ``--calibrate`` is given, then predict and measure each model."""
    parser = options(__name__)
    parser.add_argument("--calibrate", action="store_true", help="measure the rates again")
    parser.add_argument("--seconds", type=float, default=8.0, help="longest measurement of one model")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)

    found = None if chosen.calibrate else saved_calibration(device_name("cpu"))
    if found is None:
        begin = time.monotonic()
        found = calibrate("cpu")
        found.save()
        print(
            f"calibrated in {time.monotonic() - begin:.0f} s; probes' steps {found.low} to {found.high}; kept in {found.path}"
        )
    errors = []
    for name, (build, batch_of, loss, batch) in models().items():
        optimizer = partial(torch.optim.AdamW, lr=1e-4)
        tape = record_training(build, batch_of, loss, batch=batch, optimizer=optimizer, gpu=False)
        predicted = float(found.rates["fp32"].seconds(tape.operations).sum())
        measured = _measured(build, batch_of(batch), loss, optimizer, chosen.seconds)
        errors.append(100 * (predicted / measured - 1))
        print(
            f"{name:14} batch {batch:4} measured {1e3 * measured:8.1f} ms predicted {1e3 * predicted:8.1f} ms {errors[-1]:+6.1f}%",
            flush=True,
        )
    size = np.abs(errors)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"mean {size.mean():.1f}% largest {size.max():.1f}% of {len(size)} models")


def _measured(build: Any, inputs: Inputs, loss: Any, optimizer: Any, most_s: float) -> float:
    torch.manual_seed(0)
    model = build().train()
    made = optimizer(model.parameters())
    kept_outputs: Any = None

    def step() -> None:
        nonlocal kept_outputs
        made.zero_grad()
        value, kept_outputs = loss(model, inputs)
        value.backward()
        made.step()

    step()
    return least_seconds(step, "cpu", most_s=most_s)
