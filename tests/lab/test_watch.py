"""`lab watch`: its points, its server, its command, its page in Chromium."""

import gzip
import json
import math
import re
import shutil
import socket
import statistics

import pytest

from lab.watch.answers import MAX_POINTS, Columns, Watched, points_of
from lab.watch.server import FILES, MAX_CONNECTIONS, STATIC, Server, exported_page
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.optional import package
from tests.support.watching import (
    HOSTILE,
    add_run,
    add_sample,
    append,
    ask,
    lines,
    report,
    served,
    validation,
)

playwright_api = package("playwright.sync_api")


def expect(element):
    return playwright_api.expect(element)


PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, PROGRAMS)), None)


# Reading records that grow


def steps_of(columns):
    return [step + 1 for step in columns.read()["global_step"]]


def test_only_appended_whole_lines_are_parsed(runs_dir, monkeypatch):
    run_dir = add_run(runs_dir, "live", steps=30)
    columns, line, parsed = Columns(run_dir), lines(report(40, mfu="x")), []
    assert steps_of(columns) == [10, 20, 30]

    def parse(text):
        parsed.append(text)
        return [*map(json.loads, text.splitlines())]

    monkeypatch.setattr("lab.watch.answers.valid_records", parse)
    for part, steps in (
        (line[:40], [10, 20, 30]),
        (line[40:-1], [10, 20, 30]),
        ("\n", [10, 20, 30, 40]),
        ("", [10, 20, 30, 40]),
    ):
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(part)
        assert steps_of(columns) == steps
    assert parsed == [line]


def test_a_file_that_was_replaced_is_read_anew(runs_dir):
    run_dir = add_run(runs_dir, "live", steps=40)
    path, columns = run_dir / "metrics.jsonl", Columns(run_dir)
    assert steps_of(columns) == [10, 20, 30, 40]
    path.with_name("new").write_text(lines(report(10), report(33)))
    path.with_name("new").replace(path)
    assert steps_of(columns) == [10, 33]
    path.write_text(lines(report(20)))
    assert steps_of(columns) == [20]
    path.unlink()
    assert steps_of(columns) == []


def points(runs_dir, name, **options):
    found = Watched(runs_dir).run(name, **options)
    return found["x"], found["lines"]


def hand_thinned(records, keys):
    """Compute the points of records one by one; return them with the rows of each."""
    size = 1
    while len(records) > size * MAX_POINTS:
        size *= 2
    parts = [records[begin : begin + size] for begin in range(0, len(records), size)]
    lines_of = {}
    for key in keys:
        lines_of[key] = [[row[key] for row in part if key in row] for part in parts]
    return [part[-1]["global_step"] + 1 for part in parts], lines_of


@pytest.mark.parametrize("count", [0, 1, MAX_POINTS, MAX_POINTS + 1, 3000])
def test_points_are_bounded_and_keep_means_spikes_sums_and_validations(runs_dir, count):
    records = []
    for number in range(1, count + 1):
        loss = 1 + number * 7 % 13
        losses = {"train_loss": loss, "train_loss_min": loss, "train_loss_max": loss}
        records.append(report(10 * number, **losses, usd=float(number)))
        if number % 100 == 0:
            records.append(validation(10 * number, 2.0 + number % 3) | {"usd": float(number)})
    append(add_run(runs_dir, "long", steps=0), *records)
    for within, chosen in (
        (None, records),
        # A range has one row before it and one after it.
        (("steps", 505.0, 1000.0), records[49:102] or records[-1:]),
    ):
        x, found = points(runs_dir, "long", within=within)
        steps, wanted = hand_thinned(chosen, ("train_loss", "validation_loss", "usd"))
        assert x["steps"] == steps and len(steps) <= MAX_POINTS
        for key, values in wanted.items():
            if not any(values):
                assert key not in found
                continue
            statistic = max if key == "usd" else statistics.fmean
            y = [statistic(numbers) if numbers else None for numbers in values]
            assert found[key]["y"] == pytest.approx(y)
            if "high" in found[key]:
                for extreme, of in (("low", min), ("high", max)):
                    extremes = [of(numbers) if numbers else None for numbers in values]
                    assert found[key][extreme] == pytest.approx(extremes)


def test_numbers_of_gpus_become_a_mean_and_the_extremes(runs_dir):
    gpus = {"gpu_power_w": [100, 300], "gpu_memory_gib": [1.0, None, 3.0]}
    throttling = ["sw power cap", "hw slowdown"]
    append(add_run(runs_dir, "gpus", steps=10), report(20, **gpus, gpu_throttling=throttling))
    _, found = points(runs_dir, "gpus")
    assert {key: line for key, line in found.items() if key.startswith("gpu")} == {
        "gpu_power_w": {"y": [None, 200], "low": [None, 100], "high": [None, 300]},
        "gpu_memory_gib": {"y": [None, 2], "low": [None, 1], "high": [None, 3]},
        "gpus_slowed_down": {"y": [None, 1]},
    }


@pytest.mark.parametrize(
    "odd", ["no JSON", {"mfu": "x"}, {"global_step": 2.5}, {"gpu_power_w": [None, "x"]}]
)
def test_an_odd_line_among_many_changes_no_other(runs_dir, odd):
    """Without one pyarrow parses them all; an odd one is left out, as each command does."""
    records = [
        report(
            step,
            mfu=0.4,
            gpu_power_w=[100, step],
            gpu_throttling=["", "hw slowdown"],
            train_loss=[None, 2.5][step % 2],
            layer_grad_norm=[1.0],
        )
        for step in range(1, 200)
    ]
    for name in ("good", "odd"):
        append(add_run(runs_dir, name, steps=0), *records)
    with (runs_dir / "odd/metrics.jsonl").open("a") as file:
        file.write("no JSON\n" if odd == "no JSON" else lines(report(300, **odd)))
    assert points(runs_dir, "odd") == points(runs_dir, "good")


# Points


def with_sets(step, **losses):
    """Return the record of a validation with other sets than the first one."""
    record = validation(step, 2.0) | {"validation_perplexity": 7.4}
    return record | {f"validation_loss/{name}": loss for name, loss in losses.items()}


def test_validation_sets_have_lines_also_where_they_come_later(runs_dir):
    run_dir = add_run(runs_dir, "run", steps=50)
    columns = Columns(run_dir)
    assert not any("/" in key for key in points_of(columns.read())["lines"])
    append(run_dir, with_sets(60, code=3.25, code_max=9.0))
    columns.read()
    append(run_dir, report(70), with_sets(90, **{"../x": 1.0}))  # no name of a set
    append(run_dir, with_sets(100, code="x"), with_sets(110, code=2.5))  # an odd line
    found = points_of(columns.read())
    assert found == points_of(Columns(run_dir).read())  # read at once
    assert not any(".." in key for key in columns.read())
    for name, losses in (("code", [3.25, 2.5]), ("code_max", [9.0])):
        assert [y for y in found["lines"][f"validation_loss/{name}"]["y"] if y] == losses


def test_a_growth_is_where_the_steps_with_all_layers_begin(runs_dir):
    run_dir = add_run(runs_dir, "grows", steps=40)
    before = Watched(runs_dir).run("grows")
    assert before["growths"] == []
    record = {"global_step": 40, "num_layers": 4, "tokens": 41 * 2048, "seconds": 4.5}
    append(run_dir, record, report(50))
    growth = {"n_layers": 4, "steps": 41, "tokens": 41 * 2048, "time": 4.5}
    growth["dollars"] = before["x"]["dollars"][-1]  # the record has none without a price
    assert Watched(runs_dir).run("grows")["growths"] == [growth]
    for within, growths in ((("steps", 1, 20), []), (("steps", 38, 45), [growth])):
        assert Watched(runs_dir).run("grows", within)["growths"] == growths


def test_an_axis_never_goes_back(runs_dir):
    append(
        add_run(runs_dir, "odd", steps=0),
        report(10),
        report(30),
        report(20, seconds=9.0),
        report(40, seconds=1.0, train_loss=1e30),
    )
    x, found = points(runs_dir, "odd")
    assert x["steps"] == [10, 30, 40] and x["time"] == [1, 3, 9] and x["dollars"] == [None] * 3
    assert [y is None for y in found["train_loss"]["y"]] == [False, False, True]  # no measurement


# The server


def json_of(server, path):
    response, body = ask(server, path)
    assert response.status == 200, body
    assert response.headers["Content-Type"].startswith("application/json")
    return json.loads(body)


def test_the_page_and_its_questions_are_answered(runs_dir):
    add_sample(add_run(runs_dir, "a", steps=2000), 50, "def ", HOSTILE)
    with served(runs_dir) as server:
        assert server.server_address[0] == "127.0.0.1"  # this machine only
        for path, name in FILES.items():
            response, body = ask(server, path, token=None)  # a browser has none to send
            assert response.status == 200 and body == (STATIC / name).read_bytes()
        assert json_of(server, "/run?run=a&x=steps&from=41&to=59")["x"]["steps"] == [40, 50, 50, 60]
        found = json_of(server, "/run?run=a")
        assert found["x"]["tokens"][-1] == 2000 * 2048
        (sample,) = found["samples"]
        assert sample["step"] == 50
        assert "\\x1b[2J" in sample["text"] and "\x1b" not in sample["text"]
        response, body = ask(server, "/run?run=a", **{"Accept-Encoding": "gzip"})
        assert response.headers["Content-Encoding"] == "gzip"
        assert json.loads(gzip.decompress(body)) == found
        add_run(runs_dir, "new")
        assert [run["name"] for run in json_of(server, "/runs")["runs"]] == ["a", "new"]


@pytest.mark.parametrize(
    "path",
    [
        "/x",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/page.js",
        "/runs/",
        "/page.html",
        "/server.py",
        "/run",
        "/run?run=",
        "/run?run=..",
        "/run?run=../outside",
        "/run?run=%2e%2e%2foutside",
        "/run?run=a/../a",
        "/run?run=a%00",
        "/run?run=.hidden",
        "/run?run=other",
        "/run?run=a&x=secret&from=1&to=2",
        "/run?run=a&x=steps",
        "/run?run=a&x=steps&from=1&to=x",
        "/run?" + "&".join(f"a{n}=1" for n in range(20)),
        "//[/runs",
    ],
)
def test_nothing_else_can_be_read(runs_dir, tmp_path, path):
    add_run(runs_dir, "a"), add_run(runs_dir, "other"), add_run(tmp_path, "outside")
    add_run(runs_dir, "x"), (runs_dir / "x").rename(runs_dir / ".hidden")
    with served(runs_dir, "a") as server:
        assert [run["name"] for run in json_of(server, "/runs")["runs"]] == ["a"]
        response, body = ask(server, path)
        assert response.status == 404 and body == b"404 Not Found\n"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:8765"}, 200),
        ({"Host": "[::1]:1"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "localhost:1", "Sec-Fetch-Site": "cross-site"}, 200),  # a link on another site
        ({"Host": "evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "192.168.0.7:8765"}, 403),
        ({"Host": "127.0.0.1.evil.example:8765"}, 403),
        ({"Host": "localhost:8765@evil.example"}, 403),
    ],
)
def test_other_hosts_are_refused_and_links_are_followed(runs_dir, headers, status):
    with served(runs_dir) as server:
        for path in ("/", "/runs"):
            response, body = ask(server, path, **headers)
            assert response.status == status
            assert status == 200 or body == b"403 Forbidden\n"


def test_nobody_without_the_token_learns_anything(runs_dir):
    """Neither another user of the machine, who can connect, nor another site's page."""
    add_run(runs_dir, "a")
    with served(runs_dir) as server, served(runs_dir) as other:
        for path in ("/runs", "/run?run=a", "/none"):
            for token in (None, "", "é", server.token[:-1], other.token):
                response, body = ask(server, path, token=token)
                assert response.status == 403 and body == b"403 Forbidden\n"
            assert ask(server, f"{path}&token={server.token}", token=None)[0].status == 403


def test_a_proxy_may_have_a_name_that_is_allowed(runs_dir, monkeypatch):
    allowed = []
    with monkeypatch.context() as patch:
        patch.setattr(Server, "serve_forever", lambda server: allowed.append(server.allowed_hosts))
        succeeded(watch(runs_dir, "--port", "0", "--allow-host", "Train.example"))
    with served(runs_dir) as server:
        assert ask(server, "/", Host="train.example")[0].status == 403
        (server.allowed_hosts,) = allowed
        assert ask(server, "/", Host="TRAIN.example")[0].status == 200
        assert ask(server, "/", Host="other.train.example")[0].status == 403
    for name in ("page.html", "page.js"):  # so a proxy may add a prefix to the path
        assert not re.search(r"""(href|src)="/|fetch\([`"']/""", (STATIC / name).read_text())


def test_links_inside_of_a_run_directory_are_not_followed(runs_dir, tmp_path):
    add_run(runs_dir, "a")
    other = add_run(tmp_path, "other", steps=30)
    add_sample(other, 10, "def ", "secret")
    for name in ("metrics.jsonl", "samples.jsonl"):
        (runs_dir / "a" / name).unlink(missing_ok=True)
        (runs_dir / "a" / name).symlink_to(other / name)
    found = Watched(runs_dir).run("a")
    assert found["samples"] == [] and not found["lines"]


def test_idle_connections_are_bounded_and_do_not_keep_the_owner_out(runs_dir):
    with served(runs_dir) as server:
        idle = [
            socket.create_connection(("127.0.0.1", server.server_port), timeout=30)
            for _ in range(100)
        ]
        assert json_of(server, "/runs")["runs"] == []
        assert idle[0].recv(1) == b""  # closed: too many came after it
        assert len(server._connections) <= MAX_CONNECTIONS
        for connection in idle:
            connection.close()


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"<script>\r\n\r\n", 400),
        (b"GET /runs\r\n\r\n", 403),
        (b"GET /evil HTTP/x\r\n\r\n", 400),
        (b"GET /runs HTTP/1.1\r\n\r\n", 403),
        (b"GET /evil HTTP/9.0\r\n\r\n", 505),
        (b"GET /runs HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", 403),
        (b"GET /evil" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        *(
            (method + b" /runs HTTP/1.1\r\nHost: localhost\r\n\r\n", 501)
            for method in (b"POST", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"evil")
        ),
    ],
)
def test_what_is_no_request_of_the_page_gets_an_answer_that_does_not_repeat_it(
    runs_dir, request_text, status
):
    with (
        served(runs_dir) as server,
        socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as client,
    ):
        client.sendall(request_text)
        answer = b"".join(iter(lambda: client.recv(2**16), b""))
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"<script>" not in answer and b"evil" not in answer
    assert b"default-src 'none'" in answer


def test_a_run_that_is_removed_meanwhile_is_no_error(runs_dir):
    run_dir = add_run(runs_dir, "a")
    with served(runs_dir) as server:
        assert json_of(server, "/run?run=a")["lines"]
        shutil.rmtree(run_dir)
        assert json_of(server, "/runs")["runs"] == []
        assert ask(server, "/run?run=a")[0].status == 404
        runs_dir.rmdir()
        assert json_of(server, "/runs")["runs"] == []


# The command


def watch(runs_dir, *arguments):
    return run_lab("watch", "--runs-dir", str(runs_dir), *arguments)


def test_the_command_says_where_the_page_is_and_ends_quietly(runs_dir, monkeypatch):
    tokens = []

    def interrupt(server):
        tokens.append(server.token)
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupt)
    output = succeeded(watch(runs_dir, "--port", "0")).output
    (port,) = set(re.findall(r"127\.0\.0\.1:(\d+)", output))
    assert f"http://127.0.0.1:{port}/#token={tokens[0]}" in output and len(tokens[0]) > 20
    assert f"ssh -N -L {port}:127.0.0.1:{port}" in output and "Aborted" not in output


def test_errors_of_the_command_are_one_line(runs_dir, tmp_path):
    add_run(runs_dir, "a")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, message in (
            (("--port", port), f"port {port}"),
            (("b",), "no run 'b'; trained runs: a"),
            (("--export", str(tmp_path / "none/page.html")), "cannot be written"),
        ):
            assert message in error_line(watch(runs_dir, *arguments))


def test_the_exported_page_holds_everything_once_and_allows_nothing_else(runs_dir, tmp_path):
    """In Chromium, below, it works under its policy."""
    run_dir = add_run(runs_dir, "a", reason=HOSTILE)
    add_sample(run_dir, 50, HOSTILE, f"<!-- {HOSTILE} ]]> \u2028")
    append(run_dir, report(110, train_loss=1.23456))
    succeeded(watch(runs_dir, "--export", str(tmp_path / "page.html")))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; script-src 'nonce-")
    assert "unsafe" not in policy and "http" not in policy
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert not re.search("[<>&\u2028]", data)
    found = json.loads(data)["run"]["a"]
    assert found["x"]["tokens"][0] == 20480
    assert data.count("1.23456") == 2  # in the table and in the chart, for all axes
    assert "<img src=x onerror" in found["samples"][0]["text"]
    assert not re.search(r'(src|href)="(?!data:,")', page.replace(data, ""))


# The page in headless Chromium


@pytest.fixture(scope="module")
def browser(request):
    if request.config.getoption("--quick"):
        pytest.skip("starts a process")
    if CHROMIUM is None:
        pytest.skip(f"needs one of {', '.join(PROGRAMS)}")
    playwright_api.expect.set_options(timeout=30_000)  # machines of continuous integration are busy
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A tab in which every message to the console, every error and every refusal fails the test."""
    messages = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on(
        "requestfailed",
        lambda request: (
            messages.append(f"failed: {request.url}")
            if request.failure != "net::ERR_ABORTED"
            else None
        ),
    )  # that is a reload
    page.add_init_script(
        "document.addEventListener('securitypolicyviolation',"
        " (event) => console.error(`refused: ${event.violatedDirective}`))"
    )
    yield page
    context.close()
    assert messages == []


@pytest.fixture
def two_runs(runs_dir):
    for number, name in enumerate(("first", "second")):
        add_run(runs_dir, name, steps=200 + 100 * number)
    append(runs_dir / "second", report(310, usd=0.5, gpu_use_percent=[90, 80]))
    return runs_dir


def drawn(page, title):
    """Return the entries of a chart's legend, one for each line."""
    card = page.locator(".chart", has=page.get_by_role("heading", name=title))
    return card.locator(".u-series.line, .u-series.strong")


def open_page(page, server, choices=""):
    page.goto(f"{server.address}&{choices}")
    expect(page.locator("#news")).to_contain_text("updated")


def test_new_runs_and_points_appear_and_nothing_is_drawn_for_nothing(page, two_runs):
    page.add_init_script("""
        window.draws = 0;
        const stroke = CanvasRenderingContext2D.prototype.stroke;
        CanvasRenderingContext2D.prototype.stroke = function (...all) {
          draws += 1;
          return stroke.apply(this, all);
        };""")
    with served(two_runs) as server:
        open_page(page, server)
        expect(page.locator("#runs tbody tr")).to_have_count(2)
        for _ in range(2):  # before the first one the charts' sizes settle
            before, news = page.evaluate("draws"), page.locator("#news").inner_text()
            expect(page.locator("#news")).not_to_have_text(news)
        assert page.evaluate("draws") == before > 0
        add_run(two_runs, "third", status="running", steps=150)
        append(
            two_runs / "third",
            report(160, usd=16.0, usd_at_end=20.0),
            report(170, usd=17.0, usd_at_end=20.0),
        )
        expect(page.locator("#runs tbody tr")).to_have_count(3)
        first = page.locator("#runs tbody tr").first  # it trains
        expect(first).to_contain_text(re.compile(r"third.*0:00:03\s*until .*\d\d:\d\d", re.DOTALL))
        expect(first).to_contain_text(re.compile(r"\$17\.00\s*of about \$20\.00\s*at \$3600"))
        expect(drawn(page, "Learning rate")).to_have_count(3)
        assert page.evaluate("draws") > before
        append(two_runs / "third", report(180), validation(180, 1.2500499))
        expect(drawn(page, "Loss").nth(1)).to_contain_text("1.2500")
        append(two_runs / "third", report(190), validation(190, 1.23454996))
        expect(drawn(page, "Loss").nth(1)).to_contain_text("1.2345")  # not rounded twice
        expect(first.locator(".chip")).to_have_text("running")


def test_losses_of_different_tokenizers_are_in_bits_per_byte(page, runs_dir):
    for name, length in (("long", 4.0), ("short", 1.0), ("unknown", None)):
        run_dir = add_run(runs_dir, name, steps=90, tokenizer=f"that of {name}")
        append(
            run_dir,
            validation(100, 2.0)
            | ({} if length is None else {"validation_bits_per_byte": 2.0 / math.log(2) / length}),
        )
    unit = page.locator("#loss-unit")
    with served(runs_dir) as server:
        open_page(page, server, "hide=short,unknown")
        expect(unit).to_have_text("nats per token")
        expect(drawn(page, "Loss").nth(1)).to_contain_text("2.0000")
        page.get_by_role("checkbox", name="All runs").check()
        expect(unit).to_have_text(
            "bits per byte, since the tokenizers differ; not yet known of unknown"
        )
        expect(drawn(page, "Loss")).to_have_count(4)
        expect(drawn(page, "Loss").nth(1)).to_contain_text("0.7213")
        expect(drawn(page, "Loss").nth(3)).to_contain_text("2.8854")
        expect(page.locator("#runs tbody tr").first).to_contain_text("0.7213 bits per byte")
        expect(drawn(page, "Learning rate")).to_have_count(3)


def test_a_growth_is_a_line_with_the_number_of_layers(page, runs_dir):
    page.add_init_script("""
        window.written = new Map();
        const write = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, x, ...all) {
          if (text === "4 layers") written.set(this.canvas, [x, this.textAlign]);
          return write.call(this, text, x, ...all);
        };""")
    run_dir = add_run(runs_dir, "grows", steps=100)
    record = {"global_step": 100, "num_layers": 4, "tokens": 101 * 2048, "seconds": 10.1}
    append(run_dir, record, *(report(100 + n) for n in (10, 100)))
    place = f"written.get({LOSS}.plot.ctx.canvas)[0]"
    with served(runs_dir) as server:
        open_page(page, server)
        page.evaluate(WATCH_CHARTS)
        for axis, x in (("Tokens", 101 * 2048), ("Steps", 101)):
            page.locator("#axis").get_by_text(axis).click()
            line = f"{LOSS}.plot.valToPos({x}, 'x', true)"
            assert becomes(page, f"Math.round({place} - {line})", 4), axis
        # At the right edge the text is on the left of the line.
        late = {"global_step": 199, "num_layers": 4, "tokens": 200 * 2048, "seconds": 20.0}
        append(run_dir, late)
        assert becomes(page, f"written.get({LOSS}.plot.ctx.canvas)[1]", "right")
        line = f"{LOSS}.plot.valToPos(200, 'x', true)"
        assert becomes(page, f"Math.round({place} - {line})", -4)


def test_runs_and_axis_are_chosen_and_kept(page, two_runs):
    with served(two_runs) as server:
        open_page(page, server)
        loss = drawn(page, "Loss")
        expect(loss).to_have_count(4)
        page.get_by_label("first").uncheck()
        expect(loss).to_have_count(2)
        expect(loss.first).to_contain_text("second training")
        for name, ending in (
            ("Tokens", "axis=tokens"),
            ("Time", "axis=time"),
            ("Dollars", "axis=dollars"),
        ):
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
        add_run(two_runs, "new")  # what is kept is what was hidden
        expect(page.get_by_label("new")).to_be_checked()


WATCH_CHARTS = """() => {
  const show = Chart.prototype.show;
  window.charts = {};
  Chart.prototype.show = function (...all) {
    charts[this.spec.keys] = this;
    show.apply(this, all);
  };
}"""
LOSS = "charts['train_loss validation_loss train_reference_loss validation_reference_loss']"


def becomes(page, script, wanted):
    """Return whether a value on the page becomes this one in time."""
    return any(page.evaluate(script) == wanted or page.wait_for_timeout(100) for _ in range(300))


def test_a_range_is_shown_in_detail_and_the_first_losses_on_demand(page, two_runs):
    append(add_run(two_runs, "long", steps=0), *(report(10 * n) for n in range(1, 3001)))
    largest = f"{LOSS}.plot.scales.y.max"
    apart = f"(({{ x }}) => x[1] - x[0])({LOSS}.series.findLast(({{ x }}) => x.length > 200))"
    with served(two_runs) as server:
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


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (375, "dark")])
def test_it_fits_the_screen_and_follows_the_scheme(page, two_runs, width, scheme):
    """On a phone too, where a tap shows the values."""
    long = add_run(two_runs, "a-name-" + "of-many-letters-" * 7, status="running", num_steps=20_000)
    (long / "heartbeat.json").write_text('{"phase": "training"}')
    append(long, report(110, mfu=0.41, usd=119.76, gpu_memory_gib=[70.6], disk_free_gib=2.0))
    add_sample(long, 50, "def ", "x" * 500)
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 740})
    with served(two_runs) as server:
        open_page(page, server)
        expect(drawn(page, "Loss").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if width > 375:  # the table is not cut either: its last column is in the window
            for row in page.locator("#runs tr").all():
                box = row.locator("th, td").last.bounding_box()
                assert box["x"] + box["width"] <= width
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 200) == (scheme == "dark")
        page.locator(".large .u-over").click()
        expect(page.locator(".large .u-series").first).to_contain_text("step")


def test_the_exported_page_shows_the_same_without_a_server(page, two_runs, tmp_path):
    add_sample(two_runs / "first", 50, HOSTILE, HOSTILE)
    with served(two_runs) as server:
        open_page(page, server)
        live = drawn(page, "Loss").all_inner_texts()
    (tmp_path / "page.html").write_text(exported_page(Watched(two_runs)), encoding="utf-8")
    page.goto((tmp_path / "page.html").as_uri())
    expect(page.locator("#news")).to_contain_text("as of 2")
    assert drawn(page, "Loss").all_inner_texts() == live and len(live) == 4
    page.get_by_text("Tokens", exact=True).first.click()
    expect(drawn(page, "Loss")).to_have_count(4)
    expect(page.locator("#samples pre b")).to_contain_text("</script>")
    assert page.title() == "Training runs"


def test_a_server_that_ends_or_has_another_token_is_reported(browser, two_runs):
    context = browser.new_context()  # not `page`: this is to be seen on the console
    page = context.new_page()
    with served(two_runs) as server:
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
