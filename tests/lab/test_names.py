"""What a person calls a run or a model, for every command; typing errors; runs of the original."""

import json
import shutil
import sys

import pytest
from safetensors.torch import save_file

from basics.errors import UserError
from gpt import GPTModel
from lab.runs import OF_THE_ORIGINAL
from preparation.ensure_dataset import provide_dataset
from preparation.find_source import find_source
from preparation.sources import SourceOptions
from processes.command_line import command_line
from reporting.reference import find_reference
from run_config import ModelConfig, NamedRun, find_run, load_run, run_name
from tests.support.lab_cli import error_line, run_lab, succeeded, write_entries
from tests.support.models import original_weights
from tests.support.workplace import TINY_MODEL
from trainer.model_names import check_before_torch, find_model

HELD_OUT = ("--dataset", "tiny", "--start-token", "0", "--tokens", "64")
TUNE = ("--data", "data.json", "--max-epochs", "1", "--max-new-tokens", "1")
VERBS = {
    "list": ["--follow"],
    "compare": [],
    "watch": ["--export", "page.html"],
    "plan": ["--machine", "h=1xH100@1"],
    "generate": ["--max-new-tokens", "1"],
    "evaluate": HELD_OUT,
    "publish": ["--output", "exported"],
}


@pytest.fixture
def place(trained, monkeypatch):
    """A trained run in `runs`, the current directory, and weights in `exported`."""
    monkeypatch.chdir(trained.root)
    write_entries(trained.root / "data.json", 40, output="Y")
    return trained


def forms_of(name, root):
    places = (name, f"runs/{name}", f"./runs/{name}", f"{root}/runs/{name}")
    return [*places, *(f"{place}/" for place in places)]


def test_a_run_is_what_its_name_its_directory_and_a_checkpoint_of_it_mean(place):
    runs_dir = place.runs_dir.relative_to(place.root)
    for text in forms_of("tiny", place.root):
        assert find_run(runs_dir, text) == find_model(text, runs_dir) == NamedRun("tiny"), text
        assert load_run(runs_dir, text).name == "tiny"
        with_checkpoint = NamedRun("tiny", "best")
        assert find_model(f"{text.rstrip('/')}@best", runs_dir) == with_checkpoint
        options = command_line.main([f"{text.rstrip('/')}@best"], standalone_mode=False)
        assert (options.run, options.checkpoint) == with_checkpoint
    with pytest.raises(UserError, match="tiny@best: is a checkpoint; name the run alone: tiny"):
        run_name(runs_dir, "tiny@best")
    with pytest.raises(UserError, match="is a second CHECKPOINT"):
        command_line.main(["tiny@best", "latest"], standalone_mode=False)
    elsewhere = place.root / "elsewhere"
    shutil.copytree(place.runs_dir / "tiny", elsewhere / "other")
    for find in (find_model, lambda text, where: load_run(where, text)):
        for where in (str(elsewhere), "elsewhere", "./elsewhere"):  # the second could be on the hub
            with pytest.raises(UserError, match=r"another directory; add --runs-dir .*elsewhere$"):
                find(f"{where}/other", runs_dir)


def test_a_wait_for_torch_is_said(place, monkeypatch, capsys):
    check_before_torch(["tiny"], place.runs_dir)
    assert capsys.readouterr().err == ""
    monkeypatch.delitem(sys.modules, "torch")
    check_before_torch(["tiny"], place.runs_dir)
    assert capsys.readouterr().err == "loading PyTorch\n"


def test_a_model_is_a_directory_of_weights_or_a_name_on_the_hub(place):
    succeeded(run_lab("publish", "tiny", "--output", "demo"))
    for text in ("demo", "demo/", "./demo", str(place.root / "demo"), "owner/name"):
        assert find_model(text, place.runs_dir) is None, text
    place.add_run("demo")
    assert find_model("demo", place.runs_dir) == NamedRun("demo")  # the run comes first
    assert find_model("./demo", place.runs_dir) is None
    shutil.move("demo", "of@best")
    assert find_model("of@best", place.runs_dir) is None
    assert find_model("original", place.runs_dir) == NamedRun("original")  # shipped, no copy


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_a_run_as_tab_completion_writes_it(place, verb):
    printed = {succeeded(run_lab(verb, "tiny", *VERBS[verb])).stdout}
    for text in forms_of("tiny", place.root):
        printed.add(succeeded(run_lab(verb, text, *VERBS[verb])).stdout)
    assert len(printed) == 1
    assert sorted(path.name for path in place.runs_dir.iterdir()) == ["tiny"]


def test_a_row_of_the_table_is_named_by_a_directory_too(place):
    """The page too; whose loss others are compared with, and what is priced."""
    succeeded(run_lab("watch", "runs/tiny/", "--export", "page.html"))
    assert '"name":"tiny"' in (place.root / "page.html").read_text()
    options = ("--to-loss-of", "runs/tiny/", "--usd-per-hour", "runs/tiny=2")
    assert "tokens to loss" in succeeded(run_lab("compare", *options)).stdout
    like = succeeded(run_lab("new", "runs/mine", "--dataset", "tiny", "--like", "runs/tiny/"))
    assert "are those of tiny" in like.stdout and (place.runs_dir / "mine").is_dir()


def test_a_typing_error_is_answered_with_the_name_that_was_meant(place):
    runs_dir, datasets_dir = place.runs_dir, place.datasets_dir
    shutil.copytree(runs_dir / "tiny", runs_dir / "long-name")
    for verb in ("list", "compare", "watch", "plan", "generate", "evaluate", "publish", "tune"):
        for text in ("lnog-name", "runs/lnog-name/"):
            assert "(did you mean long-name?)" in error_line(run_lab(verb, text)), verb
    for action, meant in (
        (lambda: load_run(runs_dir, "dmeo"), "demo"),
        (lambda: provide_dataset(datasets_dir / "tyny", "tyny"), "tiny"),
        (lambda: provide_dataset(datasets_dir / "pyhton-stdlib", "pyhton-stdlib"), "python-stdlib"),
        (lambda: find_source(SourceOptions("pyhton-stdlib")), "python-stdlib"),
        (lambda: find_reference("dmeo", runs_dir), "demo"),
    ):
        with pytest.raises(UserError, match=rf"\(did you mean {meant}\?\)"):
            action()
    for arguments, meant in (
        (("evalute",), "evaluate"),
        (("new", "mine", "--dataset", "tiny", "--like", "dmeo"), "demo"),
    ):
        result = run_lab(*arguments)
        assert f"(did you mean {meant}?)" in f"{result.exception}{result.stderr}", arguments
    assert "did you mean" not in error_line(run_lab("list", "nothing-like-it"))


@pytest.fixture
def theirs(place):
    """A run directory of the original system with two checkpoints, the first of them its best."""
    run_dir = place.add_run("theirs", model={"context_length": 192})
    model = GPTModel(ModelConfig(**TINY_MODEL | {"context_length": 192, "init": "torch"}))
    for step, loss in ((7, 2.5), (15, 3.5)):
        checkpoint = run_dir / f"checkpoints/20260101Z0000{step:02}-iteration-{step}"
        checkpoint.mkdir(parents=True)
        save_file(original_weights(model), checkpoint / "model.safetensors")
        (checkpoint / "optimizer.pt").write_bytes(b"a pickle")
        losses = {"train_loss": loss + 0.1, "val_loss": loss, "train_ds_offset": step}
        (checkpoint / "meta.json").write_text(json.dumps(losses))
    (run_dir / "checkpoints/latest").symlink_to(checkpoint.name)
    return run_dir


def test_a_run_of_the_original_system_is_one_for_every_verb(place, theirs):
    listed = json.loads(succeeded(run_lab("list", "theirs", "--json")).stdout)["runs"][0]
    assert (listed["status"], listed["global_step"]) == (OF_THE_ORIGINAL, 15)
    assert (listed["train_loss"], listed["validation_loss"]) == (3.6, 3.5)
    for checkpoint in ("best", "latest", "20260101Z000007-iteration-7"):
        generated = succeeded(run_lab("generate", f"runs/theirs@{checkpoint}", *VERBS["generate"]))
        assert generated.stdout
    assert "no checkpoint 'nix'" in error_line(run_lab("generate", "theirs@nix"))
    succeeded(run_lab("evaluate", "theirs", *HELD_OUT))
    *_, record = (theirs / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(record)["checkpoint"] == "20260101Z000007-iteration-7"
    assert json.loads(record)["trained_tokens"] is None
    succeeded(run_lab("evaluate", "theirs@all", *HELD_OUT))
    compared = succeeded(run_lab("compare", "theirs")).stdout
    assert "(of the original system)" in " ".join(compared.split()) and "3.5000" in compared
    succeeded(run_lab("publish", "theirs"))
    card = (theirs / "export/README.md").read_text()
    assert "# theirs" in card and "an unknown number of tokens" in card and "| step | 8 |" in card
    succeeded(run_lab("tune", "theirs/", *TUNE))
    assert (theirs / "instruction-answers.json").exists()
