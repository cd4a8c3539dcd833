"""``mezzo.checkpoint``: choose what a model keeps for its backward pass, by name or by a budget, and apply it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from mezzo.engine import checkpointing
from mezzo.engine.casts.casting import Casting
from mezzo.engine.checkpointing import Keeps
from mezzo.errors import UsageError
from mezzo.measure.checkpointing.optimum import Costs, best_plan, candidates_of, costs_of, least_peak
from mezzo.measure.checkpointing.trace import Computed, ForwardTrace, trace, unwrapped
from mezzo.measure.checkpointing.wanted import EVERY, NAMED, bytes_of_text, bytes_text, is_plan
from mezzo.policy import Policy


@dataclass(kw_only=True, repr=False)
class CheckpointPlan:
    """What each checkpointed module keeps, and what that costs and saves; prints as a table."""

    name: str
    """``full``, ``every-k``, ``selective``, ``none`` or the budget."""
    regions: dict[str, Keeps]
    """By module: ``inputs``, or ``products`` for these and the outputs of its products."""
    costs: Costs
    plain_bytes: int
    """What waits for the backward pass without checkpointing."""
    forward_flops: int
    """Of the forward pass: products, convolutions, attention."""
    guarantee: str
    others: dict[str, Costs] = field(default_factory=dict)
    """The costs of the named plans, for comparison."""
    refused: dict[str, str] = field(default_factory=dict)
    """Modules that cannot be checkpointed or keep products, with the reason."""
    changed: tuple[str, ...] = ()
    """Names of the buffers that a forward pass changes."""

    @property
    def kept_bytes(self) -> int:
        """What waits for the backward pass when it begins."""
        return self.costs.kept_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that waits at any moment of the backward pass."""
        return self.costs.peak_bytes

    @property
    def recomputed_flops(self) -> int:
        """What the backward pass computes again."""
        return self.costs.recomputed_flops

    def apply(self, model: nn.Module) -> None:
        """Checkpoint the modules of ``model`` by this plan, and no others."""
        checkpointing.apply(unwrapped(model), self.regions, changed=self.changed)

    def remove(self, model: nn.Module) -> None:
        """Let ``model`` run without checkpointing again."""
        checkpointing.remove(unwrapped(model))

    def __repr__(self) -> str:
        rows = {**self.others, self.name: self.costs}
        width = max(len(name) for name in rows)
        lines = [f"Checkpointing: {self.name}. {self.guarantee}"]
        for name, costs in rows.items():
            mark = "*" if name == self.name else " "
            lines.append(
                f"{mark} {name:{width}}  keeps {bytes_text(costs.kept_bytes):>9} of {bytes_text(self.plain_bytes)}, at most "
                f"{bytes_text(costs.peak_bytes):>9} in the backward pass; recomputes {self._share(costs):.0%} of the forward pass's "
                f"FLOPs, and moves {bytes_text(costs.recomputed_moved_bytes)}"
            )
        for keeps, action in (("inputs", "keep their inputs"), ("products", "keep their products")):
            named = [name or "(the model)" for name, one in self.regions.items() if one == keeps]
            if named:
                lines.append(f"  {action}: {', '.join(named)}")
        left_out = outermost([name for name in self.refused if name])
        lines += [f"  left out: {name}: {self.refused[name]}" for name in left_out[:3]]
        if len(left_out) > 3:
            lines.append(f"  left out: {len(left_out) - 3} more")
        return "\n".join(lines)

    def _share(self, costs: Costs) -> float:
        return costs.recomputed_flops / self.forward_flops if self.forward_flops else 0.0


def checkpoint(
    model: nn.Module,
    sample: Any,
    *,
    budget: str | int | None = None,
    plan: str | None = None,
    policy: Policy | str = "fp32",
) -> CheckpointPlan:
    """Checkpoint modules of ``model`` so that what waits for the backward pass fits a budget; return the plan.

    The forward pass runs once on ``sample`` and keeps nothing, so this needs the memory of an evaluation. Gradients stay as they
    are, bit for bit. An earlier plan of the model is replaced.

    Args:
        model: the model, in training mode; call this before ``torch.compile``, and after a session with a ``-master`` or ``-pure`` policy.
        sample: a tensor, a tuple of arguments or a dict of keyword arguments: a micro-batch as the model gets it.
        budget: bytes (``12 * 2**30`` or ``"12GiB"``) for the tensors that wait for the backward pass. Weights, gradients, optimizer
            state and the operations' own working memory come on top.
        plan: instead of a budget: ``full`` checkpoints every block, ``every-3`` every third one, ``selective`` keeps the outputs of
            products in each, ``none`` removes an earlier plan. Blocks are the modules of the class that gives the lowest peak.
        policy: the precision of the training, which decides how many bytes are saved.

    Raises:
        UsageError: no plan is within the budget, the plan is unknown, or the model is in evaluation mode.
        SessionError: the forward pass runs a backward pass of its own.
    """
    if (budget is None) == (plan is None):
        raise UsageError(
            f"mezzo.checkpoint got budget={budget!r} and plan={plan!r}; allowed: one of the two",
            hint='pass budget="12GiB", or plan="full", "every-2", "selective" or "none"',
        )
    if plan is not None and not is_plan(plan):
        raise UsageError(
            f"there is no checkpointing plan {plan!r}; allowed: none, full, every-K with a number, selective",
            hint='pass plan="every-2", or budget="12GiB" for the plan with the least recomputation',
        )
    inner = unwrapped(model)
    if not inner.training:
        raise UsageError(
            "mezzo.checkpoint got a model in evaluation mode; allowed: a model in training mode",
            hint="call model.train() first: dropout and normalisation save other tensors in training",
        )
    checkpointing.remove(inner)
    first = next((t for t in (*inner.parameters(), *inner.buffers())), None)
    casting = Casting.of(Policy.of(policy), "cpu" if first is None else first.device.type)
    traced = trace(inner, runner(sample, casting.region))
    chosen = _agreed(traced, lambda: plan_for(traced, plan if budget is None else budget))
    chosen.apply(inner)
    return chosen


def runner(sample: Any, region: Callable[[], AbstractContextManager[Any]]) -> Callable[[nn.Module], Any]:
    """Return a function that calls a module with ``sample`` in a region."""
    keywords = dict(sample) if isinstance(sample, Mapping) else {}
    arguments = () if keywords else (tuple(sample) if isinstance(sample, (tuple, list)) else (sample,))

    def run(model: nn.Module) -> Any:
        with region():
            return model(*arguments, **keywords)

    return run


def plan_for(traced: ForwardTrace, wanted: str | int | None) -> CheckpointPlan:
    """Return the plan called ``wanted``, or the best plan within that many bytes.

    Raises:
        UsageError: there is no such plan.
    """
    blocks = blocks_of(traced)
    named = None if isinstance(wanted, int) else named_regions(traced, str(wanted), blocks)
    if named is not None:
        name, regions = str(wanted), named
        guarantee = f"{len(regions)} of {len(blocks)} blocks ({_class_names(traced, blocks)})."
    else:
        budget_bytes = bytes_of_text(wanted if isinstance(wanted, int) else str(wanted))
        name, (regions, guarantee) = f"within {bytes_text(budget_bytes)}", _within(traced, budget_bytes)
    others = {one: costs_of(traced, named_regions(traced, one, blocks) or {}) for one in NAMED if one != name}
    return CheckpointPlan(
        name=name,
        regions=regions,
        costs=costs_of(traced, regions),
        plain_bytes=costs_of(traced, {}).kept_bytes,
        forward_flops=sum(event.flops for event in traced.events if isinstance(event, Computed)),
        guarantee=guarantee,
        others=others,
        refused={c.module: c.refused or c.products_refused for c in traced.calls if c.refused or c.products_refused},
        changed=traced.changed,
    )


def _within(traced: ForwardTrace, budget_bytes: int) -> tuple[dict[str, Keeps], str]:
    optimum = best_plan(traced, budget_bytes)
    if optimum is None:
        least = least_peak(traced)
        raise UsageError(
            f"no plan keeps what waits for the backward pass within {bytes_text(budget_bytes)}; the least is about {bytes_text(least)}",
            hint="raise the budget, pass a smaller micro-batch as the sample, or train with Session(..., micro_batch='auto')",
        )
    claim = f"the least recomputation over {optimum.num_candidates} modules that could be checkpointed"
    return optimum.regions, f"{claim.capitalize()}{', within 1% of a forward pass' if optimum.slack else ''}."


def named_regions(traced: ForwardTrace, name: str, blocks: Sequence[str]) -> dict[str, Keeps] | None:
    """Return the regions of the plan called ``name``; None if there is no such plan."""
    every = EVERY.fullmatch(name)
    if name == "none":
        return {}
    if name == "full":
        return dict.fromkeys(blocks, "inputs")
    if name == "selective":
        whole = {call.module for call in traced.calls if call.products_refused or not call.products}
        return {block: "products" for block in blocks if block not in whole}
    if every is not None:
        return dict.fromkeys(blocks[:: int(every.group(1))], "inputs")
    return None


def _class_names(traced: ForwardTrace, blocks: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(traced.classes[block] for block in blocks)) or "no module saves anything"


def _agreed(traced: ForwardTrace, choose: Callable[[], CheckpointPlan]) -> CheckpointPlan:
    """Return the plan of rank 0: normalisation across processes synchronises in both passes, so all ranks need the same plan."""
    if not (dist.is_available() and dist.is_initialized()):
        return choose()
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            shared = [choose()]
        except UsageError as error:
            shared = [error]
    dist.broadcast_object_list(shared, src=0)
    if isinstance(shared[0], UsageError):
        raise shared[0]
    chosen: CheckpointPlan = shared[0]
    return replace(chosen, costs=costs_of(traced, chosen.regions))


# A model's blocks are its modules of one class that runs several times in a pass: the class whose checkpointing gives the lowest
# peak. So blocks win over a stage of several blocks, which saves too much when it runs again, and over their own parts, which keep
# more inputs. Costs decide, not names.


def blocks_of(trace: ForwardTrace) -> list[str]:
    """Return the names of the blocks, in the order in which they run; the outermost modules if no class runs several times."""
    checkpointable = list(
        dict.fromkeys(c.call.module for c in candidates_of(trace, smallest_share=0.0) if "inputs" in c.regions)
    )
    by_class: dict[str, list[str]] = defaultdict(list)
    for name in checkpointable:
        if name:
            by_class[trace.classes[name]].append(name)
    calls = Counter(call.module for call in trace.calls)
    levels = [level for level in map(outermost, by_class.values()) if sum(calls[name] for name in level) > 1]
    if not levels:
        return outermost([name for name in checkpointable if name]) or checkpointable
    return min(levels, key=lambda level: costs_of(trace, dict.fromkeys(level, "inputs")).peak_bytes)


def outermost(names: list[str]) -> list[str]:
    """Return the names that lie in none of the others."""
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
