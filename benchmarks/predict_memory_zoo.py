"""The trainings of gpu_memory_pairs.csv that can be built here, in FP32 and under automatic mixed precision.

- mmsegmentation's FCN and PSPNet on a dilated ResNet (``configs/_base_/models``): a stem of three convolutions, a head, an auxiliary
  head, both losses at the size of the labels. Data parallel: its buckets hold every gradient once more.
- BERT-base on MRPC with transformers' trainer, which updated one parameter after another; what nvidia-smi showed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.measure.predict.training import record_training
from mezzo.policy import Policy
from predict_models import NotBuilt, installed
from predict_segmenters import pictures, segmenter, two_losses


class Training:
    """A row's training as a tape, and what lies beside it."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        """Trace the row.

        Raises:
            NotBuilt: the row's training cannot be built.
        """
        if cells["compiled"] != "no":
            raise NotBuilt("torch.compile")
        policy = {"fp32": None, "fp16 AMP": "fp16", "fp16 AMP (--fp16)": "fp16"}.get(cells["precision"], "")
        if policy == "":
            raise NotBuilt("a precision that is neither FP32 nor automatic mixed precision")
        self.of_device = cells["pair_id"].startswith("hf-bert-base-mrpc")
        optimizer: Any
        if self.of_device:
            parts: Any = (_bert, _sentences, _own_loss)
            optimizer = partial(torch.optim.AdamW, lr=2e-5, foreach=False)
        elif (build := segmenter(cells["model"])) is not None:
            height, width = map(int, cells["input"].split("x"))
            parts = (build, partial(pictures, height, width), two_losses)
            optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
        else:
            raise NotBuilt("the model zoo of the row is not built here")
        with _algorithms_tried(not self.of_device):
            self.tape = record_training(
                *parts,
                batch=int(cells["batch_per_gpu"]),
                optimizer=optimizer,
                policy=None if policy is None else Policy.parse(policy),
            )
        self.bucket_bytes = sum(block.size_bytes for block in self.tape.blocks if block.kind == "parameters")


@contextmanager
def _algorithms_tried(tried: bool) -> Iterator[None]:
    """Let cuDNN try its algorithms in the block, as mmsegmentation's configurations do (``cudnn_benchmark=True``)."""
    own = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = tried
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = own


def _bert() -> nn.Module:
    tr = installed("transformers")
    config = tr.BertConfig(vocab_size=28996, attn_implementation="eager", problem_type="single_label_classification")
    made: nn.Module = tr.BertForSequenceClassification(config)
    return made


def _sentences(n: int) -> dict[str, Tensor]:
    ids = torch.empty(n, 128, dtype=torch.long)
    return {
        "input_ids": ids,
        "attention_mask": torch.empty(n, 1, 1, 128),
        "labels": torch.empty(n, dtype=torch.long),
    }


def _own_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    return model(**inputs).loss, None
