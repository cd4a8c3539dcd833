"""What the errors of torch, CUDA and Python say: their words are read in this file. Imports no torch."""

from __future__ import annotations

import re

_NO_GPU = r"Torch not compiled with CUDA enabled|not linked with support for cuda|No CUDA GPUs are available|Found no NVIDIA driver"
_ADVICE = {
    r"(?:ModuleNotFoundError|ImportError): .*\bapex\b": "the installed apex lacks what the script imports; to run it with Mezzo's, type: "
    "python -m mezzo.compat.apex SCRIPT",
    r"NameError: name 'get_ipython' is not defined": "the script is an exported notebook: delete its lines with get_ipython(), "
    "which only IPython has, or put %%mezzo above the cell that trains, in the notebook",
    r"NameError: name 'display' is not defined": "display() is IPython's, which adds it to notebooks only: write from IPython.display "
    "import display, or print",
    _NO_GPU: "the script asks for a GPU, and this machine has none: mezzo predict shows its speed and memory on other machines' GPUs. "
    'To train here, write device = "cuda" if torch.cuda.is_available() else "cpu" and use it',
}

_HOST_READ = (
    "the forward pass or the loss waits for the host (.item(), .cpu(), print, a boolean index), creates a tensor from Python numbers, or "
    "allocates memory by a value. Remove that, or train with step(loss)"
)
_BROKEN_CAPTURES = {
    "CUDAGeneratorImpl": "activation checkpointing reads the generator's state, which a capture refuses: "
    "checkpoint(..., preserve_rng_state=False); dropout inside then draws new numbers when it is recomputed",
    "stale reference": "a loss or output of an earlier step keeps autograd's nodes on another stream: del loss, then capture",
    "legacy stream": "a loss or output of an earlier step keeps autograd's nodes on the default stream: "
    "del loss before the capture, or remove work on other streams from the step",
    "Only one capture": "a model compiled with mode='reduce-overhead' captures graphs of its own: compile it without a mode",
    "uncaptured work": "the step waits for work on another stream: wait for that stream before the capture, or keep to one stream",
}
"""What to do about a failed capture, by a part of CUDA's or torch's message."""
_REFUSED = re.compile(
    r"\bNoKernelError: |"  # Mezzo's own, in torch's words
    r"\b(?:Runtime|NotImplemented|Type|Value)Error: .*"
    r"(?:\bdtype|scalar type|not implemented for|bias type)",
    re.DOTALL,
)
_BEYOND = re.compile(r"\bcannot be converted to type .* without overflow")
_PEER_MISSING = re.compile(
    r"connection (?:was )?(?:closed|reset|refused)|closed by peer|broken pipe|socket|gloo|nccl|watchdog|distbackenderror"
    r"|storage? timeout|time[d ]*-?out|heartbeat|tcpstore|rendezvous|store->|destroy_process_group",
    re.IGNORECASE,
)
"""Words in the errors that a process raises because another process is missing."""
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_MISSING_KEY = re.compile(r"KeyError: '(\w+)'$")
_ALLOCATION = re.compile(r"[Tt]ried to allocate ([\d.]+) (KiB|MiB|GiB|bytes)")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def advice_for(error: str) -> str:
    """Return what to do about ``error``, the text in a record; empty if that text says enough."""
    return next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, error)), "")


def asks_for_a_gpu(error: str) -> bool:
    """Return whether ``error`` comes from a script that needs a GPU, on a machine without one."""
    return re.search(_NO_GPU, error) is not None


def capture_advice(message: str) -> str:
    """Return what to do about an error that broke the capture of a CUDA graph."""
    return next((advice for part, advice in _BROKEN_CAPTURES.items() if part in message), _HOST_READ)


def refuses_format(error: str) -> bool:
    """Return whether an operation refused its operands' format: it has no kernel for it, or the operands' formats differ."""
    return _REFUSED.search(error) is not None


def leaves_range(error: str) -> bool:
    """Return whether a number in the script, such as a mask's -1e9, is beyond the range of the format it was converted to."""
    return _BEYOND.search(error) is not None


def is_of_freed_graph(message: str) -> bool:
    """Return whether torch refused to go backward through a graph that a backward pass has freed."""
    return "backward through the graph a second time" in message


def is_of_full_host(message: str) -> bool:
    """Return whether torch could not allocate memory of the host, which it says in a plain RuntimeError."""
    return "allocate memory" in message


def is_of_sparse_tensor(error: str) -> bool:
    """Return whether torch lacks an operation on a sparse tensor."""
    return "SparseTensorImpl" in error


def missing_module(error: str) -> str:
    """Return the module that Python did not find; empty if the error is another one."""
    found = _MISSING_MODULE.search(error)
    return "" if found is None else found[1]


def missing_key(error: str) -> str:
    """Return the text that a mapping, such as ``os.environ``, has no value for; empty if the error is another one."""
    found = _MISSING_KEY.search(error)
    return "" if found is None else found[1]


def requested_bytes(message: str) -> int | None:
    """Return how many bytes were requested, from the message of torch's allocators."""
    found = _ALLOCATION.search(message)
    return None if found is None else int(float(found[1]) * _UNITS.get(found[2], 1))


def is_about_peer(error: str) -> bool:
    """Return whether a process raised an error because another process is missing."""
    return _PEER_MISSING.search(error) is not None
