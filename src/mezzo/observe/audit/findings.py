"""Findings about audited steps: one rule per code, each with its page in ``docs/findings``.

A rule returns the part of the step that it concerns, or None. The gain of a change is an upper bound in plain numbers (FLOPs that would
run in another format, bytes that would not move); the time saved depends on the device and is measured with ``mezzo compare``.

A part with less than a hundredth of the step's FLOPs or bytes is not reported.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mezzo.formats import BF16, FP32
from mezzo.observe.audit.causes import copied_bytes, lowers
from mezzo.observe.audit.operations import TracedOperation, listed_precision
from mezzo.observe.settings import FORMATS_OF_16_BITS, MOST_LISTED, WIDE_FORMATS
from mezzo.records import Cause, Finding, Product, RoundTrip, WideProduct

MIN_SHARE = 0.01
MUCH_CAST = 0.25
_AMPERE = (8, 0)
_NORMS = ("native_layer_norm", "native_group_norm", "_fused_rms_norm")
"""Kernels that keep their operand for the backward pass, and add up in FP32 whatever its format."""
_FULL_WIDTH = "would run in kernels with full-width loads"


@dataclass
class AuditedSteps:
    """The audited steps, in the form that the rules inspect."""

    operations: Sequence[TracedOperation]
    wide: Sequence[WideProduct]
    trips: Sequence[RoundTrip]
    products: Sequence[Product]
    device_type: str = "cpu"
    capability: tuple[int, int] | None = None
    """Compute capability of a CUDA device."""
    fixes: Mapping[str, str] = field(default_factory=dict)
    """Fixes by code, for a framework in which they differ from PyTorch's."""

    @property
    def flops(self) -> int:
        """The FLOPs of all products."""
        return sum(o.flops for o in self.operations)

    @property
    def bytes(self) -> int:
        """The bytes of all operations."""
        return sum(o.bytes for o in self.operations)

    @property
    def lowers(self) -> bool:
        """Whether any product of a forward or backward pass ran in 16 bits."""
        return lowers(self.operations)


@dataclass
class StepPart:
    """The part of a step that a finding concerns."""

    modules: Iterable[str]
    detail: str
    flops: int = 0
    bytes: int = 0
    lines: Iterable[str] = ()
    gain: str = ""
    always: bool = field(default=False, kw_only=True)
    """Whether to report it even if it is small."""


@dataclass(frozen=True)
class FindingRule:
    """One code: its title, its fix, and the function that finds it."""

    code: str
    title: str
    fix: str
    find: Callable[[AuditedSteps], StepPart | None]


def findings(audited: AuditedSteps) -> list[Finding]:
    """Return the findings of all rules, the largest share first."""
    found = [_finding(rule, part, audited) for rule in RULES if (part := rule.find(audited)) is not None]
    return sorted((f for f in found if f is not None), key=lambda f: -f.share)


def _finding(rule: FindingRule, part: StepPart, audited: AuditedSteps) -> Finding | None:
    whole, size = (audited.flops, part.flops) if part.flops else (audited.bytes, part.bytes)
    share = size / whole if whole else 0.0
    if share < MIN_SHARE and not part.always:
        return None
    modules = list(dict.fromkeys(part.modules))
    more = f"; {len(modules)} modules in all" if len(modules) > MOST_LISTED else ""
    return Finding(
        code=rule.code,
        title=rule.title,
        modules=modules[:MOST_LISTED],
        detail=f"{part.detail}{more}",
        gain=part.gain or _gain(part, share),
        fix=audited.fixes.get(rule.code, rule.fix),
        share=share,
        flops=part.flops,
        bytes=part.bytes,
        lines=[line for line in dict.fromkeys(part.lines) if line][:MOST_LISTED],
    )


def _gain(part: StepPart, share: float) -> str:
    if part.flops:
        return (
            f"{share:.1%} of the step's product FLOPs would run in 16 bits, with half the bytes. On Tensor Cores that is up "
            "to 2 times as fast as TF32 and 16 times as fast as FP32 (NVIDIA A100: 312, 156 and 19.5 TFLOPS)"
        )
    return f"{part.bytes / 1e6:.3g} MB per audited step that need not move: {share:.1%} of all bytes"


def _wide(
    cause: Cause, *, lowers: bool | None = None, always: bool = False
) -> Callable[[AuditedSteps], StepPart | None]:
    def find(audited: AuditedSteps) -> StepPart | None:
        found = [p for p in audited.wide if p.cause == cause]
        if not found or lowers not in (None, audited.lowers):
            return None
        flops = sum(p.flops for p in found)
        detail = f"{found[0].reason}; most of it: {found[0].op} in {found[0].module}, {found[0].format}"
        return StepPart([p.module for p in found], detail, flops, lines=[p.line for p in found], always=always)

    return find


def _tf32_off(audited: AuditedSteps) -> StepPart | None:
    capable = audited.device_type == "cuda" and audited.capability is not None and audited.capability >= _AMPERE
    found = [o for o in audited.operations if o.product is not None and o.format == FP32.name]
    if not capable or not found:
        return None
    gain = "what stays in FP32 would run on Tensor Cores: up to 8 times as fast (NVIDIA A100: 156 against 19.5 TFLOPS)"
    return StepPart([o.module for o in found], "FP32 products ran without TF32", sum(o.flops for o in found), gain=gain)


def _problem(*kinds: str, gain: str) -> Callable[[AuditedSteps], StepPart | None]:
    def find(audited: AuditedSteps) -> StepPart | None:
        found = [
            p
            for p in audited.products
            if p.format not in WIDE_FORMATS and any(s.split(":")[0] in kinds for s in p.problems)
        ]
        if not found:
            return None
        problem = next(s for s in found[0].problems if s.split(":")[0] in kinds)
        detail = f"most of it: {found[0].op} in {found[0].module} ({found[0].phase}), {problem}"
        flops = sum(p.flops for p in found)
        more = f"{flops / (audited.flops or 1):.1%} of the step's product FLOPs {gain}"
        return StepPart([p.module for p in found], detail, flops, gain=more)

    return find


def _copied_inputs(audited: AuditedSteps) -> StepPart | None:
    found = [(o, size) for o in audited.operations if (size := copied_bytes(o))]
    if not found:
        return None
    most = max(found, key=lambda pair: pair[1])[0]
    detail = f"{len(found)} copies; the largest: {most.op} in {most.module} ({most.phase})"
    return StepPart([o.module for o, _ in found], detail, bytes=sum(size for _, size in found))


def _off_tensor_cores(audited: AuditedSteps) -> StepPart | None:
    found = [p for p in audited.products if p.eligible and p.format not in WIDE_FORMATS and p.on_tensor_cores is False]
    if not found:
        return None
    detail = f"most of it: {found[0].op} in {found[0].module} ran {', '.join(found[0].kernels)}"
    gain = (
        "up to 16 times the multiplication rate of a kernel without Tensor Cores (NVIDIA A100: 312 against 19.5 TFLOPS)"
    )
    return StepPart([p.module for p in found], detail, sum(p.flops for p in found), gain=gain)


def _needless_trips(audited: AuditedSteps) -> StepPart | None:
    found = [t for t in audited.trips if t.needless]
    if not found:
        return None
    count, size, most = sum(t.count for t in found), sum(t.bytes for t in found), found[0]
    detail = f"{count} times; most of it: {most.formats} in {most.module} ({most.phase})"
    return StepPart([t.module for t in found], detail, bytes=size, lines=[t.line for t in found], always=True)


def _cast_again(audited: AuditedSteps) -> StepPart | None:
    groups: dict[Hashable, list[TracedOperation]] = defaultdict(list)
    for operation in audited.operations:
        cast = operation.cast
        if cast is not None and cast.of == "weight" and operation.reads_parameter and operation.phase == "forward":
            model = operation.raw.entry.calls[-1:]
            groups[cast.place, cast.target, id(model[0]) if model else 0].append(operation)
    repeated = [o for group in groups.values() for o in group[1:]]
    if not repeated:
        return None
    detail = f"{len(repeated)} casts of weights that the same forward pass had cast before"
    lines = [o.raw.line for o in repeated]
    return StepPart(
        [o.module for o in repeated], detail, bytes=sum(o.bytes for o in repeated), lines=lines, always=True
    )


def _many_casts(audited: AuditedSteps) -> StepPart | None:
    found = [o for o in audited.operations if o.cast is not None]
    size = sum(o.bytes for o in found)
    if not audited.bytes or size < MUCH_CAST * audited.bytes:
        return None
    by_module: Counter[str] = Counter()
    size_left = size / 2
    for operation in found:
        by_module[operation.module] += operation.bytes
    order: list[str] = []
    for module, moved in by_module.most_common():  # the modules that make up half of it
        order.append(module)
        size_left -= moved
        if size_left <= 0:
            break
    detail = f"{len(found)} casts move {size / audited.bytes:.0%} of all bytes, most in {order[0]}"
    return StepPart(order, detail, bytes=size)


def _promoted(audited: AuditedSteps) -> StepPart | None:
    found = [o for o in audited.operations if o.promotes]
    if not found:
        return None
    detail = f"{found[0].op} in {found[0].module} mixes {' and '.join(found[0].inputs)}, so its result is FP32"
    return StepPart([o.module for o in found], detail, bytes=sum(m[2] // 2 for o in found for m in o.raw.outs))


def _wide_norms(audited: AuditedSteps) -> StepPart | None:
    """Find the FP32 operands of norms, unless activation checkpointing may drop them: it recomputes something beside the norm."""
    backward = {(o.module, o.op.removesuffix("_backward")) for o in audited.operations if o.phase in ("dgrad", "wgrad")}
    again = {_parent(o.module) for o in audited.operations if o.phase == "recompute"}
    kept: dict[Hashable, TracedOperation] = {}
    for o in audited.operations:
        norm = o.phase == "forward" and o.op in _NORMS and o.inputs[:1] == (FP32.name,)
        if norm and (o.module, o.op) in backward and not any(_lies_in(a, _parent(o.module)) for a in again):
            model = o.raw.entry.calls[-1:]
            kept[o.raw.ins[0][0], id(model[0]) if model else 0] = o
    if not kept or not audited.lowers:
        return None
    size = sum(o.raw.ins[0][2] for o in kept.values())
    most = max(kept.values(), key=lambda o: o.raw.ins[0][2])
    keep = f"{len(kept)} norms read FP32 values and keep" if len(kept) > 1 else "a norm reads FP32 values and keeps"
    detail = f"{keep} them for the backward pass, {_mb(size)}; most of it: {most.op} in {most.module}"
    gain = f"{_mb(size / 2)} fewer activations per audited step; the norms' results are FP32, too, until the next cast"
    return StepPart([o.module for o in kept.values()], detail, bytes=size // 2, gain=gain)


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _lies_in(module: str, outer: str) -> bool:
    return not outer or f"{module}.".startswith(f"{outer}.")


def _mb(size: float) -> str:
    return f"{size / 1e6:.3g} MB"


def _no_masters(audited: AuditedSteps) -> StepPart | None:
    updates = [o for o in audited.operations if o.raw.stepping and o.cast is None and o.reads_parameter]
    found = [o for o in updates if o.outputs[:1] and o.outputs[0] in FORMATS_OF_16_BITS] or [
        o for o in updates if not o.outputs and o.inputs[:1] and o.inputs[0] in FORMATS_OF_16_BITS
    ]
    if not found:
        return None
    detail = f"{found[0].op} updates {found[0].inputs[0]} parameters in place"
    gain = "updates smaller than half a unit in a weight's last place (2^-9 of it in BF16, 2^-12 in FP16) would not be lost"
    return StepPart([], detail, bytes=sum(o.bytes for o in found), gain=gain, always=True)


def _sensitive(audited: AuditedSteps) -> StepPart | None:
    found = [
        o
        for o in audited.operations
        if o.phase == "forward"
        and o.product is None
        and not o.raw.stepping
        and not o.raw.within
        and listed_precision(o.op) == "fp32"
        and "upsample"
        not in o.op  # a mean of a few values, which its kernels add in FP32; its backward pass is why it is listed
        and any(name in FORMATS_OF_16_BITS for name in o.inputs[:1])
        and not (o.op in _NORMS and o.inputs[:1] == (BF16.name,))  # no range is left, and sums are FP32
        and any(name in FORMATS_OF_16_BITS for name in o.outputs[:1])  # else it reads 16 bits and computes in FP32
        and any(meta[2] > 2 for meta in o.raw.ins)
    ]
    if not found:
        return None
    ops = ", ".join(dict.fromkeys(o.op for o in found))
    detail = f"{ops} ran on {found[0].inputs[0]} operands; the portable op lists keep them in FP32"
    gain = "no speed: what leaves FP16's range here becomes infinite or zero, and long sums lose their small terms"
    return StepPart([o.module for o in found], detail, bytes=sum(o.bytes for o in found), gain=gain, always=True)


RULES: tuple[FindingRule, ...] = (
    FindingRule(
        "A101",
        "no mixed precision",
        "run it under a policy: mezzo run --policy bf16 (or fp16), or mezzo.Session in the script. If it is under one already, call "
        "models as model(x), not model.forward(x), and put other code into a module or torch.autocast",
        _wide("off", lowers=False),
    ),
    FindingRule(
        "A102",
        "autocast is off around products",
        "move this code into the autocast region, or into a module that is called there",
        _wide("off", lowers=True),
    ),
    FindingRule(
        "A103",
        "a module opts out of autocast",
        "remove the script's autocast(enabled=False) there; under a policy of Mezzo, the module's name in fp32_modules. Keep them if FP32 "
        "is needed",
        _wide("excluded"),
    ),
    FindingRule(
        "A104",
        "products kept in FP32 by an op list or a kernel",
        "list the family in lower precision (policy field lower), or write the operation as matmul or linear; attention needs a mask, "
        "dropout and device that a fused kernel takes",
        _wide("list"),
    ),
    FindingRule(
        "A105",
        "products promoted to FP32",
        "cast the FP32 operand (a buffer, a mask, a scale) to the format of the others where they meet",
        _wide("promotion"),
    ),
    FindingRule(
        "A106",
        "autocast has no rule for a product",
        "cast its operands by hand inside the region, or register an autocast rule for a custom operation",
        _wide("no rule"),
    ),
    FindingRule(
        "A107",
        "products in FP64",
        "find where float64 comes in (numpy arrays, torch.set_default_dtype) and cast to float32 there",
        _wide("float64", always=True),
    ),
    FindingRule(
        "A108",
        "the script's autocast is switched off",
        "find what sets enabled=False there (a flag of the config, an argument), and turn it on; or run the unchanged script under a "
        "policy: mezzo run --policy bf16 (or fp16)",
        _wide("switched off"),
    ),
    FindingRule(
        "A201",
        "shapes that do not suit Tensor Cores",
        "choose multiples of 8 (vocabulary, channels, head width); give groups at least 8 channels each",
        _problem("dimension", "groups", gain="would run with full-width loads and without padding"),
    ),
    FindingRule(
        "A202",
        "misaligned operands",
        "make the slice contiguous, or slice at multiples of 8",
        _problem("alignment", gain=_FULL_WIDTH),
    ),
    FindingRule(
        "A203",
        "convolutions in channels-first layout",
        "model.to(memory_format=torch.channels_last), channels_last_3d for volumes, and the images too",
        _problem("layout", gain="would run without a transposition before and after"),
    ),
    FindingRule(
        "A204",
        "TF32 is off",
        'torch.set_float32_matmul_precision("high"), torch.backends.cudnn.allow_tf32 = True, or --policy tf32',
        _tf32_off,
    ),
    FindingRule(
        "A205",
        "convolutions that copy their input",
        "pass channels-last images to a channels-last model; look for operations between its convolutions that return channels-first: "
        "InstanceNorm, on CUDA also GroupNorm, reshape, flatten, einops",
        _copied_inputs,
    ),
    FindingRule(
        "A301",
        "round-trip casts",
        "drop both casts, or cast once around all of the code between",
        _needless_trips,
    ),
    FindingRule(
        "A302",
        "weights cast more than once",
        "let autocast keep its casts (cache_enabled=True, not under no_grad), or cast once before the loop",
        _cast_again,
    ),
    FindingRule(
        "A303",
        "casts dominate memory traffic",
        "keep neighbours in one format: a -master policy, or one FP32 module around several small ones",
        _many_casts,
    ),
    FindingRule(
        "A304",
        "mixed 16-bit and FP32 operands",
        "cast the FP32 operand to the format of the other, or register the buffer in it",
        _promoted,
    ),
    FindingRule(
        "A305",
        "norms keep FP32 activations",
        "if memory is short, checkpoint these modules; in BF16, name the norms in the policy's field lower (--policy "
        "bf16:lower=layer_norm): their kernels add up in FP32. In FP16 the op lists keep them in FP32 for range",
        _wide_norms,
    ),
    FindingRule(
        "A401",
        "16-bit weights updated without FP32 masters",
        "keep FP32 masters (fp16-master, bf16-master, mezzo.AdamW), or train FP32 weights under autocast",
        _no_masters,
    ),
    FindingRule(
        "A402",
        "range-sensitive operations in 16 bits",
        "run under a policy with portable op lists, or call .float() before the operation",
        _sensitive,
    ),
    FindingRule(
        "A501",
        "eligible products ran without Tensor Cores",
        "read the kernel's name in the record; check the library versions and torch.backends settings",
        _off_tensor_cores,
    ),
)
