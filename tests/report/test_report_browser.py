"""Pages in a real browser: legible, named, reachable by keyboard, quiet, without requests, at every width, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from devtools import BROWSERS, CHROMIUM, Page, browser
from every_page import write_pages

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(BROWSERS)} is on the PATH"),
]
CHECKS = (Path(__file__).parent / "checks.js").read_text(encoding="utf-8")
KINDS = {  # with the number of charts that have lines
    "compare": 3,
    "check": 3,
    "predict": 2,
    "real-gpus": 3,
    "long-names": 3,
    "emulated": 3,
    "large": 3,
    "run": 4,
    "failed": 4,
    "audit": 0,
    "diagnose": 2,
    "ranges": 2,
    "fallback": 0,
    "tune": 0,
    "resume-check": 0,
    "gate": 0,
    "doctor": 0,
    "together": 0,
    "index": 1,
}
USUAL = ("compare", "check", "run", "audit", "ranges", "index")
"""Pages that are opened in every width without ``-m slow``, too: they have every part that a page can have."""
WIDTHS = (400, 800, 1400)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_pages(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.mark.parametrize("kind", [k if k in USUAL else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_a_page_passes_the_checks_at_every_width_in_light_and_dark(
    kind: str, pages: dict[str, Path], page: Page, tmp_path: Path
) -> None:
    address = pages[kind].as_uri()
    assert pages[kind].stat().st_size <= 400_000
    for width in WIDTHS:
        for dark in (False, True):
            page.open(address, width=width, dark=dark)
            seen = page.value(CHECKS)
            if seen["faults"]:
                page.picture(tmp_path / f"{kind}-{width}-{'dark' if dark else 'light'}.png")
            assert seen["faults"] == [], (width, dark)
            assert (seen["texts"] > 20, seen["charts"]) == (True, KINDS[kind])
            assert page.complaints() == []
            assert page.requests() == [address]


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 640, 641, 760, 761, 860, 861, 1120, 1179, 1180, 2000])
def test_pages_fit_between_the_widths_at_which_they_change(width: int, pages: dict[str, Path], page: Page) -> None:
    for kind in ("long-names", "audit", "index"):
        page.open(pages[kind].as_uri(), width=width)
        assert page.value(CHECKS)["faults"] == [], kind


@pytest.mark.parametrize("kind", KINDS)
def test_every_picture_and_control_has_a_name_for_a_screen_reader(
    kind: str, pages: dict[str, Path], page: Page
) -> None:
    page.open(pages[kind].as_uri(), width=800)
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "link", "textbox", "searchbox", "image", "DisclosureTriangle", "heading", "figure"}
    nameless = [
        (node["role"]["value"], node.get("backendDOMNodeId"))
        for node in nodes
        if not node.get("ignored") and node["role"]["value"] in roles - {"figure"} and not node["name"].get("value")
    ]
    assert nameless == []
    pictures = [node["name"]["value"] for node in nodes if not node.get("ignored") and node["role"]["value"] == "image"]
    assert all(any(c.isdigit() for c in words) for words in pictures)  # each says its numbers


@pytest.mark.parametrize("kind", ["compare", "audit", "index"])
def test_the_keyboard_reaches_every_control_and_shows_where_it_is(
    kind: str, pages: dict[str, Path], page: Page
) -> None:
    page.open(pages[kind].as_uri(), width=1400)
    count = page.value("""Array.from(document.querySelectorAll("a[href], button, summary, input, [tabindex='0']"))
        .filter((e) => e.checkVisibility()).length""")
    reached = []
    for _ in range(count):
        page.key("Tab")
        reached.append(
            page.value("""(() => { const e = document.activeElement;
            window.seen = window.seen || new Set(); window.seen.add(e);
            return [window.seen.size, getComputedStyle(e).outlineStyle]; })()""")
        )
    assert [number for number, _ in reached] == list(range(1, count + 1))
    assert {outline for _, outline in reached} <= {"solid", "auto"}


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"long-names", "index"}))
def test_the_answer_is_in_the_first_300_pixels(kind: str, pages: dict[str, Path], page: Page) -> None:
    page.open(pages[kind].as_uri(), width=1400)
    assert page.value("document.querySelector('h1').getBoundingClientRect().bottom") <= 300


def test_the_first_tab_skips_to_the_answer(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["compare"].as_uri(), width=800)
    page.key("Tab")
    assert page.value("document.activeElement.textContent") == "Skip to the answer"
    page.key("Enter")
    assert page.value("document.activeElement.id") == "main"


TIP = "document.querySelector('.plot .tip:not([hidden])')?.innerText"
FRAME = """(() => { const svg = document.querySelector("[data-chart=loss] svg.wide"), box = svg.getBoundingClientRect();
    const [left, , right] = svg.dataset.frame.split(" ").map(Number), [low, high] = svg.dataset.ends.split(" ").map(Number);
    svg.scrollIntoView({block: "center"}); const at = svg.getBoundingClientRect();
    return [at.left + left * at.width / 900, at.left + right * at.width / 900, low, high, at.top + at.height / 2]; })()"""


def test_the_pointer_shows_the_values_of_the_nearest_step(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["compare"].as_uri(), width=1400)
    left, right, low, high, y = page.value(FRAME)
    page.pointer("mouseMoved", left + (121.3 - low) / (high - low) * (right - left), y)
    lines = page.value(TIP).splitlines()
    assert lines[0] == "step 121"
    shown = page.value(
        "JSON.parse(document.getElementById('chart-data').textContent).loss.lines.map((l) => [l.name, l.y[120]])"
    )
    assert [line.split()[0] for line in lines[1:5]] == [name for name, _ in shown]
    for line, (_, value) in zip(lines[1:4], shown, strict=False):
        assert float(line.split()[1]) == pytest.approx(value, rel=1e-3)
    assert lines[5].startswith("fp16-pure: seed 0: not finite in steps 121 to 200")


def test_arrow_keys_move_along_the_lines(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["compare"].as_uri(), width=1400)
    page.value("document.querySelector('[data-chart=loss] .plot').focus()")
    heads = []
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.key(key)
        heads.append(page.value(TIP).splitlines()[0])
    assert heads == ["step 1", "step 2", "step 3", "step 2"]
    page.key("Escape")
    assert page.value(TIP) is None


def test_a_policy_is_hidden_in_every_chart_and_shown_again(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["compare"].as_uri(), width=1400)
    count = """Array.from(document.querySelectorAll(".wide .line")).filter((e) => e.checkVisibility()).length"""
    pressed = "Array.from(document.querySelectorAll('.keys button[value=fp16]'), (e) => e.getAttribute('aria-pressed'))"
    assert (page.value(count), page.value(pressed)) == (4 + 3 + 1, ["true", "true"])
    page.value("document.querySelector('.keys button[value=fp16]').click()")
    assert (page.value(count), page.value(pressed)) == (3 + 2, ["false", "false"])
    page.value("document.querySelector('.keys button[value=fp16]').click()")
    assert page.value(count) == 8


def test_a_range_of_steps_is_enlarged_and_shown_whole_again(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["compare"].as_uri(), width=1400)
    left, right, low, high, y = page.value(FRAME)
    ticks = """Array.from(document.querySelectorAll("[data-chart=loss] .wide .tick[text-anchor=middle]"))
        .filter((e) => e.getClientRects().length).map((e) => Number(e.textContent))"""
    whole = page.value(ticks)
    from_x, to_x = (left + (step - low) / (high - low) * (right - left) for step in (99.6, 140.4))
    page.pointer("mouseMoved", from_x, y)
    page.pointer("mousePressed", from_x, y, clicks=1)
    page.pointer("mouseMoved", to_x, y, clicks=1)
    page.pointer("mouseReleased", to_x, y, clicks=1)
    assert page.value(ticks) == [100, 110, 120, 130, 140]
    page.pointer("mouseMoved", (left + right) / 2, y)
    assert page.value(TIP).splitlines()[0] == "step 120"
    # The cross at step 121 moved with the lines: right of the middle of what is shown.
    cross = page.value("""(() => { const e = document.querySelector("[data-chart=loss] .wide .cross").getBoundingClientRect();
        return (e.left + e.right) / 2; })()""")
    assert cross == pytest.approx(left + (121 - 99.6) / 40.8 * (right - left), abs=3)
    page.value("document.querySelector('[data-chart=loss] .tools button:last-child').click()")
    assert page.value(ticks) == whole


def test_tables_sort_by_number_whatever_the_unit(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["audit"].as_uri(), width=1400)
    table = "Array.from(document.querySelectorAll('table')).find((t) => t.tHead && t.tHead.rows[0].cells.length === 8)"
    column = f"Array.from({table}.tBodies[0].rows, (row) => row.cells[6].textContent)"
    page.value(f"{table}.tHead.rows[0].cells[6].querySelector('button').click()")
    falling = page.value(column)
    assert falling == sorted(falling, key=lambda text: -float(text.split()[0]))
    page.value(f"{table}.tHead.rows[0].cells[6].querySelector('button').click()")
    assert page.value(column) == falling[::-1]
    assert page.value(f"{table}.tHead.rows[0].cells[6].getAttribute('aria-sort')") == "ascending"


def test_the_index_filters_its_records(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["index"].as_uri(), width=1400)
    page.value("document.getElementById('filter').focus()")
    for letter in "audit":
        page.key(letter)
    rows = "Array.from(document.querySelectorAll('#records tbody tr')).filter((r) => r.checkVisibility()).length"
    assert page.value(rows) == 1
    assert page.value("document.getElementById('filtered').textContent") == f"1 of {len(KINDS) - 2}"


def test_without_scripts_everything_is_there(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["compare"].as_uri(), width=1400, script=False)
    root = page.call("DOM.getDocument", depth=0)["root"]["nodeId"]
    lines = page.call("DOM.querySelectorAll", nodeId=root, selector=".wide .line")["nodeIds"]
    assert len(lines) == 8
    assert page.call("DOM.querySelectorAll", nodeId=root, selector="button:not([hidden])")["nodeIds"] == []


def test_print_is_light_and_opens_what_is_folded(pages: dict[str, Path], page: Page, tmp_path: Path) -> None:
    page.open(pages["compare"].as_uri(), width=800, dark=True, media="print")
    assert page.value("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert page.value("document.querySelector('.tools').checkVisibility()") is False
    page.value("window.dispatchEvent(new Event('beforeprint'))")
    assert page.value("document.querySelectorAll('details:not([open])').length") == 0
    page.picture(tmp_path / "print.png")


def test_a_module_leads_to_its_line(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["audit"].as_uri(), width=1400)
    page.value("document.querySelector('.tree a').click()")
    assert (
        page.value("document.querySelector('.source .named:target code').textContent")
        == "x = x.float() @ weight_11  # <b>"
    )
