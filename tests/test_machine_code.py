"""What the GPU kernels are compiled to: read in the machine code, which needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parent.parent
H100 = 90

# Instructions that move 16 bytes: (loads, stores). FP32 streams move four elements a thread at once; a thread takes four elements of
# narrower formats along, which is 4 or 8 bytes.
WIDE = {
    "reduce, FP16": (2, 0),
    "reduce, BF16": (2, 0),
    "reduce, FP32": (4, 0),
    "AdamW, FP16 with masters": (3, 3),  # master and two moments
    "AdamW, BF16 with low bits": (2, 2),
    "AdamW, FP32": (4, 3),
    "AdamW, BF16 with low bits, 8-bit moments": (0, 0),
    "AdamW, BF16 alone, BF16 moments, stochastic": (0, 0),
    "begin": (0, 0),
    "SGD, FP16 with masters": (2, 2),
    "exponents, FP32": (1, 0),
}


def codes(capability: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """Compile in a process without Triton's interpreter, which the tests' own process has."""
    program = f"""
import json, warnings
warnings.simplefilter("ignore")  # Triton's, about its own next version
from benchmarks.machine_code import compiled, launches
made = {{one.name: vars(compiled(one, {capability})) for one in launches() if one.name in {names}}}
print(json.dumps(made))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return made


def test_kernels_for_an_h100_spill_nothing_and_move_16_bytes_at_a_time() -> None:
    made = codes(H100, list(WIDE))
    assert set(made) == set(WIDE)
    wide = {name: (code["loads"].get("16", 0), code["stores"].get("16", 0)) for name, code in made.items()}
    assert wide == WIDE
    assert {name: code["spilled_bytes"] for name, code in made.items()} == dict.fromkeys(WIDE, 0)
    # 64 registers leave room for a thousand threads on a processor of the GPU.
    assert {name: code["registers"] for name, code in made.items() if code["registers"] > 64} == {}


@pytest.mark.parametrize("capability", [75, 100])
def test_kernels_compile_for_older_and_newer_gpus(capability: int) -> None:
    name = "AdamW, BF16 with low bits"
    code = codes(capability, [name])[name]
    assert (code["spilled_bytes"], code["loads"]["16"], code["stores"]["16"]) == (0, 2, 2)


def test_no_kernel_is_compiled_again_for_other_addresses_or_counts() -> None:
    program = """
import json
from benchmarks.machine_code import launches
kernels = {one.kernel.fn.__name__: one.kernel for one in launches()}
print(json.dumps({name: [
    [p.name for p in k.params if not (p.is_constexpr or p.do_not_specialize or p.do_not_specialize_on_alignment)]
    , [p.name for p in k.params if p.name == "count" and not p.do_not_specialize]
] for name, k in kernels.items()}))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = ["square_kernel", "adamw_kernel", "begin_kernel", "sgd_kernel", "exponent_kernel"]
    assert json.loads(done.stdout) == {name: [[], []] for name in expected}
