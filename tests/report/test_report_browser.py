"""The page in a real browser: it draws, it fits, and it says nothing on the console."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

import record_builders as build
from mezzo.records import CompareRecord, RunRecord
from mezzo.report.html import render_html

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((path for path in map(shutil.which, BROWSERS) if path), None)
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=6000",
    "--window-size=1400,1000",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(BROWSERS)} is on the PATH"),
]

LISTEN = """<script>
window.complaints = [];
window.addEventListener("error", function (e) { complaints.push("error: " + e.message); });
window.addEventListener("unhandledrejection", function (e) { complaints.push("rejection: " + e.reason); });
document.addEventListener("securitypolicyviolation", function (e) { complaints.push("csp: " + e.blockedURI); });
["error", "warn"].forEach(function (kind) {
  console[kind] = function () { complaints.push(kind + ": " + Array.prototype.join.call(arguments, " ")); };
});
</script>"""

MEASURE = """<script>
window.addEventListener("load", function () {
  setTimeout(function () {
    var plots = Array.from(document.querySelectorAll("[data-plot]"));
    parent.postMessage({
      complaints: window.complaints,
      inner: window.innerWidth,
      scroll: document.documentElement.scrollWidth,
      outside: Array.from(document.querySelectorAll("section > *")).filter(function (e) {
        return e.getBoundingClientRect().right > window.innerWidth + 0.5;
      }).length,
      plots: plots.map(function (e) {
        return {
          name: e.dataset.plot,
          drawn: !!e.querySelector(".main-svg"),
          traces: e.querySelectorAll(".trace").length,
          width: e.querySelector(".main-svg").getBoundingClientRect().width,
          room: e.getBoundingClientRect().width
        };
      })
    }, "*");
  }, 1500);
});
</script>"""

# A window cannot be narrower than some 500 pixels; a frame can, and its media queries see its own width.
FRAME = """<!doctype html><body style="margin:0"><iframe src="page.html" style="width:{width}px;height:900px;border:0"></iframe>
<pre id="out"></pre><script>window.addEventListener("message", function (e) {{
document.getElementById("out").textContent = JSON.stringify(e.data); }});</script></body>"""


def measured(record: CompareRecord | RunRecord, width: int, folder: Path) -> dict[str, object]:
    assert CHROMIUM is not None
    page = render_html(record)
    assert page.count("<head>") == 1
    watched = page.replace("<head>", f"<head>{LISTEN}").replace("</body>", f"{MEASURE}</body>")
    (folder / "page.html").write_text(watched, encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", frame.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'<pre id="out">(.+?)</pre>', shown, re.DOTALL)
    assert found is not None, "the page reported nothing"
    return json.loads(unescape(found.group(1)))


def long_names() -> CompareRecord:
    name = "fp16:fp32_modules=encoder.layers.*.attention+head.*:init_scale=1024:growth_interval=100"
    rows = build.compare_rows()
    rows[2] = rows[2].model_copy(update={"policy": name, "reason": "because" * 40})
    runs = [build.run_record(name, error="unbroken" * 60), *build.compare_record().runs]
    return build.compare_record(rows=rows, runs=runs)


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize(
    ("record", "plots"),
    [
        (build.compare_record(), {"loss": 15, "scale": 6, "memory": 4, "times": 4}),
        (long_names(), {"loss": 16, "scale": 6, "memory": 4, "times": 4}),
        (build.run_record(error="unbroken" * 60), {"loss": 1, "scale": 2, "memory": 4, "times": 1}),
    ],
    ids=["compare", "long-names", "run"],
)
def test_page_draws_and_fits(
    record: CompareRecord | RunRecord, plots: dict[str, int], width: int, tmp_path: Path
) -> None:
    seen = measured(record, width, tmp_path)
    assert seen["complaints"] == []
    assert seen["inner"] == width
    assert seen["scroll"] <= width  # type: ignore[operator]
    assert seen["outside"] == 0
    drawn = seen["plots"]
    assert isinstance(drawn, list)
    assert {plot["name"]: plot["traces"] for plot in drawn} == plots
    assert all(plot["drawn"] and plot["width"] <= plot["room"] + 0.5 for plot in drawn)
