"""Add up and reduce a script's gradients, and gather its sharded weights, in the formats that the policy names.

Several processes: ``DistributedDataParallel`` gets a communication hook before its first forward pass, unless the script
registers one of its own; ``fully_shard`` gets a ``MixedPrecisionPolicy``. One process: its gradients are changed after every
backward pass as the reduction over ``world`` processes would change them (``engine.processes.emulated_world``). ``DistributedDataParallel``
does that, too, unless a script calls ``no_sync``: so if a script accumulates, every backward pass reduces what has been added up.
Gathering only rounds each weight, in the same way for any number of processes: ``fully_shard`` in a group of one process does it, for
the modules that the script shards.

Sums of gradients over micro-batches (``gradients=bf16``) are rounded after every backward pass too, in one process.

The loss scale is divided out of gradients before they are reduced (``backward``); in FP16 they are reduced with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mezzo.engine.gradients import gradients_of, round_sums, trained_leaves
from mezzo.engine.processes.distributed import EmulatedWorld
from mezzo.engine.processes.exchange import refuse_sums_of_shards, refuse_world, set_hook
from mezzo.engine.processes.shards import local
from mezzo.errors import PolicyError, ScriptError
from mezzo.formats import FORMATS, Format
from mezzo.launch.patches import Patches
from mezzo.launch.torch.state import TorchRun
from mezzo.policy import Policy
from mezzo.records import Note

Before: TypeAlias = list[tuple[Tensor, Tensor | None, int]]
"""Parameters, each with its gradient before a backward pass and that gradient's version."""

_NO_GROUP = (
    "the script uses neither DistributedDataParallel nor fully_shard in several processes; world=N emulates N processes"
)
_NO_SHARDS = "the script does not use fully_shard, which in a group of one process rounds weights as in a group of many"
_OWN_SUMS = "the script adds up the results of torch.autograd.grad itself"
_EXCHANGED = ("reduce", "gather")


class Communication:
    """The exchange of gradients and weights between a script's processes, real or emulated."""

    def __init__(self, run: TorchRun) -> None:
        self._run = run
        self._policy = run.precision.effective
        self._world: EmulatedWorld | None = None
        self._sums: Format | None = None
        if self._policy is None:
            return
        if self._policy.gradients != "auto" and self._policy.changes_gradients:
            self._sums = FORMATS[self._policy.gradients]
        if self._policy.world > 1:
            self._world = EmulatedWorld(self._policy, self._loss_scale)
            run.notes.add_measurement(self.explanation)

    def install(self, patches: Patches) -> None:
        """Apply the policy to models that the script replicates or shards, until ``patches`` are undone."""
        policy = self._policy
        if policy is None:
            return
        named = [f for f in _EXCHANGED if getattr(policy, f) != "auto"]
        if not (named or self._sums):
            return
        for field in named:
            if field == "gather" or self._world is None:
                why = _NO_GROUP if field == "reduce" else _NO_SHARDS
                self._run.notes.note_left_alone(field, getattr(policy, field), why)
        if dist.is_available():
            patches.around(DistributedDataParallel, "__init__", functools.partial(self._replicate, policy))
            import torch.distributed.fsdp as fsdp

            patches.around(fsdp, "fully_shard", functools.partial(self._shard, policy))
            patches.around(fsdp.FullyShardedDataParallel, "__init__", functools.partial(_refuse, policy))

    # --- several processes -----------------------------------------------------------------------------------------------------

    def _replicate(
        self, policy: Policy, original: Callable[..., Any], model: DistributedDataParallel, *args: Any, **kwargs: Any
    ) -> None:
        original(model, *args, **kwargs)
        if dist.get_world_size(model.process_group) > 1:
            refuse_world(policy)

            def before_forward(*_: Any) -> None:
                handle.remove()
                self._set_hook(model, policy)

            handle = model.register_forward_pre_hook(torch.compiler.disable(before_forward))

    def _set_hook(self, model: DistributedDataParallel, policy: Policy) -> None:
        if policy.reduce == "auto":
            return
        self._run.notes.forget(f"reduce {policy.reduce}")  # noted before the script replicated a model
        if model._comm_hooks:
            self._run.notes.note_left_alone(
                "reduce", policy.reduce, "the script's own communication hook decides the format"
            )
            return
        set_hook(model, policy, self._loss_scale)

    def _shard(self, policy: Policy, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        refuse_sums_of_shards(policy)
        alone = dist.get_world_size() == 1  # then nothing is reduced, or an emulated world reduces
        if not alone:
            refuse_world(policy)
        if not alone and policy.reduce == "fp16" and policy.loss_scale != "none":
            raise PolicyError(
                f"policy {policy!s} reduces in fp16, and fully_shard reduces gradients whose loss scale was taken out: small ones "
                "would be lost; allowed with fully_shard: fp32, bf16",
                hint="use reduce=bf16, or a mezzo.Session in the script, which reduces scaled gradients",
            )
        fields = ("gather",) if alone else _EXCHANGED
        dtypes = {f: FORMATS[v].dtype for f in fields if (v := getattr(policy, f)) != "auto"}
        if not dtypes:
            return original(module, *args, **kwargs)
        of_script = kwargs.pop("mp_policy", MixedPrecisionPolicy())
        changed = {"param_dtype": dtypes.get("gather", of_script.param_dtype)}
        changed["reduce_dtype"] = dtypes.get("reduce", of_script.reduce_dtype)
        for field in dtypes:
            self._run.notes.forget(f"{field} {getattr(policy, field)}")
        return original(module, *args, mp_policy=dataclasses.replace(of_script, **changed), **kwargs)

    # --- one process -----------------------------------------------------------------------------------------------------------

    def before_backward(self, parameters: Callable[[], Iterable[Tensor]]) -> Before | None:
        """Return the gradients before a backward pass; None if nothing is emulated.

        Args:
            parameters: returns the parameters that the backward pass reaches, for a script without optimizers.
        """
        if self._world is None and self._sums is None:
            return None
        trained = [p for o in self._run.objects.optimizers for p in trained_leaves(o)]
        return [(p, p.grad, _version(p.grad)) for p in dict.fromkeys(trained or parameters())]

    def after_backward(self, before: Before | None) -> None:
        """Round and reduce the gradients that a backward pass has changed since ``before``."""
        if before is not None:
            changed = [p for p, grad, version in before if p.grad is not grad or _version(p.grad) != version]
            gradients = gradients_of(changed)
            if self._sums is not None:
                round_sums(map(local, gradients), self._sums)
            if self._world is not None:
                self._world.reduce(gradients)

    def returned(self, gradients: Sequence[Tensor]) -> None:
        """Change the results of ``torch.autograd.grad`` in place as the reduction over an emulated world would."""
        if self._sums is not None:
            self._run.notes.note_left_alone("gradients", self._sums.name, _OWN_SUMS)
        if self._world is not None:
            self._world.reduce(gradients)

    def explanation(self) -> list[Note]:
        """Return what an emulated reduction did to the gradients, as measured."""
        error = None if self._world is None else self._world.error()
        if error is None:
            return []
        reason = (
            "of the gradients' norm, the median over all backward passes; the processes' shares are drawn at random"
        )
        return [Note(what="rounding of the reduction", value=f"{error:.2g}", reason=reason)]

    def _loss_scale(self) -> Tensor | None:
        """Return the loss scale that was divided out of the gradients."""
        scale = self._run.precision.scale.on_device() if self._run.precision.scale.skips_overflows else None
        return scale if isinstance(scale, Tensor) else None


def _refuse(policy: Policy, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    raise PolicyError(
        f"policy {policy!s} sets formats of gradients or weights, and the script uses FullyShardedDataParallel; "
        "allowed: DistributedDataParallel and fully_shard",
        hint="use fully_shard, or leave reduce, gather and gradients out and pass mixed_precision=MixedPrecision(...) in the script",
    )


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


# Inside ``join()`` a process that has run out of batches takes part only in the model's reductions, and makes no updates. It would take no
# part in the exchanges of ``--snapshot`` and ``--guard``, and all others would wait for it until the group's time-out.


def refuse_join(option: str, patches: Patches) -> None:
    """Raise where the script enters ``join()`` in several processes, until ``patches`` are undone.

    ``option`` is the command-line option that cannot be used with it.
    """
    if not dist.is_available():
        return
    from torch.distributed.algorithms.join import Join

    patches.around(Join, "__enter__", functools.partial(_enter, option))


def _enter(option: str, original: Callable[..., Any], self: Any) -> Any:
    if self._enable and dist.get_world_size(self._process_group) > 1:
        raise ScriptError(
            f"{option} in several processes, and the script trains under join(), where they make different numbers of updates; "
            "allowed: the same number in each",
            hint=f"leave {option} out, or give each process as many batches (DistributedSampler, drop_last=True) and leave join() out",
        )
    return original(self)
