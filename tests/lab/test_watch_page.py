"""The page of `lab watch` in a real browser: headless Chromium."""

import re
import shutil

import pytest
from playwright.sync_api import (
    expect,
    sync_playwright,
)

from lab.watch.answers import Watched
from lab.watch.export import exported_page
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
expect.set_options(timeout=30_000)  # machines of continuous integration are busy
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 740}


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A tab in which every message to the console, every error and every refusal fails the test."""
    messages: list[str] = []
    context = browser.new_context(viewport=DESKTOP)
    page = context.new_page()
    page.set_default_timeout(30_000)

    def note(message):
        messages.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: messages.append(str(error)))

    def note_failure(request):
        if request.failure != "net::ERR_ABORTED":  # by a reload
            messages.append(f"failed: {request.url}")

    page.on("requestfailed", note_failure)
    page.add_init_script("document.addEventListener('securitypolicyviolation',"
                         " (event) => console.error(`refused: ${event.violatedDirective}`))")
    yield page
    context.close()
    assert messages == []


@pytest.fixture
def runs_dir(tmp_path):
    path = tmp_path / "runs"
    for number, name in enumerate(("first", "second")):
        add_run(path, name, steps=200 + 100 * number)
    append(path / "second", report(310, usd=0.5, gpu_use_percent=[90, 80]))
    return path


def drawn(page, title):
    """Return the entries of a chart's legend, one for each line."""
    card = page.locator(".chart", has=page.get_by_role("heading", name=title))
    return card.locator(".u-series.line, .u-series.strong")


def open_page(page, server, choices=""):
    page.goto(f"{server.address}&{choices}")
    expect(page.locator("#news")).to_contain_text("updated")


def test_new_runs_and_points_appear_and_nothing_is_drawn_for_nothing(page, runs_dir):
    page.add_init_script("""
        window.draws = 0;
        const stroke = CanvasRenderingContext2D.prototype.stroke;
        CanvasRenderingContext2D.prototype.stroke = function (...all) {
          draws += 1;
          return stroke.apply(this, all);
        };""")
    with served(runs_dir) as server:
        open_page(page, server)
        expect(page.locator("#runs tbody tr")).to_have_count(2)
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
        append(runs_dir / "third", report(180), validation(180, 1.25))
        expect(drawn(page, "Loss").nth(1)).to_contain_text("1.2500")
        expect(first.locator(".chip")).to_have_text("running")


def test_ten_runs_have_ten_colors_also_when_others_were_drawn_before(page, runs_dir):
    for number in range(10):
        add_run(runs_dir, f"run-{number}", steps=10)
    with served(runs_dir) as server:
        open_page(page, server)
        expect(drawn(page, "Learning rate")).to_have_count(10)
        for hidden, shown in (("run-3", "first"), ("run-7", "second")):
            page.get_by_label(hidden).uncheck()
            page.get_by_label(shown).check()
        expect(drawn(page, "Learning rate")).to_have_count(10)
        colors = drawn(page, "Learning rate").locator(".u-marker").evaluate_all(
            "(marks) => marks.map((mark) => mark.style.borderColor)")
        assert len(set(colors)) == 10


def test_runs_and_axis_are_chosen_and_kept(page, runs_dir):
    with served(runs_dir) as server:
        open_page(page, server)
        loss = drawn(page, "Loss")
        expect(loss).to_have_count(4)
        page.get_by_label("first").uncheck()
        expect(loss).to_have_count(2)
        expect(loss.first).to_contain_text("second training")
        for name, ending in (("Tokens", "axis=tokens"), ("Time", "axis=time"),
                             ("Dollars", "axis=dollars")):
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
  const show = Chart.prototype.show;
  window.charts = {};
  Chart.prototype.show = function (...all) {
    charts[this.spec.keys] = this;
    show.apply(this, all);
  };
}"""
LOSS = "charts['train_loss validation_loss']"


def becomes(page, script, wanted):
    """Return whether a value on the page becomes this one in time."""
    return any(page.evaluate(script) == wanted or page.wait_for_timeout(100) for _ in range(300))


def test_a_range_is_shown_in_detail_and_the_first_losses_on_demand(page, runs_dir):
    append(add_run(runs_dir, "long", steps=0), *(report(10 * n) for n in range(1, 3001)))
    largest = f"{LOSS}.plot.scales.y.max"
    apart = f"(({{ x }}) => x[1] - x[0])({LOSS}.series.findLast(({{ x }}) => x.length > 200))"
    with served(runs_dir) as server:
        open_page(page, server)
        page.evaluate(WATCH_CHARTS)
        page.get_by_label("All losses").check()
        assert page.evaluate(largest) > 2.2
        page.get_by_label("All losses").uncheck()
        assert page.evaluate(largest) < 2 and page.evaluate(apart) == 40  # four in a point
        page.locator(".large .u-over").scroll_into_view_if_needed()
        box = page.locator(".large .u-over").bounding_box()
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


def test_hostile_texts_stay_text(page, runs_dir):
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
def test_it_fits_the_screen_and_follows_the_scheme(page, runs_dir, scheme, size):
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
        page.locator(".large .u-over").click()  # a tap does the same
        expect(page.locator(".large .u-series").first).to_contain_text("step")
        assert page.locator(".uplot canvas").first.bounding_box()["width"] > 0.8 * min(
            size["width"], 400)


def test_the_exported_page_shows_the_same_without_a_server(page, runs_dir, tmp_path):
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


def test_a_server_that_ends_or_has_another_token_is_reported(browser, runs_dir):
    context = browser.new_context()  # not `page`: this is to be seen on the console
    page = context.new_page()
    with served(runs_dir) as server:
        open_page(page, server)
        page.route("**/runs?", lambda route: route.abort())
        expect(page.locator("#news")).to_contain_text("no answer")
        expect(drawn(page, "Loss")).to_have_count(4)
        page.unroute("**/runs?")
        expect(page.locator("#news")).to_contain_text("updated")
        assert drawn(page, "Loss").count() == 4
        page.goto(server.address.replace("token=", "token=x"))  # of an earlier launch, or none
        expect(page.locator("#news")).to_have_text("open the address that lab watch has printed")
        open_page(page, server)
    context.close()
