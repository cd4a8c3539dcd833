"""How well does a CPU's own calibration predict the steps of ten models that it does not contain, and of tiny ones?

Times are the CPU time of one thread, the smallest of several repeats. Each model is traced without values and predicted, then built and
measured, one after another. None of them is among the calibration's probes. timm, torchvision and transformers are needed.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.prediction.zoo.trainings import Training, class_loss, images, installed, numbers, own_loss, text
from benchmarks.shared import options
from mezzo.measure.predict.calibrate import calibrate, device_name, least_seconds, saved_calibration
from mezzo.measure.predict.training import record_training


class _Recurrent(nn.Module):
    def __init__(self, words: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(hidden, 4)
        self.layer = nn.LSTM(width, hidden, layers, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layer(self.words(x))[0][:, -1])


def _dense(*widths: int) -> nn.Module:
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def _lenet() -> nn.Module:
    features = [
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(*features, _dense(400, 120, 84, 10))


def _models() -> dict[str, tuple[int, Training]]:
    """Return the batch size and the training of each model."""
    timm, tr, tv = installed("timm"), installed("transformers"), installed("torchvision").models
    small = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    bert = tr.BertConfig(vocab_size=8000, **small)
    gpt = tr.GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=8000)

    def pictures(build: Any, size: int) -> Training:
        return Training(build, partial(images, size), class_loss)

    def vectors(build: Any, *size: int) -> Training:
        return Training(build, lambda n: {"x": torch.empty(n, *size), "y": numbers(n)}, class_loss)

    def sequences(build: Any, length: int) -> Training:
        return Training(build, lambda n: {"x": numbers(n, length), "y": numbers(n)}, class_loss)

    def of_timm(name: str, size: int, **settings: Any) -> Training:
        return pictures(partial(timm.create_model, name, **settings), size)

    return {
        "resnet18": (8, of_timm("resnet18", 96)),
        "resnet50": (4, of_timm("resnet50", 64)),
        "vgg11": (4, pictures(lambda: tv.vgg11(num_classes=10), 64)),
        "mobilenetv3": (8, of_timm("mobilenetv3_small_100", 128)),
        "efficientnet": (8, of_timm("efficientnet_b0", 64)),
        "vit": (8, of_timm("vit_tiny_patch16_224", 96, img_size=96)),
        "bert": (8, Training(lambda: tr.BertForMaskedLM(bert), partial(text, 64), own_loss)),
        "gpt2": (4, Training(lambda: tr.GPT2LMHeadModel(gpt), partial(text, 96), own_loss)),
        "mlp": (128, vectors(partial(_dense, 784, 1500, 800, 400, 10), 784)),
        "lstm": (16, sequences(partial(_Recurrent, 2000, 128, 192, 2), 24)),
        "tiny mlp": (16, vectors(partial(_dense, 784, 64, 10), 784)),
        "tiny lenet": (8, vectors(_lenet, 1, 28, 28)),
        "tiny lstm": (4, sequences(partial(_Recurrent, 100, 16, 32, 1), 8)),
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
        took_s = time.monotonic() - begin
        print(f"calibrated in {took_s:.0f} s; probes' steps {found.low} to {found.high}; kept in {found.path}")
    errors: dict[str, float] = {}
    optimizer = partial(torch.optim.AdamW, lr=1e-4)
    for name, (batch, one) in _models().items():
        tape = record_training(one.build, one.batch_of, one.loss_of, batch=batch, optimizer=optimizer, gpu=False)
        predicted = float(found.rates["fp32"].seconds(tape.operations).sum())
        measured = _measured(one, batch, optimizer, chosen.seconds)
        errors[name] = 100 * (predicted / measured - 1)
        times = f"measured {1e3 * measured:8.2f} ms predicted {1e3 * predicted:8.2f} ms"
        print(f"{name:14} batch {batch:4} {times} {errors[name]:+6.1f}%", flush=True)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for tiny in (False, True):
        size = np.abs([error for name, error in errors.items() if name.startswith("tiny") is tiny])
        print(f"mean {size.mean():.1f}% largest {size.max():.1f}% of {len(size)} {'tiny ' * tiny}models")


def _measured(one: Training, batch: int, optimizer: Any, most_s: float) -> float:
    torch.manual_seed(0)
    model = one.build().train()
    made = optimizer(model.parameters())
    inputs = {
        k: torch.rand(v.shape) if v.is_floating_point() else torch.ones_like(v) for k, v in one.batch_of(batch).items()
    }
    kept_outputs: Any = None

    def step() -> None:
        nonlocal kept_outputs
        made.zero_grad()
        value, kept_outputs = one.loss_of(model, inputs)
        value.backward()
        made.step()

    step()
    return least_seconds(step, "cpu", most_s=most_s)
