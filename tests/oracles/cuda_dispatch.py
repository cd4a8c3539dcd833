"""Which dtypes torch's operations and modules return under autocast: on CUDA by torch's own dispatcher, and here by the op lists.

Every sample of torch's own test database of operations (``op_db``) and modules (``module_db``) runs on tensors that have no
data: torch works out shapes, devices and dtypes, and autocast's kernels run as they do on a device. So the oracle needs
torch's CUDA build and no GPU::

    python tests/oracles/cuda_dispatch.py                            # with the CUDA build: writes cuda_dispatch.json
    python tests/oracles/cuda_dispatch.py fp16:arithmetic=emulated   # compares a policy with the file, all samples

``test_casting_cuda_dispatch.py`` compares the first samples of each operation.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mezzo.errors import NoKernelError

DATA = Path(__file__).with_suffix(".json")
LETTERS = {
    torch.float16: "h",
    torch.bfloat16: "h",
    torch.float32: "f",
    torch.float64: "d",
    torch.complex64: "c",
    torch.complex128: "C",
    torch.complex32: "q",
    torch.bool: "b",
}
MAX_SAMPLES = 12
INTERNAL = ("op _batch_norm_with_update ", "op _native_batch_norm_legit ", "op native_batch_norm ")
"""Entries that are compared in part: kernels that keep statistics for the backward pass, in a dtype that is the kernel's own."""
DROPS_SAMPLES = ("op nn.functional.max_unpool",)
"""Entries whose samples torch makes at random, and drops where results are not unique."""
Region = Callable[[], AbstractContextManager[Any]]


def results(device: str, low: torch.dtype, region: Region, *, samples: int = MAX_SAMPLES) -> dict[str, str]:
    """Return the dtypes of the results of the first ``samples``, by operation or module and by the dtype of what it is given.

    A letter is a result: ``h`` the lower format, ``f`` FP32, ``d`` FP64, ``i`` an integer, ``x`` a sample that raises, ``r`` one
    without a kernel on CUDA, which tensors without data do not show (``cuda_kernels.py`` beside this file).
    Commas stand between samples.
    """
    from helpers_torch import module_db, op_db

    found: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)  # of samples that raise
        for op in sorted(op_db, key=lambda op: (op.name, op.variant_test_name)):
            calls = list(_op_calls(op, samples))
            for given in (torch.float32, low):
                name = f"op {op.name} {op.variant_test_name} {LETTERS[given]}"
                found[name] = ",".join(_dtypes(op.op, call, given, device, region) for call in calls)
        for info in sorted(module_db, key=lambda info: info.name):
            calls = list(_module_calls(info, samples))
            for given in (torch.float32, low):
                name = f"module {info.name} {LETTERS[given]}"
                found[name] = ",".join(
                    _dtypes(_built(info.module_cls, *built), call, given, device, region) for built, call in calls
                )
    logging.disable(logging.NOTSET)
    return {name: dtypes for name, dtypes in found.items() if dtypes.strip("x,")}


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


def _op_calls(op: Any, samples: int) -> Iterator[Call]:
    _seed()
    try:
        # Not op.sample_inputs: it inspects the source of every caller, which took nine tenths of the time beneath pytest-xdist.
        for number, sample in enumerate(op.sample_inputs_func(op, "cpu", torch.float32, False)):
            if number == samples:
                return
            yield (sample.input, *sample.args), sample.kwargs
    except Exception:  # a database entry that cannot make its samples for FP32
        return


def _module_calls(info: Any, samples: int) -> Iterator[tuple[Call, Call]]:
    _seed()
    made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
    for sample in made[:samples]:
        built, given = sample.constructor_input, sample.forward_input
        if given is not None:
            yield (built.args, built.kwargs), (given.args, given.kwargs)


def _built(kind: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    return kind(*args, **kwargs)


def _dtypes(function: Callable[..., Any], call: Call, given: torch.dtype, device: str, region: Region) -> str:
    with FakeTensorMode(allow_non_fake_inputs=True):

        def empty(t: Tensor, *, keeps_dtype: bool = False) -> Tensor:
            if t.layout is not torch.strided:
                raise TypeError("no data-less copy of a sparse tensor")
            dtype = given if t.dtype is torch.float32 and not keeps_dtype else t.dtype
            made = torch.empty_strided(t.size(), t.stride(), dtype=dtype, device=device)
            return made.requires_grad_() if t.requires_grad else made

        try:
            if isinstance(function, nn.Module):
                function._apply(lambda t: empty(t, keeps_dtype=True))
            args, kwargs = tree_map_only(Tensor, empty, call)
            with region():
                out = function(*args, **kwargs)
        except NoKernelError:
            return "r"
        except Exception:
            return "x"
    return "".join(LETTERS.get(t.dtype, "i") for t in tree_leaves(out) if isinstance(t, Tensor)) or "-"


def cuda_autocast(low: torch.dtype) -> Region:
    """Return what turns CUDA's autocast on by its state: ``torch.autocast`` refuses where there is no device."""

    @contextmanager
    def region() -> Iterator[None]:
        before = torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", low)
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", before)
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    return region


def table(low: torch.dtype) -> dict[str, str]:
    """Return the results in the file for one format."""
    data = json.loads(DATA.read_text())
    return {**data["float16"], **(data["where bfloat16 differs"] if low is torch.bfloat16 else {})}


def compare(policy: str, *, samples: int = MAX_SAMPLES) -> tuple[int, list[str]]:
    """Return how many samples agree with CUDA under ``policy`` on the CPU, and what does not."""
    from mezzo.engine.casts.casting import Casting
    from mezzo.policy import Policy

    casting = Casting.of(Policy.parse(policy), "cpu")
    low = casting.policy.storage.dtype
    found = results("cpu", low, casting.region, samples=samples)
    agree, apart = 0, []
    for name, line in table(low).items():
        if not line:  # CUDA refuses all of them
            continue
        expected = line.split(",")[:samples]
        ours = found.get(name, ",".join("x" * len(expected))).split(",")
        # torch drops samples of max_unpool whose numbers meet: an entry may have fewer here than where the table was made.
        for number, (theirs, own) in enumerate(zip(expected, ours, strict=not name.startswith(DROPS_SAMPLES))):
            if theirs == "x" or own == "r":
                continue
            same = theirs[0] == own[0] if name.startswith(INTERNAL) else theirs == own
            agree += same
            apart += [] if same else [f"{name}, sample {number}: CUDA gives {theirs}, this {own}"]
    return agree, apart


def _write() -> None:
    assert torch.version.cuda is not None, "this needs torch's CUDA build"
    fp16, bf16 = (results("cuda", low, cuda_autocast(low)) for low in (torch.float16, torch.bfloat16))
    differs = {name: bf16.get(name, "") for name in sorted({*fp16, *bf16}) if bf16.get(name, "") != fp16.get(name)}
    data = {"torch": torch.__version__.split("+")[0], "float16": fp16, "where bfloat16 differs": differs}
    DATA.write_text(json.dumps(data, indent=0, sort_keys=True) + "\n")
    print(
        sum(line.count(",") + 1 for line in fp16.values()), "samples of", len(fp16), "entries;", len(differs), "differ"
    )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        _write()
    else:
        agree, apart = compare(sys.argv[1])
        print(*apart, f"{agree} agree, {len(apart)} do not", sep="\n")
