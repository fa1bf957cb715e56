from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import socket
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from basics.errors import UserError
from lab.compare.run_results import read_result
from lab.watch.answers import MAX_POINTS, Watched
from lab.watch.columns import Columns
from lab.watch.files import read_part
from lab.watch.latest import TAIL_BYTES
from lab.watch.run_state import chosen_runs, launched_runs, read_state
from lab.watch.server import FILES, HEADERS, STATIC, Server
from lab.watch.thinning import bucket_size, first_changed, thin
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


def beat(run_dir: Path, *, age: float = 0.0, phase: str = "training") -> None:
    path = run_dir / "heartbeat.json"
    path.write_text(json.dumps({"phase": phase, "global_step": 1}))
    os.utime(path, (time.time() - age, time.time() - age))


# The state of a run


def test_the_state_of_a_finished_run(runs_dir: Path) -> None:
    add_run(runs_dir, "done", global_step=99, seconds={"training": 9.0, "startup": 1.5},
            usd={"training": 0.4, "total": 0.5}, machine={"peak_memory_gib": 3.25})
    state = read_state(runs_dir, "done")
    assert (state.status, state.global_step, state.num_steps) == ("finished", 99, 200)
    assert state.tokens == 100 * 2048 and state.validation_loss == 1.5 + 1 / 100
    assert state.train_loss == 1.4 and state.tokens_per_second == 20480
    assert (state.seconds, state.usd, state.memory_gib) == (10.5, 0.5, 3.25)
    assert state.seconds_left is None and state.warnings == ()


def test_the_state_of_a_running_run(runs_dir: Path) -> None:
    run_dir = add_run(runs_dir, "live", status="running", seconds={"training": 0.0})
    beat(run_dir, phase="validation")
    append(run_dir, report(110, mfu=0.41, usd=0.25, gpu_memory_gib=[10.5, 70.25], disk_free_gib=2.0,
                           skipped_steps=3))
    state = read_state(runs_dir, "live")
    assert (state.status, state.phase, state.is_running) == ("running", "validation", True)
    assert 0 <= state.heartbeat_seconds < 30
    assert state.seconds_left == pytest.approx(9.0)  # 90 steps of 0.1 seconds
    assert (state.mfu, state.usd, state.memory_gib, state.seconds) == (0.41, 0.25, 70.25, 11.0)
    assert [any(part in warning for warning in state.warnings)
            for part in ("3 of the last", "2.0 GiB free")] == [True, True]


def test_a_killed_run_has_no_heartbeat(runs_dir: Path) -> None:
    beat(add_run(runs_dir, "dead", status="running"), age=75.0)
    state = read_state(runs_dir, "dead")
    assert state.status == "no heartbeat" and state.phase is None and state.seconds_left is None
    assert "no heartbeat for 0:01:15" in state.warnings[0]


@pytest.mark.parametrize(("age", "status"), [(0, "running"), (7200, "running when last written")])
def test_a_run_without_heartbeat_is_as_old_as_what_it_wrote_last(
    runs_dir: Path, age: int, status: str
) -> None:
    run_dir = add_run(runs_dir, "copy", status="running")
    at = time.time() - age
    os.utime(run_dir / "metrics.jsonl", (at, at))
    os.utime(run_dir / "summary.json", (at - 9000, at - 9000))
    state = read_state(runs_dir, "copy")
    assert (state.status, state.seconds_left is None) == (status, age > 0)
    assert any("last written 2:00:0" in warning for warning in state.warnings) == (age > 0)
    assert read_result(run_dir).status == status


@pytest.mark.parametrize(("throttling", "warnings"), [
    (["sw power cap"] * 8, ()), (["", "x"], ()),
    (["hw thermal slowdown"] * 8, ("GPUs 0-7: hw thermal slowdown",)),
    (["", "sw power cap, hw slowdown, hw thermal slowdown"],
     ("GPU 1: hw slowdown, hw thermal slowdown",)),
    (["hw slowdown", "hw slowdown", "", "hw slowdown", "sw thermal slowdown"],
     ("GPUs 0-1, 3: hw slowdown", "GPU 4: sw thermal slowdown"))])
def test_only_slowdowns_by_heat_and_supply_are_warned_of(
    runs_dir: Path, throttling: list[str], warnings: tuple[str, ...]
) -> None:
    append(add_run(runs_dir, "live", status="running"), report(110, gpu_throttling=throttling))
    assert read_state(runs_dir, "live").warnings == warnings


@pytest.mark.parametrize(("content", "status"), [
    ("{", "summary damaged"), ("[]", "summary damaged"), ('{"status": 3}', "summary damaged"),
    (None, "no summary"), ('{"status": "a\\u001b[2J"}', "a\\x1b[2J")])
def test_a_damaged_summary_is_no_error(runs_dir: Path, content: str | None, status: str) -> None:
    run_dir = add_run(runs_dir, "odd")
    (run_dir / "summary.json").unlink()
    if content is not None:
        (run_dir / "summary.json").write_text(content)
    assert read_state(runs_dir, "odd").status == status


@pytest.mark.parametrize("value", ['"x"', "NaN", "-1", "1e400", "9" * 400, "[]", "{}", "true"])
def test_hostile_numbers_are_unknown(runs_dir: Path, value: str) -> None:
    run_dir = add_run(runs_dir, "odd", steps=0)
    keys = ("global_step", "num_steps", "tokens", "seconds", "usd", "machine", "train_loss")
    (run_dir / "summary.json").write_text(
        '{"status": "finished", ' + ", ".join(f'"{key}": {value}' for key in keys) + "}")
    more = {key: "V" for key in ("mfu", "tokens_per_second", "gpu_memory_gib", "gpu_throttling",
                                 "host_load", "disk_free_gib", "energy_kwh")}
    append(run_dir, report(10))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(lines(report(20, **more)).replace('"V"', value))
    state = read_state(runs_dir, "odd")
    assert state.num_steps is None and state.usd is None and state.mfu is None
    assert "mfu" not in Watched(runs_dir).series("odd", "steps")["lines"]


def test_only_the_end_of_long_records_is_read_and_an_older_validation_is_found(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = add_run(runs_dir, "long", steps=50)
    append(run_dir, *(report(step) for step in range(60, 60_000, 10)))
    assert (run_dir / "metrics.jsonl").stat().st_size > 2 * TAIL_BYTES
    state = read_state(runs_dir, "long")
    assert state.global_step == 59_989 and state.validation_loss == 1.52
    starts = []
    monkeypatch.setattr("lab.watch.latest.read_part", lambda path, start, **limits: starts.append(
        start) or read_part(path, start, **limits))
    size = (run_dir / "metrics.jsonl").stat().st_size
    append(run_dir, report(60_000))
    assert read_state(runs_dir, "long").validation_loss == 1.52
    assert len(starts) == 2 and min(starts) > size - 2 * TAIL_BYTES  # what was read is not again
    append(run_dir, validation(60_010, 1.25))
    assert read_state(runs_dir, "long").validation_loss == 1.25
    append(run_dir, *(report(step) for step in range(60_010, 75_000, 10)))
    assert read_state(runs_dir, "long").validation_loss == 1.25
    kept = lines(validation(10, 3.5), *(report(step) for step in range(10, 90_000, 10)))
    (run_dir / "new").write_text(kept)
    (run_dir / "new").replace(run_dir / "metrics.jsonl")
    assert read_state(runs_dir, "long").validation_loss == 3.5


def test_launched_runs_are_plain_names_inside_the_directory(runs_dir: Path, tmp_path: Path) -> None:
    for name in ("b", "a"):
        add_run(runs_dir, name)
    add_run(tmp_path, "outside")
    (runs_dir / "link").symlink_to(tmp_path / "outside")
    (runs_dir / "not-launched").mkdir()
    (runs_dir / ".hidden").mkdir()
    add_run(runs_dir, "<b>")
    empty = add_run(runs_dir, "empty", steps=0)
    (empty / "summary.json").write_text("")
    linked = add_run(runs_dir, "linked", steps=0)
    (linked / "summary.json").unlink()
    (linked / "metrics.jsonl").symlink_to(tmp_path / "outside/metrics.jsonl")
    assert launched_runs(runs_dir) == ["a", "b"]
    assert chosen_runs(runs_dir, ("b", "b")) == ["b"]
    for name, words in (("link", "has not been trained"), ("../a", "no run"),
                        ("x", "trained runs: a, b"), ("not-launched", "has not been trained yet")):
        with pytest.raises(UserError, match=words):
            chosen_runs(runs_dir, (name,))
    with pytest.raises(UserError, match="--runs-dir"):
        launched_runs(tmp_path / "none")


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
    version = columns.version
    kept = lines(*(report(step) for step in (10, 20, 33, 43, 53, 63)))  # longer than before
    if is_in_place:
        path.write_text(kept)
    else:
        path.with_name("new").write_text(kept)
        path.with_name("new").replace(path)
    assert steps_of(columns) == [10, 20, 33, 43, 53, 63] and columns.version != version
    path.unlink()
    assert steps_of(columns) == []


def test_links_pipes_and_huge_files_are_not_read(runs_dir: Path, tmp_path: Path) -> None:
    outside = add_run(tmp_path, "outside")
    for kind in ("link", "pipe", "huge"):
        run_dir = add_run(runs_dir, kind, steps=0)
        for name in ("metrics.jsonl", "samples.jsonl"):
            if kind == "link":
                (run_dir / name).symlink_to(outside / "metrics.jsonl")
            elif kind == "pipe":
                os.mkfifo(run_dir / name)
            else:
                (run_dir / name).write_text(lines(report(10)))
                os.truncate(run_dir / name, 2**27 + 1)
        watched = Watched(runs_dir)
        assert watched.series(kind, "steps")["lines"] == {}
        assert watched.samples(kind) == {"samples": []}
        state = read_state(runs_dir, kind)
        assert state.train_loss is None and "metrics.jsonl" in state.warnings[0]


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


def test_points_before_the_first_changed_one_stay() -> None:
    values = np.random.default_rng(1).normal(size=5000)
    for before in range(0, 5000, 37):
        for now in (before, before + 1, before + 40, 2 * before + 1):
            if now <= len(values):
                first = first_changed(before, now, 100)
                old, new = thin(values[:before], 100), thin(values[:now], 100)
                assert old.ends[old.ends < first].tolist() == new.ends[new.ends < first].tolist()
                assert (old.means[old.ends < first] == new.means[new.ends < first]).all()


def merged(old: dict, new: dict) -> dict:
    """Return what the page has after an update."""
    return {key: {part: old.get(key, {}).get(part, [])[:line["keep"]] + line[part]
                  for part in ("x", "y", "low", "high") if part in line}
            for key, line in new["lines"].items()}


@pytest.mark.parametrize("axis", ["steps", "tokens", "time", "dollars"])
def test_updates_add_up_to_the_whole(runs_dir: Path, axis: str) -> None:
    run_dir, watched, shown = add_run(runs_dir, "live", steps=0), Watched(runs_dir), {}
    random, version, sizes = np.random.default_rng(2), "", []
    step = 0
    for count in (1, 3, 90, 30, 400, 5, 5, 700, 1, 1):
        for _ in range(count):
            step += 10
            append(run_dir, report(step, train_loss=float(random.normal()), usd=step / 7))
            if step % 50 == 0:
                append(run_dir, validation(step, float(random.random())))
        answer = watched.series("live", axis, max_points=100, since=version)
        version, shown = answer["version"], merged(shown, answer)
        sizes.append(len(json.dumps(answer)))
        assert shown == merged({}, watched.series("live", axis, max_points=100))
    assert sizes[-1] < sizes[-3] / 4  # one record more is a short answer
    assert len(shown["train_loss"]["x"]) <= 102


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
    assert part["version"] == "" and all(line["keep"] == 0 for line in part["lines"].values())
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
