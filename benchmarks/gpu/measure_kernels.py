"""How long does every kernel of a training step take on one GPU?

Plain torch, timm and transformers; Mezzo is not imported. The cases are trained as ``measure_zoo`` trains them, all in one process. Each
gets a folder once it is measured, and a case with a folder is not measured again. It contains

- ``steps.csv``: the time of a step without a profiler, the host's time (of the same step with almost no data, which the host bounds),
  and the time of the kernels in one step under torch's profiler,
- ``kernels.csv.gz``, with a row for each kernel of that step: the operation that launched it, with the shapes, formats and strides of its
  operands, the kind of operation, when it was launched, when it began and how long it ran,
- ``trace.json.gz``, the trace.

``predict_kernels DIR`` prints predicted and measured milliseconds by kind.
"""

from __future__ import annotations

import gc
import gzip
import json
import shutil
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measure_zoo import WARM_UP, Case, Training, asked, facts_of, tiny, wait
from benchmarks.shared import csv_rows, options

CASES = (
    Case("timm:resnet50", 224, 256, "bf16"),
    Case("transformers:bert-base-uncased", 128, 32, "bf16"),
    Case("transformers:gpt2", 1024, 8, "bf16"),
    Case("timm:vit_base_patch16_224", 224, 128, "bf16"),
    Case("timm:vgg16", 224, 64, "bf16"),
    Case("timm:resnet50", 224, 64, "fp32"),
    Case("timm:efficientnet_b0", 224, 128, "bf16"),
    Case("timm:convnext_tiny", 224, 64, "tf32"),
    Case("transformers:gpt2", 1024, 8, "tf32"),
    Case("timm:resnet50", 224, 64, "bf16"),
    Case("timm:mobilenetv3_large_100", 224, 512, "bf16"),
    Case("timm:vgg16", 224, 64, "tf32"),
    Case("transformers:bert-base-uncased", 128, 32, "tf32"),
    Case("timm:vit_base_patch16_224", 224, 128, "tf32"),
    Case("timm:efficientnet_b0", 224, 128, "fp16"),
    Case("timm:resnet50", 224, 256, "bf16", True),
)
"""Trainings of ``measure_zoo``'s first list, the most valuable first."""
_MEASURED = "the step whose kernels count"
_BY_HOST, _ON_DEVICE = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events."""
_TINY_BATCH, _TINY_TOKENS = 2, 16
"""The size of the step that measures the host's time; batch normalisation needs two samples."""
_BLOCKS, _BLOCK_S = 5, 0.2
_LONGEST_TEXT = 400
"""Longer texts are cut: the shapes of an optimizer's lists of tensors."""


_NAMES = {
    "convolution": "convolution convolution_backward convolution_input_gradient convolution_weight_gradient",
    "product": "mm addmm bmm baddbmm",
    "attention": " ".join(
        f"_scaled_dot_product_{way}_attention _scaled_dot_product_{way}_attention_backward"
        for way in ("flash", "efficient", "cudnn")
    ),
    "batch norm": "native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward",
    "layer norm": "native_layer_norm native_layer_norm_backward",
    "softmax": "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data "
    "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward",
    "pooling": "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward "
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward",
    "reduction": "sum mean mean_backward amax amin any all",
    "cast or copy": "_to_copy clone copy_ cat stack split_with_sizes_copy constant_pad_nd as_strided_",
    "index": "embedding embedding_dense_backward index index_select gather scatter index_put_ index_add_",
    "elementwise": "add add_ sub mul mul_ div div_ pow tanh tanh_backward gelu gelu_backward relu relu_ "
    "threshold_backward silu silu_ silu_backward sigmoid sigmoid_backward native_dropout "
    "native_dropout_backward hardtanh hardtanh_ hardtanh_backward hardswish hardswish_ "
    "hardswish_backward hardsigmoid hardsigmoid_backward neg rsqrt where masked_fill",
    "fill": "zeros zero_ zeros_like ones ones_like fill_ full new_zeros new_ones select_backward arange",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}


def kind_of(operation: str, phase: str) -> str:
    """Return the kind of an operation, by its name in torch's dispatcher and on a tape."""
    return "optimizer" if phase == "optimizer" else _KINDS.get(operation, "other")


@dataclass
class Kernel:
    """One kernel, copy or fill of the device in one step; times are from the step's begin on the host."""

    place: int
    """Number of the operation in the step, by the order in which operations began."""
    phase: str
    kind: str
    operation: str
    shapes: str
    formats: str
    strides: str
    numbers: str
    """The operation's other arguments, such as a convolution's stride and padding."""
    kernel: str
    launched_us: float
    began_us: float
    took_us: float


@dataclass(frozen=True)
class Step(Case):
    """The times of one case's step."""

    gpu: str = ""
    torch: str = ""
    library: str = ""
    step_ms: float = 0.0
    """Median of blocks of steps, without a profiler."""
    host_ms: float = 0.0
    """The same for a step with almost no data, which takes only the host's time."""
    profiled_ms: float = 0.0
    """From the beginning of the first kernel to the end of the last under the profiler, which slows down the host."""
    kernels_ms: float = 0.0
    """Sum of the kernels' times."""
    num_kernels: int = 0
    clock_mhz: int = 0

    @property
    def case(self) -> Case:
        return Case(**{field.name: getattr(self, field.name) for field in fields(Case)})


def rows_of(trace: dict[str, Any]) -> list[Kernel]:
    """Return the kernels that the marked step of a Chrome trace launched, in the order in which they began."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "cat" in event]
    marks = [event for event in events if event["name"] == _MEASURED and event["cat"] == "user_annotation"]
    if len(marks) != 1:
        raise ValueError(f"the trace has {len(marks)} marked steps instead of one")
    begin, end = float(marks[0]["ts"]), float(marks[0]["ts"]) + float(marks[0]["dur"])
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event["cat"] in _BY_HOST and begin <= float(event["ts"]) <= end and "correlation" in event["args"]
    }
    stacks = _stacks(events, launches)
    found: list[tuple[float, Kernel]] = []
    for event in events:
        number = event["args"].get("correlation") if event["cat"] in _ON_DEVICE else None
        if number not in launches:
            continue
        operation, phase = _operation(stacks[number])
        args = operation["args"] if operation is not None else {}
        name = _bare(operation["name"]) if operation is not None else ""
        at = float(operation["ts"]) if operation is not None else float(launches[number]["ts"])
        kernel = Kernel(
            place=0,
            phase=phase,
            kind=kind_of(name, phase),
            operation=name,
            shapes=_text(args.get("Input Dims")),
            formats=" ".join(args.get("Input type", []))[:_LONGEST_TEXT],
            strides=_text(args.get("Input Strides")),
            numbers=_text(args.get("Concrete Inputs")),
            kernel=event["name"][:_LONGEST_TEXT],
            launched_us=float(launches[number]["ts"]) - begin,
            began_us=float(event["ts"]) - begin,
            took_us=float(event["dur"]),
        )
        found.append((at, kernel))
    numbers = {at: number for number, at in enumerate(sorted({at for at, _ in found}))}
    placed = [replace(kernel, place=numbers[at]) for at, kernel in found]
    return sorted(placed, key=lambda kernel: kernel.began_us)


def _stacks(events: Iterable[dict[str, Any]], launches: dict[int, dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return for each launch the operations that were running in its thread, outermost first."""
    threads: dict[Any, list[tuple[float, float, int, Any]]] = defaultdict(list)
    for event in events:
        if event["cat"] in ("cpu_op", "user_annotation"):
            threads[event["tid"]].append((float(event["ts"]), -float(event["dur"]), 0, event))
    for number, event in launches.items():
        threads[event["tid"]].append((float(event["ts"]), 0.0, 1, number))
    found: dict[int, list[dict[str, Any]]] = {}
    for entries in threads.values():
        stack: list[dict[str, Any]] = []
        for at, _, is_launch, what in sorted(entries, key=lambda entry: entry[:3]):
            while stack and float(stack[-1]["ts"]) + float(stack[-1]["dur"]) < at:
                stack.pop()
            if is_launch:
                found[what] = list(stack)
            else:
                stack.append(what)
    return found


def _operation(stack: Sequence[dict[str, Any]]) -> tuple[dict[str, Any] | None, str]:
    """Return the operation that a tape would name, and the phase: the outermost known one, else the innermost of torch's."""
    phase = "forward"
    if any(event["name"].startswith("Optimizer.step") for event in stack):
        phase = "optimizer"
    elif any(event["name"].startswith("autograd::engine") for event in stack):
        phase = "backward"
    own = [event for event in stack if event["name"].startswith("aten::")]
    known = (event for event in own if _bare(event["name"]) in _KINDS)
    return next(known, own[-1] if own else None), phase


def _bare(name: str) -> str:
    return name.removeprefix("aten::")


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))[:_LONGEST_TEXT] if value else ""


def step_ms(step: Callable[[], None], device: str) -> float:
    """Return the milliseconds of a step: the median over blocks that begin and end with a wait for the device."""
    for _ in range(WARM_UP):
        step()
    wait(device)
    found, num = [], 1
    for block in range(_BLOCKS + 1):
        begin = time.perf_counter()
        for _ in range(num):
            step()
        wait(device)
        each_s = (time.perf_counter() - begin) / num
        if block == 0:
            num = max(3, min(50, int(_BLOCK_S / each_s)))
        else:
            found.append(1e3 * each_s)
    return statistics.median(found)


def write_trace(step: Callable[[], None], device: str, path: Path) -> None:
    """Write the Chrome trace of ``step``, which is marked in it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step()  # the first one pays for the profiler's buffers
        wait(device)
        with torch.profiler.record_function(_MEASURED):
            step()
        wait(device)
    profiler.export_chrome_trace(str(path))


def measure(case: Case, device: str, out: Path) -> Step:
    """Train ``case``, write its trace, kernels and step to the folder ``out``, and return the times of its step."""
    facts = facts_of(case, device)
    few = replace(case, batch=_TINY_BATCH, size=_TINY_TOKENS if case.model.startswith("transformers") else case.size)
    host_ms = step_ms(Training(few, device).step, device)
    training = Training(case, device)
    took_ms = step_ms(training.step, device)
    row = Step(**facts, step_ms=took_ms, host_ms=host_ms, clock_mhz=asked("clocks.sm"))
    write_trace(training.step, device, out / "trace.json.gz")
    try:
        row = with_kernels(row, write_kernels(case, out))
    except (KeyError, ValueError) as error:  # the step's time is still worth a row, and the trace is stored
        print(f"{case}: no kernels were read: {type(error).__name__}: {error}", flush=True)
    csv_rows.write(out / "steps.csv", [asdict(row)], [field.name for field in fields(Step)])
    return row


def with_kernels(row: Step, kernels: Sequence[Kernel]) -> Step:
    if not kernels:
        return row
    ends = max(kernel.began_us + kernel.took_us for kernel in kernels)
    return replace(
        row,
        profiled_ms=(ends - kernels[0].began_us) / 1e3,
        kernels_ms=sum(kernel.took_us for kernel in kernels) / 1e3,
        num_kernels=len(kernels),
    )


def write_kernels(case: Case, folder: Path) -> list[Kernel]:
    """Write the kernels of the trace in a case's folder, and return them."""
    with gzip.open(folder / "trace.json.gz", "rt", encoding="utf-8", errors="replace") as file:
        kernels = rows_of(json.loads(file.read(), strict=False))
    rows = [{**asdict(case), **asdict(kernel)} for kernel in kernels]
    for row in rows:
        row |= {key: round(value, 3) for key, value in row.items() if isinstance(value, float)}
    csv_rows.write(folder / "kernels.csv.gz", rows, [field.name for field in (*fields(Case), *fields(Kernel))])
    return kernels


def main(argv: Sequence[str] = ()) -> int:
    """Measure the cases without a folder until the seconds are over; return 1 if one was not measured."""
    parser = options(__name__)
    parser.add_argument("--out", type=Path, default=Path("kernels"), help="the folder of the files")
    parser.add_argument("--seconds", type=float, default=120.0, help="no case begins that may end later")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="a CPU has no kernels to show")
    parser.add_argument("--cases", default="zoo", choices=("zoo", "tiny"), help="tiny: a test of this program")
    chosen = parser.parse_args(argv)
    out: Path = chosen.out
    failed, cases = 0, CASES if chosen.cases == "zoo" else tiny()
    for case in csv_rows.until(chosen.seconds, [case for case in cases if not (out / case.file_name).exists()]):
        at = time.monotonic()
        part = out / "part"  # becomes the case's folder when all of it is there
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            one = measure(case, chosen.device, part)
            part.rename(out / case.file_name)
        except Exception:  # it is printed, and the next case runs
            failed = 1
            print(f"{case}: not measured\n{traceback.format_exc()}", flush=True)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        times = (
            f"step {one.step_ms:.2f} ms, host {one.host_ms:.2f} ms, {one.num_kernels} kernels {one.kernels_ms:.2f} ms"
        )
        print(f"{case}: {times}, {time.monotonic() - at:.1f} s", flush=True)
    return failed
