"""Every plain example under every policy on small data, and one table of verdicts: ``make examples``.

The data are made by examples/small_data.py in the real file formats; sizes and steps are small, so a verdict says that a policy trains
here, not how good it is. The table goes to docs/examples.md.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import with_table
from mezzo.records import CompareRecord, Row, read_record

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "examples.md"
BEGIN, END = "<!-- made by make examples -->\n", "<!-- end of what make examples made -->"
POLICIES = ("fp32", "tf32", "bf16", "fp16", "bf16-master", "fp16-master", "bf16-pure", "fp16-pure", "fp8")
SMALL_BERT = ("--vocab", "{data}/text/vocab.txt", "--small")


class Example(NamedTuple):
    """One script with the arguments that make it small; ``{data}`` is the folder of small data."""

    script: str
    arguments: tuple[str, ...]
    policies: tuple[str, ...] = POLICIES


EXAMPLES = [
    Example("mnist_cnn.py", ("--data", "{data}/mnist", "--epochs", "1", "--max-steps", "12")),
    Example(
        "cifar_resnet.py",
        ("--data", "{data}/cifar-10-batches-bin", "--epochs", "1", "--max-steps", "8", "--batch-size", "32"),
    ),
    Example("bert_pretrain.py", ("--data", "{data}/text/corpus.txt", *SMALL_BERT, "--steps", "20")),
    Example(
        "bert_classify.py", ("--data", "{data}/text/labelled.tsv", *SMALL_BERT, "--epochs", "1", "--max-steps", "20")
    ),
    Example("gpt2.py", ("--data", "{data}/text/corpus.txt", "--small", "--length", "32", "--steps", "20")),
    Example("dcgan.py", ("--data", "{data}/mnist", "--steps", "8")),
    Example("diffusion.py", ("--data", "{data}/mnist", "--steps", "6", "--width", "8", "--batch-size", "16")),
    Example("cartpole.py", ("--updates", "12", "--ticks", "60")),
]
"""What runs in Mezzo's own environment; timm, Keras and Paddle have theirs."""


def compare(
    example: Example, data: Path, out: Path, *, seeds: int, policies: Sequence[str] | None = None
) -> CompareRecord:
    """Return the comparison of an example's policies; its exit code is not looked at, because a row says why."""
    arguments = [argument.format(data=data) for argument in example.arguments]
    chosen = ",".join(policies or example.policies)
    options = ["--policies", chosen, "--seeds", str(seeds), "--gpu", "none", "--out", str(out), "--fail-on", "failed"]
    command = [sys.executable, "-m", "mezzo", "compare", *options, f"examples/{example.script}", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    record = out / "record.json"
    if not record.is_file():
        raise SystemExit(f"{example.script}: no record, exit code {done.returncode}\n{done.stderr[-2000:]}")
    found = read_record(record)
    assert isinstance(found, CompareRecord)
    return found


def cell(row: Row) -> str:
    """Return a row as a cell of the table: the verdict and the loss's difference."""
    if row.loss is None or row.loss.scale != "ratio":
        return row.verdict
    return f"{row.verdict} ({100 * row.loss.difference:+.1f}%)"


def make_data(folder: Path) -> Path:
    """Write the small data below ``folder``."""
    data = folder / "data"
    subprocess.run([sys.executable, "examples/small_data.py", str(data)], cwd=ROOT, check=True, capture_output=True)
    return data


def main() -> None:
    """Compare all examples with two seeds and write the table."""
    lines = [f"| example | {' | '.join(POLICIES[1:])} |", "|---" * len(POLICIES) + "|"]
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder))
        for example in EXAMPLES:
            record = compare(example, data, Path(folder) / example.script, seeds=2)
            cells = {row.policy: cell(row) for row in record.rows}
            lines.append(f"| `{example.script}` | {' | '.join(cells.get(policy, '-') for policy in POLICIES[1:])} |")
            print(lines[-1], flush=True)
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_table(text, BEGIN, END, "\n".join(lines) + "\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
