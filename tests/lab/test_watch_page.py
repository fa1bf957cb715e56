"""The page of `lab watch` in a real browser: headless Chromium."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from lab.watch.answers import Watched
from lab.watch.export import exported_page
from lab.watch.server import Server
from tests.support.watching import (
    HOSTILE,
    add_run,
    add_sample,
    append,
    report,
    served,
    validation,
)

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, PROGRAMS)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"needs one of {', '.join(PROGRAMS)}")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 740}


TOUCH = """(element) => {
  const { left, top } = element.getBoundingClientRect();
  element.dispatchEvent(new PointerEvent("pointermove", {
    pointerType: "touch", clientX: left + 50, clientY: top + 20, bubbles: true }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab in which every message to the console, every error and every refusal fails the test."""
    messages: list[str] = []
    context = browser.new_context(viewport=DESKTOP)
    page = context.new_page()
    page.set_default_timeout(30_000)

    def note(message: ConsoleMessage) -> None:
        messages.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: messages.append(str(error)))

    def note_failure(request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # by a reload
            messages.append(f"failed: {request.url}")

    page.on("requestfailed", note_failure)
    page.add_init_script("document.addEventListener('securitypolicyviolation',"
                         " (event) => console.error(`refused: ${event.violatedDirective}`))")
    yield page
    context.close()
    assert messages == []


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs"
    for number, name in enumerate(("first", "second")):
        add_run(path, name, steps=200 + 100 * number)
    append(path / "second", report(310, usd=0.5, gpu_use_percent=[90, 80]))
    return path


def drawn(page: Page, title: str) -> Any:
    """Return what a chart has drawn: its x values, and the label of each line of its legend."""
    card = page.locator(".chart", has=page.get_by_role("heading", name=title))
    return card.locator(".legend li")


def open_page(page: Page, server: Server, choices: str = "") -> None:
    page.goto(f"{server.address}#{choices}")
    expect(page.locator("#news")).to_contain_text("updated")


def test_points_appear_while_records_are_appended(page: Page, runs_dir: Path) -> None:
    run_dir = add_run(runs_dir, "live", steps=20, status="running")
    is_done = threading.Event()

    def train() -> None:
        for step in range(30, 100_000, 10):
            append(run_dir, report(step), *([validation(step, 1.25)] if step % 50 == 0 else []))
            if is_done.wait(0.02):
                return

    with served(runs_dir, "live") as server:
        open_page(page, server)
        row = page.locator("#runs tbody tr")
        before = row.locator("td").nth(2).inner_text()
        writer = threading.Thread(target=train)
        writer.start()
        try:
            expect(row.locator("td").nth(2)).not_to_contain_text(before.split("\n")[0])
            expect(drawn(page, "Loss").nth(1)).to_contain_text("1.2500")
            expect(row.locator(".chip")).to_have_text("running")
            assert row.locator("td").nth(2).inner_text() != before
        finally:
            is_done.set()
            writer.join()


def test_a_new_run_appears_and_nothing_is_drawn_for_nothing(page: Page, runs_dir: Path) -> None:
    page.add_init_script("""
        window.draws = 0;
        const stroke = CanvasRenderingContext2D.prototype.stroke;
        CanvasRenderingContext2D.prototype.stroke = function (...all) {
          draws += 1;
          return stroke.apply(this, all);
        };
        new MutationObserver(() => (window.said ??= []).push(
          document.getElementById("news")?.textContent)).observe(
          document, { childList: true, subtree: true });""")
    with served(runs_dir) as server:
        open_page(page, server)
        expect(page.locator("#runs tbody tr")).to_have_count(2)
        assert "reading run 2 of 2" in page.evaluate("said")
        page.wait_for_timeout(200)  # the charts' sizes settle
        before, news = page.evaluate("draws"), page.locator("#news").inner_text()
        expect(page.locator("#news")).not_to_have_text(news)
        assert page.evaluate("draws") == before > 0
        add_run(runs_dir, "third", status="running", steps=150)
        append(runs_dir / "third", report(160, usd=1.0), report(170, usd=2.0))
        expect(page.locator("#runs tbody tr")).to_have_count(3)
        first = page.locator("#runs tbody tr").first  # it trains
        expect(first).to_contain_text(re.compile(r"third.*0:00:03\s*until .*\d\d:\d\d", re.DOTALL))
        expect(first).to_contain_text(re.compile(r"\$2\.00\s*of about \$5\.00\s*at \$3600"))
        expect(drawn(page, "Learning rate")).to_have_count(3)
        assert page.evaluate("draws") > before


def test_runs_and_axis_are_chosen_and_kept(page: Page, runs_dir: Path) -> None:
    with served(runs_dir) as server:
        open_page(page, server)
        loss = drawn(page, "Loss")
        expect(loss).to_have_count(4)
        page.get_by_label("first").uncheck()
        expect(loss).to_have_count(2)
        expect(loss.first).to_contain_text("second training")
        for name, ending in (("Tokens", "x=tokens"), ("Time", "x=time"), ("Dollars", "x=dollars")):
            page.get_by_text(name, exact=True).first.click()
            page.wait_for_url(f"**/*{ending}*")
            expect(loss.first).to_contain_text("second training")
        expect(loss).to_have_count(1)
        page.get_by_label("Log scale").check()
        page.reload()
        expect(loss).to_have_count(1)  # one point has a price, and it is no validation
        expect(page.get_by_label("Log scale")).to_be_checked()
        expect(page.get_by_label("first")).not_to_be_checked()
        expect(page.get_by_label("second")).to_be_checked()
        page.get_by_label("second").uncheck()
        expect(page.get_by_text("No run is selected")).to_be_visible()
        add_run(runs_dir, "new")  # what is kept is what was hidden
        expect(page.get_by_label("new")).to_be_checked()


WATCH_CHARTS = """() => {
  const show = Chart.prototype.showValues;
  window.charts = {};
  Chart.prototype.showValues = function () {
    charts[this.spec.title] = this;
    show.call(this);
  };
}"""


def becomes(page: Page, script: str, wanted: float) -> bool:
    """Return whether a value on the page becomes this one in time."""
    return any(page.evaluate(script) == wanted or page.wait_for_timeout(100) for _ in range(300))


def test_a_range_is_shown_in_detail_and_the_first_losses_on_demand(
    page: Page, runs_dir: Path
) -> None:
    append(add_run(runs_dir, "long", steps=0), *(report(10 * n) for n in range(1, 3001)))
    largest = "charts.Loss.plot.scales.y.max"
    apart = "(({ x }) => x[1] - x[0])(charts.Loss.lines.findLast(({ run }) => run === 'long'))"
    with served(runs_dir) as server:
        open_page(page, server)
        page.evaluate(WATCH_CHARTS)
        page.locator(".large .u-over").scroll_into_view_if_needed()
        box = page.locator(".large .u-over").bounding_box()
        page.mouse.move(box["x"] + 100, box["y"] + 50)
        assert page.evaluate(largest) < 2 and page.evaluate(apart) == 40  # four in a bucket
        page.get_by_label("All losses").check()
        assert page.evaluate(largest) > 2.2
        page.get_by_label("All losses").uncheck()
        page.mouse.move(box["x"] + 100, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 300, box["y"] + 60, steps=3)
        page.mouse.up()
        expect(page.locator("#reset")).to_be_visible()
        assert becomes(page, apart, 10)
        page.locator("#reset").click()
        expect(page.locator("#reset")).to_be_hidden()
        assert becomes(page, apart, 40)
        page.mouse.dblclick(box["x"] + 100, box["y"] + 50)
        expect(page.get_by_label("All losses")).to_be_checked()


def test_hostile_texts_stay_text(page: Page, runs_dir: Path) -> None:
    run_dir = add_run(runs_dir, "hostile", status=HOSTILE, reason=HOSTILE)
    (run_dir / "heartbeat.json").write_text('{"phase": "<img src=x onerror=alert(1)>"}')
    add_sample(run_dir, 50, HOSTILE, HOSTILE)
    add_sample(run_dir, 100, "<b>", f"</pre><!-- {HOSTILE}")
    with served(runs_dir) as server:
        open_page(page, server)
        expect(page.locator("#samples pre").first).to_contain_text("</pre><!-- </script><script>")
        expect(page.locator("#samples pre").first).to_contain_text(r"\x1b[2J\u202e")
        expect(page.locator("tbody .more", has_text="</script>")).to_have_count(1)
        assert page.title() == "Training runs"
        assert page.locator("img, pre script, td script").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_fits_the_screen_and_follows_the_scheme(
    page: Page, runs_dir: Path, scheme: str, size: dict[str, int]
) -> None:
    long = add_run(runs_dir, "a-name-" + "of-many-letters-" * 7)
    add_sample(long, 50, "def ", "x" * 500)
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size(size)
    with served(runs_dir) as server:
        open_page(page, server)
        expect(drawn(page, "Loss").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 200) == (scheme == "dark")
        page.locator(".large .u-over").evaluate(TOUCH)
        expect(page.locator(".large .at")).to_contain_text("step")
        assert page.locator(".uplot canvas").first.bounding_box()["width"] > 0.8 * min(
            size["width"], 400)


def test_the_exported_page_shows_the_same_without_a_server(
    page: Page, runs_dir: Path, tmp_path: Path
) -> None:
    add_sample(runs_dir / "first", 50, HOSTILE, HOSTILE)
    with served(runs_dir) as server:
        open_page(page, server)
        live = drawn(page, "Loss").all_inner_texts()
    (tmp_path / "page.html").write_text(exported_page(Watched(runs_dir)), encoding="utf-8")
    page.goto((tmp_path / "page.html").as_uri())
    expect(page.locator("#news")).to_contain_text("as of 2")
    assert drawn(page, "Loss").all_inner_texts() == live and len(live) == 4
    page.get_by_text("Tokens", exact=True).first.click()
    expect(drawn(page, "Loss")).to_have_count(4)
    expect(page.locator("#samples pre b")).to_contain_text("</script>")
    assert page.title() == "Training runs"


def test_a_server_that_ends_is_reported(browser: Browser, runs_dir: Path) -> None:
    context = browser.new_context()  # not `page`: this is to be seen on the console
    page = context.new_page()
    with served(runs_dir) as server:
        open_page(page, server)
        page.route("**/runs?", lambda route: route.abort())
        expect(page.locator("#news")).to_contain_text("no answer", timeout=30_000)
        expect(drawn(page, "Loss")).to_have_count(4)
        page.unroute("**/runs?")
        expect(page.locator("#news")).to_contain_text("updated", timeout=30_000)
        assert drawn(page, "Loss").count() == 4
    context.close()
