"""The views of an audit, and the proof from the profiler."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from markupsafe import escape
from rich.console import Console
from torch import Tensor, nn

import mezzo
import record_builders as build
from helpers_audit import audited
from mezzo.commands.audit import page as audit_page
from mezzo.measure.flops import OperandFormats
from mezzo.observe.audit import observer
from mezzo.observe.audit.operations import TracedOperation, interpret, weights_of
from mezzo.observe.module_names import Names
from mezzo.observe.observer import ModuleTree
from mezzo.observe.trace import RawOperation
from mezzo.observe.tracer import Tracer
from mezzo.records import AS_IS, AuditRecord, Cause, Finding, Operation, WideProduct
from mezzo.report import formatting as fmt
from mezzo.report.charts import modules
from mezzo.report.charts.data import Bars, Nothing, TreeChart, TreeNode
from mezzo.report.html import render_html, source_lines
from mezzo.report.pages import finding_section, page_of
from mezzo.report.sections import FactTable
from mezzo.report.terminal import render


@pytest.fixture(scope="module")
def record() -> AuditRecord:
    return audited("audit_cases", "A103", "planted")


def text_of(record: AuditRecord) -> str:
    screen = io.StringIO()
    render(record, Console(file=screen, width=110))
    return screen.getvalue()


def test_the_text_says_what_was_found_and_where(record: AuditRecord) -> None:
    text = text_of(record)
    assert "Step 2 of x.py under as-is: " in text.splitlines()[0]
    assert "A103  a module opts out of autocast" in text
    assert "docs/findings/A103.md" in text
    assert "autocast is on when middle begins and off at" in text
    assert "the model ran on cpu" in text


def test_the_page_has_every_operation(record: AuditRecord) -> None:
    page = render_html(record)
    for operation in record.operations:
        assert operation.op in page
    assert "<b>" not in render_html(record.model_copy(update={"run": record.run.model_copy(update={"script": "<b>"})}))


def test_the_bars_show_the_flops_of_each_phase_by_format(record: AuditRecord) -> None:
    bars = modules.phase_bars(record)
    assert isinstance(bars, Bars)
    drawn = {(row.name, part.name): part.text for row in bars.rows for part in row.parts}
    flops = {(p, f): fmt.flops_text(n) for p, own in record.flops_by_phase.items() for f, n in own.items() if n}
    assert drawn == flops
    assert {part.style for row in bars.rows for part in row.parts} == {"bf16-0", "fp32-0"}
    longest = max(sum(own.values()) for own in record.flops_by_phase.values())
    whole = {p: pytest.approx(sum(own.values()) / longest) for p, own in record.flops_by_phase.items()}
    assert {row.name: sum(part.share for part in row.parts) for row in bars.rows} == whole


def flat(nodes: Sequence[TreeNode]) -> Iterator[TreeNode]:
    for node in nodes:
        yield node
        yield from flat(node.children)


def test_the_tree_sums_each_module_with_those_inside_it(record: AuditRecord) -> None:
    tree = modules.module_tree(record, {})
    assert isinstance(tree, TreeChart)
    shown = {node.path: tuple(node.numbers) for node in flat(tree.roots)}
    inside = {
        path: [o for o in record.operations if o.module == path or o.module.startswith(f"{path}.")] for path in shown
    }
    casts = {
        path: sum(c.count for c in record.casts if c.module == path or c.module.startswith(f"{path}."))
        for path in shown
    }
    assert {o.module for o in record.operations} <= set(shown)
    for path, own in inside.items():
        flops, size = sum(o.flops for o in own), sum(o.bytes for o in own)
        assert shown[path] == (fmt.flops_text(flops), fmt.bytes_text(size), str(casts[path]))


def test_a_module_leads_to_its_source_line_with_its_text(record: AuditRecord) -> None:
    source = source_lines(page_of(record))
    places = audit_page._places(record, source)
    wide = next(p for p in record.wide_products if p.line in source.keys)
    key = source.keys[wide.line]
    assert places[wide.module] == key
    line = next(one for file in source.files for part in file.parts for one in part if one.key == key)
    name, _, number = wide.line.rpartition(":")
    assert line.number == int(number)
    assert line.text == Path(name).read_text(encoding="utf-8").splitlines()[int(number) - 1]
    page = render_html(record)
    assert f'href="#{key}"' in page
    assert f'id="{key}"' in page
    assert str(escape(line.text)) in page


def test_an_audit_without_products_draws_nothing() -> None:
    empty = mezzo.audit(lambda: torch.ones(3).sum())
    assert isinstance(modules.phase_bars(empty), Nothing)
    assert "No matrix product or convolution ran." in render_html(empty)
    assert page_of(empty).answer.sentence.endswith("no matrix product; 0 findings")


def test_a_tree_of_many_modules_keeps_the_largest_and_says_so() -> None:
    operations = [
        Operation(
            op="mm",
            module=f"layers.{n}.linear",
            phase="forward",
            inputs=["fp16"],
            outputs=["fp16"],
            format="fp16",
            flops=n,
            bytes=1,
        )
        for n in range(1, 401)
    ]
    record = AuditRecord(
        run=build.run_record(), steps=[2], operations=operations, flops_by_phase={"forward": {"fp16": sum(range(401))}}
    )
    tree = modules.module_tree(record, {})
    assert isinstance(tree, TreeChart)
    paths = [node.path for node in flat(tree.roots)]
    assert len(paths) == modules.MOST_NODES
    assert {"layers", "layers.400.linear"} <= set(paths)
    assert "layers.1.linear" not in paths
    assert tree.note.startswith("The 250 largest of 801 are shown; record.json has all.")


NARROW_SHARES = [
    # policy, FLOPs by format, cause of the wide products, start of the headline
    (AS_IS, {"bf16": 1, "fp32": 9999}, "excluded", "Mixed precision is on, but only <0.1% of the FLOPs use it. Step 2"),
    (AS_IS, {"fp32": 100}, "excluded", "Mixed precision is on, but none of the FLOPs use it. Step 2"),
    (AS_IS, {"fp32": 100}, "off", "Mixed precision is off. Step 2"),
    (AS_IS, {"fp32": 100}, "switched off", "Mixed precision is off. Step 2"),
    ("fp32", {"fp32": 100}, "off", "Step 2"),
    (AS_IS, {"bf16": 2, "fp32": 98}, "excluded", "Step 2"),
    ("bf16", {"bf16": 1, "fp32": 9999}, "excluded", "Step 2"),
]


@pytest.mark.parametrize(("policy", "flops", "cause", "start"), NARROW_SHARES)
def test_mixed_precision_that_is_hardly_used_comes_first(
    policy: str, flops: dict[str, int], cause: Cause, start: str
) -> None:
    wide = WideProduct(op="mm", module="0", format="fp32", cause=cause, reason="r", flops=1, line="/x/train.py:3")
    finding = Finding(code="A103", title="t", modules=["0", "head", "1"], detail="d", gain="g", fix="f")
    page = page_of(
        AuditRecord(
            run=build.run_record(policy),
            steps=[2],
            flops_by_phase={"forward": flops},
            wide_products=[wide],
            findings=[finding],
        )
    )
    assert page.answer.sentence.startswith(start)
    assert {fact.what: fact.value for fact in page.facts("t")}["where"] == "0 (train.py:3), head, 1"


# --- kernels -------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(8, 8, 3), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.conv(x).mean((2, 3)))
        return y @ y.T


def traced(net: nn.Module) -> tuple[Tracer, Any]:
    tracer, x = Tracer(OperandFormats(), device_type="cpu"), torch.randn(4, 8, 6, 6, requires_grad=True)
    net(x).sum().backward()
    tracer.start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        net(x).sum().backward()
    tracer.stop()
    return tracer, profiler


def test_the_profiler_sees_the_calls_that_the_trace_sees() -> None:
    tracer, profiler = traced(Net())
    ours = Counter(
        n.func.overloadpacket.__name__ for n in map(RawOperation._make, tracer.trace.operations) if n.product
    )
    theirs = Counter(event.name.removeprefix("aten::") for event, _ in observer.calls(profiler.events()))
    assert ours == {"convolution": 1, "addmm": 1, "mm": 5, "convolution_backward": 1}
    assert {op: theirs[op] for op in ours} == ours


@dataclass
class Span:
    start: int


@dataclass
class Ran:
    name: str
    duration: float


@dataclass
class Event:
    """An event as torch's profiler has them."""

    name: str
    start: int
    kernels: list[Ran] = field(default_factory=list)
    cpu_children: list[Event] = field(default_factory=list)
    cpu_parent: Event | None = None
    activity_type: str = "cpu_op"

    @property
    def time_range(self) -> Span:
        return Span(self.start)


def call(name: str, start: int, kernel: str) -> list[Event]:
    """A call of an operation under a dispatch mode: once outside, once inside, where the kernel is launched."""
    outer, mode = Event(f"aten::{name}", start), Event("PythonDispatchMode", start + 1)
    inner = Event(f"aten::{name}", start + 2, kernels=[Ran(kernel, 2000.0)], cpu_parent=mode)
    outer.cpu_children, mode.cpu_parent, mode.cpu_children = [mode], outer, [inner]
    return [inner, outer, mode]


def test_kernels_reach_the_products_that_launched_them() -> None:
    tracer, _ = traced(Net())
    names = Names(tracer.trace.roots, ModuleTree())
    seen: list[TracedOperation] = interpret(tracer.trace, names, weights_of(names.roots, []))
    order = [one.op for one in {id(one.raw): one for one in seen if one.product is not None}.values()]
    products = [f"{op}_s16816" if op != "convolution" else "sgemm_simt" for op in order]
    events = [e for n, (op, kernel) in enumerate(zip(order, products, strict=True)) for e in call(op, 10 * n, kernel)]
    found = observer.launches(events)
    assert [(launch.op, launch.kernel) for launch in found] == [
        (f"aten::{op}", kernel) for op, kernel in zip(order, products, strict=True)
    ]

    proven = observer.prove(observer.products(seen), seen, found)
    for product in proven:
        assert product.kernels == [f"{product.op}_s16816" if product.op != "convolution" else "sgemm_simt"]
        assert product.on_tensor_cores is (product.op != "convolution")
    both = [p.phase for p in proven if p.op == "convolution_backward"]
    assert sorted(both) == ["dgrad", "wgrad"]
    times = {k.name: (k.count, k.time_ms, k.tensor_cores) for k in observer.totals(found, seen)}
    assert times["mm_s16816"] == (5, 10.0, True)
    assert times["sgemm_simt"] == (1, 2.0, False)


def test_autocasts_casts_are_no_kernels_of_the_product_that_they_serve() -> None:
    """As autocast runs ``addmm`` on a GPU: the outer call casts the weight, then passes on to the inner call."""
    outer, mode = Event("aten::addmm", 0), Event("PythonDispatchMode", 4)
    cast = Event("aten::copy_", 1, kernels=[Ran("bfloat16_copy_kernel", 4000.0)], cpu_parent=outer)
    inner = Event("aten::addmm", 5, kernels=[Ran("nvjet_sm90", 2000.0)], cpu_parent=mode)
    outer.cpu_children, mode.cpu_parent, mode.cpu_children = [cast, mode], outer, [inner]
    found = observer.launches([inner, cast, outer, mode])
    assert [(one.op, one.kernel) for one in found] == [
        ("aten::addmm", "nvjet_sm90"),
        ("aten::copy_", "bfloat16_copy_kernel"),
    ]


def test_a_kernel_counts_once_though_the_profilers_overhead_has_the_operations_number() -> None:
    """As seen on an H100: CUDA loads a kernel's code at its first launch, in an event with the number of the operation."""
    kernel = Ran("flash_fwd_kernel", 2000.0)
    operation = Event("aten::_flash_attention_forward", 0, kernels=[kernel])
    overhead = [
        Event("Lazy Function Loading", 1, [kernel], [], operation, "overhead"),
        Event("cudaDeviceSynchronize", 2, [kernel], [], operation, "cuda_runtime"),
    ]
    operation.cpu_children = overhead
    assert [one.kernel for one in observer.launches([operation, *overhead])] == ["flash_fwd_kernel"]


def test_without_kernels_nothing_is_proven() -> None:
    tracer, _ = traced(Net())
    seen = interpret(tracer.trace, Names(tracer.trace.roots, ModuleTree()), set())
    assert all(p.on_tensor_cores is None for p in observer.prove(observer.products(seen), seen, []))


def test_a_class_of_a_whole_model_and_a_bare_number_have_their_line() -> None:
    names = ["Sequential", "0", "encoder.head", "head"]
    finding = Finding(code="A101", title="t", modules=names, detail="d", gain="g", fix="f")
    section = finding_section(finding, dict.fromkeys(names, "/home/x/train.py:7"))
    rows = {fact.what: fact.value for block in section.blocks if isinstance(block, FactTable) for fact in block.rows}
    assert rows["where"] == "Sequential (train.py:7), 0 (train.py:7), encoder.head, head"


def test_a_model_of_torchs_own_parts_has_the_line_that_calls_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()

    lines = {one.module: Path(one.line).name.partition(":")[0] for one in mezzo.audit(train).wide_products}
    assert lines == {"0": "test_page_audit.py", "1.0": ""}


def test_modules_of_one_weight_stay_in_the_order_of_the_record() -> None:
    def node(path: str, children: Sequence[TreeNode]) -> TreeNode:
        return TreeNode(name=path, path=path, bars=(), text="", children=children)

    names = [f"layer{n}" for n in range(40)]
    assert [one.name for one in modules.nodes_of(dict.fromkeys(names), node, lambda path: 0)] == names
