"""Find 16-bit copies that a script keeps of what must change slowly: averages of weights, running statistics."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mezzo.diagnosis.lint.noticed import Noticed
from mezzo.formats import BF16, FP16, format_of

_HALF = (FP16.dtype, BF16.dtype)


def check_running_statistics(noticed: Noticed, roots: Iterable[nn.Module]) -> None:
    """Look at the running statistics of all modules that update theirs."""
    found = [
        module
        for root in roots
        for module in root.modules()
        if isinstance(module, _NormBase) and module.training and _is_half(module.running_mean)
    ]
    if found:
        mean = found[0].running_mean
        assert mean is not None
        detail = f"running_mean and running_var of {len(found)} modules are {_name(mean)}, and training updates them"
        noticed.add("A613", detail, modules=found, line="")


def check_average(noticed: Noticed, average: nn.Module, model: nn.Module) -> None:
    """Look at the weights that ``torch.optim.swa_utils.AveragedModel`` averages into."""
    pairs = zip(average.parameters(), model.parameters(), strict=False)
    found = [(mean, weight) for mean, weight in pairs if _is_half(mean)]
    if found:
        detail = f"AveragedModel keeps {len(found)} averages in {_name(found[0][0])}"
        noticed.add("A612", detail, parameters=[weight for _, weight in found])


def _is_half(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in _HALF


def _name(tensor: Tensor) -> str:
    form = format_of(tensor.dtype)
    return str(tensor.dtype) if form is None else form.name.upper()
