"""How fast do named models train on one GPU, and in how much memory?

Plain torch, timm and transformers; nothing is downloaded and Mezzo is not imported. Each case trains random data as
``mezzo predict --model`` assumes: eager, one resident batch, AdamW with torch's defaults, channels-first unless the case says otherwise,
no loss scaling, gradients set to None before the forward pass, outputs kept until the next one. ``fp32`` computes all products in FP32,
``tf32`` all in TF32, ``fp16`` and ``bf16`` are torch's autocast with TF32 for the rest, ``fp16-pure`` and ``bf16-pure`` have 16-bit
weights. cuDNN does not try its algorithms.

A case runs in a separate process, forked after the imports. Its row is written immediately; cases that the file contains already are
skipped. ``--cases holdout`` measures other models, whose predictions ``predict_zoo --cases holdout`` stored before; ``--cases articles``
the trainings of docs/article-numbers.md. ``predict_zoo --rows zoo.csv`` prints predicted against measured.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shared import ROOT, csv_rows, options
from benchmarks.shared.processes import NoAnswerError, answer_of

WARM_UP, LEAST_STEPS, LEAST_S = 5, 10, 1.5
"""Steps before the timed ones; how many are timed at least, and for how long."""
_CASE_S = 240
"""Seconds after which a case is stopped."""


@dataclass(frozen=True)
class Case:
    """What is trained."""

    model: str
    size: int
    """Height of images, or tokens of a sequence."""
    batch: int
    policy: str
    channels_last: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(str(getattr(self, field.name)) for field in fields(Case))

    @property
    def file_name(self) -> str:
        return "-".join(self.key).replace(":", "-").replace("/", "-")

    def __str__(self) -> str:
        return " ".join(self.key)


Sized: TypeAlias = tuple[tuple[str, int, int], ...]
SIZES: Sized = (
    ("timm:resnet50", 224, 256),
    ("timm:mobilenetv3_large_100", 224, 512),
    ("transformers:bert-base-uncased", 128, 32),
    ("transformers:gpt2", 1024, 8),
    ("timm:vit_base_patch16_224", 224, 128),
    ("timm:resnet50", 224, 64),
    ("timm:efficientnet_b0", 224, 128),
    ("timm:vgg16", 224, 64),
    ("timm:convnext_tiny", 224, 64),
    ("timm:swin_tiny_patch4_window7_224", 224, 64),
    ("timm:densenet121", 224, 64),
    ("transformers:bert-base-uncased", 384, 16),
    ("timm:mobilenetv3_large_100", 224, 128),
    ("timm:vit_base_patch16_224", 224, 64),
    ("timm:regnety_032", 224, 128),
    ("transformers:distilbert-base-uncased", 128, 64),
    ("transformers:gpt2-medium", 1024, 4),
    ("timm:resnet18", 224, 256),
    ("timm:resnet152", 224, 64),
)
"""Models with sizes and batches, the most valuable rows first."""
LAST = ("timm:resnet50", "timm:mobilenetv3_large_100", "timm:efficientnet_b0", "timm:convnext_tiny")
"""Models that are measured channels-last as well."""
HOLDOUT: tuple[tuple[str, int, int, str], ...] = (
    ("timm:resnet50", 224, 256, "fp16"),
    ("transformers:gpt2", 1024, 8, "fp16"),
    ("transformers:roberta-base", 512, 16, "bf16 tf32"),
    ("timm:resnext50_32x4d", 224, 128, "bf16 tf32"),
    ("timm:deit_small_patch16_224", 224, 256, "bf16 tf32"),
    ("transformers:EleutherAI/gpt-neo-125m", 1024, 8, "bf16 fp32"),
    ("timm:wide_resnet50_2", 224, 128, "bf16 fp32"),
    ("timm:mobilenetv2_100", 224, 256, "fp16 bf16 fp32"),
    ("transformers:EleutherAI/pythia-160m", 1024, 8, "bf16 fp16"),
    ("timm:efficientnetv2_s", 224, 64, "bf16 tf32"),
    ("transformers:t5-small", 512, 16, "bf16 fp32"),
    ("timm:mixer_b16_224", 224, 64, "bf16 tf32"),
    ("transformers:bert-base-uncased", 128, 32, "fp16"),
    ("timm:regnetx_032", 224, 128, "bf16 tf32"),
    ("timm:inception_v3", 299, 64, "bf16 fp32"),
    ("timm:deit_small_patch16_224", 224, 256, "fp32"),
    ("transformers:roberta-base", 512, 16, "fp16"),
    ("timm:densenet121", 224, 64, "bf16 tf32"),
    ("transformers:Qwen/Qwen2.5-0.5B", 512, 8, "bf16"),
)
"""Models that no version of the predictor had seen when their predictions were stored, with policies, the most valuable rows first."""
ARTICLES: Sized = (
    ("timm:resnet50", 224, 64),
    ("timm:mobilenetv3_large_100", 224, 512),
    ("transformers:bert-base-uncased", 128, 32),
    ("transformers:bert-base-uncased", 384, 32),
)
"""Models with sizes and batches of which articles give figures."""
PURE = {"fp16-pure": torch.float16, "bf16-pure": torch.bfloat16}
"""Policies whose weights, gradients and moments are in 16 bits."""


def _of(models: Sized, *policies: str, channels_last: bool = False) -> list[Case]:
    """Return the cases of ``models``, policy by policy; channels-last only of those in ``LAST``."""
    chosen = [one for one in models if one[0] in LAST or not channels_last]
    return [Case(*one, policy, channels_last) for policy in policies for one in chosen]


def zoo() -> list[Case]:
    """Return the cases of the first rows, the most valuable first."""
    first = [Case(*one, policy) for one in SIZES for policy in ("fp32", "tf32", "bf16")]
    layouts = _of(SIZES, "bf16", channels_last=True)
    return [*first[:30], *layouts[:3], *first[30:], *layouts[3:], *_of(SIZES, "fp16")]


def holdout() -> list[Case]:
    """Return the cases that are predicted before they are measured, the most valuable first."""
    return [Case(*one[:3], policy) for one in HOLDOUT for policy in one[3].split()]


def articles() -> list[Case]:
    """Return the trainings of articles: without TF32, with it, under autocast, with 16-bit weights, then channels-last."""
    return _of(ARTICLES, "fp32", "tf32", "fp16", "bf16", *PURE) + _of(ARTICLES, "tf32", "fp16", channels_last=True)


def tiny() -> list[Case]:
    return [Case("tiny:convnet", 8, 2, policy) for policy in ("fp32", "bf16", "bf16-pure")]


CASES: dict[str, Callable[[], list[Case]]] = {"zoo": zoo, "holdout": holdout, "articles": articles, "tiny": tiny}


@dataclass(frozen=True)
class Measured(Case):
    """One row: a case and what was measured."""

    gpu: str = ""
    torch: str = ""
    library: str = ""
    status: str = "ok"
    optimizer: str = "adamw"
    step_ms: float = 0.0
    step_ms_p10: float = 0.0
    step_ms_p90: float = 0.0
    steps: int = 0
    throughput: float = 0.0
    allocated_bytes: int = 0
    """Peak memory of tensors: ``max_memory_allocated``."""
    reserved_bytes: int = 0
    """Peak memory of the caching allocator: ``max_memory_reserved``."""
    device_bytes: int = 0
    """Peak of ``reserved_bytes`` plus all other memory that the device uses beyond its idle state."""
    total_bytes: int = 0
    """The device's memory, by ``mem_get_info``."""
    retries: int = 0
    """How often the allocator emptied its cache because memory ran out."""
    clock_mhz: int = 0
    loss: float = 0.0


def build(name: str) -> tuple[nn.Module, int]:
    """Return the model that ``mezzo predict --model`` builds, and the number of its classes or words."""
    library, _, model = name.partition(":")
    if library == "tiny":
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)), 4
    if library == "timm":
        import timm

        return timm.create_model(model), 1000
    import transformers

    facts = json.loads((ROOT / "src/mezzo/measure/predict/models.json").read_text(encoding="utf-8"))[model]
    config = transformers.AutoConfig.for_model(facts["type"], **facts["config"])
    head = {"masked": "MaskedLM", "causal": "CausalLM", "sequence": "Seq2SeqLM"}[facts["task"]]
    return getattr(transformers, f"AutoModelFor{head}").from_config(config), config.vocab_size


class Training:
    """A case on the GPU."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        model, words = build(case.model)
        layout: Any = torch.channels_last if case.channels_last else torch.contiguous_format
        dtype = PURE.get(case.policy)
        self.model = model.train().to(device, dtype)
        if case.channels_last:
            self.model = self.model.to(memory_format=layout)
        self.images = not case.model.startswith("transformers")
        if self.images:
            x = torch.randn(case.batch, 3, case.size, case.size).contiguous(memory_format=layout)
            self.inputs = {"x": x.to(dtype), "y": torch.randint(words, (case.batch,))}
        else:
            ids = torch.randint(words, (case.batch, case.size))
            self.inputs = {"input_ids": ids, "labels": ids.clone()}
        self.inputs = {key: value.to(device) for key, value in self.inputs.items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(case.policy)
        self.region: Callable[[], Any] = lambda: torch.autocast(device, half, enabled=half is not None)
        self.outputs: Any = None

    def step(self) -> None:
        """Run one step; the outputs stay until the next step's."""
        self.optimizer.zero_grad()
        with self.region():
            loss, self.outputs = self._loss()
        loss.backward()
        self.last: Tensor = loss.detach()
        self.optimizer.step()

    def _loss(self) -> tuple[Tensor, Any]:
        if self.images:
            outputs = self.model(self.inputs["x"])
            return F.cross_entropy(outputs, self.inputs["y"]), outputs
        outputs = self.model(**self.inputs)
        return outputs.loss, outputs


def facts_of(case: Case, device: str) -> dict[str, Any]:
    """Return the first columns of a case's row, and let FP32 products and convolutions use TF32 unless its policy is FP32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = case.policy != "fp32"
    gpu = torch.cuda.get_device_name() if device == "cuda" else device
    return {**asdict(case), "gpu": gpu, "torch": str(torch.__version__), "library": library_of(case)}


def library_of(case: Case) -> str:
    """Return the library of a case's model with its version."""
    name = case.model.split(":")[0]
    return name if name == "tiny" else f"{name} {importlib.import_module(name).__version__}"


def wait(device: str) -> None:
    """Wait until the device has done all that was launched."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(case: Case, device: str, idle_bytes: int) -> Measured:
    """Train ``case`` on the device and return its row; runs in a separate process. A CPU's row has no memory."""
    row = facts_of(case, device)
    try:
        training = Training(case, device)
        for _ in range(WARM_UP):
            training.step()
        times = _times(training.step) if device == "cuda" else _times_by_clock(training.step)
    except torch.cuda.OutOfMemoryError:
        row["status"] = "out of memory"
    else:
        ms, tenths = statistics.median(times), statistics.quantiles(times, n=10)
        row |= {"step_ms": ms, "step_ms_p10": tenths[0], "step_ms_p90": tenths[-1], "steps": len(times)}
        row |= {"throughput": 1e3 * case.batch / ms, "loss": float(training.last)}
    return Measured(**row, **(_memory(idle_bytes) if device == "cuda" else {}))


def _memory(idle_bytes: int) -> dict[str, Any]:
    reserved = torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": reserved,
        "total_bytes": total,
        "device_bytes": total - free - idle_bytes + reserved - torch.cuda.memory_reserved(),
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "clock_mhz": asked("clocks.sm"),
    }


def _times_by_clock(step: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(LEAST_STEPS):
        began_s = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - began_s))
    return times


def _times(step: Callable[[], None]) -> list[float]:
    """Return the milliseconds between the ends of steps, by CUDA events; the host runs ahead, as in any training."""
    torch.cuda.synchronize()
    begin = time.monotonic()
    step()
    torch.cuda.synchronize()
    num = max(LEAST_STEPS, min(200, int(LEAST_S / (time.monotonic() - begin))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def asked(what: str) -> int:
    """Return a whole number that nvidia-smi reports for the first GPU; 0 if it reports none."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        return int(float(found[0]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def main(argv: Sequence[str] = ()) -> int:
    """Measure the cases that the file lacks until the minutes are over; return 1 if one was not measured."""
    parser = options(__name__)
    parser.add_argument("--cases", choices=CASES, default="zoo", help="which list of cases")
    parser.add_argument("--out", type=Path, default=Path("zoo.csv"), help="rows are added to this file")
    parser.add_argument("--minutes", type=float, default=9.0, help="no case begins that may end later")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="with --cases tiny, a CPU tests this program"
    )
    chosen = parser.parse_args(argv)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # checks for CUDA without opening it before the fork
    idle_bytes = asked("memory.used") << 20
    done = {tuple(cells[field.name] for field in fields(Case)) for cells in csv_rows.continued(chosen.out)}
    left = [case for case in CASES[chosen.cases]() if case.key not in done]
    for case in left:
        library_of(case)  # imported before the fork, so that no case imports it again
    failed = 0
    for case in csv_rows.until(60 * chosen.minutes, left):
        call = partial(measure, case, chosen.device, idle_bytes)
        try:
            try:
                row = answer_of(call, limit_s=_CASE_S)
            except NoAnswerError as error:
                if "forked subprocess" not in str(error):
                    raise
                row = answer_of(call, limit_s=_CASE_S, start="spawn")  # an import has opened CUDA
        except NoAnswerError as error:
            print(f"{case}: not measured: {error}", flush=True)
            failed = 1
            continue
        csv_rows.append(chosen.out, [asdict(row)], [field.name for field in fields(Measured)])
        sizes = " ".join(f"{n} {getattr(row, n + '_bytes') >> 20} MiB" for n in ("allocated", "reserved", "device"))
        print(f"{case}: {row.status} {row.step_ms:.2f} ms {row.throughput:.0f}/s {sizes}", flush=True)
    return failed
