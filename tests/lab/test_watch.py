"""`lab watch`: its points, its server, its command and its export, without a browser."""

import base64
import gzip
import hashlib
import json
import re
import socket
import threading
import tomllib

import pytest

from lab.watch.answers import Watched
from lab.watch.columns import MAX_POINTS, Columns, bucket_size
from lab.watch.server import FILES, HEADERS, STATIC, Server
from tests.support.lab_cli import error_line, run_lab, succeeded
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


@pytest.fixture
def runs_dir(tmp_path):
    path = tmp_path / "runs"
    path.mkdir()
    return path


# Reading records that grow


def steps_of(columns):
    return [step + 1 for step in columns.read().get("global_step", ())]


def test_only_appended_whole_lines_are_parsed(runs_dir, monkeypatch):
    path = add_run(runs_dir, "live", steps=30) / "metrics.jsonl"
    columns, line, parsed = Columns(path), lines(report(40, mfu="x")), []
    assert steps_of(columns) == [10, 20, 30]
    monkeypatch.setattr("lab.watch.columns.valid_records", lambda text: [
        parsed.append(text), *map(json.loads, text.split("\n")[:-1])][1:])
    for part, steps in ((line[:40], [10, 20, 30]), (line[40:-1], [10, 20, 30]),
                        ("\n", [10, 20, 30, 40]), ("", [10, 20, 30, 40])):
        with path.open("a") as file:
            file.write(part)
        assert steps_of(columns) == steps
    assert parsed == [line]


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_file_that_was_replaced_is_read_anew(runs_dir, is_in_place):
    path = add_run(runs_dir, "live", steps=40) / "metrics.jsonl"
    columns = Columns(path)
    assert steps_of(columns) == [10, 20, 30, 40]
    kept = lines(*(report(step) for step in (10, 20, 33, 43, 53, 63)))  # longer than before
    if is_in_place:
        path.write_text(kept)
    else:
        path.with_name("new").write_text(kept)
        path.with_name("new").replace(path)
    assert steps_of(columns) == [10, 20, 33, 43, 53, 63]
    path.unlink()
    assert steps_of(columns) == []


def points(runs_dir, name, **options):
    found = Watched(runs_dir).run(name, **options)
    return found["x"], found["lines"]


def test_numbers_of_gpus_become_a_mean_and_the_extremes(runs_dir):
    append(add_run(runs_dir, "gpus", steps=10), report(
        20, gpu_power_w=[100, 300], gpu_memory_gib=[1.0, None, 3.0],
        gpu_throttling=["sw power cap", "hw slowdown"]))
    _, found = points(runs_dir, "gpus")
    assert {key: line for key, line in found.items() if key.startswith("gpu")} == {
        "gpu_power_w": {"y": [None, 200], "low": [None, 100], "high": [None, 300]},
        "gpu_memory_gib": {"y": [None, 2], "low": [None, 1], "high": [None, 3]},
        "gpus_slowed_down": {"y": [None, 1]}}


@pytest.mark.parametrize("odd", [
    "no JSON", {"mfu": "x"}, {"usd": -1}, {"global_step": 2.5}, {"gpu_power_w": [None, "x"]}])
def test_an_odd_line_among_many_changes_no_other(runs_dir, odd):
    """Without one pyarrow parses them all; an odd one is left out, as each command does."""
    records = [report(step, mfu=0.4, gpu_power_w=[100, step], gpu_throttling=["", "hw slowdown"],
                      train_loss=[None, 2.5][step % 2], layer_grad_norm=[1.0])
               for step in range(1, 200)]
    for name in ("good", "odd"):
        append(add_run(runs_dir, name, steps=0), *records)
    with (runs_dir / "odd/metrics.jsonl").open("a") as file:
        file.write("no JSON\n" if odd == "no JSON" else lines(report(300, **odd)))
    assert points(runs_dir, "odd") == points(runs_dir, "good")


# Points


@pytest.mark.parametrize("num_rows", [0, 1, 1000, 1001, 2000, 2001, 100_003])
def test_a_point_is_a_power_of_two_of_records(num_rows):
    size = bucket_size(num_rows)
    assert size & (size - 1) == 0 and -(-num_rows // size) <= MAX_POINTS
    assert size == 1 or -(-num_rows // (size // 2)) > MAX_POINTS


def test_points_are_bounded_and_keep_means_spikes_sums_and_validations(runs_dir):
    run_dir = add_run(runs_dir, "long", steps=0)
    spike = 1_777
    append(run_dir, *(report(10 * n, train_loss=9.0 if n == spike else 1.0, train_loss_min=0.5,
                             train_loss_max=9.5 if n == spike else 1.5, usd=float(n))
                      for n in range(1, 3001)), validation(30_000, 2.0))
    x, found = points(runs_dir, "long")
    assert all(len(values) == len(x["steps"]) <= MAX_POINTS
               for line in found.values() for values in line.values())
    loss, size = found["train_loss"], bucket_size(3001)
    at = loss["high"].index(9.5)
    assert 0 <= x["steps"][at] - 10 * spike < 10 * size
    assert loss["y"][at] == 1 + 8 / size and loss["high"].count(1.5) == 3000 // size - 1
    assert set(loss["low"][:-1]) == {0.5} and set(found["usd"]) == {"y"}
    assert found["usd"]["y"][:-1] == [step / 10 for step in x["steps"][:-1]]
    assert [y for y in found["validation_loss"]["y"] if y] == [2]


def test_a_range_is_thinned_by_itself(runs_dir):
    append(add_run(runs_dir, "long", steps=0),
           *(report(10 * n, usd=float(n)) for n in range(1, 5001)))
    assert points(runs_dir, "long", within=("steps", 20_005.0, 21_005.0))[0]["steps"] == [
        *range(20_000, 21_011, 10)]
    assert points(runs_dir, "long", within=("dollars", 7.2, 7.4))[0]["dollars"] == [7, 8]
    assert points(runs_dir, "long", within=("steps", 9e9, 1e10))[1]["usd"]["y"] == [5000]


def test_an_axis_never_goes_back(runs_dir):
    append(add_run(runs_dir, "odd", steps=0), report(10), report(30), report(20, seconds=9.0),
           report(40, seconds=1.0, train_loss=1e30))
    x, found = points(runs_dir, "odd")
    assert x["steps"] == [10, 30, 40] and x["time"] == [1, 3, 9] and x["dollars"] == [None] * 3
    assert [y is None for y in found["train_loss"]["y"]] == [False, False, True]  # no measurement


# The server


def json_of(server, path):
    response, body = ask(server, path)
    assert response.status == 200, body
    assert response.headers["Content-Type"].startswith("application/json")
    return json.loads(body)


def assert_headers(response):
    for name, value in HEADERS.items():
        assert response.headers[name] == value


def test_the_page_and_its_questions_are_answered(runs_dir):
    add_sample(add_run(runs_dir, "a", steps=2000), 50, "def ", HOSTILE)
    with served(runs_dir) as server:
        assert server.server_address[0] == "127.0.0.1"  # this machine only
        for path, name in FILES.items():
            response, body = ask(server, path, token=None)  # a browser has none to send
            assert response.status == 200 and body == (STATIC / name).read_bytes()
            assert_headers(response)
        (run,) = json_of(server, "/runs")["runs"]
        assert (run["name"], run["status"]) == ("a", "finished")
        assert json_of(server, "/run?run=a&x=steps&from=41&to=59")["x"]["steps"] == [40, 50, 50, 60]
        found = json_of(server, "/run?run=a")
        assert found["x"]["tokens"][-1] == 2000 * 2048
        (sample,) = found["samples"]
        assert sample["step"] == 50
        assert "\\x1b[2J" in sample["text"] and "\x1b" not in sample["text"]
        response, body = ask(server, "/run?run=a", **{"Accept-Encoding": "gzip"})
        assert response.headers["Content-Encoding"] == "gzip"
        assert json.loads(gzip.decompress(body)) == found
        response, body = ask(server, "/runs", "HEAD")
        assert response.status == 200 and body == b"" and int(response.headers["Content-Length"])
        add_run(runs_dir, "new")
        assert [run["name"] for run in json_of(server, "/runs")["runs"]] == ["a", "new"]


@pytest.mark.parametrize("path", [
    "/x", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/static/page.js", "/runs/",
    "/page.html", "/server.py", "/run", "/run?run=", "/run?run=..", "/run?run=../outside",
    "/run?run=%2e%2e%2foutside", "/run?run=a/../a", "/run?run=a%00", "/run?run=link",
    "/run?run=.hidden", "/run?run=other", "/run?run=a&x=secret&from=1&to=2", "/run?run=a&x=steps",
    "/run?run=a&x=steps&from=1&to=x", "/run?" + "&".join(f"a{n}=1" for n in range(20)),
    "//[/runs"])
def test_nothing_else_can_be_read(runs_dir, tmp_path, path):
    add_run(runs_dir, "a"), add_run(runs_dir, "other"), add_run(tmp_path, "outside")
    add_run(runs_dir, "x"), (runs_dir / "x").rename(runs_dir / ".hidden")
    (runs_dir / "link").symlink_to(tmp_path / "outside")
    with served(runs_dir, "a", "link") as server:
        assert [run["name"] for run in json_of(server, "/runs")["runs"]] == ["a"]
        response, body = ask(server, path)
        assert response.status == 404 and body == b"404 Not Found\n"
        assert_headers(response)


@pytest.mark.parametrize(("headers", "status"), [
    ({"Host": "127.0.0.1:8765"}, 200), ({"Host": "localhost:9999"}, 200),
    ({"Host": "[::1]:1"}, 200), ({"Host": "localhost"}, 200),
    ({"Host": "localhost:1", "Sec-Fetch-Site": "cross-site"}, 200),  # a link on another site
    ({"Host": "evil.example"}, 403), ({"Host": ""}, 403),
    ({"Host": "127.0.0.1.evil.example:8765"}, 403), ({"Host": "localhost:8765@evil.example"}, 403),
    ({"Host": "localhost:x"}, 403), ({"Host": "192.168.0.7:8765"}, 403)])
def test_other_hosts_are_refused_and_links_are_followed(runs_dir, headers, status):
    with served(runs_dir) as server:
        for path in ("/", "/runs"):
            response, body = ask(server, path, **headers)
            assert response.status == status
            assert_headers(response)
            assert status == 200 or body == b"403 Forbidden\n"


@pytest.mark.parametrize("path", ["/runs", "/run?run=a", "/none"])
def test_nobody_without_the_token_learns_anything(runs_dir, path):
    """Neither another user of the machine, who can connect, nor another site's page."""
    add_run(runs_dir, "a")
    with served(runs_dir) as server, served(runs_dir) as other:
        for token in (None, "", "é", server.token[:-1], other.token):
            response, body = ask(server, path, token=token)
            assert response.status == 403 and body == b"403 Forbidden\n"
            assert_headers(response)
        assert ask(server, f"{path}&token={server.token}", token=None)[0].status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"])
def test_other_methods_are_refused(runs_dir, method):
    with served(runs_dir) as server:
        response, _ = ask(server, "/runs", method)
        assert response.status == (501 if method == "BREW" else 405)
        assert_headers(response)


@pytest.mark.parametrize(("request_text", "status"), [
    (b"<script>\r\n\r\n", 400), (b"GET /runs\r\n\r\n", 403), (b"GET /evil HTTP/x\r\n\r\n", 400),
    (b"GET /runs HTTP/1.1\r\n\r\n", 403), (b"GET /evil HTTP/9.0\r\n\r\n", 505),
    (b"GET /runs HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", 403),
    (b"GET /evil" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414)])
def test_malformed_requests_get_an_answer_that_does_not_repeat_them(runs_dir, request_text, status):
    with served(runs_dir) as server, socket.create_connection(
            ("127.0.0.1", server.server_port), timeout=20) as client:
        client.sendall(request_text)
        answer = b"".join(iter(lambda: client.recv(2**16), b""))
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"<script>" not in answer and b"evil" not in answer


def test_a_run_that_is_removed_meanwhile_is_no_error(runs_dir):
    run_dir = add_run(runs_dir, "a")
    with served(runs_dir) as server:
        assert json_of(server, "/run?run=a")["lines"]
        for path in run_dir.iterdir():
            path.unlink()
        run_dir.rmdir()
        assert json_of(server, "/runs") == {"runs": []}
        assert ask(server, "/run?run=a")[0].status == 404
        runs_dir.rmdir()
        assert json_of(server, "/runs") == {"runs": []}


def test_many_threads_read_a_run_that_grows(runs_dir):
    run_dir, found = add_run(runs_dir, "live", steps=10), []
    with served(runs_dir) as server:
        def follow():
            while len(json_of(server, "/run?run=live")["x"]["steps"]) < 30:
                pass
            found.append(True)

        threads = [threading.Thread(target=follow) for _ in range(4)]
        for thread in threads:
            thread.start()
        for step in range(20, 310, 10):
            append(run_dir, report(step))
        for thread in threads:
            thread.join(timeout=60)
    assert found == [True] * 4


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
        line = error_line(watch(runs_dir, "--port", port))
        assert f"port {port}" in line and "--port" in line
    assert "no run 'b'" in error_line(watch(runs_dir, "b"))
    assert "cannot be written" in error_line(
        watch(runs_dir, "--export", str(tmp_path / "none/page.html")))


def test_the_exported_page_holds_everything_once_and_allows_nothing_else(runs_dir, tmp_path):
    run_dir = add_run(runs_dir, "a", reason=HOSTILE)
    add_sample(run_dir, 50, HOSTILE, f"<!-- {HOSTILE} ]]> \u2028")
    append(run_dir, report(110, train_loss=1.23456))
    succeeded(watch(runs_dir, "--export", str(tmp_path / "page.html")))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    (style, own_style) = re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert len(scripts) == 3 and policy.startswith("default-src 'none';")
    assert "unsafe" not in policy and "http" not in policy
    for content in (*scripts, style, own_style):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert not re.search("[<>&\u2028]", data)
    found = json.loads(data)["run"]["a"]
    assert found["x"]["tokens"][0] == 20480
    assert data.count("1.23456") == 2  # in the table and in the chart, for all axes
    assert "<img src=x onerror" in found["samples"][0]["text"]
    assert not re.search(r'(src|href)="(?!data:,")', page.replace(data, ""))


def test_the_files_of_the_page_are_part_of_the_wheel_and_need_no_network():
    root = STATIC.parents[2]
    build = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert f"/{STATIC.relative_to(root)}/*" in build["targets"]["wheel"]["include"]
    for name in ("page.html", "page.css", "page.js", "charts.js"):
        text = (STATIC / name).read_text()
        assert "http" not in text and "innerHTML" not in text and " style=" not in text
    assert (STATIC / "uPlot-LICENSE").read_text().startswith("The MIT License")
