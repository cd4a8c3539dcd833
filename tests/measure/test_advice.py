"""Advice on errors whose text does not show the cause."""

from __future__ import annotations

import pytest

from mezzo.measure.advice import advice_for, asks_for_a_gpu

APEX = "to run it with Mezzo's, type: python -m mezzo.compat.apex SCRIPT"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("NameError: name 'get_ipython' is not defined", "delete its lines with get_ipython()"),
        ("NameError: name 'display' is not defined", "write from IPython.display import display, or print"),
        ("train.py:3: NameError: name 'get_ipython' is not defined", "put %%mezzo above the cell that trains"),
        ("NameError: name 'ipython' is not defined", ""),
        ("AssertionError: Torch not compiled with CUDA enabled", "mezzo predict shows its speed and memory on GPUs"),
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


def test_a_script_that_needs_a_gpu_is_known_by_its_error() -> None:
    assert asks_for_a_gpu("the script as it is cannot be timed: AssertionError: Torch not compiled with CUDA enabled")
    assert not asks_for_a_gpu("RuntimeError: CUDA out of memory")
