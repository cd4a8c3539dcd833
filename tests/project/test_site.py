"""The site is built without a warning, its search answers questions, and pages do not scroll sideways, in Chromium if it is there."""

from __future__ import annotations

import fcntl
import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT, TESTS

pytestmark = pytest.mark.slow
WIDTHS = (400, 1400)
PAGES = (
    "index",
    "tutorial",
    "predict",
    "evidence/predictions",
    "troubleshooting",
    "article-numbers",
    "reference/command-run",
    "zh-CN/start",
)
PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  const d = document.documentElement;
  parent.postMessage(JSON.stringify([innerWidth, d.scrollWidth <= d.clientWidth]), "*");
}, 200))</script></body>"""
FRAMES = """<pre></pre><script>addEventListener("message", e => document.querySelector("pre").append(e.data + "\\n"))</script>"""
NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


QUESTIONS: dict[str, str] = {
    # symptoms
    "loss is NaN": "troubleshooting",
    "why does the loss become inf": "troubleshooting",
    "training does not converge": "troubleshooting",
    "accuracy lower than fp32": "troubleshooting",
    "CUDA out of memory": "troubleshooting-speed",
    "memory did not shrink with mixed precision": "troubleshooting-speed",
    "no speedup with amp": "troubleshooting-speed",
    "amp slower than fp32": "troubleshooting-speed",
    "low GPU utilization": "watch",
    "GPU not busy": "watch",
    "multiple GPUs slow": "troubleshooting-speed",
    "resume from checkpoint gives a different loss": "resume-check",
    "expected scalar type Half but found Float": "troubleshooting",
    "skipped steps": "troubleshooting",
    # tuning
    "how to choose the batch size": "tuning",
    "learning rate when the batch grows": "tuning",
    "warmup": "tuning",
    "loss scale": "tuning",
    "dynamic loss scaling": "tuning",
    "gradient accumulation": "tuning",
    "gradient checkpointing": "checkpointing",
    "fastest batch size on this machine": "tune",
    # formats and hardware
    "what is fp16": "formats",
    "difference between fp16 and bf16": "formats",
    "fp32 tf32 fp16 bf16 fp8": "formats",
    "should I use fp16 or bf16": "choosing-a-policy",
    "what are master weights": "formats",
    "overflow and underflow": "formats",
    "which GPU supports bf16": "hardware",
    "driver and CUDA version": "hardware",
    "does V100 support bf16": "hardware",
    "Tensor Cores need multiples of 8": "troubleshooting-speed",
    # models and figures of articles
    "ResNet-50 throughput A100": "article-numbers",
    "MobileNetV3 throughput": "article-numbers",
    "BERT memory": "article-numbers",
    "CIFAR-10": "examples",
    "MNIST": "examples",
    "how much memory does mixed precision save": "article-numbers",
    "which batch fits on an RTX 4090": "predict",
    "benchmark results": "benchmarks",
    # frameworks
    "migrate from torch.amp": "migrating",
    "Apex O1 O2": "apex",
    "Keras mixed_float16": "keras",
    "TensorFlow mixed precision": "keras",
    "Paddle AMP O2": "paddle",
    "Lightning precision plugin": "lightning",
    "Accelerate": "accelerate",
    "DeepSpeed": "migrating",
    "Hugging Face Trainer": "transformers",
    "DDP": "distributed",
    "FSDP": "distributed",
    "torch.compile": "fast-path",
    "channels_last": "fast-path",
    # the rest
    "what does a term mean glossary": "glossary",
    "exit codes": "exit-codes",
    "fail CI": "gate",
    "drive mezzo from a program": "agents",
    "TensorBoard": "tracking",
    "Jupyter notebook": "notebook",
    "how to read a report": "report",
    "stop training when the loss spikes": "guardrails",
    "snapshot and resume a killed job": "snapshots",
    "clip gradients before unscale": "troubleshooting",
    # Chinese: the headings and the words of the Chinese pages
    "损失变成 NaN": "zh-CN/troubleshooting",
    "为什么不收敛": "zh-CN/troubleshooting",
    "精度下降怎么办": "zh-CN/troubleshooting",
    "显存不足": "zh-CN/troubleshooting-speed",
    "没有加速": "zh-CN/troubleshooting-speed",
    "训练变慢": "zh-CN/troubleshooting-speed",
    "GPU 利用率低": "zh-CN/troubleshooting-speed",
    "多卡训练慢": "zh-CN/troubleshooting-speed",
    "断点续训": "zh-CN/troubleshooting-speed",
    "如何选择策略": "zh-CN/choosing-a-policy",
    "混合精度": "zh-CN/check",
    "损失缩放": "zh-CN/troubleshooting",
    "术语表": "zh-CN/glossary",
    "梯度累积": "zh-CN/memory",
    "重计算": "zh-CN/memory",
    "GLOG": "zh-CN/paddle",
    "NCCL 多卡": "zh-CN/distributed",
}
"""Questions as a newcomer types them into the site's search, and the page that must be among the first three that it finds."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx")
    workers = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if workers else base
    built = folder / "site"
    with (folder / "site.lock").open("w") as lock:  # each build writes docs/reference, so that two workers share one
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (built / "index.html").is_file():
            _build(built)
    return built


def _build(built: Path) -> None:
    words = ("--fail-on-warning", "--keep-going", "--quiet", "--builder", "html", "--fresh-env", "docs", str(built))
    env = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }  # torchao's kernels need Triton itself
    command = [sys.executable, "-m", "sphinx", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=500)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_pages_of_commands_and_modules_are_built_and_nothing_is_left_behind(site: Path) -> None:
    assert "--snapshot" in (site / "reference/command-run.html").read_text(encoding="utf-8")
    assert "mezzo.Session" in (site / "reference/module-mezzo.html").read_text(encoding="utf-8")
    assert not (ROOT / "docs/reference").exists()


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_search_answers_each_question_within_three_results(site: Path) -> None:
    command = [str(NODE), str(TESTS / "site_search.js"), str(site)]
    done = subprocess.run(command, input=json.dumps(list(QUESTIONS)), capture_output=True, text=True, check=True)
    missed = {}
    for (question, wanted), results in zip(QUESTIONS.items(), json.loads(done.stdout), strict=True):
        pages = list(dict.fromkeys(target.split("#")[0] for target, _ in results))
        if wanted not in pages[:3]:
            missed[question] = pages[:5]
    assert missed == {}


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_not_scroll_sideways(page: str, site: Path, tmp_path: Path) -> None:
    source = site / f"{page}.html"
    probed, outer = source.with_name(f"probed-{source.name}"), site / f"outer-{source.name}"
    probed.write_text(source.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    frames = [
        f'<iframe src="{probed.relative_to(site)}" style="width:{width}px;border:0"></iframe>' for width in WIDTHS
    ]
    outer.write_text(FRAMES + "".join(frames), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--window-size=2000,900")
    command = [str(CHROMIUM), *options, "--virtual-time-budget=5000", "--dump-dom", outer.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    told = re.search(r"<pre>(.*?)</pre>", shown, re.S)
    assert told is not None
    fits = dict(json.loads(html.unescape(line)) for line in told[1].split("\n") if line)
    assert fits == dict.fromkeys(WIDTHS, True)
