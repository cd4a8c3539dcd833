"""The misuses of mixed precision that are checked: a row for each, with where a running script made it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from mezzo.observe.module_names import SCRIPT, Names
from mezzo.observe.observer import ModuleTree, ObservedRun
from mezzo.observe.settings import MOST_LISTED
from mezzo.observe.source_lines import running_line
from mezzo.records import Finding, Severity

ENOUGH = 2
"""Updates that must show the same misuse before it is reported."""
_MAX_LINES = 4
_ORDER = ("error", "warning", "info", "")


@dataclass(frozen=True)
class NamedParameters:
    """The names of an optimizer's parameters."""

    paths: Mapping[int, tuple[str, str]]
    """By the parameter's identity: its own path and its module's."""
    whole: tuple[str, ...]
    """What stands for all of them."""

    def parameter(self, identity: int) -> str:
        """Return the path of a parameter."""
        return self.paths.get(identity, (Names.no_path, ""))[0]

    def module(self, identity: int) -> str:
        """Return the path of a parameter's module."""
        return self.paths.get(identity, ("", SCRIPT))[1]

    def modules(self, identities: Iterable[int]) -> list[str]:
        """Return the modules of some parameters; what stands for all, if they are in every module."""
        found = list(dict.fromkeys(self.module(one) for one in identities))
        every = {module for _, module in self.paths.values()}
        return (list(self.whole) if every.issubset(found) else found)[:MOST_LISTED]


class MisuseLog:
    """The misuse found in a run, one entry per code."""

    def __init__(self, run: ObservedRun) -> None:
        self._run = run
        self._findings: dict[str, Finding] = {}

    def add(
        self,
        code: str,
        detail: str,
        *,
        parameters: Iterable[Tensor] = (),
        modules: Iterable[nn.Module] = (),
        named: Sequence[str] | None = None,
        line: str | None = None,
        step: int | None = None,
        count: int = 1,
    ) -> None:
        """Record a misuse.

        Args:
            code: its code.
            detail: a sentence on what was found; only the first for a code is kept.
            parameters: the weights concerned, for their modules' names.
            modules: the modules concerned.
            named: the names of the modules concerned, if they were found earlier.
            line: the script's line; the one running now if left out.
            step: the number of the step; the current one if left out.
            count: the number of occurrences.
        """
        line = running_line() if line is None else line
        finding = self._findings.get(code)
        if finding is None:
            misuse = BY_CODE[code]
            self._findings[code] = Finding(
                code=code,
                title=misuse.title,
                severity=misuse.severity,
                modules=list(_named(self._run.objects.roots, parameters, modules) if named is None else named),
                detail=detail,
                gain=misuse.harm,
                fix=misuse.fix,
                lines=[line] if line else [],
                step=self._run.update.recorder.num_closed + 1 if step is None else step,
                count=count,
            )
            return
        new = [line] if line and line not in finding.lines and len(finding.lines) < _MAX_LINES else []
        self._findings[code] = finding.model_copy(
            update={"count": finding.count + count, "lines": [*finding.lines, *new]}
        )

    def __contains__(self, code: str) -> bool:
        return code in self._findings

    def names(self) -> Names:
        """Return the names of the script's modules and parameters as they are now."""
        return Names(list(self._run.objects.roots), ModuleTree())

    def named(self, parameters: Iterable[Tensor]) -> NamedParameters:
        """Return the names of some parameters, which are also known when the models are gone."""
        parameters, names = list(parameters), self.names()
        own = [names.parameter(p) for p in parameters]
        sizes = [" x ".join(map(str, p.shape)) for p in parameters]
        listed = zip(parameters, own, sizes, strict=True)
        paths = {
            id(p): (f"parameter {k}, of {size}" if name == Names.no_path else name, names.of_parameter(id(p)))
            for k, (p, name, size) in enumerate(listed)
        }
        return NamedParameters(paths, tuple(_named(self._run.objects.roots, parameters, ())))

    def findings(self) -> list[Finding]:
        """Return all misuse found, the most severe first."""
        return sorted(self._findings.values(), key=lambda f: (_ORDER.index(f.severity), f.code))


def _named(roots: Iterable[nn.Module], parameters: Iterable[Tensor], modules: Iterable[nn.Module]) -> list[str]:
    """Return the names of modules; for a model whose parameters are all among ``parameters``, only its class."""
    models, listed = list(roots), [id(p) for p in parameters]
    concerned = set(listed)
    names = Names(models, ModuleTree())
    whole = [model for model in models if (ids := [id(p) for p in model.parameters()]) and concerned.issuperset(ids)]
    covered = {id(p) for model in whole for p in model.parameters()}
    named = [type(getattr(model, "_orig_mod", model)).__name__ for model in whole]  # the class inside torch.compile's
    named += [names.of_parameter(p) for p in listed if p not in covered]
    named += [names.of(module) for module in modules]
    return list(dict.fromkeys(named))[:MOST_LISTED]


@dataclass(frozen=True)
class Misuse:
    """One code: its title, its severity, what it does to training, and its fix."""

    code: str
    title: str
    severity: Severity
    harm: str
    fix: str


MISUSES: tuple[Misuse, ...] = (
    Misuse(
        "A601",
        "gradients are clipped while they are scaled",
        "error",
        "the limit applies to gradients times the loss scale, so every update is cut to almost nothing and changes its "
        "size with the scale",
        "call scaler.unscale_(optimizer) after backward() and before clipping",
    ),
    Misuse(
        "A602",
        "the norm of scaled gradients is read",
        "info",
        "the number is the gradient norm times the loss scale",
        "call scaler.unscale_(optimizer) first, or divide the norm by scaler.get_scale()",
    ),
    Misuse(
        "A603",
        "an optimizer steps on scaled gradients",
        "error",
        "the update is as many times too large as the loss scale is, and an overflow reaches the weights",
        "call scaler.step(optimizer) in place of optimizer.step()",
    ),
    Misuse(
        "A604",
        "GradScaler.step on gradients that were not scaled",
        "error",
        "gradients that nothing multiplied are divided by the loss scale: the update is lost",
        "call scaler.scale(loss).backward() for every loss of this optimizer",
    ),
    Misuse(
        "A605",
        "GradScaler calls out of order",
        "error",
        "torch raises an error, or gradients are divided by the scale twice or not at all, or used twice",
        "keep the order: scale(loss).backward(), unscale_(optimizer) if needed, step(optimizer), and update() once at the end",
    ),
    Misuse(
        "A606",
        "GradScaler.update between scale() and step()",
        "warning",
        "the gradients are multiplied by one scale and divided by another",
        "call update() once, after the steps of all optimizers whose losses were scaled",
    ),
    Misuse(
        "A607",
        "the loss is divided twice for accumulation",
        "warning",
        "each update uses one k-th of the mean gradient of its k micro-batches",
        "divide in one place: leave the division to the library, or tell the library not to accumulate",
    ),
    Misuse(
        "A608",
        "the loss is not divided under accumulation",
        "info",
        "if these are micro-batches of one batch, the gradients are k times too large",
        "divide the loss by k before backward(), or the learning rate by k if the optimizer is not invariant to scale",
    ),
    Misuse(
        "A609",
        "FP16 gradients without a loss scale",
        "error",
        "gradients below 6e-8 become zero in FP16, and those below 6e-5 lose bits",
        "use torch.amp.GradScaler around backward() and step(), or BF16, which needs no scale",
    ),
    Misuse(
        "A610",
        "the schedule moves on at skipped updates",
        "warning",
        "the learning rate runs ahead of the updates; a warm-up may be over before the first one",
        "step the scheduler only if scaler.get_scale() did not fall: scale = scaler.get_scale(); scaler.update(); "
        "if scaler.get_scale() >= scale: scheduler.step()",
    ),
    Misuse(
        "A611",
        "the schedule steps before the optimizer",
        "warning",
        "the first learning rate of the schedule is never used",
        "call scheduler.step() after optimizer.step() or scaler.step(optimizer)",
    ),
    Misuse(
        "A612",
        "an average of weights is kept in 16 bits",
        "warning",
        "a step of the average below half a unit in the last place (2^-9 of the value in BF16, 2^-12 in FP16) is lost: "
        "the average does not move",
        "keep the averaged copy in FP32: copy.deepcopy(model).float()",
    ),
    Misuse(
        "A613",
        "running statistics are kept in 16 bits",
        "warning",
        "changes of mean and variance below half a unit in the last place are lost, and evaluation uses stale statistics",
        "keep these modules in FP32: module.float() after model.half() or model.bfloat16(), or autocast over FP32 weights",
    ),
    Misuse(
        "A614",
        "gradients are cleared between backward() and step()",
        "error",
        "the optimizer steps without gradients: nothing is learned",
        "call zero_grad() after step(), or before backward()",
    ),
    Misuse(
        "A615",
        "GradScaler with BF16 autocast",
        "info",
        "BF16 has the range of FP32: the scale has nothing to save, costs a pass over the gradients and a wait for the device",
        "leave the scaler out, or pass enabled=(dtype == torch.float16)",
    ),
    Misuse(
        "A616",
        "GradScaler over FP16 weights",
        "error",
        "unscaling FP16 gradients would lose what the scale had saved; torch refuses it",
        "keep the weights in FP32 under autocast, or use FP32 master weights (mezzo.Session with policy fp16-master)",
    ),
    Misuse(
        "A617",
        "checkpoints without the GradScaler",
        "warning",
        "a resumed run begins at the initial scale: it skips updates until the scale has fallen to where it was, or loses small "
        "gradients until it has grown back",
        "save scaler.state_dict() beside the optimizer's, and call scaler.load_state_dict() when resuming",
    ),
    Misuse(
        "A618",
        "parameters of two optimizers are unscaled twice",
        "error",
        "the gradients that both optimizers train on are divided by the loss scale twice: the second update is lost",
        "give each parameter to one optimizer, or step, clear and compute the gradients of one optimizer after the other's",
    ),
    Misuse(
        "A619",
        "an average of weights moves at skipped updates",
        "info",
        "the weights did not change, but the average forgets older ones and its decay's warm-up goes on; an equal average (SWA) counts "
        "the same weights twice",
        "move the average only if scaler.get_scale() did not fall: scale = scaler.get_scale(); scaler.update(); "
        "if scaler.get_scale() >= scale: ema.update_parameters(model)",
    ),
    Misuse(
        "A620",
        "a bound or a small term that 16 bits round away",
        "warning",
        "what it should prevent happens: a division by zero, the logarithm of zero, an infinite slope",
        "call .float() before this operation, or choose a number that the format holds: above 6e-8 in FP16; below 1, at most 1 - 2**-11 in "
        "FP16 and 1 - 2**-8 in BF16",
    ),
    Misuse(
        "A621",
        "integers that 16 bits cannot hold",
        "warning",
        "different labels, indices, time steps or positions become equal: integers are exact up to 2048 in FP16 and 256 in BF16",
        "keep them as integers, or cast them with .float()",
    ),
    Misuse(
        "A622",
        "second moments are kept in 16 bits",
        "warning",
        "step sizes are wrong: a moment that never falls makes every later step smaller than it should be, and one of 0 divides by eps",
        "keep FP32 weights under autocast, or 16-bit weights with FP32 masters and moments (mezzo.AdamW, mezzo.Session with policy "
        "bf16-master)",
    ),
    Misuse(
        "A623",
        "sines and cosines of 16-bit angles",
        "warning",
        "neighbouring positions or time steps get equal or random phases: half a turn is 3.14 radians",
        "compute positions, frequencies and angles in FP32: with torch.autocast off around a matrix product, or as an elementwise product "
        "of .float() operands",
    ),
    Misuse(
        "A624",
        "a short accumulation window is divided by the whole number",
        "info",
        "the gradients of this update, usually the last of an epoch, are too small by the share of micro-batches that are missing",
        "divide by the number of micro-batches in the window, or leave out the rest: drop_last=True and a number of batches that is a "
        "multiple of the window",
    ),
    Misuse(
        "A625",
        "a running sum in 16 bits",
        "warning",
        "it stands still: a number below half a unit in the last place of the sum is lost, so totals and averages are too small",
        "add in FP32: total += loss.detach().float() with a total in FP32, or x.float().cumsum(dim)",
    ),
    Misuse(
        "A626",
        "checkpointed weights get no gradients",
        "error",
        "these weights never change; where the loss depends on nothing else, backward() raises an error",
        "checkpoint(block, x, use_reentrant=False); in transformers gradient_checkpointing_kwargs={'use_reentrant': False}",
    ),
    Misuse(
        "A627",
        "optimizer state is kept in 16 bits",
        "warning",
        "averages of gradients lose small changes: BF16 has 8 bits, FP16 11; a count of steps stands still at 256 or 2048",
        "create the state in FP32, as torch's optimizers do for FP32 weights; leave the optimizer out of conversions of a checkpoint",
    ),
    Misuse(
        "A628",
        "optimizer state changes its format",
        "warning",
        "state that becomes wider takes twice the memory, and compiled code is compiled again; state that becomes narrower loses digits",
        "keep one format: create, load and update the state in it; torch's load_state_dict casts state to the format of the weights",
    ),
    Misuse(
        "A629",
        "FP32 numbers have passed through 16 bits",
        "warning",
        "they take the memory of FP32 and have the digits of 16 bits: small updates are lost as if they were stored so",
        "remove the cast to 16 bits from the update; save and load FP32 weights and state, not 16-bit copies",
    ),
    Misuse(
        "A630",
        "the configured precision computes nothing",
        "warning",
        "the run has neither the speed nor the memory of the format that was asked for",
        "call the model inside the autocast region, or pass it through the library that was configured: accelerator.prepare(model), "
        "Trainer(args=args)",
    ),
    Misuse(
        "A631",
        "gradients of FP32 weights are reduced in 16 bits",
        "info",
        "each sum over processes is rounded to 8 bits in BF16 and 11 in FP16, and FP16 overflows; the error grows with their number",
        "reduce in FP32: no compression hook, reduce_dtype=torch.float32; keep 16 bits where the exchange is what limits the speed",
    ),
    Misuse(
        "A632",
        "the norm of gradients is taken in 16 bits",
        "info",
        "the norm has 3 digits in BF16, and differs with the way in which parameters are grouped; in FP16 it overflows above 65504, and "
        "clipping then makes every gradient 0",
        "take the norm in FP32: torch.linalg.vector_norm(g, dtype=torch.float32)",
    ),
    Misuse(
        "A633",
        "updates of 16-bit weights are rounded away",
        "warning",
        "an update below half a unit in the last place (2^-9 of the weight in BF16, 2^-12 in FP16) changes nothing: these weights stop "
        "learning",
        "keep FP32 weights under autocast or FP32 masters (mezzo.AdamW, mezzo.Session with policy bf16-master), or round at random",
    ),
    Misuse(
        "A634",
        "the loss is scaled twice",
        "warning",
        "gradients stay multiplied by one of the scales: updates are too large, or the other scale falls until nothing is left of it",
        "scale in one place: leave it to the library that calls backward(), or turn its scaler off",
    ),
    Misuse(
        "A635",
        "the eps of Adafactor follows the format of the weights",
        "warning",
        "where gradients are smaller than eps, updates shrink with them: a model that was cast to 16 bits trains slower than in FP32",
        "keep FP32 weights under autocast, use mezzo.Adafactor, whose eps is FP32's, or pass eps=(1.2e-7, 1e-3)",
    ),
)

BY_CODE = {misuse.code: misuse for misuse in MISUSES}
