"""Run stored command lines with two sources: ``python tests/project/same_runs.py REVISION [FILE]``.

Each line of ``FOLDERS`` runs once with the source of REVISION and once with the working tree's, in fresh folders that are alike.
Compared are the exit code, what the terminal shows, each record and file that is written, and the visible text of each page. What is
measured is replaced first: times, speeds, dates, temporary paths. For each run, one line says ``same``, or ``differs`` with the
lines that do; the exit code is 1 if any differs. FILE keeps the results of REVISION: the next call with it runs the working tree only.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent

FOLDERS = (
    (
        "run --policy bf16 --out bf16 scripts/plain.py 8",
        "run --policy fp16-pure --metric '\"norms\": .([0-9.]+)' --seed 3 --out bf16 scripts/plain.py 8",
        "report .",
        "report --json bf16",
        "report missing",
    ),
    ("run --policy as-is --json scripts/own_amp.py new 1024",),
    ("run --policy fp8 --policy-typo scripts/plain.py", "run --policy fp12 scripts/plain.py", "run nothing.py", "run"),
    ("run --policy bf16 -m common", "run --policy bf16 ends.py exit", "run --policy bf16 ends.py raise"),
    ("run --policy fp16 ends.py kill", "audit ends.py abort", "diagnose --policy bf16 ends.py leave"),
    ("run --policy bf16 --guard stop --out out scripts/going_wrong.py nan 70",),
    (
        "run --policy bf16 --snapshot 1h --out out ends.py stop",
        "run --policy fp16 --resume out ends.py stop",
        "run --policy bf16 --resume out --out resumed ends.py stop",
        "run --policy bf16 --resume missing ends.py stop",
        "run --policy bf16 --snapshot 1ms ends.py stop",
    ),
    ("run --policy bf16 --snapshot 1h --guard rewind:1 --out out scripts/going_wrong.py nan 70",),
    ("run --policy as-is scripts/lint_planted.py clip_norm",),
    ("run --policy bf16 scripts/out_of_memory.py fake 3",),
    ("2 x run --policy bf16 --out out scripts/ranks.py ddp 6",),
    ("compare --policies fp32,fp16 --seeds 3 --gpus none --out out scripts/plain.py 12", "report out --out pages"),
    ("compare --policies bf16,fp16 --seeds 1 --gpus none --fail-on none --json ends.py exit",),
    ("audit --policy bf16 --at 2 scripts/plain.py", "audit --json scripts/audit_cases.py softmaxes planted"),
    ("diagnose --policy fp16 faults/faults.py range_linear",),
    ("diagnose --policy fp16 faults/faults.py invalid_log",),
    ("diagnose --policy as-is --json faults/reports.py dice",),
    ("diagnose --policy fp16 --steps 4 faults/faults.py healthy_plain",),
    ("ranges --policy fp16 --steps 5 scripts/plain.py", "ranges --policy bf16 ends.py no-loss"),
    ("fallback --fresh 1 --out out scripts/fragile.py",),
    ("tune --policies as-is --changes channels-last --steps 10 --seeds 2 --out out scripts/plain.py 40",),
    ("check --budget 90s --gpu a100-80gb --policies fp16 scripts/plain.py 20",),
    (
        "predict --gpus a100-80gb,t4 --policies fp32,bf16 scripts/plain.py",
        "predict --gpus a100-80gb --policies bf16 ends.py exit",
        "predict --gpus a100-80gb --policies bf16 ends.py kill",
        "predict --gpus a100-80gb --policies bf16 --json ends.py raise",
        "predict --gpus k80 scripts/plain.py",
    ),
    ("watch scripts/plain.py 4",),
    ("resume-check --resume-with '--resume last.pt' --stop-after 7 scripts/resume_faults.py --without optimizer",),
    ("doctor", "doctor --json"),
    ("run --policy bf16 examples/digits.py --epochs 1", "run --policy as-is examples/session_digits.py --epochs 1"),
    (
        "run --policy bf16 apexes.py",
        "python -m mezzo.compat.apex apexes.py",
        "python -m mezzo.compat.apex ends.py exit",
        "python -m mezzo.compat.apex --without-amp -m common",
        "python -m mezzo.compat.apex nothing.py",
    ),
    ("--help", "compare --help-all", "--version"),
)
"""Command lines of mezzo by the folder that they share. A line may begin with ``2 x`` for two processes, or with ``python``."""

ENDS = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
word = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
step = 0
for (inputs,) in loader:
    loss = model(inputs).square().mean()
    if word != "no-loss":
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    step += 1
    print("step", step, loss.item(), flush=True)
    if step == 2:
        {
            "exit": lambda: sys.exit(3),
            "raise": lambda: [].pop(),
            "kill": lambda: os.kill(os.getpid(), 9),
            "abort": os.abort,
            "leave": lambda: os._exit(4),
            "stop": lambda: os.kill(os.getpid(), 15),
        }.get(word, lambda: None)()
"""
"""A training that ends in its second step as its argument says."""
APEXES = """
import torch
from apex import amp
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1")
for step in range(4):
    loss = model(torch.ones(8, 4)).square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    print("loss", loss.item())
"""

_LIMIT_S = 240.0
_LINES_SHOWN = 30
_RUNS_AT_ONCE = 2

_NUMBER = r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
_MEASURED_TEXT = (
    (r"\d{4}-\d\d-\d\d(?:[T -]\d{6}|[T ]\d\d:\d\d(?::\d\d)?)?(?:\.\d+)?(?: UTC|\+00:00)?", "DATE"),
    (r"/tmp/\S*?(?=[\s\"',;)\]]|$)", "TEMPORARY"),
    (r"\[\d+:\d\d, \d+:\d\d left\]", "[# left]"),
    (rf"{_NUMBER}\s?(?:ns|us|µs|ms|s|min|h)\b(?!\w)", "# s"),
    (rf"{_NUMBER}\s?((?:steps|samples|inputs|tokens)/s|/s|GB/s|x\b|times\b)", r"# \1"),
    (rf"{_NUMBER} to {_NUMBER}(?= x|x|\)| #|$)", "# to #"),
    (r"\bpid \d+|process \d{3,}", "PROCESS"),
    (r"MASTER_PORT=\d+", "MASTER_PORT=PORT"),
    (r"0x[0-9a-f]{6,}", "ADDRESS"),
    (r"(#(?: \w+)?)(?:\s*\1)+", r"\1"),
)
"""What the text of a terminal, a page or a record shows of measurements, and what stands for it."""
_MEASURED_FIELD = re.compile(
    r"(_ms|_us|_s|_w|_mhz|_c|_low|_high)$|^(ms|date|throughput|speedup|shares|utilization|cost_per_million|low|high|noise|started_at_s"
    r"|largest_throughput|seeds_needed|over_fp32|over_tf32|times|pid)$"
)
"""Fields of records that are measured: numbers in them are replaced."""
_LEFT_OUT = ("request_sha256", "MASTER_PORT", "bottleneck")
"""Fields of records that differ in every folder, or that a loaded machine changes."""
_LEFT_OUT_TITLE = "What holds it back"
_MEASURED_TITLE = re.compile("time|speed|throughput", re.IGNORECASE)
"""The titles of sections whose charts and tables of numbers are measured."""
_WRAPPED = 60
"""Characters of a line that may have been wrapped, at the width of a table of measured numbers."""
_TYPED_FIELDS = ("budget_s", "every_s")
_LIVE = re.compile(r"^mezzo: .*(?:running|step \d+(?: of \d+)?), .*\d+ (?:s|min)$|^\[W\d{3}")
"""Lines that come or not, by how fast the machine is."""

Result = dict[str, list[str]]
"""What one command line left, as lines, by where: its exit code, the terminal, and each file that it wrote."""


class PageText(HTMLParser):
    """The visible text of a page: one line for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self._inside, self._title = [""], Counter[str](), ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._inside[tag] += tag in ("script", "style", "svg", "table", "figure", "h2")
        if tag == "h2":
            self._title = ""
        if tag not in ("a", "b", "code", "em", "i", "strong"):
            self.lines.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside[tag] -= self._inside[tag] > 0

    def handle_data(self, data: str) -> None:
        if self._inside["script"] or self._inside["style"]:
            return
        if self._inside["h2"]:
            self._title += data
        elif self._title == _LEFT_OUT_TITLE:
            return
        measured = _MEASURED_TITLE.search(self._title) and (self._inside["table"] or self._inside["figure"])
        if measured or self._inside["svg"]:  # the ticks of a chart follow what it shows
            data = re.sub(_NUMBER, "#", data)
        self.lines[-1] += data


def text_lines(text: str, folder: Path) -> list[str]:
    """Return the lines of a text without what is measured; runs of spaces and of lines in tables count as one."""
    kept: list[str] = []
    for line in unwrapped_lines(text.replace(str(folder.parent), "PLACE")):
        for pattern, replacement in _MEASURED_TEXT:
            line = re.sub(pattern, replacement, line)
        line = re.sub(r"[─━═│╭╮╰╯┃\s]+", " ", line).strip()
        if line and kept[-1:] != [line]:
            kept.append(line)
    return kept


def unwrapped_lines(text: str) -> Iterator[str]:
    """Yield a line for each sentence of wrapped prose, and each other line as it is."""
    prose = ""
    for line in [*text.splitlines(), ""]:
        if _LIVE.match(line):
            continue
        long = len(line) > _WRAPPED and "  " not in line.strip() and not line.startswith("mezzo: ")
        if long or (prose and line):
            prose = f"{prose} {line.strip()}"
        if not long:
            yield from re.split(r"(?<=[.:]) (?=[A-Z])", prose) if prose else [line]
            prose = ""


def record_lines(value: Any, folder: Path, path: str = "", *, measured: bool = False) -> Iterator[str]:
    """Yield a line for each value of a record, with its path, without what is measured."""
    if isinstance(value, dict):
        for name, one in value.items():
            if name in _LEFT_OUT:
                continue
            inside = measured or (bool(_MEASURED_FIELD.search(name)) and name not in _TYPED_FIELDS)
            yield from record_lines(one, folder, f"{path}.{name}", measured=inside)
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from record_lines(one, folder, f"{path}[{number}]", measured=measured)
    elif isinstance(value, float | int) and not isinstance(value, bool) and measured:
        yield f"{path}: #"
    elif isinstance(value, str):
        yield f"{path}: {' / '.join(text_lines(value, folder))}"
    else:
        yield f"{path}: {value}"


def file_lines(file: Path, folder: Path) -> list[str]:
    """Return what a file says that a command wrote."""
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".html":
        page = PageText()
        page.feed(text)
        return text_lines("\n".join(page.lines), folder)
    if file.suffix == ".json":
        return list(record_lines(json.loads(text), folder))
    return text_lines(text, folder)


def terminal_lines(text: str, folder: Path) -> list[str]:
    """Return what a terminal shows; a record that is printed counts as one."""
    before, bracket, printed = text.partition("{\n")
    if not bracket:
        return text_lines(text, folder)
    try:
        record, end = json.JSONDecoder().raw_decode(bracket + printed)
    except ValueError:
        return text_lines(text, folder)
    return [*text_lines(before + (bracket + printed)[end:], folder), *record_lines(record, folder)]


def ended(line: str, folder: Path, known: dict[str, str]) -> tuple[list[int], str]:
    """Run a command line in its folder; return how its processes ended and what they showed."""
    size, line = (2, line.removeprefix("2 x ")) if line.startswith("2 x ") else (1, line)
    words = shlex.split(line)
    command = [sys.executable, *(words[1:] if words[:1] == ["python"] else ["-m", "mezzo", *words])]
    if size > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            known = known | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            known["MASTER_PORT"] = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | known | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for rank in range(size)
    ]
    try:
        shown = [process.communicate(timeout=_LIMIT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [process.returncode for process in started], "\n".join(shown)


def results_of(lines: tuple[str, ...], source: Path, number: int) -> list[Result]:
    """Run the command lines of one folder with a source; return what each left."""
    folder = source.parent / f"run{number:02}"
    for name in ("tests/scripts", "tests/faults", "examples"):
        shutil.copytree(ROOT / name, folder / Path(name).name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "ends.py").write_text(ENDS)
    (folder / "apexes.py").write_text(APEXES)
    shutil.copy(ROOT / "tests/scripts/common.py", folder)
    known = {"PYTHONPATH": str(source), "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "240", "TERM": "dumb"}
    known |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "LC_ALL": "C.UTF-8"}
    found: list[Result] = []
    seen: dict[Path, int] = {}
    for line in lines:
        codes, shown = ended(line, folder, known)
        result = {"exit code": [str(code) for code in codes], "terminal": terminal_lines(shown, folder)}
        for suffix in ("json", "html", "toml", "md", "diff", "patch"):
            for file in sorted(folder.rglob(f"*.{suffix}")):
                changed = file.stat().st_mtime_ns
                if seen.get(file) == changed or "cache" in file.relative_to(folder).parts:
                    continue
                seen[file] = changed
                result[text_lines(str(file.relative_to(folder)), folder)[0]] = file_lines(file, folder)
        found.append(result)
    return found


def with_sources(sources: list[Path]) -> list[dict[str, Result]]:
    """Return the results of all command lines with each source."""
    jobs = [(lines, source, number) for number, lines in enumerate(FOLDERS) for source in sources]
    with ThreadPoolExecutor(_RUNS_AT_ONCE) as pool:
        found = list(pool.map(lambda job: results_of(*job), jobs))
    results: list[dict[str, Result]] = [{} for _ in sources]
    for (lines, source, _), of_lines in zip(jobs, found, strict=True):
        results[sources.index(source)] |= dict(zip(lines, of_lines, strict=True))
    return results


def differences(before: Result, after: Result) -> list[str]:
    """Return the lines in which two results differ, each under where it was read."""
    lines: list[str] = []
    for name in dict.fromkeys([*before, *after]):
        compared = difflib.unified_diff(before.get(name, []), after.get(name, []), lineterm="", n=0)
        changed = [line for line in compared if not line.startswith(("---", "+++", "@@"))]
        lines += [f"    {name}", *(f"        {line[:200]}" for line in changed)] if changed else []
    return lines


def revision_source(revision: str, place: Path) -> Path:
    """Unpack the source of a revision."""
    archive = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, capture_output=True, check=True)
    place.mkdir()
    subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
    return place / "src"


def main(revision: str, kept: Path | None = None) -> int:
    """Print for each command line whether its results are the same; return the exit code."""
    commit = subprocess.run(["git", "rev-parse", revision], cwd=ROOT, capture_output=True, text=True, check=True)
    known = json.loads(kept.read_text(encoding="utf-8")) if kept is not None and kept.exists() else {}
    if known and (known["commit"], list(known["results"])) != (
        commit.stdout.strip(),
        [line for lines in FOLDERS for line in lines],
    ):
        raise SystemExit(f"{kept} is of another revision, or of other command lines: delete it, or name another file")
    with tempfile.TemporaryDirectory(prefix="same-") as name:
        place = Path(name).resolve()
        shutil.copytree(ROOT / "src", place / "b" / "src", ignore=shutil.ignore_patterns("__pycache__"))
        sources = [place / "b" / "src"]
        if not known:
            sources.insert(0, revision_source(revision, place / "a"))
        *of_revision, after = with_sources(sources)
        before: dict[str, Result] = of_revision[0] if of_revision else known["results"]
    if kept is not None and not known:
        kept.write_text(json.dumps({"commit": commit.stdout.strip(), "results": before}, indent=1), encoding="utf-8")
    differing = 0
    for line in after:
        changed = differences(before[line], after[line])
        differing += bool(changed)
        print(f"{'differs' if changed else 'same'}: {line}")
        print("".join(f"{one}\n" for one in changed[:_LINES_SHOWN]), end="")
        if len(changed) > _LINES_SHOWN:
            print(f"    and {len(changed) - _LINES_SHOWN} more lines")
    print(f"{len(after) - differing} of {len(after)} runs are the same")
    return 1 if differing else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None))
