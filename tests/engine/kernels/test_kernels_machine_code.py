"""What the GPU kernels are compiled to: read in the machine code, which needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from paths import ROOT

pytest.importorskip("triton")
H100 = 90

# Instructions that move 16 bytes: (loads, stores). FP32 streams move four elements per thread at once; a thread takes four elements of
# narrower formats along, which is 4 or 8 bytes.
WIDE = {
    "reduce, FP16": (2, 0),
    "reduce, BF16": (2, 0),
    "reduce, FP32": (6, 0),  # in FP32 and, of a chunk that needs it, twice more
    "AdamW, FP16 with masters": (3, 3),  # master and two moments
    "AdamW, BF16 with low bits": (2, 2),
    "AdamW, FP32": (4, 3),
    "AdamW, BF16 with low bits, 8-bit moments": (0, 0),
    "AdamW, BF16 alone, BF16 moments, stochastic": (0, 0),
    "begin": (0, 0),
    "SGD, FP16 with masters": (2, 2),
    "exponents, FP32": (1, 0),
}


PROGRAM = f"""
import json, warnings
warnings.simplefilter("error")  # none for a user, either
from benchmarks.gpu.machine_code import compiled, launches
every = list(launches())
params = [[launch.kernel.fn.__name__, p] for launch in every for p in launch.kernel.params if not p.is_constexpr]
print(json.dumps({{
    "H100": {{one.name: vars(compiled(one, {H100})) for one in every}},
    "others": [vars(compiled(one, gpu)) for one in every if one.name == "AdamW, BF16 with low bits" for gpu in (75, 100)],
    "specialized": [
        [name, p.name] for name, p in params
        if not p.do_not_specialize and (p.name == "count" or not p.do_not_specialize_on_alignment)
    ],
}}))
"""


@pytest.mark.slow
def test_kernels_spill_nothing_move_16_bytes_at_a_time_and_are_compiled_once() -> None:
    # In a process without Triton's interpreter, which the tests' own process has.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made: dict[str, Any] = json.loads(done.stdout)
    codes = made["H100"]
    assert {name: (c["loads"].get("16", 0), c["stores"].get("16", 0)) for name, c in codes.items()} == WIDE
    assert {name: c["spilled_bytes"] for name, c in codes.items()} == dict.fromkeys(WIDE, 0)
    # 64 registers leave room for a thousand threads on a processor of the GPU; tests/cuda_build compiles for the others.
    assert {name: c["registers"] for name, c in codes.items() if c["registers"] > 64} == {}
    for older_or_newer in made["others"]:
        spilled, loads, stores = (older_or_newer[name] for name in ("spilled_bytes", "loads", "stores"))
        assert (spilled, loads["16"], stores["16"]) == (0, 2, 2)
    # Other addresses or counts compile nothing again: that could happen inside a capture.
    assert made["specialized"] == []
