"""How fast do named models train on one GPU, and in how much memory?

Plain torch, timm and transformers, and ``csv_rows.py``; nothing is downloaded and Mezzo is not needed. Each case trains random data as
``mezzo predict --model`` assumes: eager, one resident batch, AdamW with torch's defaults, channels-first unless the case says otherwise,
no loss scaling, gradients set to None before the forward pass, outputs kept until the next one. ``fp32`` computes all products in FP32,
``tf32`` all in TF32, ``fp16`` and ``bf16`` are torch's autocast with TF32 for the rest, ``fp16-pure`` and ``bf16-pure`` have 16-bit
weights.

A case runs in a separate process, forked after the imports. Its row is written immediately; cases that FILE contains already are skipped.
``--history DIR`` also stores the allocator's events in the first two steps, one file per case.
``--cases holdout`` measures other models, whose predictions ``predict_zoo.py --cases holdout`` stored before; ``--cases articles`` the
trainings of docs/article-numbers.md. ``--cases tiny --device cpu`` tests this program.
``python benchmarks/predict_zoo.py --rows zoo.csv`` prints predicted against measured.
"""

from __future__ import annotations

import gzip
import importlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shared import ROOT, csv_rows, options

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
        """The columns that identify a case in the file."""
        return tuple(str(value) for value in asdict(self).values())

    @property
    def file_name(self) -> str:
        """A name for the case's files, without an ending."""
        return "-".join(self.key).replace(":", "-").replace("/", "-")


SIZES: tuple[tuple[str, int, int], ...] = (
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


ARTICLES: tuple[tuple[str, int, int], ...] = (
    ("timm:resnet50", 224, 64),
    ("timm:mobilenetv3_large_100", 224, 512),
    ("transformers:bert-base-uncased", 128, 32),
    ("transformers:bert-base-uncased", 384, 32),
)
"""Models with sizes and batches of which articles give figures."""
PURE = {"fp16-pure": torch.float16, "bf16-pure": torch.bfloat16}
"""Policies whose weights, gradients and moments are in 16 bits."""


def zoo() -> list[Case]:
    """Return the cases of the first rows, the most valuable first."""
    first = [Case(*one, policy) for one in SIZES for policy in ("fp32", "tf32", "bf16")]
    layouts = [Case(*one, "bf16", True) for one in SIZES if one[0] in LAST]
    return [*first[:30], *layouts[:3], *first[30:], *layouts[3:], *(Case(*one, "fp16") for one in SIZES)]


def holdout() -> list[Case]:
    """Return the cases that are predicted before they are measured, the most valuable first."""
    return [Case(*one, policy) for *one, policies in HOLDOUT for policy in policies.split()]


def articles() -> list[Case]:
    """Return the trainings of articles: without TF32, with it, under autocast, with 16-bit weights, then channels-last."""
    policies = ["fp32", "tf32", "fp16", "bf16", *PURE]
    plain = [Case(*one, policy) for policy in policies for one in ARTICLES]
    return plain + [Case(*one, policy, True) for policy in ("tf32", "fp16") for one in ARTICLES if one[0] in LAST]


def tiny() -> list[Case]:
    """Return cases that a CPU trains in milliseconds."""
    return [Case("tiny:convnet", 8, 2, policy) for policy in ("fp32", "bf16", "bf16-pure")]


CASES: dict[str, Callable[[], list[Case]]] = {"zoo": zoo, "holdout": holdout, "articles": articles, "tiny": tiny}


@dataclass
class Measured:
    """One row: a case and what was measured."""

    model: str
    size: int
    batch: int
    policy: str
    channels_last: bool
    gpu: str
    torch: str
    library: str
    status: str
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
    cudnn_benchmark: bool = False
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

    here = ROOT / "src" / "mezzo" / "measure" / "predict" / "models.json"
    fact = json.loads(here.read_text(encoding="utf-8"))[model] if here.exists() else _FACTS[model]
    config = transformers.AutoConfig.for_model(fact["type"], **fact["config"])
    heads = {
        "masked": transformers.AutoModelForMaskedLM,
        "causal": transformers.AutoModelForCausalLM,
        "sequence": transformers.AutoModelForSeq2SeqLM,
    }
    return heads[fact["task"]].from_config(config), config.vocab_size


_FACTS: dict[str, Any] = {
    "bert-base-uncased": {"type": "bert", "task": "masked", "config": {}},
    "distilbert-base-uncased": {"type": "distilbert", "task": "masked", "config": {}},
    "gpt2": {"type": "gpt2", "task": "causal", "config": {}},
    "gpt2-medium": {"type": "gpt2", "task": "causal", "config": {"n_embd": 1024, "n_layer": 24, "n_head": 16}},
}
"""Entries of ``models.json``, for a copy of this file without the repository."""


class Training:
    """A case on the GPU."""

    def __init__(self, case: Case, device: str) -> None:
        """Build the model, its inputs and its optimizer."""
        torch.manual_seed(0)
        model, words = build(case.model)
        layout = torch.channels_last if case.channels_last else torch.contiguous_format
        self.model = model.train().to(device, PURE.get(case.policy))
        if case.channels_last:
            self.model = self.model.to(memory_format=layout)  # type: ignore[call-overload]
        self.images = not case.model.startswith("transformers")
        if self.images:
            x = torch.randn(case.batch, 3, case.size, case.size).contiguous(memory_format=layout)
            self.inputs = {"x": x, "y": torch.randint(words, (case.batch,))}
        else:
            ids = torch.randint(words, (case.batch, case.size))
            self.inputs = {"input_ids": ids, "labels": ids.clone()}
        self.inputs = {key: value.to(device) for key, value in self.inputs.items()}
        if self.images:
            self.inputs["x"] = self.inputs["x"].to(PURE.get(case.policy))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(case.policy)
        self.region: Callable[[], Any] = lambda: torch.autocast(device, dtype, enabled=dtype is not None)
        self.outputs: Any = None
        self.loss = 0.0

    def step(self) -> None:
        """Run one step; the outputs stay until the next step's."""
        self.optimizer.zero_grad()
        with self.region():
            loss, outputs = self._loss()
            self.outputs = outputs
        loss.backward()
        self.last: Tensor = loss.detach()
        self.optimizer.step()

    def _loss(self) -> tuple[Tensor, Any]:
        if self.images:
            outputs = self.model(self.inputs["x"])
            return F.cross_entropy(outputs, self.inputs["y"]), outputs
        outputs = self.model(**self.inputs)
        return outputs.loss, outputs


def allow_tf32(policy: str) -> None:
    """Let torch compute FP32 products and convolutions in TF32, unless ``policy`` is FP32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = policy != "fp32"


def library_of(case: Case) -> str:
    """Return the library of a case's model with its version."""
    name = case.model.split(":")[0]
    return name if name == "tiny" else f"{name} {importlib.import_module(name).__version__}"


def wait(device: str) -> None:
    """Wait until the device has done all that was launched."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(case: Case, *, device: str, benchmark: bool, idle_bytes: int, history: Path | None) -> Measured:
    """Train ``case`` on the device and return its row; runs in a separate process. A CPU's row has no memory."""
    allow_tf32(case.policy)
    torch.backends.cudnn.benchmark = benchmark
    row = Measured(
        **asdict(case),
        gpu=torch.cuda.get_device_name() if device == "cuda" else device,
        torch=str(torch.__version__),
        library=library_of(case),
        status="ok",
        cudnn_benchmark=benchmark,
    )
    try:
        training = _with_history(case, history) if history is not None else Training(case, device)
        for _ in range(WARM_UP):
            training.step()
        times = _times(training.step) if device == "cuda" else _times_by_clock(training.step)
    except torch.cuda.OutOfMemoryError:
        row.status = "out of memory"
    else:
        tenths = statistics.quantiles(times, n=10)
        row.step_ms, row.step_ms_p10, row.step_ms_p90 = statistics.median(times), tenths[0], tenths[-1]
        row.steps, row.throughput = len(times), 1e3 * case.batch / row.step_ms
        row.loss = float(training.last)
    if device == "cuda":
        _add_memory(row, idle_bytes)
    return row


def _add_memory(row: Measured, idle_bytes: int) -> None:
    row.allocated_bytes, row.reserved_bytes = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    free, row.total_bytes = torch.cuda.mem_get_info()
    now = row.total_bytes - free - idle_bytes
    row.device_bytes = now + row.reserved_bytes - torch.cuda.memory_reserved()
    row.retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    row.clock_mhz = asked("clocks.sm")


def _times_by_clock(step: Callable[[], None]) -> list[float]:
    """Return the milliseconds of steps on a CPU."""
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


def _with_history(case: Case, folder: Path) -> Training:
    """Return ``case`` after two steps; write the allocator's events until then, each with action, address and bytes."""
    memory = torch.cuda.memory
    torch.cuda.init()
    memory._record_memory_history("all", context=None, stacks="python", max_entries=1_000_000)
    training = Training(case, "cuda")
    torch.cuda.synchronize()
    num_setup = len(memory._snapshot()["device_traces"][0])
    for _ in range(2):
        training.step()
    torch.cuda.synchronize()
    events = [(e["action"], e.get("addr", 0), e["size"]) for e in memory._snapshot()["device_traces"][0]]
    memory._record_memory_history(None)
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / f"{case.file_name}.json.gz", "wt", encoding="utf-8") as file:
        json.dump({"case": asdict(case), "num_setup_events": num_setup, "events": events}, file)
    return training


def asked(what: str) -> int:
    """Return a whole number that nvidia-smi reports for the first GPU; 0 if it reports none."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        return int(float(found[0]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def _child(send: Any, case: Case, options: dict[str, Any]) -> None:
    try:
        send.send(measure(case, **options))
    except Exception as error:  # it is printed, and the next case runs
        traceback.print_exc()
        send.send(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def one_case(case: Case, options: dict[str, Any], start: Literal["fork", "spawn"] = "fork") -> Measured | str:
    """Return the row of ``case``, or the error, from a separate process."""
    processes: Any = multiprocessing.get_context(start)
    receive, send = processes.Pipe(duplex=False)
    child = processes.Process(target=_child, args=(send, case, options))
    child.start()
    send.close()
    found: Measured | str
    try:
        found = receive.recv() if receive.poll(_CASE_S) else f"no answer in {_CASE_S} s"
    except EOFError:
        found = "the process ended without an answer"
    finally:
        child.join(10)
        if child.is_alive():
            child.kill()
            child.join()
    if start == "fork" and isinstance(found, str) and "forked subprocess" in found:  # an import has opened CUDA
        return one_case(case, options, "spawn")
    return found


def main(argv: Sequence[str] = ()) -> None:
    """Measure the cases that FILE lacks until the minutes are over."""
    parser = options(__name__)
    parser.add_argument("--cases", choices=CASES, default="zoo", help="which list of cases")
    parser.add_argument("--out", type=Path, default=Path("zoo.csv"), help="rows are added to this file")
    parser.add_argument("--minutes", type=float, default=9.0, help="no case begins that may end later")
    parser.add_argument("--policies", help="only these, comma-separated")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="a CPU tests this program")
    parser.add_argument("--models", default="", help="only models whose names contain one of these, comma-separated")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN try its algorithms")
    parser.add_argument(
        "--history", type=Path, help="folder for the allocator's events of two steps, one file per case"
    )
    chosen = parser.parse_args(argv)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # checks for CUDA without opening it before the fork
    idle_bytes = asked("memory.used") << 20
    wanted = CASES[chosen.cases]()
    if chosen.policies:
        wanted = [case for case in wanted if case.policy in chosen.policies.split(",")]
    wanted = [case for case in wanted if any(part in case.model for part in chosen.models.split(","))]
    done = {tuple(cells[field.name] for field in fields(Case)) for cells in csv_rows.continued(chosen.out)}
    left = [case for case in wanted if case.key not in done]
    for case in left:
        library_of(case)  # imported before the fork, so that no case imports it again
    failed = 0
    for case in csv_rows.until(60 * chosen.minutes, left, lambda case: " ".join(case.key)):
        settings = {"device": chosen.device, "benchmark": chosen.cudnn_benchmark}
        settings |= {"idle_bytes": idle_bytes, "history": chosen.history}
        row = one_case(case, settings)
        if isinstance(row, str):
            print(f"{' '.join(case.key)}: not measured: {row}", flush=True)
            failed = 1
            continue
        csv_rows.append(chosen.out, [asdict(row)], [field.name for field in fields(Measured)])
        sizes = " ".join(f"{n} {getattr(row, n + '_bytes') >> 20} MiB" for n in ("allocated", "reserved", "device"))
        print(f"{' '.join(case.key)}: {row.status} {row.step_ms:.2f} ms {row.throughput:.0f}/s {sizes}", flush=True)
    sys.exit(failed)
