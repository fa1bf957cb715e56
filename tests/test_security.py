"""The promises of SECURITY.md that no other test shows: printing, tokens, and the network."""

import ast
import importlib
import io
import logging
import re
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from unittest.mock import Mock

import pytest
from huggingface_hub import get_token
from packaging.requirements import Requirement
from packaging.version import Version

import ddp_train
import prepare_dataset
from basics.errors import UserError, one_line, print_error, print_traceback, visible
from lab import __main__ as lab_main
from lab.instruct.instructions import Entry
from lab.instruct.judge_endpoint import Judge, compare
from preparation.hub import fetch_dataset
from tests.support import workplace
from tests.support.hub_server import Fault, Handler, Hub, listening, serving, used_in_this_process
from tests.support.lab_cli import run_lab, succeeded
from tests.support.preparation import prepare
from tests.support.stand_ins import environment_of_refusal, refused_network
from tests.support.workplace import PROJECT_DIR, Workplace, run_command, train_tiny

TOKEN = "hf_marker0123456789abcdefghijklmnop"
HOSTILE = "a\x1b]0;title\x07\x1b[2J\r\x9b31m\u202eb\u2066\x00"
# The version that fixed the last vulnerability of each package that was known when this was
# written; packages without one are absent. No list of advisories was queried.
FIXED = {
    "filelock": "3.20.3",
    "psutil": "5.6.6",
    "pyarrow": "23.0.1",
    "pydantic": "2.4.0",
    "pytest": "9.0.3",
    "torch": "2.10.0",
    "tqdm": "4.66.3",
    "transformers": "5.0.0",
}
PRINTERS, BARS = {"click.echo", "print", "tqdm.write"}, {"tqdm"}  # a bar prints its `desc`
OWN = ("tests", "benchmarks", ".venv")  # print nothing from outside, or to developers


def is_inert(text):
    """Return whether a terminal shows all of a text, and obeys none of it but line ends."""
    return all(c.isprintable() or c in "\n\t" for c in text)


def test_text_keeps_its_lines_and_characters_and_loses_its_orders():
    text = "Grüße, 世界\u3000\U0001f469\u200d\U0001f4bb\n\tx\n"
    assert visible(text) == text
    assert visible("\x1b[31m\r\n\x9b\u202e\ud800") == r"\x1b[31m\r" + "\n" + r"\x9b\u202e\ud800"
    assert is_inert(visible(HOSTILE)) and "\n" not in one_line("a\nb")
    for code in (*range(32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)):
        assert chr(code) in "\n\t" or chr(code) not in visible(f"a{chr(code)}b")


def prints_only_its_own(call):
    """Return whether all that a call prints is its own text, numbers, or made visible."""

    def is_safe(node):
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Call):
            is_colour = ast.unparse(node.func) == "click.style" and is_safe(node.args[0])
            return is_colour or ast.unparse(node.func) in ("visible", "one_line", "len")
        if isinstance(node, ast.BinOp):
            return is_safe(node.left) and is_safe(node.right)
        if isinstance(node, ast.IfExp):
            return is_safe(node.body) and is_safe(node.orelse)
        if isinstance(node, ast.JoinedStr):
            return all(map(is_safe, node.values))
        if isinstance(node, ast.FormattedValue):
            return node.format_spec is not None or is_safe(node.value)
        return isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and bool(
            re.search(r"num_|number$|length$|counts\[|^head$|^kind$", ast.unparse(node))
        )

    if ast.unparse(call.func) in BARS:
        return all(is_safe(keyword.value) for keyword in call.keywords if keyword.arg == "desc")
    return all(map(is_safe, call.args))


def is_titled(call):
    return any(keyword.arg == "desc" for keyword in call.keywords)


def test_what_is_printed_is_made_visible():
    found = []
    for pattern in ("*.py", "[a-z]*/*.py", "[a-z]*/*/*.py"):
        for path in PROJECT_DIR.glob(pattern):
            if path.relative_to(PROJECT_DIR).parts[0] not in OWN:
                found += [
                    (path, node)
                    for node in ast.walk(ast.parse(path.read_text()))
                    if isinstance(node, ast.Call) and ast.unparse(node.func) in PRINTERS | BARS
                ]
    assert len(found) > 20
    assert any(ast.unparse(node.func) == "tqdm" and is_titled(node) for _, node in found)
    for path, node in found:
        assert prints_only_its_own(node), (
            f"{path}:{node.lineno}: print text from outside through basics.errors.visible"
        )


@pytest.mark.parametrize("script", ["lab", "prepare_dataset.py"])
def test_wrong_command_lines_are_one_inert_line(monkeypatch, capsys, script):
    words = ["compare"] if script == "lab" else ["source", "output"]
    for arguments in (
        [*words, f"--{HOSTILE[:-1]}"],
        [*words, "--markdown=\x1b[2J"],
        [*words, "--revision"],
        ["\x9b31m\n\x1b[2J"],
    ):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(SystemExit) as caught:
            lab_main.main() if script == "lab" else prepare_dataset.run()
        captured = capsys.readouterr()
        assert caught.value.code == 2 and captured.out == ""
        assert captured.err.startswith("Error: ") and captured.err.count("\n") == 1
        assert is_inert(captured.err) and " --help." in captured.err


def test_the_traceback_of_a_command_is_inert(tmp_path, monkeypatch, capsys):
    fail = Mock(side_effect=RuntimeError(HOSTILE))
    monkeypatch.setattr("preparation.find_source.find_source", fail)
    monkeypatch.setattr(ddp_train, "launch_run", fail)
    monkeypatch.setattr(lab_main.cli, "invoke", fail)
    monkeypatch.setattr("sys.argv", ["a command", "tiny"])
    for command in (
        lambda: prepare_dataset.run(["source", str(tmp_path / "out")]),
        ddp_train.main,
        lab_main.main,
    ):
        with pytest.raises(SystemExit) as caught:
            command()
        err = capsys.readouterr().err
        assert caught.value.code == 1 and is_inert(err) and err.startswith("Traceback")
        assert r"\x1b[2J" in err
    fail.side_effect = MemoryError(HOSTILE)
    with pytest.raises(SystemExit, match="2"):
        prepare_dataset.run(["source", str(tmp_path / "out")])
    assert capsys.readouterr().err.startswith("Error: out of memory; set a smaller --workers")


def test_generated_text_keeps_its_lines_and_is_inert(monkeypatch):
    importlib.import_module("lab.evaluate.measure")  # keeps the real `load_model` for later tests
    monkeypatch.setattr("trainer.models.load_model", Mock(return_value=Mock(checkpoint=None)))
    monkeypatch.setattr(
        "reporting.sampling.stream_text", lambda *_, **__: iter([f"{HOSTILE}\n\tx"])
    )
    for arguments in (("--samples", "2"), ("--prompt", HOSTILE.replace("\0", ""))):
        result = succeeded(run_lab("generate", "owner/x", *arguments))
        assert is_inert(result.output) and "\n\tx" in result.output
        assert r"\x1b[2J" in result.output
    side_by_side = succeeded(run_lab("generate", "owner/x", "owner/y")).output
    assert is_inert(side_by_side) and side_by_side.count(r"\x1b[2J") == 2


def test_the_hub_client_prints_nothing_by_itself(tmp_path, caplog):
    """What a server warns of is not made visible."""
    faults = [Fault("/api/", status=429, headers={"X-HF-Warning": "a; \x9b31m"})]
    with (
        serving(Hub({"train.safetensors": b"tokens"}, faults=faults)) as hub,
        used_in_this_process(hub, tmp_path / "home"),
        caplog.at_level(logging.WARNING, "huggingface_hub"),
    ):
        logging.getLogger("huggingface_hub").addHandler(caplog.handler)
        fetch_dataset(tmp_path / "data", hub.repository, ["train"])
        logging.getLogger("huggingface_hub").removeHandler(caplog.handler)
    assert (tmp_path / "data/train.safetensors").read_bytes() == b"tokens"
    assert not caplog.messages


ECHO = {
    "X-Error-Message": f"Authorization: Bearer {TOKEN}",
    "X-Request-Id": TOKEN,
    "X-Error-Code": TOKEN,
}
ANSWERS = {
    "rejected": [Fault("/api/", times=-1, status=400, headers=ECHO)],
    "busy": [Fault("/api/", times=-1, status=503, headers=ECHO)],
    "redirected": [
        Fault("/api/", times=-1, status=307, headers={"Location": f"/at/{TOKEN}"}),
        Fault("/at/", times=-1, status=418, headers=ECHO),
    ],
    "no revision": [
        Fault("/api/", times=-1, status=404, headers=ECHO | {"X-Error-Code": "RevisionNotFound"})
    ],
}


@pytest.mark.parametrize(
    ("answer", "place"), [*((answer, "environment") for answer in ANSWERS), ("rejected", "file")]
)
def test_a_hub_that_repeats_the_token_does_not_get_it_printed(tmp_path, monkeypatch, answer, place):
    said, hub_of_answer = io.StringIO(), Hub({}, faults=[*map(replace, ANSWERS[answer])])
    with serving(hub_of_answer) as hub, used_in_this_process(hub, tmp_path / "home"):
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "token").write_text(TOKEN if place == "file" else "")
        monkeypatch.setenv("HF_TOKEN", TOKEN if place == "environment" else "")
        assert get_token() == TOKEN
        with redirect_stderr(said), redirect_stdout(said):
            with pytest.raises(UserError) as caught:
                fetch_dataset(tmp_path / "data", hub.repository, ["train"])
            print_traceback(caught.value)
            print_error(caught.value.line())
    assert TOKEN[:14] not in str(caught.value) + said.getvalue()
    written = [path.read_text() for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert TOKEN not in "".join(written)


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (400, f'{{"error": {{"message": "wrong key {TOKEN}"}}}}', "status 400: wrong key ***"),
        (413, f"wrong: {TOKEN}", "status 413: wrong: ***"),
        (401, f"wrong: {TOKEN}", "status 401 for model 'm' (wrong: ***); check OPENAI_API_KEY"),
        (307, "", "status 307 for model 'm' (it redirects to /***); check OPENAI_API_KEY"),
    ],
)
def test_a_judge_that_repeats_the_key_does_not_get_it_printed(
    monkeypatch, status, content, message
):
    pytest.importorskip("openai")
    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)

    class Answers(Handler):
        def do_POST(self):
            self.body()
            self.send(status, content.encode(), {"Location": f"/{TOKEN}"} if status == 307 else {})

    comparison = compare(Entry(instruction="?", output="!"), {"a": "1"}, judge_model="m", seed=1)
    with listening(Answers) as address, pytest.raises(Exception) as caught:
        Judge(f"{address}/v1", "m").score(comparison)
    assert message in str(caught.value) and TOKEN[:14] not in str(caught.value)


def test_the_lab_asks_no_other_machine(tmp_path):
    place = train_tiny(tmp_path)
    for verb in (
        ("plan", "tiny"),
        ("compare",),
        ("compare", "--published", "--csv"),
        ("evaluate", "tiny", "--tokens", "64"),
        ("generate", "tiny", "--max-new-tokens", "3"),
        ("publish", "tiny"),
    ):
        datasets = ["--datasets-dir", str(place.datasets_dir)] if "evaluate" in verb else []
        with refused_network(tmp_path / "log"):
            succeeded(run_lab(*verb, "--runs-dir", str(place.runs_dir), *datasets))
        assert not (tmp_path / "log").exists(), (tmp_path / "log").read_text()


def test_preparing_own_files_asks_no_other_machine(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    (tmp_path / "b.txt").write_text("other text\n" * 50)
    with refused_network(tmp_path / "log"):
        workplace.succeeded(
            prepare(str(tmp_path / "*.txt"), str(tmp_path / "out"), "--validation-fraction", "0.5")
        )  # GPT-2's vocabulary
    assert not (tmp_path / "log").exists(), (tmp_path / "log").read_text()


def test_training_asks_no_other_machine(tmp_path):
    place = Workplace(tmp_path)
    place.add_run(train={"min_train_tokens": 128, "validation_batches": 1, "compile": False})
    place.add_dataset()
    environment = environment_of_refusal(tmp_path / "site", tmp_path / "log")
    probe = run_command(
        sys.executable, "-c", "import socket; socket.create_connection(('a.b', 1))", **environment
    )
    assert "no network in this test" in probe.stderr and (tmp_path / "log").exists()
    (tmp_path / "log").unlink()
    result = workplace.succeeded(
        run_command(
            sys.executable,
            "ddp_train.py",
            *place.arguments("tiny", "--nproc-per-node", "2"),
            **environment,
        )
    )
    assert "Warning" not in result.stderr
    assert not (tmp_path / "log").exists(), (tmp_path / "log").read_text()


def requirements():
    project = tomllib.loads((PROJECT_DIR / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    tools = project["dependency-groups"]["test"]
    for texts in (project["project"]["dependencies"], *extras, tools):
        yield from map(Requirement, texts)


def test_no_lower_bound_is_below_a_known_fix():
    lowest = {
        each.name: Version(bound.version)
        for each in requirements()
        for bound in each.specifier
        if bound.operator == ">="
    }
    assert {"gguf", "wandb"} <= lowest.keys()  # those of the extras too
    for name, fixed in FIXED.items():
        assert lowest[name] >= Version(fixed), name
