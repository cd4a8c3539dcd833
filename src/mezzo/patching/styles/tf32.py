"""TF32 for matrix products and convolutions: torch's own switches, set once after the imports."""

from __future__ import annotations

import ast

from mezzo.patching.job import PatchJob
from mezzo.patching.outcome import unclear

_SWITCHES = ("allow_tf32", "fp32_precision")


def patch(job: PatchJob) -> None:
    """Set the switches.

    Raises:
        Unclear: the script sets them itself.
    """
    script = job.script
    switches: list[ast.AST] = [n for n in script.tree.nodes if isinstance(n, ast.Attribute) and n.attr in _SWITCHES]
    switches += script.calls_to(r"torch\.set_float32_matmul_precision")
    if switches:
        unclear(
            f"line {getattr(switches[0], 'lineno', '?')} sets the precision of FP32 products already",
            "check that it allows TF32",
            already=True,
        )
    job.imports("torch")
    job.after_imports(
        "torch",
        f"{job.library}.backends.cuda.matmul.allow_tf32 = True",
        f"{job.library}.backends.cudnn.allow_tf32 = True",
    )
    why = "FP32 products and convolutions read 10 bits of the mantissa on NVIDIA GPUs since Ampere"
    job.note("imports", "allow_tf32 = True after them", why)
