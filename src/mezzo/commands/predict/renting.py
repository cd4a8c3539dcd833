"""What a GPU costs to rent, and the lines that request it from a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mezzo.cli.words import with_value
from mezzo.errors import UsageError, nearest

if TYPE_CHECKING:
    from mezzo.gpus import Gpu
    from mezzo.records import Prediction, Reason

_CPUS = 8
_SPARE_GIB = 8
_MILLION, _HOUR_S = 1e6, 3600.0


def prices_of(text: str | None, gpus: Sequence[Gpu]) -> dict[str, float]:
    """Return the price of an hour of each GPU by name, from ``2.10`` or ``h100=2.5,a100-80gb=1.3``.

    Raises:
        UsageError: a price is not a positive number, or is for a GPU that is not predicted.
    """
    from mezzo.gpus import gpu_named

    if text is None:
        return {}
    if "=" not in text:
        return dict.fromkeys([gpu.name for gpu in gpus], _price(text, text))
    prices: dict[str, float] = {}
    names = [gpu.name for gpu in gpus]
    for part in text.split(","):
        name, _, price = part.partition("=")
        gpu = gpu_named(name.strip(), option="--price")
        if gpu.name not in names:
            raise UsageError(
                f"--price {text!r} has a price for {gpu.name}, which --gpus does not name; {nearest(gpu.name, names)}",
                hint=f"type: {with_value('--gpus', ','.join([*names, gpu.name]))}",
            )
        prices[gpu.name] = _price(price, text)
    return prices


def _price(text: str, whole: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not price > 0 or math.isinf(price):
        raise UsageError(
            f"--price {whole!r} has {text!r} where a price for an hour belongs; allowed: a number above 0",
            hint=f"type: {with_value('--price', '2.10')}; by GPU: --price h100=2.5,a100-80gb=1.3",
        )
    return price


def cost_per_million(throughput: float, price_per_hour: float) -> float:
    """Return the price of a million samples."""
    return price_per_hour * _MILLION / throughput / _HOUR_S


def slurm_lines(gpu: Gpu, prediction: Prediction, *, num_gpus: int = 1) -> tuple[list[str], list[Reason]]:
    """Return the lines of a batch script that request ``num_gpus`` of ``gpu`` on one machine, and what they assume."""
    from mezzo.records import Reason

    gib = max(16, 8 * math.ceil(num_gpus * (prediction.device_bytes / 2**30 + _SPARE_GIB) / 8))
    kind = (
        gpu.name.split("-")[0] if gpu.name.startswith(("a100", "h100", "h200", "v100")) else gpu.name.replace("-", "_")
    )
    each = "" if num_gpus == 1 else f", for each of {num_gpus} GPUs"
    lines = [
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        f"#SBATCH --gres=gpu:{kind}:{num_gpus}",
        f"#SBATCH --cpus-per-task={_CPUS * num_gpus}",
        f"#SBATCH --mem={gib}G",
    ]
    assumed = [
        Reason(
            what="--gres",
            value=f"gpu:{kind}:{num_gpus}",
            reason="each cluster names its GPUs: sinfo -o '%G' lists its names",
        ),
        Reason(
            what="--mem",
            value=f"{gib}G",
            reason=f"the step's {prediction.device_bytes / 2**30:.1f} GiB of GPU memory and {_SPARE_GIB} GiB for data{each}, in steps of 8",
        ),
        Reason(
            what="--cpus-per-task", value=str(_CPUS * num_gpus), reason="for loading data; its time is not predicted"
        ),
        Reason(what="--time", value="not set", reason="Mezzo does not know how many steps you train"),
    ]
    return lines, assumed
