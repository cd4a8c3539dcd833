"""What help shows: the questions that people come with, and for each command its group, an example and its most used options."""

from __future__ import annotations

from dataclasses import dataclass

QUESTIONS = (
    ("Is mixed precision on, and what do I gain?", "mezzo audit train.py", "mezzo check train.py"),
    ("Why is my loss NaN?", "mezzo diagnose train.py"),
    ("Which GPU, and how much memory?", "mezzo predict --gpus rtx-4090,a100-80gb train.py"),
    ("Will my training resume from its checkpoints?", "mezzo resume-check train.py"),
    ("What holds my training back?", "mezzo watch train.py"),
)
"""Each with the commands that answer it."""

GROUPS = ("start", "measure", "understand", "plan", "keep")
MOST_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Page:
    """The help of a command."""

    group: str
    says: str
    """What it does, in a line."""
    example: str
    shown: tuple[str, ...]
    """The options that ``--help`` shows; ``--help-all`` shows the others, too."""


PAGES = {
    "doctor": Page(
        group="start",
        says="say which formats this machine computes in",
        example="mezzo doctor",
        shown=("--out", "--json"),
    ),
    "check": Page(
        group="start",
        says="say which precision to train in: one answer",
        example="mezzo check --budget 5m train.py --epochs 3",
        shown=("--budget", "--gpu", "--policies", "--metric", "--write-patch", "--out", "--resume", "-m"),
    ),
    "run": Page(
        group="start",
        says="run the script under a policy",
        example="mezzo run --policy bf16 train.py --epochs 3",
        shown=("--policy", "--snapshot", "--resume", "--guard", "--metric", "--seed", "--out", "-m"),
    ),
    "compare": Page(
        group="measure",
        says="train under several policies, and judge whether they train as well",
        example="mezzo compare --policies fp32,bf16 train.py --epochs 3",
        shown=("--policies", "--seeds", "--metric", "--gpus", "--fail-on", "--out", "--resume", "-m"),
    ),
    "tune": Page(
        group="measure",
        says="find the fastest way to run the script here",
        example="mezzo tune --vary batch-size=32,64 train.py",
        shown=("--vary", "--policies", "--changes", "--memory", "--budget", "--out", "--resume", "-m"),
    ),
    "watch": Page(
        group="measure",
        says="say what holds the training back",
        example="mezzo watch train.py --epochs 3",
        shown=("--out", "--log-to", "--json", "-m"),
    ),
    "audit": Page(
        group="understand",
        says="record what ran in which format, and what to change",
        example="mezzo audit --policy bf16 train.py",
        shown=("--policy", "--at", "--out", "--log-to", "--json", "-m"),
    ),
    "diagnose": Page(
        group="understand",
        says="find the first NaN or infinity, and why it appeared",
        example="mezzo diagnose --policy fp16 train.py",
        shown=("--policy", "--steps", "--out", "--log-to", "--json", "-m"),
    ),
    "ranges": Page(
        group="understand",
        says="count values by exponent, and find the window of loss scales",
        example="mezzo ranges --policy fp16 train.py",
        shown=("--policy", "--steps", "--out", "--log-to", "--json", "-m"),
    ),
    "fallback": Page(
        group="understand",
        says="find the modules that have to stay in FP32",
        example="mezzo fallback --policy fp16 train.py",
        shown=("--policy", "--tolerance", "--fresh", "--out", "--resume", "-m"),
    ),
    "predict": Page(
        group="plan",
        says="predict time and memory on GPUs that you do not have",
        example="mezzo predict --gpus rtx-4090,a100-80gb train.py",
        shown=("--gpus", "--policies", "--batch", "--model", "--gpus-per-job", "--price", "--out", "-m"),
    ),
    "resume-check": Page(
        group="keep",
        says="say whether the script's own checkpoints resume the run that was stopped",
        example="mezzo resume-check --resume-with '--resume last.pt' train.py",
        shown=("--resume-with", "--stop-after", "--notice", "--out", "--json", "-m"),
    ),
    "report": Page(
        group="keep",
        says="show records, and write pages and an index of them",
        example="mezzo report runs/",
        shown=("--open", "--serve", "--port", "--out", "--log-to", "--json"),
    ),
}
