"""Which operation of a step ran in which format, and what that cost."""

from __future__ import annotations

from typing import Literal, TypeAlias

from mezzo.records.run import RunRecord
from mezzo.records.values import Finding, Note, Value, WholeRecord

PassKind: TypeAlias = Literal["forward", "recompute", "dgrad", "wgrad", "optimizer"]
Cause: TypeAlias = Literal["off", "switched off", "list", "promotion", "excluded", "no rule", "float64"]


_MOST_LINES = 3


class Operation(Value):
    """All operations of one kind in one module and phase."""

    op: str
    """Its name in torch's dispatcher."""
    module: str
    phase: PassKind
    inputs: list[str]
    """Formats of its operands, each listed once, in order; integers and booleans by torch's names."""
    outputs: list[str]
    format: str = ""
    """Format that a matrix product or convolution multiplies in; empty for other operations."""
    count: int = 1
    flops: int = 0
    bytes: int = 0
    """Bytes of all operands and results: the memory traffic if nothing stays in a cache."""


class CastTotal(Value):
    """All casts of one kind in one module and phase."""

    module: str
    phase: PassKind
    of: Literal["weight", "activation", "gradient"]
    source: str
    target: str
    count: int = 1
    bytes: int = 0
    line: str = ""


class RoundTrip(Value):
    """Casts to a format and back that one module causes."""

    module: str
    """Where the value is cast first."""
    phase: PassKind
    formats: str
    """For example ``fp16 > fp32 > fp16``."""
    needless: bool
    """Whether nothing between the two casts needs the format in the middle."""
    count: int = 1
    bytes: int = 0
    """Bytes that both casts move."""
    line: str = ""


class WideProduct(Value):
    """Matrix products and convolutions of one module that ran in FP32 or wider, and why."""

    op: str
    module: str
    format: str
    cause: Cause
    reason: str
    flops: int
    """Forward and backward together."""
    line: str = ""


class Product(Value):
    """Matrix products or convolutions of one shape in one module and phase, as a Tensor Core sees them."""

    op: str
    module: str
    phase: PassKind
    format: str
    m: int
    n: int
    k: int
    batch: int = 1
    count: int = 1
    flops: int = 0
    eligible: bool
    """Whether Tensor Cores can run it with full-width loads: in its own format or, if that is FP32, in 16 bits."""
    problems: list[str] = []
    kernels: list[str] = []
    """The device kernels that the profiler recorded for it."""
    on_tensor_cores: bool | None = None
    """Whether one of these kernels uses Tensor Cores; None without a profile."""


class Kernel(Value):
    """All launches of one kernel."""

    name: str
    count: int = 1
    time_ms: float = 0.0
    tensor_cores: bool = False
    """Whether a Tensor Core kernel has its name."""


ContractRole: TypeAlias = Literal[
    "weights",
    "master_weights",
    "gradients",
    "reduction",
    "gather",
    "optimizer_state",
    "ema",
    "buffers",
    "activations",
    "checkpoints",
]
"""What a tensor is for: a table of a contract. ``reduction`` is of gradients and ``gather`` of weights, between processes."""
ContractMoment: TypeAlias = Literal["set-up", "first update", "third update", "resume", "save", "end"]
"""When a format was found: before the first forward pass, in an update, at a load or in the update after it, in a file, at the end."""


class TensorFormat(Value):
    """What one tensor is stored in; a module's results count as one tensor."""

    role: ContractRole
    module: str
    tensor: str
    """Its name in the module: ``weight``, ``weight.exp_avg``; empty for what the module returns."""
    formats: list[str]
    """Several where it changes, or has several parts."""
    moment: ContractMoment
    step: int
    """The step in which it was found, from 1; of a save, a load and the end, the number of steps before it."""
    line: str = ""
    """The line of the script that made it so; empty if that is not known."""
    ranks: list[int] = []
    """The processes that have it so; empty for the only one."""

    @property
    def name(self) -> str:
        """The whole name, which patterns are matched with."""
        return ".".join(filter(None, (self.module, self.tensor)))


class Breach(Value):
    """One thing that is not as a contract expects."""

    problem: Literal["format", "nothing", "unknown"]
    """A tensor has another format, a line matches nothing, or what it matches could not be observed."""
    role: ContractRole
    pattern: str
    """The line of the contract."""
    expected: list[str]
    """The formats that are allowed there."""
    found: list[str] = []
    module: str = ""
    tensor: str = ""
    moment: ContractMoment | None = None
    """None where nothing was found."""
    step: int | None = None
    line: str = ""
    """The line of the script that made it so; empty if that is not known."""
    why: str = ""
    """Why it could not be observed."""
    of_rank: int | None = None
    """The only process that the contract's line is for; None for all."""
    ranks: list[int] = []
    """The processes in which it is so; empty for the only one."""


class CheckedContract(Value):
    """What a contract expects, and what was found."""

    file: str = ""
    """The contract; empty if none was given, and the formats are only listed."""
    breaches: list[Breach] = []
    formats: list[TensorFormat] = []
    """Every tensor that was found, once for each format that it had."""


class AuditRecord(WholeRecord):
    """Operations, casts, products and findings of the recorded steps of a script."""

    kind: Literal["audit"] = "audit"
    run: RunRecord
    steps: list[int]
    """The recorded steps; every sum is over all of them."""
    forced_eager: bool = False
    """Whether compiled code ran eagerly in these steps, so that every operation could be recorded."""
    operations: list[Operation] = []
    flops_by_phase: dict[str, dict[str, int]] = {}
    """FLOPs by phase, then by format."""
    casts: list[CastTotal] = []
    round_trips: list[RoundTrip] = []
    wide_products: list[WideProduct] = []
    products: list[Product] = []
    kernels: list[Kernel] = []
    findings: list[Finding] = []
    """Findings on the script's own mixed precision come first; the run's record has these, too."""
    contract: CheckedContract | None = None
    """What ``--expect`` and ``--write-expect`` found; None without them."""
    notes: list[Note] = []
    """What could not be recorded, and why."""

    @property
    def summary(self) -> str:
        """The script, the formats of its products and the number of findings, in one line."""
        flops = self.flops_by_format
        shares = [f"{count / max(sum(flops.values()), 1):.0%} {name}" for name, count in flops.items() if count]
        found = "1 finding" if len(self.findings) == 1 else f"{len(self.findings)} findings"
        broken = 0 if self.contract is None else len(self.contract.breaches)
        kept = f"; {broken} not as {self.contract.file} expects" if self.contract is not None and broken else ""
        return f"{self.run.where}: products {', '.join(shares) or 'none'}; {found}{kept}"

    @property
    def located_findings(self) -> list[Finding]:
        """The findings; one without lines has the lines of its modules' products and casts, if they are known."""
        lines: dict[str, dict[str, None]] = {}
        named: list[WideProduct | RoundTrip | CastTotal] = [*self.wide_products, *self.round_trips, *self.casts]
        for one in named:
            if one.line:
                lines.setdefault(one.module, {})[one.line] = None
        known = [[line for module in found.modules for line in lines.get(module, ())] for found in self.findings]
        return [
            found if found.lines else found.model_copy(update={"lines": places[:_MOST_LINES]})
            for found, places in zip(self.findings, known, strict=True)
        ]

    @property
    def flops_by_format(self) -> dict[str, int]:
        """The FLOPs of all phases by format."""
        total: dict[str, int] = {}
        for by_format in self.flops_by_phase.values():
            for name, flops in by_format.items():
                total[name] = total.get(name, 0) + flops
        return total

    @property
    def bytes(self) -> int:
        """The bytes of all operations."""
        return sum(operation.bytes for operation in self.operations)
