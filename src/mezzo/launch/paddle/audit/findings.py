"""Findings on audited Paddle steps: the rules of ``docs/findings`` that apply to its dynamic graph, in Paddle's terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mezzo.formats import FORMATS
from mezzo.launch.paddle.audit.audited import Audited
from mezzo.observe.limits import MOST_LISTED, WIDE
from mezzo.records import Cause, Finding

_SMALL = 0.01
"""Share of the step's FLOPs or bytes below which there is no finding, except for FP64 and range-sensitive operations."""

TITLES = {
    "A101": "no mixed precision",
    "A102": "autocast is off around products",
    "A103": "a module opts out of autocast",
    "A104": "products kept in FP32 by an op list or a kernel",
    "A107": "products in FP64",
    "A201": "shapes that do not suit Tensor Cores",
    "A203": "convolutions in channels-first layout",
    "A402": "range-sensitive operations in 16 bits",
}
"""The titles of the codes, as for PyTorch."""
_FIXES = {
    "A101": "run it under a policy: mezzo run --policy bf16 (or fp16), or paddle.amp.auto_cast in the script. Call models as "
    "model(x), not model.forward(x)",
    "A102": "move this code into a layer, or into the auto_cast region",
    "A103": "remove the layer from fp32_modules, or its auto_cast(enable=False), if FP32 is not needed there",
    "A104": "list the family in lower precision (policy field lower), or in custom_white_list of paddle.amp.auto_cast",
    "A107": 'find where float64 comes in (numpy arrays, paddle.set_default_dtype) and call .astype("float32") there',
    "A201": "choose multiples of 8 (vocabulary, channels, head width); give groups at least 8 channels each",
    "A203": 'give the convolutions data_format="NHWC", and the images too',
    "A402": 'run under a policy with portable op lists, or call .astype("float32") before the operation',
}
_GAINS = {
    "A201": "would run with full-width loads and without padding",
    "A203": "would run without a transposition before and after",
}


def findings(rows: Sequence[Audited]) -> list[Finding]:
    """Return the findings on audited operations, the largest share first."""
    lowers = any(row.flops and row.format not in WIDE for row in rows)
    found = [
        _of(rows, "A102" if lowers else "A101", lambda r: _wide_by(r, "off")),
        _of(rows, "A103", lambda r: _wide_by(r, "excluded")),
        _of(rows, "A104", lambda r: _wide_by(r, "list")),
        _of(rows, "A107", lambda r: _wide_by(r, "float64"), always=True),
        _of(rows, "A201", lambda r: _has(r, "dimension", "groups")),
        _of(rows, "A203", lambda r: _has(r, "layout")),
        _of(rows, "A402", lambda r: r.sensitive and r.format in ("", *FORMATS), always=True),
    ]
    return sorted((finding for finding in found if finding is not None), key=lambda finding: -finding.share)


def _wide_by(row: Audited, cause: Cause) -> bool:
    return row.cause is not None and row.cause[0] == cause


def _has(row: Audited, *kinds: str) -> bool:
    """Return whether a 16-bit product has a problem of one of these kinds."""
    problems = () if row.shape is None or row.format in WIDE else row.shape.problems
    return any(kind in problems for kind in kinds)


def _of(
    rows: Sequence[Audited], code: str, concerns: Callable[[Audited], bool], *, always: bool = False
) -> Finding | None:
    """Return the finding on the rows that it concerns; None if there are none or, unless ``always``, if their share is small."""
    concerned = [row for row in rows if concerns(row)]
    flops, size = sum(row.flops for row in concerned), sum(row.bytes for row in concerned)
    whole, part = (sum(r.flops for r in rows), flops) if flops else (sum(r.bytes for r in rows), size)
    share = part / whole if whole else 0.0
    if not concerned or (share < _SMALL and not always):
        return None
    return Finding(
        code=code,
        title=TITLES[code],
        modules=list(dict.fromkeys(row.module for row in concerned))[:MOST_LISTED],
        detail=_detail(concerned, code),
        gain=_gain(code, share),
        fix=_FIXES[code],
        share=share,
        flops=flops,
        bytes=0 if flops else size,
        lines=[line for line in dict.fromkeys(row.line for row in concerned) if line][:MOST_LISTED],
    )


def _detail(rows: Sequence[Audited], code: str) -> str:
    most = max(rows, key=lambda row: row.flops)
    if most.cause is not None:
        return f"{most.cause[1]}; most of it: {most.op} in {most.module}, {most.format}"
    if code == "A402":
        ops = ", ".join(dict.fromkeys(row.op for row in rows))
        return f"{ops} ran on {rows[0].inputs[0]} operands; the portable op lists keep them in FP32"
    kinds = ("layout",) if code == "A203" else ("dimension", "groups")
    problems = [] if most.shape is None else most.shape.listed()
    problem = next(problem for problem in problems if problem.split(":")[0] in kinds)
    return f"most of it: {most.op} in {most.module} ({most.phase}), {problem}"


def _gain(code: str, share: float) -> str:
    if code == "A402":
        return "no speed: what leaves FP16's range here becomes infinite or zero, and long sums lose their small terms"
    return f"{share:.1%} of the step's product FLOPs {_GAINS.get(code, 'would run in 16 bits')}"
