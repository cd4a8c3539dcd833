"""What is read from the text of errors."""

from __future__ import annotations

import pytest
import torch

from mezzo.error_texts import (
    advice_for,
    asks_for_a_gpu,
    is_of_sparse_tensor,
    leaves_range,
    missing_key,
    missing_module,
    refuses_format,
    requested_bytes,
)

APEX = "to run it with Mezzo's, type: python -m mezzo.compat.apex SCRIPT"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("NameError: name 'get_ipython' is not defined", "delete its lines with get_ipython()"),
        ("NameError: name 'display' is not defined", "write from IPython.display import display, or print"),
        ("train.py:3: NameError: name 'get_ipython' is not defined", "put %%mezzo above the cell that trains"),
        ("NameError: name 'ipython' is not defined", ""),
        (
            "AssertionError: Torch not compiled with CUDA enabled",
            "mezzo predict shows its speed and memory on other machines' GPUs",
        ),
        ("RuntimeError: No CUDA GPUs are available", "torch.cuda.is_available()"),
        ("ImportError: cannot import name 'amp' from 'apex' (/lib/apex/__init__.py)", APEX),
        ("train.py:1: ModuleNotFoundError: No module named 'apex.amp'", APEX),
        ("ImportError: Please install apex from https://www.github.com/nvidia/apex to use fp16 training.", APEX),
        ("ModuleNotFoundError: No module named 'apexpy'", ""),
        ("RuntimeError: apex", ""),
        ("", ""),
    ],
)
def test_an_error_is_followed_by_what_to_do(error: str, said: str) -> None:
    advice = advice_for(error)
    assert said in advice
    assert bool(said) == bool(advice)


@pytest.mark.parametrize(
    ("statement", "module", "key"),
    [
        ("import no_such_module.inner", "no_such_module", ""),
        ("import os; os.environ['NO_SUCH_VARIABLE']", "", "NO_SUCH_VARIABLE"),
        ("{}[3]", "", ""),
        ("raise ModuleNotFoundError('none')", "", ""),
    ],
)
def test_what_python_did_not_find_is_named(statement: str, module: str, key: str) -> None:
    with pytest.raises((LookupError, ImportError)) as caught:
        exec(statement, {})
    error = f"train.py:1: {type(caught.value).__name__}: {caught.value}"
    assert (missing_module(error), missing_key(error)) == (module, key)


def test_a_sparse_tensor_without_storage_is_known_by_its_error() -> None:
    with pytest.raises(NotImplementedError) as caught:
        torch.eye(2).to_sparse().untyped_storage()
    assert is_of_sparse_tensor(str(caught.value))
    assert not is_of_sparse_tensor("RuntimeError: CUDA out of memory")


def test_a_script_that_needs_a_gpu_is_known_by_its_error() -> None:
    assert asks_for_a_gpu("the script as it is cannot be timed: AssertionError: Torch not compiled with CUDA enabled")
    assert not asks_for_a_gpu("RuntimeError: CUDA out of memory")


REFUSALS = {
    "RuntimeError: Unsupported dtype BFloat16": True,
    "RuntimeError: scatter(): Expected self.dtype to be equal to src.dtype": True,
    "RuntimeError: expected scalar type Float but found Half": True,
    "fft.py:8: RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::Half": True,
    """NotImplementedError: "svd_cpu" not implemented for 'Half'""": True,
    "RuntimeError: Input type (float) and bias type (c10::Half) should be the same": True,
    "fft.py:8: NoKernelError: cuFFT only supports dimensions whose sizes are powers of two": True,
    "UnsupportedFormatError: this device cannot compute in fp8": False,
    "RuntimeError: value cannot be converted to type c10::Half without overflow": False,  # a value's fault
    "RuntimeError: shape '[2, 3]' is invalid for input of size 4": False,
    "KeyError: 'dtype'": False,
    "exit code 1": False,
    "": False,
}


@pytest.mark.parametrize(("error", "refused"), REFUSALS.items())
def test_an_operation_that_refuses_a_format_is_told_from_other_errors(error: str, refused: bool) -> None:
    assert refuses_format(error) is refused
    assert leaves_range(error) is error.endswith("without overflow")


MESSAGES = [
    ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0", 20 * 2**20),
    ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes. Error code 12", 400),
    ("no words", None),
]


@pytest.mark.parametrize(("message", "expected"), MESSAGES)
def test_the_bytes_asked_for(message: str, expected: int | None) -> None:
    assert requested_bytes(message) == expected
