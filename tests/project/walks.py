"""Follow three ways through the source: ``python tests/project/walks.py [REVISION]`` prints the files whose functions run on each.

forward     a module's forward pass in the script's own torch.autocast region, under ``mezzo run --policy bf16``
update      ``Session.step``, backward pass and optimizer included, under FP16
diagnosis   what ``mezzo diagnose`` of a script that overflows runs beyond ``mezzo run`` of the same script, children included:
            beyond a run under FP16, and beyond one in FP32, which the diagnosis makes to compare

These are the files that somebody reads who follows the call; files that only define values are not among them. A file that is started as a
program of its own counts as run, though it may import nothing that could trace it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

PROFILE = """
import os, sys, threading
class Files:
    def __init__(self):
        self.root, self.seen = os.environ["MEZZO_SOURCE"], set()
    def __call__(self, frame, event, arg):
        code = frame.f_code
        function = code.co_flags & 2 and not code.co_name.startswith("<")  # no module's or class's body
        if event == "call" and function and code.co_filename.startswith(self.root) and code.co_filename not in self.seen:
            self.seen.add(code.co_filename)
            self.keep(code.co_filename)
    def keep(self, path):
        with open(os.environ["WALKED"], "a") as kept:
            kept.write(path[len(self.root):] + chr(10))
    def started(self, event, args):
        for path in args[1] if event == "subprocess.Popen" else ():
            if str(path).startswith(self.root) and str(path).endswith(".py"):
                self.keep(str(path))
    def of(self, call):
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            return call()
        finally:
            sys.setprofile(before)
"""
WHOLE_PROCESS = (
    PROFILE + "files = Files(); sys.setprofile(files); threading.setprofile(files); sys.addaudithook(files.started)\n"
)
MODEL = (
    PROFILE
    + """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer, files = torch.optim.SGD(model.parameters(), lr=0.1), Files()
"""
)
FORWARD = (
    MODEL
    + """
for step in range(8):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = files.of(lambda: model(torch.ones(8, 4)).square().mean())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
)
UPDATE = (
    MODEL
    + """
import mezzo
session = mezzo.Session(model, optimizer, policy="fp16")
for step in range(8):
    with session.autocast():
        loss = model(torch.ones(8, 4)).square().mean()
    files.of(lambda: session.step(loss))
"""
)
OVERFLOWS = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    loss = model(torch.randn(8, 4) * (1e6 if step == 5 else 1)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


WHOLE = {"diagnose": ("--policy", "fp16"), "predict": ("--gpus", "t4")}
"""Commands on the script that overflows, of which all files are counted."""


def walked(source: Path, script: str, *command: str) -> set[str]:
    """Return the files of ``source`` whose functions ran: where ``script`` traces itself, or in all of a command of mezzo on it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "walk.py").write_text(script)
        path = [str(source)]
        if script is OVERFLOWS:
            (folder / "sitecustomize.py").write_text(WHOLE_PROCESS)
            path.insert(0, place)
        known = {"PYTHONPATH": os.pathsep.join(path), "MEZZO_SOURCE": f"{source}/mezzo/", "WALKED": f"{place}/walked"}
        program = ["-m", "mezzo", *command] if command else []
        done = subprocess.run(
            [sys.executable, *program, "walk.py"], cwd=folder, env=os.environ | known, capture_output=True, check=False
        )
        if done.returncode not in (0, 1):  # a diagnosis that finds something ends with 1
            raise RuntimeError(done.stderr.decode())
        return set((folder / "walked").read_text().split())


def main(revision: str) -> None:
    """Print the three ways of a revision, and how many files whole commands run."""
    with tempfile.TemporaryDirectory() as place:
        archive = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
        source = Path(place).resolve() / "src"
        diagnosed = walked(source, OVERFLOWS, "diagnose", "--policy", "fp16")
        diagnosed -= {
            file for policy in ("fp16", "fp32") for file in walked(source, OVERFLOWS, "run", "--policy", policy)
        }
        ways = {
            "forward": walked(source, FORWARD, "run", "--policy", "bf16"),
            "update": walked(source, UPDATE),
            "diagnosis": {name for name in diagnosed if name.endswith(".py")},
        }
        whole = {name: walked(source, OVERFLOWS, name, *words) for name, words in WHOLE.items()}
        print("; ".join(f"mezzo {name}: {len(files)} files in all" for name, files in whole.items()))
        for name, files in ways.items():
            print(f"{name}: {len(files)} files\n    " + "\n    ".join(sorted(files)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "HEAD")
