"""Let the CPU stand in for CUDA on a machine without it: a script that says ``.cuda()``, ``device="cuda"`` or ``.to(0)`` runs.

This is set up only for scripts whose own files name CUDA, so that other scripts meet torch's own functions.

torch's C++ code reaches a device in two ways. A factory function (``torch.zeros``) dispatches to the device's key: kernels of ours at
the CUDA key create the tensor on the CPU. A move (``Tensor.to``) first asks the device's guard, which a CPU build does not have: the
methods that move tensors are replaced, at about 0.2 us for each call.

On a GPU a move makes a copy, so here it does, too, also back to the CPU: ``best = weights.cpu()`` must not follow the training. A
tensor that was already moved, and a leaf that is trained, stay what they are.

``torch.cuda.is_available()`` stays false and ``tensor.device`` is the CPU, so a script that asks goes its own way. A script that only
counts devices, to start a process for each, is told one. Events measure the host's clock, and memory queries answer for the machine's
own memory, or 0.

Refused: the script's own CUDA graphs, which a CPU cannot replay. Not covered: kernels compiled for CUDA (Triton, extensions),
``torch.device(0)``, and moves inside TorchScript.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.jit import _builtins as torchscript
from torch.utils import _device as device_contexts
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.devices import cpu_name
from mezzo.errors import ScriptError
from mezzo.launch.patches import Patches
from mezzo.measure.cuda_answers import ANSWERS, CUDA_TYPES, Idle, always, answers_everywhere, each, first, generators
from mezzo.records import Note

_CPU = torch.device("cpu")
_CUDA = "cuda"
_TO = ("device", "dtype", "non_blocking", "copy")
"""The positional arguments of ``Tensor.to`` if the first is a device."""
_ALIASING = (torch.as_tensor, torch.asarray)
"""Factory functions that share the memory of what they are given, unless it is on another device."""
_KEYS = ("CUDA", "SparseCUDA", "SparseCsrCUDA", "QuantizedCUDA")
_BEFORE_CUDA = 15
"""Priority of a storage location's handler in ``torch.load``: the CPU's is 10, CUDA's 20."""
_CAPABILITY = (8, 0)
"""Compute capability that a script is told: it then chooses as on a GPU with all formats but FP8."""


def names_cuda(device: object) -> bool:
    """Return whether a device, given as an object, a name or a number, is a CUDA device."""
    if isinstance(device, str):
        return device.partition(":")[0] == _CUDA
    if isinstance(device, torch.device):
        return device.type == _CUDA
    return type(device) is int


def _beside_cuda(device: Any) -> Any:
    """Return the CPU for a CUDA device, and any other device as it is."""
    return _CPU if names_cuda(device) else device


def replace_builtin(patches: Patches, name: str, new: Callable[..., Any]) -> None:
    """Set ``torch.<name>`` to ``new`` until ``patches`` are undone; TorchScript keeps compiling it as torch's own function."""
    builtin = torchscript._find_builtin(getattr(torch, name))
    if builtin is not None:
        torchscript._register_builtin(new, builtin)
    patches.replace(torch, name, new)


class CudaStandIn:
    """The CPU in place of CUDA devices, for one run of a script."""

    def __init__(self) -> None:
        self.used = False
        """Whether the script has used a CUDA device."""
        self._factories: list[Callable[..., Any]] = []
        self._moved = WeakTensorKeyDictionary()
        """Tensors that were created on CUDA or moved there."""

    def explanation(self) -> list[Note]:
        """Return the choice of the device, if the script has named CUDA."""
        why = "the script names CUDA, which this machine does not have; times and memory are the CPU's"
        return [Note(what="device", value="the CPU stands in for CUDA", reason=why)] if self.used else []

    def use(self) -> None:
        """Note that the script uses a CUDA device, and say so the first time."""
        if not self.used:
            self.used = True
            print(
                "mezzo: there is no CUDA device: the CPU stands in for it; times and memory are the CPU's",
                file=sys.stderr,
            )

    def install(self, patches: Patches, before_compiling: list[Callable[[], Any]]) -> None:
        """Replace what reaches a CUDA device until ``patches`` are undone."""
        before_compiling.append(self.keep_in_graphs)
        self._install_kernels(patches)
        patches.around(torch.cuda, "_lazy_init", _initialized)
        self._install_moves(patches)
        self._install_answers(patches)
        if dist.is_available():
            patches.around(dist, "init_process_group", _over_gloo)
            patches.around(dist.distributed_c10d, "init_process_group", _over_gloo)
            patches.around(dist, "new_group", _over_gloo)
            patches.around(dist, "barrier", _without_device_ids)
            patches.around(nn.parallel.DistributedDataParallel, "__init__", _without_device_ids)
            patches.replace(nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle", always(None))
            patches.around(nn.SyncBatchNorm, "forward", normalize_over_processes)

    def keep_in_graphs(self) -> None:
        """Let torch.compile call our factory functions as it calls torch's, instead of tracing them."""
        from torch._dynamo import allow_in_graph

        for make in self._factories:
            allow_in_graph(make)

    # --- tensors ---------------------------------------------------------------------------------------------------------------

    def _install_kernels(self, patches: Patches) -> None:
        """Register kernels that create tensors of CUDA devices on the CPU."""
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel")
            for op in _factories():
                kernel = self._creating(op)
                for key in _KEYS:
                    library.impl(op, kernel, key)
        patches.on_undo(library._destroy)

    def _creating(self, op: Any) -> Callable[..., Tensor]:
        def create(*args: Any, **kwargs: Any) -> Tensor:
            self.use()
            kwargs.update(device=_CPU)
            kwargs.pop("pin_memory", None)
            made: Tensor = op(*args, **kwargs)
            self._moved[made] = None
            return made

        return create

    def _install_moves(self, patches: Patches) -> None:
        patches.wrap(Tensor, "to", self._to)
        patches.around(Tensor, "cuda", self._cuda)
        patches.wrap(Tensor, "cpu", self._cpu)
        patches.around(Tensor, "pin_memory", lambda _, tensor, *args, **named: tensor.clone())
        patches.around(Tensor, "type", self._type)
        patches.around(torch._C._nn, "_parse_to", self._parse_to)
        patches.around(torch, "set_default_tensor_type", lambda call, kind: call(_cpu_type(kind)))
        patches.replace(torch, "Generator", generators(torch.Generator, _beside_cuda))
        patches.replace(Tensor, "record_stream", always(None))
        for name in [name for name in vars(torch.cuda) if name.endswith("Tensor") and hasattr(torch, name)]:
            patches.replace(torch.cuda, name, getattr(torch, name))
        factories: set[Callable[..., Any]] = device_contexts._device_constructors()
        for function in factories:
            if vars(torch).get(function.__name__) is function:
                self._wrap_factory(function, patches)
        torch.serialization.register_package(_BEFORE_CUDA, always(None), self._loaded)
        registry = torch.serialization._package_registry
        patches.on_undo(lambda: registry.remove(next(row for row in registry if row[0] == _BEFORE_CUDA)))

    def _to(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            target = args[0] if args else kwargs.get("device")
            if target is None or type(target) is torch.dtype or isinstance(target, Tensor):
                return original(tensor, *args, **kwargs)
            on_cuda = names_cuda(target)
            if not on_cuda and not (self.used and torch.device(target).type == "cpu"):
                return original(tensor, *args, **kwargs)
            named = {**dict(zip(_TO, args, strict=False)), **kwargs}
            # Under a function mode torch calls this wrapper again: a device would be taken for the script's.
            named["device"] = None if tensor.device.type == "cpu" else _CPU
            if not on_cuda:
                return original(tensor, **{**named, "copy": True})
            self.use()
            stays = tensor in self._moved or (tensor.is_leaf and tensor.requires_grad)
            moved = original(tensor, **(named if stays else {**named, "copy": True}))
            self._moved[moved] = None
            return moved

        return to

    def _cuda(
        self, original: object, tensor: Tensor, device: Any = None, non_blocking: bool = False, **named: Any
    ) -> Tensor:
        return tensor.to(_CUDA if device is None else device, non_blocking=non_blocking, **named)

    def _cpu(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            here = original(tensor, *args, **kwargs)
            return here.clone() if self.used and here is tensor else here

        return cpu

    def _type(self, original: Callable[..., Any], tensor: Tensor, *kind: Any, **named: Any) -> Any:
        return original(tensor, *map(_cpu_type, kind), **{name: _cpu_type(value) for name, value in named.items()})

    def _parse_to(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Read the arguments of ``Module.to``: a number is a CUDA device, which moves the module's tensors one by one."""
        if args and type(args[0]) is int:
            args = (f"{_CUDA}:{args[0]}", *args[1:])
        return original(*args, **kwargs)

    def _wrap_factory(self, function: Callable[..., Any], patches: Patches) -> None:
        """Replace a factory function: torch's parser of arguments refuses pinned memory, numbers of devices, and moves."""

        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs and names_cuda(kwargs["device"]):
                self.use()
                made = function(*args, **{**kwargs, "device": _CPU})
                made = made.clone() if function in _ALIASING else made
                self._moved[made] = None
                return made
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return function(*args, **kwargs)

        self._factories.append(make)
        replace_builtin(patches, function.__name__, make)

    def _loaded(self, storage: Any, location: str) -> Any:
        """Return the storage of a CUDA tensor in a file that ``torch.load`` reads; None for other locations."""
        if not location.startswith(_CUDA):
            return None
        self.use()
        return storage

    # --- functions of torch.cuda -----------------------------------------------------------------------------------------------

    def _install_answers(self, patches: Patches) -> None:
        made: dict[str, Any] = {}
        for module, name, answer in answers_everywhere({**ANSWERS, **_OF_THE_MACHINE}):
            if name not in made:  # one object for each name: torch.compile keeps tables by object
                original = getattr(module, name)
                made[name] = type(name, (answer,), {}) if isinstance(answer, type) else self._noted(original, answer)
            patches.replace(module, name, made[name])

    def _noted(self, original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that answers the script; torch itself, its compiler for example, gets the true answer."""

        @functools.wraps(original)
        def answered(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith(("torch.", "mezzo.")) and not caller.startswith("torch.cuda"):
                return original(*args, **kwargs)
            self.use()
            return answer(*args, **kwargs)

        return answered


def _initialized(original: Callable[[], None]) -> None:
    """Let torch's C++ code start CUDA, which it does before it creates a tensor there; functions of ``torch.cuda`` fail as without CUDA."""
    if sys._getframe(2).f_globals.get("__name__", "").startswith("torch.cuda"):
        original()


def _factories() -> list[Any]:
    """Return torch's operations that create a tensor on a device from no other tensor, and have a kernel of their own on a CPU."""
    found = []
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        base, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        arguments = [] if op is None else op._schema.arguments
        if any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments):
            found.append(op)
    return found


def _cpu_type(kind: Any) -> Any:
    """Return the name of a tensor type on the CPU for one on CUDA; anything else as it is."""
    is_cuda = isinstance(kind, str) and kind.startswith(CUDA_TYPES)
    return "torch." + kind.removeprefix(CUDA_TYPES) if is_cuda else kind


def _over_gloo(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Form a process group over gloo where the script names NCCL, which needs GPUs."""
    named = {name: "gloo" if name == "backend" and "nccl" in str(value) else value for name, value in kwargs.items()}
    named.pop("device_id", None)
    return original(*("gloo" if isinstance(a, str) and "nccl" in a and "://" not in a else a for a in args), **named)


def _without_device_ids(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Drop numbers of GPUs, which torch accepts only with models and groups on GPUs."""
    return original(*args[:2], **{**kwargs, **dict.fromkeys(kwargs.keys() & {"device_ids", "output_device"})})


class _Event(Idle):
    """An event of the host: what was issued before it has ended."""

    _at_s = 0.0

    def record(self, *args: object) -> None:
        """Read the clock."""
        self._at_s = time.perf_counter()

    def elapsed_time(self, other: Any) -> float:
        """Return the milliseconds between two events."""
        return float(other._at_s - self._at_s) * 1e3


class _Graph(Idle):
    """A CUDA graph, which is refused."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ScriptError(
            "the script captures a CUDA graph, and this machine has no CUDA device: the CPU that stands in cannot replay one",
            hint="run the script without its graph, which computes the same; torch.cuda.make_graphed_callables is accepted",
        )


def _memory(*args: object) -> tuple[int, int]:
    """Return the free and the total bytes of this machine's memory."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes


def _properties(*args: object) -> SimpleNamespace:
    major, minor = _CAPABILITY
    processors = os.cpu_count() or 1
    return SimpleNamespace(
        name=cpu_name(),
        total_memory=_memory()[1],
        major=major,
        minor=minor,
        multi_processor_count=processors,
        warp_size=1,
    )


_OF_THE_MACHINE: dict[str, Any] = {
    **each("is_bf16_supported is_tf32_supported", always(True)),
    "device_count": always(1),
    "Event": _Event,
    **each("CUDAGraph graph", _Graph),
    "make_graphed_callables": first,
    "get_device_name": lambda *args: cpu_name(),
    "get_device_capability": always(_CAPABILITY),
    "get_device_properties": _properties,
    "mem_get_info": _memory,
}
"""Answers about the device that stands in."""


# The statistics cover the batches of all processes, summed over gloo; the backward pass sums their gradients in the same way.


def normalize_over_processes(original: Callable[..., Tensor], layer: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    """Return what ``SyncBatchNorm.forward`` returns on GPUs; with one process, that is a batch norm."""
    if not (layer.training and dist.is_initialized()):
        return original(layer, input)
    group = layer.process_group or dist.group.WORLD
    if dist.get_world_size(group) == 1:
        return nn.modules.batchnorm._BatchNorm.forward(layer, input)
    layer._check_input_dim(input)
    layer._check_non_zero_input_channels(input)
    values = input.float()
    shape = [1, -1, *[1] * (input.dim() - 2)]
    dims = [dim for dim in range(input.dim()) if dim != 1]
    count = torch.tensor([input.numel() / input.size(1)])
    dist.all_reduce(count, group=group)
    mean = _summed(values.sum(dims), group) / count
    centred = values - mean.view(shape)
    variance = _summed(centred.square().sum(dims), group) / count
    _track(layer, mean.detach(), variance.detach(), float(count))
    normal = centred * (variance + layer.eps).rsqrt().view(shape)
    if layer.weight is not None:
        normal = normal * layer.weight.view(shape)
    if layer.bias is not None:
        normal = normal + layer.bias.view(shape)
    return normal.to(input.dtype)


class _Sum(torch.autograd.Function):
    """The sum of a tensor over processes, and of its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _summed(value: Tensor, group: Any) -> Tensor:
    total: Tensor = _Sum.apply(value, group)
    return total


def _track(layer: nn.SyncBatchNorm, mean: Tensor, variance: Tensor, count: float) -> None:
    """Move the running statistics towards a batch's, whose variance is made unbiased."""
    if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
        return
    layer.num_batches_tracked.add_(1)
    share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
    layer.running_var.lerp_((variance * (count / max(count - 1, 1))).to(layer.running_var.dtype), share)
