from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import socket
import threading
import tomllib
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from lab.watch.answers import MAX_POINTS, Watched, bucket_size, thin
from lab.watch.columns import Columns
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
def runs_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs"
    path.mkdir()
    return path


# Reading records that grow


def steps_of(columns: Columns) -> list[float]:
    with columns.updated() as found:
        return list(found.axes["steps"])


def test_only_appended_lines_are_parsed(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, parsed = add_run(runs_dir, "live", steps=30), []
    columns = Columns(run_dir / "metrics.jsonl")
    assert steps_of(columns) == [10, 20, 30]
    monkeypatch.setattr("lab.watch.columns.valid_records", lambda text: [
        parsed.append(text), *map(json.loads, text.split("\n")[:-1])][1:])
    append(run_dir, report(40))
    assert steps_of(columns) == [10, 20, 30, 40] == steps_of(columns)
    assert "".join(parsed) == lines(report(40))


def test_a_line_that_is_not_complete_yet_is_read_later(runs_dir: Path) -> None:
    run_dir = add_run(runs_dir, "live", steps=20)
    columns, line = Columns(run_dir / "metrics.jsonl"), lines(report(30))
    for part, steps in ((line[:40], [10, 20]), (line[40:-1], [10, 20]), ("\n", [10, 20, 30])):
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(part)
        assert steps_of(columns) == steps


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_file_that_was_replaced_is_read_anew(runs_dir: Path, is_in_place: bool) -> None:
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


def test_numbers_of_gpus_become_a_mean_and_the_extremes(runs_dir: Path) -> None:
    run_dir = add_run(runs_dir, "gpus", steps=0)
    append(run_dir, report(10, gpu_power_w=[100, 300], gpu_memory_gib=[1.0, None, 3.0],
                           gpu_throttling=["sw power cap", "hw slowdown"]))
    found = Watched(runs_dir).series("gpus", "steps")["lines"]
    assert {key: line["y"] for key, line in found.items() if key.startswith("gpu")} == {
        "gpu_power_w": [200], "gpu_power_w_min": [100], "gpu_power_w_max": [300],
        "gpu_memory_gib": [2], "gpu_memory_gib_min": [1], "gpu_memory_gib_max": [3],
        "gpus_slowed_down": [1]}


@pytest.mark.parametrize("odd", [None, {"mfu": "x"}, {"usd": -1}, {"global_step": 2.5}, "no JSON",
                                 {"gpu_power_w": [None, "x"]}, {"train_loss": 1e30}])
def test_many_records_are_read_as_one_by_one(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, odd: dict | str | None
) -> None:
    run_dir = add_run(runs_dir, "long", steps=3000)
    append(run_dir, *(report(step, mfu=0.4, gpu_power_w=[100, step], gpu_memory_gib=[None, 2.0],
                             gpu_throttling=["", "hw slowdown"][:1 + step % 2],
                             train_loss=[None, 2.5][step % 2],
                             layer_grad_norm=[1.0]) for step in range(3001, 3201)))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("" if odd is None else f"{odd}\n" if odd == "no JSON" else lines(
            report(3300, **odd), report(3400)))
    found = []
    for min_bytes in (0, 2**30):
        monkeypatch.setattr("lab.watch.columns.MIN_BYTES", min_bytes)
        with Columns(run_dir / "metrics.jsonl").updated() as columns:
            found.append((columns.series, [columns.axis(axis).tolist()[:3200] for axis in (
                "steps", "tokens", "time")]))
    assert found[0] == found[1] and columns.num_rows > 500


# Thinning


@pytest.mark.parametrize("num_values", [0, 1, 99, 100, 101, 1000, 100_003])
def test_thinning_keeps_the_mean_and_the_extremes_of_each_bucket(num_values: int) -> None:
    values = np.random.default_rng(0).normal(size=num_values)
    found = thin(values, 100)
    assert len(found.ends) <= (100 if found.size == 1 else 50)
    assert (found.size == 1) == (num_values <= 100)
    parts = [values[start:start + found.size] for start in range(0, num_values, found.size)]
    assert found.means == pytest.approx([part.mean() for part in parts])
    assert found.lows.tolist() == [part.min() for part in parts]
    assert found.highs.tolist() == [part.max() for part in parts]
    assert values[found.ends].tolist() == [part[-1] for part in parts]


def test_answers_are_bounded_and_keep_few_validations(runs_dir: Path) -> None:
    run_dir = add_run(runs_dir, "long", steps=0)
    spike = 23_451
    append(run_dir, *(report(10 * n, train_loss=99.0 if n == spike else 1.0)
                      for n in range(1, 30_001)))
    append(run_dir, *(validation(300_000 + step, 2.0) for step in range(30)))
    found = Watched(runs_dir).series("long", "steps")["lines"]
    assert len(found["validation_loss"]["x"]) == 30
    assert all(len(line["x"]) <= MAX_POINTS for line in found.values())
    loss = found["train_loss"]
    at = [x for x, high in zip(loss["x"], loss["high"], strict=True) if high == 99]
    assert len(at) == 1 and 0 <= at[0] - 10 * spike < 10 * bucket_size(30_000, MAX_POINTS)
    assert 1 < max(loss["y"]) < 10 and set(loss["low"]) == {1} and "low" not in found[
        "train_loss_max"]


def test_a_range_is_thinned_by_itself(runs_dir: Path) -> None:
    run_dir = add_run(runs_dir, "long", steps=0)
    append(run_dir, *(report(10 * n, usd=float(n)) for n in range(1, 5001)))
    watched = Watched(runs_dir)
    assert len(watched.series("long", "steps")["lines"]["train_loss"]["x"]) < 1000
    part = watched.series("long", "steps", within=(20_005.0, 21_005.0))
    assert part["lines"]["train_loss"]["x"] == list(range(20_000, 21_011, 10))
    between = watched.series("long", "dollars", within=(7.2, 7.4))["lines"]["train_loss"]
    assert between["x"] == [7, 8]
    assert watched.series("long", "steps", within=(9e9, 1e10))["lines"]["usd"]["y"] == [5000]


def test_an_axis_never_goes_back(runs_dir: Path) -> None:
    run_dir = add_run(runs_dir, "odd", steps=0)
    append(run_dir, report(10), report(30), report(20), report(40, seconds="x"))
    watched = Watched(runs_dir)
    assert watched.series("odd", "steps")["lines"]["train_loss"]["x"] == [10, 30]
    assert watched.series("odd", "dollars")["lines"]["train_loss"]["x"] == []


# The server


def json_of(server: Server, path: str) -> dict:
    response, body = ask(server, path)
    assert response.status == 200, body
    assert response.headers["Content-Type"].startswith("application/json")
    return json.loads(body)


def test_the_page_and_its_questions_are_answered(runs_dir: Path) -> None:
    add_sample(add_run(runs_dir, "a"), 50, "def ", HOSTILE)
    with served(runs_dir) as server:
        for path, (name, content_type) in FILES.items():
            response, body = ask(server, path)
            assert (response.status, response.headers["Content-Type"]) == (200, content_type)
            assert body == (STATIC / name).read_bytes()
        (run,) = json_of(server, "/runs")["runs"]
        assert (run["name"], run["status"]) == ("a", "finished")
        part = json_of(server, "/series?run=a&from=41&to=59")["lines"]["train_loss"]["x"]
        assert part == [40, 50, 60]
        found = json_of(server, "/series?run=a&x=tokens")
        assert found["lines"]["validation_loss"]["x"] == [50 * 2048, 100 * 2048]
        (sample,) = json_of(server, "/samples?run=a")["samples"]
        assert sample["step"] == 50
        assert "\\x1b[2J" in sample["text"] and "\x1b" not in sample["text"]
        add_run(runs_dir, "new")
        assert [run["name"] for run in json_of(server, "/runs")["runs"]] == ["a", "new"]


def test_only_the_chosen_runs_are_served(runs_dir: Path) -> None:
    add_run(runs_dir, "a"), add_run(runs_dir, "b")
    with served(runs_dir, "b") as server:
        assert [run["name"] for run in json_of(server, "/runs")["runs"]] == ["b"]
        assert ask(server, "/series?run=a")[0].status == 404


@pytest.mark.parametrize("path", [
    "/x", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/static/page.js", "/runs/",
    "/page.html", "/server.py", "/series", "/series?run=", "/series?run=..",
    "/series?run=../outside", "/series?run=%2e%2e%2foutside", "/series?run=a/../a",
    "/series?run=a%00", "/series?run=link",
    "/samples?run=.hidden", "/series?run=a&x=secret", "/series?run=a&points=-1",
    "/series?run=a&points=99999999", "/series?run=a&from=1",
    "/series?run=a&from=1&to=x", "/samples?" + "&".join(f"a{n}=1" for n in range(20))])
def test_nothing_else_can_be_read(runs_dir: Path, tmp_path: Path, path: str) -> None:
    add_run(runs_dir, "a"), add_run(tmp_path, "outside")
    add_run(runs_dir, "x"), (runs_dir / "x").rename(runs_dir / ".hidden")
    (runs_dir / "link").symlink_to(tmp_path / "outside")
    with served(runs_dir) as server:
        response, body = ask(server, path)
        assert response.status == 404 and body == b"404 Not Found\n"
        assert_headers(response)


def assert_headers(response) -> None:
    for name, value in HEADERS.items():
        assert response.headers[name] == value


@pytest.mark.parametrize(("headers", "status"), [
    ({"Host": "127.0.0.1:8765"}, 200), ({"Host": "localhost:9999"}, 200),
    ({"Host": "[::1]:1"}, 200), ({"Host": "localhost"}, 200),
    ({"Host": "evil.example"}, 403), ({"Host": ""}, 403),
    ({"Host": "127.0.0.1.evil.example:8765"}, 403), ({"Host": "localhost:8765@evil.example"}, 403),
    ({"Host": "localhost:x"}, 403), ({"Host": "192.168.0.7:8765"}, 403),
    ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
    ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
    ({"Host": "localhost:1", "Origin": "https://localhost:1"}, 403),
    ({"Host": "localhost:1", "Origin": "null"}, 403),
    ({"Host": "localhost:1", "Origin": "http://evil.example"}, 403),
    ({"Host": "localhost:1", "Sec-Fetch-Site": "same-origin"}, 200),
    ({"Host": "localhost:1", "Sec-Fetch-Site": "none"}, 200),
    ({"Host": "localhost:1", "Sec-Fetch-Site": "cross-site"}, 403),
    ({"Host": "localhost:1", "Sec-Fetch-Site": "same-site"}, 403)])
def test_other_hosts_and_origins_are_refused(
    runs_dir: Path, headers: dict[str, str], status: int
) -> None:
    add_run(runs_dir, "a")
    with served(runs_dir) as server:
        for path in ("/", "/runs"):
            response, body = ask(server, path, **headers)
            assert response.status == status
            assert_headers(response)
            assert status == 200 or body == b"403 Forbidden\n"


def test_it_listens_on_this_machine_only(runs_dir: Path) -> None:
    with served(runs_dir) as server:
        assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"])
def test_other_methods_are_refused(runs_dir: Path, method: str) -> None:
    with served(runs_dir) as server:
        response, body = ask(server, "/runs", method)
        assert response.status == (501 if method == "BREW" else 405)
        assert_headers(response)


def test_head_has_no_body_and_long_answers_are_compressed(runs_dir: Path) -> None:
    add_run(runs_dir, "a", steps=2000)
    with served(runs_dir) as server:
        response, body = ask(server, "/runs", "HEAD")
        assert response.status == 200 and body == b"" and int(response.headers["Content-Length"])
        response, body = ask(server, "/series?run=a", **{"Accept-Encoding": "gzip"})
        assert response.headers["Content-Encoding"] == "gzip"
        assert len(json.loads(gzip.decompress(body))["lines"]["train_loss"]["x"]) == 200


def test_malformed_requests_are_refused_without_repeating_them(runs_dir: Path) -> None:
    with served(runs_dir) as server:
        for request in (b"<script>\r\n\r\n", b"GET /runs HTTP/1.1\r\n\r\n", b"GET /runs\r\n\r\n",
                        b"GET /runs HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
                        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as client:
                client.sendall(request)
                answer = b"".join(iter(lambda: client.recv(2**16), b""))  # noqa: B023
            assert b"200 OK" not in answer and b"<script>" not in answer and b"evil" not in answer


def test_a_run_that_is_removed_meanwhile_is_no_error(runs_dir: Path) -> None:
    run_dir = add_run(runs_dir, "a")
    with served(runs_dir) as server:
        assert json_of(server, "/series?run=a")["lines"]
        for path in run_dir.iterdir():
            path.unlink()
        run_dir.rmdir()
        assert json_of(server, "/runs") == {"runs": []}
        assert ask(server, "/series?run=a")[0].status == 404
        runs_dir.rmdir()
        assert json_of(server, "/runs") == {"runs": []}


def test_many_threads_read_a_run_that_grows(runs_dir: Path) -> None:
    run_dir, found = add_run(runs_dir, "live", steps=10), []
    with served(runs_dir) as server:
        def follow() -> None:
            while len(json_of(server, "/series?run=live")["lines"]["train_loss"]["x"]) < 30:
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


def watch(runs_dir: Path, *arguments: str) -> Result:
    return run_lab("watch", "--runs-dir", str(runs_dir), *arguments)


def test_the_command_says_where_the_page_is_and_ends_quietly(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupt)
    output = succeeded(watch(runs_dir, "--port", "0")).output
    (port,) = set(re.findall(r"127\.0\.0\.1:(\d+)", output))
    assert f"http://127.0.0.1:{port}/" in output and f"ssh -N -L {port}:127.0.0.1:{port}" in output
    assert "Aborted" not in output


def test_errors_of_the_command_are_one_line(runs_dir: Path, tmp_path: Path) -> None:
    add_run(runs_dir, "a")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = error_line(watch(runs_dir, "--port", port))
        assert f"port {port}" in line and "--port" in line
    assert "no run 'b'" in error_line(watch(runs_dir, "b"))
    assert "--runs-dir" in error_line(watch(tmp_path / "none"))
    assert "cannot be written" in error_line(
        watch(runs_dir, "--export", str(tmp_path / "none/page.html")))


def test_the_exported_page_holds_everything_and_allows_nothing_else(
    runs_dir: Path, tmp_path: Path
) -> None:
    run_dir = add_run(runs_dir, "a", reason=HOSTILE)
    add_sample(run_dir, 50, HOSTILE, f"<!-- {HOSTILE} ]]> \u2028")
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
    found = json.loads(data)
    assert found["series"]["tokens"]["a"]["lines"]["train_loss"]["x"][0] == 20480
    assert "<img src=x onerror" in found["samples"]["a"]["samples"][0]["text"]
    assert not re.search(r'(src|href)="(?!data:,")', page.replace(data, ""))


def test_the_files_of_the_page_are_part_of_the_wheel_and_need_no_network() -> None:
    root = STATIC.parents[2]
    build = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert f"/{STATIC.relative_to(root)}/*" in build["targets"]["wheel"]["include"]
    assert {name for name, _ in FILES.values()} <= {path.name for path in STATIC.iterdir()}
    for name in ("page.html", "page.css", "page.js", "charts.js"):
        text = (STATIC / name).read_text()
        assert "http" not in text and "innerHTML" not in text and " style=" not in text
    assert (STATIC / "uPlot-LICENSE").read_text().startswith("The MIT License")
