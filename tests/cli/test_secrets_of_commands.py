"""No secret of a command line or of the environment is in anything that a command prints or writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from forked_processes import in_fork
from mezzo.secrets import secrets_among
from test_secrets import SECRETS, VARIABLES, S

SCRIPT = """
import argparse, os, torch
parser = argparse.ArgumentParser()
parser.add_argument("--api-key"); parser.add_argument("--steps", type=int)
args, rest = parser.parse_known_args()
hub, auth = os.environ["HF_TOKEN"], f"Bearer {args.api_key}"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
opt = torch.optim.AdamW(model.parameters(), 0.01)
for step in range(args.steps):
    x = torch.randn(16, 8)
    loss = torch.nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    opt.zero_grad(); loss.backward(); opt.step()
if "--fail" in rest:
    raise SystemExit(f"401 for https://me:{args.api_key}@x.org/?token={args.api_key}: {hub}")
"""
COMMANDS = {
    "run": ["--policy", "fp16"],
    "run with snapshots": ["--policy", "fp16", "--snapshot", "0.01s"],
    "run that fails": ["--policy", "fp16"],
    "watch": [],
    "compare": ["--policies", "fp32,fp16"],
    "audit": ["--policy", "fp16"],
    "diagnose": ["--policy", "fp16"],
    "ranges": [],
    "fallback": ["--policy", "fp16"],
    "check": ["--seeds", "1"],
    "tune": ["--budget", "20s"],
    "resume-check": [],
    "predict": ["--gpus", "h100"],
    "predict without its option": ["--gpu", "h100"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_no_secret_is_printed_or_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word for words, _ in SECRETS for word in words]
    variables = dict.fromkeys(VARIABLES, S) | {"HF_TOKEN": "hf_QwErTyUiOp123456"}
    secrets = {one for one in secrets_among(words, variables).values() if len(one) > 6}
    assert len(secrets) > 8
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "train.py").write_text(SCRIPT)
    own = ["train.py", "--steps", "6", *(["--fail"] if "fails" in name else []), *words]
    tracker = ["--log-to", f"tensorboard:{tmp_path / 'tracker'}"]

    ended = in_fork([name.split()[0], *COMMANDS[name], "--out", "out", *tracker, *own], folder=tmp_path)

    assert ended.code in ((2,) if "without" in name else (0, 1)), ended.printed
    printed = ended.printed.replace(f"401 for https://me:{S}@x.org/?token={S}: hf_QwErTyUiOp123456", "")
    assert [one for one in secrets if one in printed] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "train.py"]
    assert [(str(path), one) for path in files for one in secrets if one.encode() in path.read_bytes()] == []
