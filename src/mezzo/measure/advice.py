"""Advice on a script's errors whose text does not show the cause. Imports no torch."""

from __future__ import annotations

import re

_NO_GPU = r"Torch not compiled with CUDA enabled|not linked with support for cuda|No CUDA GPUs are available|Found no NVIDIA driver"
_ADVICE = {
    r"(?:ModuleNotFoundError|ImportError): .*\bapex\b": "the installed apex lacks what the script imports; to run it with Mezzo's, type: "
    "python -m mezzo.compat.apex SCRIPT",
    r"NameError: name 'get_ipython' is not defined": "the script is an exported notebook: delete its lines with get_ipython(), which only "
    "IPython has (magics and shell commands, not training), or put %%mezzo above the cell that trains, in the notebook",
    r"NameError: name 'display' is not defined": "display() is IPython's, which adds it to notebooks only: write from IPython.display "
    "import display, or print",
    _NO_GPU: "the script asks for a GPU, and this machine has none: mezzo predict shows its speed and memory on GPUs that this machine "
    "does not have; to train here, write "
    'device = "cuda" if torch.cuda.is_available() else "cpu" and use it',
}


def advice_for(error: str) -> str:
    """Return what to do about ``error``, the text in a record; empty if that text says enough."""
    return next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, error)), "")


def asks_for_a_gpu(error: str) -> bool:
    """Return whether ``error`` comes from a script that needs a GPU, on a machine without one."""
    return re.search(_NO_GPU, error) is not None
