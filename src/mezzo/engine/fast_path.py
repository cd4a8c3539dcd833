"""Switches that make a step faster without changing what it learns, each with a figure to support it.

The benefit of a switch depends on the device: ``channels_last`` speeds up FP16 convolutions on a GPU and slows down
FP32 ones on a CPU. So every switch is decided for a model, a policy and a device, and the decision is a ``Choice``
whose reason quotes a figure and its source. Figures called published come from others and were not measured by this
project; only the time of your own step counts.

Limits: alignment considers linear layers, convolutions, attention's projections and vocabularies, not recurrent
layers; sizes that come from the data (sequence length, batch) are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from mezzo.devices import Device, this_device
from mezzo.engine.arguments import device_of
from mezzo.engine.matrix_units.native_units import set_fp32_products
from mezzo.explain import Choice
from mezzo.formats import TF32
from mezzo.policy import Policy

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PLANAR = (nn.Conv2d, nn.ConvTranspose2d)
_CONVOLUTIONAL_SHARE = 0.25
"""Least share of two-dimensional convolutions among the layers of a convolutional model; a vision transformer has only one."""
_ROW_BYTES, _TILE_BYTES = 16, 128
"""Bytes that matrix units load at once, and the cache line to which a vocabulary is padded: padding its rows is cheap."""
_SMALL_SHARE = 0.01
"""Share of the multiplied weights below which padding a layer is not worth a changed checkpoint."""


@dataclass(frozen=True)
class _Switch:
    choice: Choice
    apply: Callable[[], object] | None = None
    """Applies the choice; None if there is nothing to do."""


@dataclass(frozen=True)
class _Case:
    """The facts behind the decisions."""

    model: nn.Module
    policy: Policy
    device: Device
    native: bool
    """Whether the device's own units multiply the policy's 16-bit or 8-bit format."""
    fixed_shapes: bool
    compile: bool


def fast_path(
    model: nn.Module,
    *,
    policy: Policy | str = "fp16",
    device: Device | str | None = None,
    fixed_shapes: bool = True,
    compile: bool = False,
    apply: bool = False,
) -> list[Choice]:
    """Return which switches pay off for ``model`` under a policy on a device, each with a figure; ``apply`` applies them.

    Call it before ``Session``: the session's optimizers and compiled code then start from the right memory format.
    With ``apply`` the model is changed in place; torch's own switches are set for the whole process.

    Args:
        model: a module; the choices alone need only one on the meta device.
        policy: a ``Policy``, a policy text, or the path of a policy file, as for ``Session``.
        device: the device to train on: torch's device type, or a ``Device``, which need not be in this machine.
            The model's own device if left out.
        fixed_shapes: whether every step has inputs of the same shapes.
        compile: compile the model with torch.compile, in place.
        apply: apply the choices.

    Raises:
        PolicyError: the policy cannot be read.
        UnsupportedFormatError: the device can neither compute in the format nor emulate it.
        SessionError: the model has no parameters.
    """
    parsed = Policy.of(policy)
    kind = device_of(list(model.parameters())).type
    where = device if isinstance(device, Device) else this_device(device or ("cpu" if kind == "meta" else kind))
    native = parsed.lowers and parsed.arithmetic_on(where)[0] == "native"
    case = _Case(model, parsed, where, native, fixed_shapes, compile)
    switches = [decide(case) for decide in (_channels_last, _cudnn_benchmark, _tf32, _compile, _cast_cache)]
    for switch in switches:
        if apply and switch.apply is not None:
            switch.apply()
    return [*(switch.choice for switch in switches), *_slow_kernels(case), *_alignment(case)]


def _switch(what: str, value: str, reason: str, apply: Callable[[], object] | None = None) -> _Switch:
    return _Switch(Choice(what=what, value=value, reason=reason), apply)


def _channels_last(case: _Case) -> _Switch:
    def off(reason: str) -> _Switch:
        return _switch("channels_last", "off", reason)

    planar = sum(isinstance(m, _PLANAR) for m in case.model.modules())
    layers = sum(1 for m in case.model.modules() if isinstance(m, (nn.Linear, *_CONVOLUTIONS)) or _is_conv1d(m))
    if planar == 0 or planar < _CONVOLUTIONAL_SHARE * layers:
        return off(f"{planar} of {layers} layers are two-dimensional convolutions: the rest has no use for it")
    if any(p.dim() == 5 for p in case.model.parameters()):
        return off("the model has weights of 5 dimensions, which torch.channels_last does not support")
    if case.device.kind == "cpu":
        return off("FP32 3x3 convolutions of 64 channels took 98 ms in it and 64 ms without, measured on an AVX2 CPU")
    if case.device.kind != "cuda":
        return off(f"no figure is known for {case.device.kind}")
    if not case.native:
        return off("the published gains are for 16-bit convolutions, and this policy has none here")
    reason = (
        "matrix units read channels next to each other; published: training under AMP on an RTX 3090 is 1.47 times as "
        "fast with ResNet-50, 1.26 with MobileNetV3-L (timm's benchmark tables). Give it channels_last images too"
    )
    return _switch("channels_last", "on", reason, lambda: case.model.to(memory_format=torch.channels_last))  # type: ignore[call-overload]


def _cudnn_benchmark(case: _Case) -> _Switch:
    def off(reason: str) -> _Switch:
        return _switch("cudnn benchmark", "off", reason)

    if not any(isinstance(m, _CONVOLUTIONS) for m in case.model.modules()):
        return off("the model has no convolutions")
    if case.device.kind != "cuda":
        return off(f"cuDNN is NVIDIA's, and the device is {case.device.kind}")
    if not case.fixed_shapes:
        return off("every new input shape would be tried out again, which costs several steps")
    if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
        return off("deterministic algorithms are required, and trying them out may choose others")
    reason = (
        "tries cuDNN's algorithms once for each shape and keeps the fastest; published: an epoch of speech training "
        "takes 12 minutes instead of 17 on a V100 (SpeechBrain, pull request 294)"
    )

    def turn_on() -> None:
        torch.backends.cudnn.benchmark = True

    return _switch("cudnn benchmark", "on", reason, turn_on)


def _tf32(case: _Case) -> _Switch:
    what, policy = "tf32 for the fp32 rest", case.policy

    def off(reason: str) -> _Switch:
        return _switch(what, "off", reason)

    support = case.device.support(TF32)
    if support.level != "native":
        return off(support.reason)
    if policy.compute == "tf32":
        return _switch(what, "on", "the policy is TF32: the session turns it on")
    if not policy.lowers:
        return off("the policy asks for FP32: the session turns TF32 off; policy tf32 would turn it on")
    kept = [*policy.fp32_modules, *policy.fp32]
    if kept:
        return off(f"the policy keeps {', '.join(kept)} in FP32, and TF32 would round their operands to 10 bits")
    reason = (
        "what the op lists leave in FP32. Published: on an A100 a 10240 x 10240 product takes 0.016 s instead of 0.11 s, "
        "with errors of 0.2% of the mean result (torch's notes on CUDA)"
    )
    return _switch(what, "on", reason, lambda: set_fp32_products("tf32"))


def _slow_kernels(case: _Case) -> list[Choice]:
    if (
        case.device.kind != "cpu"
        or not case.policy.lowers
        or case.device.support(case.policy.storage).level == "native"
    ):
        return []
    value = "native, as requested" if case.native else "emulated"
    reason = (
        "this CPU's own 16-bit kernels ran at 0.04 to 0.10 of FP32's speed, emulated ones at 0.57 to 1.08, measured on "
        "an AVX2 CPU"
    )
    return [Choice(what="16-bit kernels", value=value, reason=reason)]


def _compile(case: _Case) -> _Switch:
    what = "torch.compile"
    if case.device.kind == "cpu":
        figure = "a small convolutional net ran at 0.96 of its speed after 83 s of compiling, measured on an AVX2 CPU"
    elif case.device.kind == "cuda":
        figure = (
            "published: a nanoGPT step on A100s takes 135 ms instead of 250 (its README); the first step takes minutes"
        )
    else:
        figure = f"no figure is known for {case.device.kind}"
    if getattr(case.model, "_compiled_call_impl", None) is not None or hasattr(case.model, "_orig_mod"):
        return _switch(what, "on", f"the model is compiled already; {figure}")
    if case.compile:
        return _switch(what, "on", f"requested; {figure}", case.model.compile)
    if case.device.kind != "cuda":
        return _switch(what, "off", figure)
    if not case.fixed_shapes:
        return _switch(what, "off", "new input shapes compile again; with fixed shapes it is worth a try")
    return _switch(what, "suggested", f"{figure}. Turn it on with compile=True")


def _cast_cache(case: _Case) -> _Switch:
    what, shared = "cast cache", _shared_weights(case.model)
    if case.policy.casting != "ops":
        kept = "kept in 16 bits" if case.policy.casting == "model" else "not cast"
        return _switch(what, "not used", f"weights are {kept}")
    reason = (
        f"a weight is cast once per forward pass; casting it again for a further use would cost 6 bytes of traffic per element; {shared} "
        "weights have several users. In a captured step too: its region opens inside the graph, so no replay reads a cast from outside"
    )
    return _switch(what, "on", reason)


def _shared_weights(model: nn.Module) -> int:
    owners: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[parameter] = owners.get(parameter, 0) + 1
    return sum(count > 1 for count in owners.values())


class _Side(NamedTuple):
    """One dimension of a multiplied weight, and how many weights one more of it would add."""

    layer: str
    dimension: Literal["inputs", "outputs", "vocabulary"]
    size: int
    weights_each: int


def _alignment(case: _Case) -> list[Choice]:
    """Return the sizes that matrix units read badly, the largest first."""
    formats = case.policy.required_formats
    if case.device.kind != "cuda" or not (case.policy.lowers or case.policy.compute == "tf32"):
        return []
    if any(case.device.support(fmt).level != "native" for fmt in formats):
        return []
    row, tile = _ROW_BYTES // formats[0].bytes, _TILE_BYTES // formats[0].bytes
    sides = list(_sides(case.model))
    total = sum(s.size * s.weights_each for s in sides if s.dimension != "inputs")
    uneven: dict[tuple[str, int], list[_Side]] = {}
    for side in sides:
        if side.size % row:
            uneven.setdefault((side.dimension, side.size), []).append(side)
    large = {key: group for key, group in uneven.items() if _weights(group) >= _SMALL_SHARE * total}
    choices = [_padding_choice(group, row, tile, case) for group in sorted(large.values(), key=_weights, reverse=True)]
    small = [side for key, group in uneven.items() if key not in large for side in group]
    if small:
        count = len({side.layer for side in small})
        share = f"each size has under {_SMALL_SHARE:.0%} of the multiplied weights"
        choices.append(
            _alignment_choice(f"{count} small layer{'s' * (count != 1)} left", f"{share}: padding would gain little")
        )
    return choices or [
        _alignment_choice("nothing to pad", f"every size is a multiple of {row} for {case.policy.compute}")
    ]


def _padding_choice(group: list[_Side], row: int, tile: int, case: _Case) -> Choice:
    first, compute = group[0], case.policy.compute
    vocabulary = first.dimension == "vocabulary"
    to = tile if vocabulary else row
    padded = -(-first.size // to) * to
    extra = sum((padded - first.size) * side.weights_each for side in group)
    name = first.layer if len(group) == 1 else f"{first.layer} and {len(group) - 1} more"
    share = extra / sum(p.numel() for p in case.model.parameters())
    cost = f"costs {extra:,} weights ({share:.2%} of the model) and changes the shapes in checkpoints"
    why = (
        f"matrix units load {_ROW_BYTES} bytes at once: multiples of {row} in {compute} (NVIDIA's matrix product guide)"
    )
    if vocabulary:
        why = (
            f"{why}; published: 50257 -> 50304 made a nanoGPT step about 25% faster (its author, 2023). A look-up alone "
            "gains nothing: pad it where an output layer multiplies by it"
        )
    return _alignment_choice(f"{name}: {first.size} -> {padded} {first.dimension}", f"{why}; {cost}")


def _alignment_choice(value: str, reason: str) -> Choice:
    return Choice(what="alignment", value=value, reason=reason)


def _weights(group: list[_Side]) -> int:
    return sum(side.size * side.weights_each for side in group)


def _sides(model: nn.Module) -> Iterator[_Side]:
    """Yield both sizes of every weight that is multiplied; a vocabulary is the largest embedding, or the layer of its size."""
    embeddings = {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    largest = max(embeddings, key=lambda name: embeddings[name].num_embeddings, default="")
    words = embeddings[largest].num_embeddings if embeddings else -1
    multiplied = False
    for name, module in model.named_modules():
        outputs, inputs = _sizes(module)
        if outputs:
            head = outputs == words
            multiplied = multiplied or head
            yield _Side(name or type(module).__name__, "vocabulary" if head else "outputs", outputs, inputs)
            yield _Side(name or type(module).__name__, "inputs", inputs, outputs)
    if embeddings and not multiplied:
        yield _Side(largest or "Embedding", "vocabulary", words, embeddings[largest].embedding_dim)


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Return the outputs and inputs of a layer's matrix, for a convolution of one group's; zeros if nothing is multiplied."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, _CONVOLUTIONS):
        depthwise = module.groups == module.in_channels > 1  # no matrix: one channel in, one or a few out
        return (0, 0) if depthwise else (module.out_channels // module.groups, module.in_channels // module.groups)
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        return module.in_proj_weight.shape[0], module.in_proj_weight.shape[1]
    if _is_conv1d(module):
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        return weight.shape[1], weight.shape[0]
    return 0, 0


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether ``module`` is the linear layer of GPT-2 in transformers, which is called Conv1D and has its weight transposed."""
    return type(module).__name__ == "Conv1D" and getattr(getattr(module, "weight", None), "ndim", 0) == 2
