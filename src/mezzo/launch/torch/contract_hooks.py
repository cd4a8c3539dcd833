"""Tell the watch of a contract what a script does: which weights it makes and casts, what it loads, saves and exchanges.

These hooks change nothing: every call proceeds as the script made it. Exchanges are seen of ``DistributedDataParallel``, its communication
hooks, ``fully_shard``, and ``all_reduce`` of a gradient by the script itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mezzo.engine.gradients import trained_leaves
from mezzo.errors import ScriptError
from mezzo.launch.patches import Patches, after_import
from mezzo.launch.torch.state import TorchRun
from mezzo.observe.contracts.collected import stored_format
from mezzo.observe.contracts.contract import Contract
from mezzo.observe.contracts.watch import ContractWatch
from mezzo.observe.tensors import format_name

_SHARDING = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_SAVES = {"safetensors.torch": ("save_file", "save_model"), "torch.distributed.checkpoint": ("save", "async_save")}
_SAVED = ("obj", "tensors", "model", "state_dict")
"""What these functions, and ``torch.save``, call their first argument."""
_EXCHANGED = ("reduction", "gather")


def watch_contract(contract: Contract, run: TorchRun, patches: Patches) -> None:
    """Watch the formats of a run until ``patches`` are undone.

    Raises:
        ScriptError: the policy emulates several processes, whose exchanges the contract has lines for.
    """
    exchanged = [role for role in _EXCHANGED if role in contract.roles()]
    policy = run.precision.effective
    if policy is not None and policy.world > 1 and exchanged:
        raise ScriptError(
            f"the contract has lines for [{exchanged[0]}], and policy {policy!s} emulates {policy.world} processes; "
            "allowed: lines for exchanges between real processes",
            hint="start real processes with torchrun, or leave world out of the policy",
        )

    def notify(on: bool) -> None:
        if on:
            run.steady_state.end()
            run.objects.notify_of_calls(watch.called)
        else:
            run.objects.end_notices()

    watch = ContractWatch(run, contract, notify=notify, num_updates=lambda: run.update.num_updates)
    run.listeners.check(watch)
    run.lint.notify_of_averages(watch.averaged)
    _tell_of_tensors(watch, patches)
    _tell_of_files(watch, patches)
    if dist.is_available():
        _Exchanges(run, watch, exchanged).install(patches)
    patches.on_undo(watch.close)
    watch.wake()


def _tell_of_tensors(watch: ContractWatch, patches: Patches) -> None:
    """Tell which line makes, casts or loads a model's tensors, and an optimizer's state."""

    def register(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        if not torch.compiler.is_compiling():
            for tensor in (*args, *kwargs.values()):
                watch.origins.made(tensor)

    def create(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        watch.optimizer_created()
        original(optimizer, *args, **kwargs)

    def load(original: Callable[..., Any], target: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(target, *args, **kwargs)
        watch.loaded(target, args[0] if args else kwargs.get("state_dict"))
        return result

    patches.around(nn.Module, "register_parameter", register)
    patches.around(nn.Module, "register_buffer", register)
    patches.around(nn.Module, "_apply", watch.origins.cast)
    patches.around(Optimizer, "__init__", create)
    for owner in (nn.Module, Optimizer):
        patches.around(owner, "load_state_dict", load)


def _tell_of_files(watch: ContractWatch, patches: Patches) -> None:
    def save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        watch.saved(args[0] if args else next((kwargs[name] for name in _SAVED if name in kwargs), None))
        return original(*args, **kwargs)

    def patch(package: str) -> None:
        for name in _SAVES[package]:
            patches.around(sys.modules[package], name, save)

    patches.around(torch, "save", save)
    for package in _SAVES:
        after_import(package, functools.partial(patch, package), patches)


class _Exchanges:
    """What processes send each other of gradients and weights."""

    def __init__(self, run: TorchRun, watch: ContractWatch, expected: Sequence[str]) -> None:
        self._run, self._watch, self._expected = run, watch, expected
        self._sent: list[str] | None = None
        """The formats that a communication hook reduces in, while it runs."""

    def install(self, patches: Patches) -> None:
        """Tell of exchanges until ``patches`` are undone."""
        patches.around(DistributedDataParallel, "register_comm_hook", self._register)
        patches.around(dist, "all_reduce", self._reduce)
        after_import(_SHARDING, functools.partial(self._follow_shards, patches), patches)
        if self._expected:
            import torch.distributed.fsdp as fsdp

            patches.around(fsdp.FullyShardedDataParallel, "__init__", self._refuse)

    def _register(self, original: Callable[..., Any], model: Any, state: Any, hook: Callable[..., Any]) -> Any:
        @functools.wraps(hook)
        def told(state: Any, bucket: Any) -> Any:
            if not self._watch.listens:
                return hook(state, bucket)
            before, self._sent = self._sent, []
            try:
                future = hook(state, bucket)
                formats = self._sent or [stored_format(bucket.buffer())]
            finally:
                self._sent = before
            for name in dict.fromkeys(formats):
                weights = bucket.parameters()
                self._watch.exchanged("reduction", weights, [name] * len(weights))
            return future

        return original(model, state, told)

    def _reduce(self, original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self._sent is not None:
            self._sent.append(stored_format(tensor))
        elif self._watch.listens and isinstance(tensor, Tensor) and tensor.dim():
            weights = (p for optimizer in self._run.objects.optimizers for p in trained_leaves(optimizer))
            owner = next((p for p in weights if p.grad is tensor), None)
            if owner is not None:
                self._watch.exchanged("reduction", [owner], [stored_format(tensor)])
        return original(tensor, *args, **kwargs)

    def _follow_shards(self, patches: Patches) -> None:
        groups = sys.modules[_SHARDING]
        patches.around(groups, "foreach_all_gather", self._gather)
        patches.around(groups, "foreach_reduce", self._reduce_shards)

    def _gather(self, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(parameters, *args, **kwargs)
        if result is not None and self._watch.listens:
            for parameter, dtypes in zip(parameters, result.param_all_gather_input_dtypes, strict=False):
                for dtype in dict.fromkeys(dtypes):
                    self._watch.exchanged("gather", [parameter.sharded_param], [format_name(dtype)])
        return result

    def _reduce_shards(
        self, original: Callable[..., Any], parameters: Any, gradients: Any, *args: Any, **kwargs: Any
    ) -> Any:
        dtype = kwargs.get("reduce_dtype", args[4] if len(args) > 4 else None)
        formats = [format_name(dtype or gradient.dtype) for gradient in gradients]
        self._watch.exchanged("reduction", [parameter.sharded_param for parameter in parameters], formats)
        return original(parameters, gradients, *args, **kwargs)

    def _refuse(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        raise ScriptError(
            f"the contract has lines for [{self._expected[0]}], and the script uses FullyShardedDataParallel, whose exchanges are "
            "of flat parameters without names; allowed: DistributedDataParallel and fully_shard",
            hint="use fully_shard, or leave these lines out of the contract",
        )
