"""Choose the stages, the folder and the time, and run what is left."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu.first_gpu.running import BUDGET_S, Results, Stage, write_json
from benchmarks.gpu.first_gpu.stages import STAGES, dry
from benchmarks.shared import ROOT

FAILED, BUSY, NO_GPU, LEFT = 1, 2, 3, 4
PACKAGES = ("torch", "triton", "numpy", "torchao", "transformers", "timm", "accelerate", "lightning", "pytest")
_ASK = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


def main(argv: Sequence[str]) -> int:
    """Run the stages; return the exit code that ``__init__.py`` describes."""
    args = _parse(argv)
    stages = dry(STAGES) if args.dry_run else STAGES
    chosen = [stage for stage in stages if stage.name in (args.stages or [one.name for one in stages])]
    gpu = "cpu" if args.dry_run else _output(sys.executable, "-c", _ASK)
    if not gpu:
        print(f"no GPU: torch.cuda.is_available() is false for {sys.executable}. Nothing was run, nothing was written.")
        print("On a GPU, these stages would run; --dry-run tests the program on this CPU.")
        print("\n".join(f"  {stage.name}: {stage.what} ({len(stage.cases)} cases)" for stage in chosen))
        return NO_GPU
    identity = {"code": _code(), "torch": _version("torch"), "device": gpu}
    folder = args.out.resolve() / "-".join(_words(one)[:24] for one in (gpu, identity["torch"], identity["code"][:8]))
    _say_what_changed(args.out, folder, identity)
    ends_s = time.monotonic() + 60 * args.minutes
    try:
        with Results(folder) as results:
            if not (folder / "where.json").exists():
                write_json(folder / "where.json", {**identity, **_where()})
            for stage in chosen:
                results.run(stage, ends_s)
                results.summarize(stages)
            return _said(results, stages, chosen)
    except BlockingIOError:
        print(f"another process measures in {folder}: wait until it has ended, or name another folder with --out")
        return BUSY


def _said(results: Results, stages: Sequence[Stage], chosen: Sequence[Stage]) -> int:
    """Print what failed, what is missing and what is left; return the exit code."""
    rows = results.summarize(stages)
    for what, outcome, _ in rows:
        if outcome not in ("passed", "skipped"):
            print(f"{what}: {outcome}")
    left = [stage.name for stage in chosen if results.left(stage)]
    print(f"results: {results.folder}")
    if left:
        print(f"left: {', '.join(left)}. The same command continues there.")
        return LEFT
    ended = [results.of(stage, case) for stage in chosen for case in stage.cases]
    return FAILED if any(one["exit_code"] != 0 for one in ended if one is not None) else 0


def _say_what_changed(out: Path, folder: Path, identity: dict[str, str]) -> None:
    if folder.exists():
        return
    for path in sorted(out.glob("*/where.json")):
        before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        changed = [f"{key} was {before.get(key)}" for key in identity if before.get(key) != identity[key]]
        if (
            "cpu" not in (before["device"], identity["device"]) or before["device"] == identity["device"]
        ):  # dry runs are none
            print(f"{path.parent.name} has results with other conditions ({', '.join(changed)}): all is measured again")


def _where() -> dict[str, Any]:
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD") or "unknown",
        "changed_files": len(changed.splitlines()),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "driver": (_output("nvidia-smi") or _output("rocm-smi")).splitlines(),
    }


def _code() -> str:
    """Return a digest of all Python files that a result may depend on; a copy without its history has one too."""
    digest = hashlib.sha256()
    for name in ("src", "benchmarks", "tests"):
        for path in sorted((ROOT / name).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _output(*command: str) -> str:
    """Return what a program prints; nothing if it fails or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _words(text: str) -> str:
    return "".join(one if one.isalnum() or one == "." else "_" for one in text)


def _parse(argv: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser(prog="bash benchmarks/first_gpu.sh", description="What a GPU is asked first.")
    names = [stage.name for stage in STAGES]
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"all by default: {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=Path("runs/first-gpu"), help="folder of all results")
    parser.add_argument(
        "--minutes", type=float, default=1e6, help=f"for this command; a stage takes {BUDGET_S / 60:.0f} at most"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny cases on the CPU, to test the program")
    args = parser.parse_args(argv)
    unknown = [name for name in args.stages if name not in names]
    if unknown:
        parser.error(f"no stage is named {unknown[0]!r}; there are {', '.join(names)}")
    return args
