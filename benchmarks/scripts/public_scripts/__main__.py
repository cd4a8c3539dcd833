"""Run the public scripts and print the table."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.scripts.public_scripts.outcomes import cell
from benchmarks.scripts.public_scripts.resuming import resumed_outcome
from benchmarks.scripts.public_scripts.scripts import HERE, SCRIPTS, Script
from benchmarks.shared import ROOT, options
from benchmarks.shared.harness import table
from mezzo.errors import MezzoError
from mezzo.records import read_record

COMMANDS = {
    "fp16": "run --policy fp16",
    "bf16": "run --policy bf16",
    "bf16-emulated": "run --policy bf16:arithmetic=emulated",
    "compare": "compare --policies fp32,fp16 --seeds 2 --timeout 300s",
    "audit": "audit",
    "diagnose": "diagnose --steps 40",
    "check": "check --seeds 2",
    "watch": "watch",
    "ranges": "ranges",
    "fallback": "fallback --policy fp16",
    "resume": "run --policy fp16",
}
UNLESS_NAMED = ("check", "watch", "ranges", "fallback", "resume")
"""Commands that run only if ``--commands`` names them."""
LIMIT_S = 900


def clone(script: Script, clones: Path) -> Path:
    """Return the folder of the script's repository; fetch its commit if it is not there."""
    folder = clones / script.repository.replace("/", "+")
    if not folder.exists():
        subprocess.run(["git", "init", "--quiet", folder], check=True)
    known = ["git", "-C", folder, "cat-file", "-e", f"{script.commit}^{{commit}}"]
    if subprocess.run(known, check=False, stderr=subprocess.DEVNULL).returncode:
        url = f"https://github.com/{script.repository}"
        subprocess.run(["git", "-C", folder, "fetch", "--quiet", "--depth", "1", url, script.commit], check=True)
    return folder


def variables(script: Script) -> dict[str, str]:
    """Return the environment of a run: the stand-ins, Mezzo's source, one thread, no window, and the script's own variables."""
    paths = [HERE / "standins", ROOT / "src", script.variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    own = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", **script.variables}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}


def line(script: Script, command: str) -> str:
    return f"{COMMANDS[command]} {shlex.quote(os.path.relpath(script.file, script.where))} {script.arguments}".strip()


def outcome(script: Script, command: str, repository: Path, results: Path) -> str:
    """Run one command in a new folder with the repository's files, and return its cell."""
    shutil.rmtree(results, ignore_errors=True)  # or Mezzo would write beside the record of another command line
    results.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder_of_sandboxes:
        sandbox = Path(folder_of_sandboxes, "files")
        sandbox.mkdir()
        archive: list[str | Path] = [
            "git",
            "-C",
            repository,
            "archive",
            script.commit,
            script.where,
            f":(exclude){script.leave_out}",
        ]
        files = subprocess.run(archive, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", sandbox], input=files, check=True)
        folder, environment = Path(sandbox, script.where), variables(script)
        if script.data is not None:
            script.data(folder)
        if script.prepare:
            subprocess.run(
                [sys.executable, script.prepare], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL
            )
        verb, *rest = shlex.split(line(script, command))
        words = [sys.executable, "-m", "mezzo", verb, "--out", str(results), *rest]
        if command == "resume":
            return resumed_outcome(words, sandbox, folder, environment, results)
        with (results / "output.txt").open("w", encoding="utf-8") as log:
            own = {"cwd": folder, "env": environment, "stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            try:
                done = subprocess.run(words, timeout=LIMIT_S, check=False, **own)  # type: ignore[call-overload]
            except subprocess.TimeoutExpired:
                return f"stopped after {LIMIT_S} s"
    try:
        said = cell(read_record(results / "record.json"))
    except (MezzoError, OSError):
        message = (results / "output.txt").read_text(encoding="utf-8").rpartition("mezzo: ")[2].partition("\n")[0]
        return f"exit {done.returncode}, no record: {message}"
    return said if done.returncode == 0 else f"exit {done.returncode}; {said}"


def main(argv: Sequence[str] = ()) -> None:
    """Run the selected scripts and commands, print the results, and write records, outputs and a Markdown table to ``--results``."""
    parser = options(__name__)
    parser.add_argument(
        "clones", type=Path, help="a folder with the repositories, owner+name; missing ones are fetched"
    )
    parser.add_argument("--only", default="", help="a pattern for repository, file and arguments")
    usual = ",".join(name for name in COMMANDS if name not in UNLESS_NAMED)
    parser.add_argument("--commands", default=usual, help=f"some of {', '.join(COMMANDS)} (default: %(default)s)")
    results = Path("runs/public-scripts")
    parser.add_argument("--results", type=Path, default=results, help="where records go (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the command lines and run nothing")
    asked = parser.parse_args(argv)
    chosen = [script for script in SCRIPTS if re.search(asked.only, script.name)]
    commands = asked.commands.split(",")
    if asked.list:
        for script in chosen:
            print(f"{script.repository}@{script.commit[:10]} in {script.where}: mezzo {line(script, commands[0])}")
        return

    # Before the threads start: several scripts share a repository.
    clones = {script.repository: clone(script, asked.clones.resolve()) for script in chosen}

    def row(script: Script) -> dict[str, str]:
        repository = clones[script.repository]
        folder = asked.results.resolve() / re.sub(r"\W+", "-", script.name)[:120].strip("-")
        cells = {command: outcome(script, command, repository, folder / command) for command in commands}
        print("\n".join([f"\n{script.name}", *(f"  {command}: {said}" for command, said in cells.items())]), flush=True)
        return {"script": script.name, "commit": script.commit, **cells}

    with ThreadPoolExecutor(asked.jobs) as pool:
        rows = list(pool.map(row, chosen))
    (asked.results / "outcomes.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    cells = ([row[name].replace("|", "\\|") for name in ("script", *commands)] for row in rows)
    (asked.results / "outcomes.md").write_text(table(("script", *commands), cells), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
