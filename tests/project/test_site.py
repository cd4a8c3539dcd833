"""The site is built without a warning, and no page scrolls sideways on a phone or a desktop, in Chromium where it is installed."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

pytestmark = pytest.mark.slow
WIDTHS = (400, 1400)
PAGES = ("index", "tutorial", "predict", "troubleshooting", "article-numbers", "reference/command-run", "zh-CN/start")
PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  const d = document.documentElement;
  parent.postMessage(JSON.stringify([innerWidth, d.scrollWidth <= d.clientWidth]), "*");
}, 200))</script></body>"""
FRAMES = """<pre></pre><script>addEventListener("message", e => document.querySelector("pre").append(e.data + "\\n"))</script>"""
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx")
    built = tmp_path_factory.mktemp("site")
    words = ("--fail-on-warning", "--keep-going", "--quiet", "--builder", "html", "--fresh-env", "docs", str(built))
    env = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }  # torchao's kernels need Triton itself
    command = [sys.executable, "-m", "sphinx", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=500)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return built


def test_pages_of_commands_and_modules_are_built_and_nothing_is_left_behind(site: Path) -> None:
    assert "--snapshot" in (site / "reference/command-run.html").read_text(encoding="utf-8")
    assert "mezzo.Session" in (site / "reference/module-mezzo.html").read_text(encoding="utf-8")
    assert not (ROOT / "docs/reference").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_not_scroll_sideways(page: str, site: Path, tmp_path: Path) -> None:
    source = site / f"{page}.html"
    probed, outer = source.with_name("probed.html"), site / "outer.html"
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
