"""How far are BF16 and FP16 from FP32, and generation from training?

Small models of public architectures score the same inputs under each policy (``benchmarks/scripts/differences/score.py``). A row is the
relative distance of log-probabilities, their KL divergence, and the share of ratios outside PPO's band. On a CPU both formats are emulated.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.shared.harness import report
from mezzo.commands.diff.answer import compare_values
from mezzo.observe.values.log import VALUES_NAME, Floats, ValuesLog
from mezzo.records import PointDifference

SCRIPT = Path(__file__).parents[1] / "scripts" / "differences" / "score.py"
MODELS = {
    "gpt2": "decoder, GPT-2",
    "llama": "decoder, Llama",
    "vit": "ViT",
    "unet": "U-Net",
    "t5": "encoder-decoder, T5",
}
POLICIES = ("fp32", "bf16", "fp16")


def main() -> None:
    rows, found = [], {}
    for name, title in MODELS.items():
        points = {policy: _points(name, policy) for policy in POLICIES}
        for policy in POLICIES[1:]:
            one = compare_values("logprobs", "fp32", points["fp32"]["logprobs#1"], points[policy]["logprobs#1"])
            rows.append((f"{title}: {policy} from fp32", _said(one), ""))
            found[f"{name} {policy}"] = one.model_dump()
        for policy in POLICIES if "logprobs#2" in points["fp32"] else ():
            one = compare_values("logprobs", policy, points[policy]["logprobs#1"], points[policy]["logprobs#2"])
            rows.append((f"{title}: {policy}, with a cache from without", _said(one), ""))
            found[f"{name} {policy} cache"] = one.model_dump()
    report("differences", rows, found)


def _points(name: str, policy: str) -> dict[str, Floats]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "mezzo",
            "run",
            "--policy",
            policy,
            "--fingerprints",
            "--out",
            folder,
            str(SCRIPT),
            name,
        ]
        subprocess.run(command, check=True, capture_output=True)
        return ValuesLog.load(Path(folder) / VALUES_NAME).points


def _said(one: PointDifference) -> str:
    return f"{one.distance:.1e}, KL {one.kl:.1e}, outside {one.outside:.2%}"
