"""`lab publish`: exports, uploads, model cards, GGUF files."""

import ast
import errno
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from safetensors.torch import load_file

from basics import failpoints
from basics.errors import UserError
from basics.files import aside_of
from checkpointing import Snapshot, find_checkpoint, list_checkpoints, prune, save_checkpoint
from lab.publish import export
from lab.publish.export import Extras, write_export
from lab.publish.formats import GGUF_FILES, write_tokenizer_files
from lab.publish.model_card import PublishRequest, declared_of, model_card
from processes.run_lock import write_heartbeat
from run_config import load_run
from tests.support.lab_cli import (
    HOSTILE,
    active_parts,
    add_tunable_run,
    error_line,
    publish,
    succeeded,
    tune,
)
from tests.support.models import random_model, write_tokenizer
from tests.support.optional import package
from tests.support.upload_server import taking_uploads
from tests.support.workplace import run_command
from tests.support.workplace import succeeded as process_succeeded
from tokens.token_file import TokenFile
from tokens.tokenizer import BYTE_LETTERS, choose_tokenizer, load_tokenizer
from trainer import models
from trainer.models import LoadedModel, load_model

transformers = package("transformers")
gguf = package("gguf")

EXPORTED = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
CHARTS = {"loss-chart.png", "grad-norm-chart.png", "learning-rate-chart.png"}
SHAPE = {"context_length": 64, "emb_dim": 64, "n_heads": 4}


@pytest.fixture
def hub():
    with taking_uploads() as hub:
        yield hub


@pytest.fixture
def tuned(workplace):
    """The directory of a tuned model."""
    add_tunable_run(workplace)
    succeeded(tune(workplace, "--max-epochs", "1", "--max-new-tokens", "1"))
    return workplace.runs_dir / "tiny/tuned"


def uploading_error(result, *, status=2):
    """Return the error line of an upload that failed after the files were listed."""
    assert isinstance(result.exception, UserError), result.output + repr(result.exception)
    assert "bytes  model.safetensors" in result.stdout and result.exception.status == status
    return result.exception.line()


def names_in(directory):
    return {path.name for path in directory.iterdir()}


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def no_tokenizer():
    return LoadedModel("mine", random_model(vocab_size=61), None)


@torch.no_grad()
def test_an_export_is_a_standard_gpt2_with_its_tokenizer_and_card(
    trained, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "export"
    result = succeeded(publish(trained, "tiny", "--output", str(output)))
    assert names_in(output) == EXPORTED | CHARTS and f"written to {output}" in result.stdout
    assert "the model card names no licence" in result.stdout
    monkeypatch.chdir(output)
    (code,) = re.findall(r"```python\n(.*?)```", (output / "README.md").read_text(), re.S)
    exec(code)
    assert capsys.readouterr().out.startswith("The ")  # and no longer than the model's context
    ours = load_model("tiny", runs_dir=trained.runs_dir).model
    theirs = transformers.GPT2LMHeadModel.from_pretrained(output).eval()
    tokens = torch.arange(30).view(2, 15)
    assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-4
    text = "naïve 😀 text\n"
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    assert tokenizer.encode(text) == list(text.encode()) and tokenizer.eos_token_id == 256
    generated = transformers.pipeline("text-generation", model=str(output))(
        "ab", max_new_tokens=4, do_sample=False
    )[0]["generated_text"]
    assert generated.startswith("ab") and len(generated) > 2


def test_transformers_loads_the_tokenizer_of_gpt2(tmp_path):
    write_tokenizer_files(tmp_path, "gpt2", context_length=1024)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer("gpt2")
    for text in ("Hello, it's  me\n\n\tdef f(x):", "中文 😀 žluť\u00a0x", " "):
        assert theirs.encode(text) == ours.encode_ordinary(text)
        assert theirs.decode(theirs.encode(text)) == text
    assert (theirs.eos_token_id, len(theirs)) == (ours.eot_token, ours.n_vocab)
    assert theirs.model_max_length == 1024


@pytest.mark.parametrize(
    ("kind", "options", "others", "refusal"),
    [
        ("private", (), ("--public",), "is private; omit --public"),
        ("public", ("--public",), (), "is public; add --public"),
    ],
)
def test_a_model_is_uploaded_and_a_repository_keeps_its_visibility(
    trained, tmp_path, hub, kind, options, others, refusal
):
    export_dir, command = trained.runs_dir / "tiny/export", ("tiny", "someone/one")
    environment = hub.environment(tmp_path)
    dry = succeeded(publish(trained, *command, *options, "--dry-run", **environment))
    assert f"would upload to the {kind} model repository someone/one" in dry.stdout
    assert not hub.repositories
    succeeded(publish(trained, *command, *options, **environment))
    assert hub.repositories["model", "someone/one"]["private"] is (kind == "private")
    files = hub.files("model", "someone/one")
    assert files == files_of(export_dir) and files.keys() == EXPORTED | CHARTS
    assert 'model="someone/one"' in files["README.md"].decode()
    result = publish(trained, *command, *others, **environment)
    assert f"already exists and {refusal}" in uploading_error(result)
    assert hub.files("model", "someone/one") == files


def test_a_broken_upload_is_retried_and_can_be_repeated(trained, tmp_path, hub, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between attempts
    environment = hub.environment(tmp_path)
    for place, fault in (("/lfs/", (99, 400)), ("/commit/", (99, 503)), ("/commit/", (99, 0))):
        hub.faults[place] = fault
        result = publish(trained, "tiny", "someone/tiny", **environment)
        line = uploading_error(result, status=2 if fault[1] == 400 else 1)  # others may pass
        assert line.startswith("Error: someone/tiny on the Hugging Face hub: ")
        assert hub.files("model", "someone/tiny") == {}
        hub.faults.clear()
    hub.faults |= {"/lfs/": (1, 503), "/commit/": (1, 500), "/api/repos/create": (1, 429)}
    succeeded(publish(trained, "tiny", "someone/tiny", **environment))
    assert hub.files("model", "someone/tiny").keys() == EXPORTED | CHARTS
    assert set(hub.received.values()) == {1}  # received files were not sent again
    for token, message in (
        ("", "uploading needs a token; set HF_TOKEN"),
        ("hf_wrong", "set HF_TOKEN"),
    ):
        result = publish(trained, "tiny", "someone/other", **hub.environment(tmp_path, token=token))
        assert message in uploading_error(result)
        assert ("model", "someone/other") not in hub.repositories


def test_a_dataset_is_uploaded_unchanged(workplace, tmp_path, hub):
    directory = workplace.add_dataset()
    (directory / "README.md").write_text("---\nlicense: mit\n---\n")
    (directory / ".train.safetensors.scan.json").write_text("{}")
    (directory / "notes.txt").write_text("mine")
    command, environment = (str(directory), "someone/dataset"), hub.environment(tmp_path)
    dry = succeeded(publish(workplace, *command, "--dry-run", **environment))
    assert "nothing uploaded" in dry.stdout and hub.paths == []
    succeeded(publish(workplace, *command, **environment))
    files = hub.files("dataset", "someone/dataset")
    assert files == {
        name: (directory / name).read_bytes()
        for name in ("README.md", "train.safetensors", "validation.safetensors")
    }
    assert "name the REPOSITORY" in error_line(publish(workplace, str(directory)))
    assert "without --output" in error_line(publish(workplace, *command, "--license", "mit"))


def test_what_a_link_points_to_is_not_published(workplace, tmp_path):
    directory, charts_dir = workplace.add_dataset(), tmp_path / "run"
    charts_dir.mkdir()
    (tmp_path / "token").write_text("hf_secret")
    for name in ("README.md", "tokenizer.json"):
        (directory / name).symlink_to(tmp_path / "token")
        result = publish(workplace, str(directory), "someone/data", "--dry-run")
        assert f"{name}: is a link" in error_line(result)
        (directory / name).unlink()
    for target in ("token", "nix"):
        (charts_dir / "loss-chart.png").symlink_to(tmp_path / target)
        with pytest.raises(UserError, match="loss-chart.png: is a link.* move it away"):
            write_export(no_tokenizer(), tmp_path / "export", Extras("ddp-train", charts_dir))
        (charts_dir / "loss-chart.png").unlink()
        assert not (tmp_path / "export").exists()


def test_an_export_replaces_an_earlier_one_and_nothing_else(trained, tmp_path):
    output = tmp_path / "export"
    for said in ("", f"{output}: replaces the earlier export there\n"):
        step, _, rest = succeeded(
            publish(trained, "tiny", "--output", str(output))
        ).stderr.partition("\n")
        assert re.match(r"tiny: step \d+, checkpoint ", step) and rest == said
    assert names_in(tmp_path) == {"export"}
    for added, message in (("thesis.txt", "holds other files (thesis.txt)"), (".git", "(.git)")):
        (output / added).write_text("years of work")
        before = names_in(output)
        assert message in error_line(publish(trained, "tiny", "--output", str(output)))
        assert names_in(output) == before
        (output / added).unlink()
    (output / "README.md").write_text("Somebody else's model, of the same files.")
    assert "a model from elsewhere" in error_line(publish(trained, "tiny", "--output", str(output)))


def test_two_exports_to_one_place_leave_each_other_alone(tmp_path, monkeypatch):
    write_files, output = export._write_files, tmp_path / "export"
    own_pid, cards = os.getpid(), []
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / f".export.ddp-train-{ended.pid}").mkdir()  # of a kill

    def write(target, directory, extras):
        cards.append(extras.card)
        if len(cards) == 1:  # another process exports meanwhile
            monkeypatch.setattr(os, "getpid", lambda: own_pid)
            write_export(target, output, Extras("tags: ddp-train, second"))
            assert names_in(tmp_path) == {"export", f".export.ddp-train-{os.getppid()}"}
        write_files(target, directory, extras)

    monkeypatch.setattr(export, "_write_files", write)
    monkeypatch.setattr(os, "getpid", os.getppid)  # another one that runs
    write_export(no_tokenizer(), output, Extras("tags: ddp-train, first"))
    assert names_in(tmp_path) == {"export"} and len(cards) == 2
    assert names_in(output) >= {"config.json", "model.safetensors"}
    assert "first" in (output / "README.md").read_text()


def test_an_export_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    output = write_export(no_tokenizer(), tmp_path / "export", Extras("tags: ddp-train"))
    before = files_of(output)

    for error in (
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(export, "write_tensors", fail)
        with pytest.raises(UserError, match="export: cannot be written: No space left") as caught:
            write_export(no_tokenizer(), output, Extras("tags: ddp-train, new"))
        assert caught.value.status == 4
        assert names_in(tmp_path) == {"export"} and files_of(output) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nix",), "no such run"),
        (("../tiny",), "not a plain name"),
        ((".",), "not a plain name"),
        (("tiny", "nix"), "REPOSITORY: 'nix' cannot be used; give owner/name"),
        (("tiny", "some/one", "--checkpoint", "nix"), "no checkpoint 'nix'"),
        (("tiny", "--output", "link"), "is not a directory"),
        (("tiny", "--output", "file"), "is not a directory"),
        (("tiny", "--license", "My Licence"), "--license"),
        (("tiny", "--license", "mit\ntags: x"), "--license"),
        (("tiny", "--license", ""), "--license"),
        (("tiny", "--language", "English"), "--language"),
        (("tiny", "--language", "e\x1b"), "--language"),
    ],
)
def test_a_user_error_is_one_line(trained, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "file").write_text("mine")
    assert message in error_line(publish(trained, *arguments))
    assert (tmp_path / "file").read_text() == "mine" and names_in(tmp_path / "elsewhere") == set()
    assert not (trained.runs_dir / "tiny/export").exists()


def test_a_tuned_model_is_published_with_its_template_and_card(workplace, tuned, tmp_path, hub):
    before, output = files_of(tuned), tmp_path / "export"
    options = ("--output", str(output), "--license", "cc-by-4.0", "--language", "de")
    succeeded(publish(workplace, str(tuned), *options))
    assert files_of(tuned) == before
    assert before | {"README.md": files_of(output)["README.md"]} == files_of(output)
    card, old = (ModelCard.load(place / "README.md") for place in (output, tuned))
    assert card.text.split() == old.text.split() and str(tmp_path) not in card.content
    stated = {"license": "cc-by-4.0", "language": ["de"]}
    assert card.data.to_dict() == old.data.to_dict() | stated
    assert transformers.AutoTokenizer.from_pretrained(output).chat_template
    for repository in ("someone/tuned", "someone/again"):
        succeeded(publish(workplace, str(tuned), repository, **hub.environment(tmp_path)))
        files = hub.files("model", repository)
        assert files == files_of(tuned)
        assert files["model.safetensors"] == before["model.safetensors"]
        card = files["README.md"].decode()
        assert card.count("model=") == card.count(f'model="{repository}")') == 1
    for card, message in (
        ("---\ntags: [ddp-train\n---\nx", "not a model card"),
        ("Somebody else's model.", "not a plain name"),
    ):
        (tuned / "README.md").write_text(card)
        assert message in error_line(publish(workplace, str(tuned)))


def test_a_kill_while_an_export_is_replaced_loses_nothing(trained, monkeypatch):
    succeeded(publish(trained, "tiny"))
    place = trained.runs_dir / "tiny/export"
    before = files_of(place)
    with monkeypatch.context() as patched:
        patched.setenv(failpoints.VARIABLE, "replace:raise")
        assert isinstance(publish(trained, str(place)).exception, RuntimeError)
    assert files_of(place) == before
    place.rename(aside_of(place))  # as a kill between the two renames leaves it
    succeeded(publish(trained, str(place)))
    assert files_of(place) == before
    assert [path.name for path in place.parent.glob(".*export*")] == []


def test_a_run_that_removes_what_is_read_is_read_again_and_damage_is_an_error(
    trained, tmp_path, monkeypatch
):
    checkpoints_dir = trained.runs_dir / "tiny/checkpoints"
    load_weights, opened = models.load_weights, []
    command = "tiny", "--checkpoint", "latest", "--output", str(tmp_path / "export")

    def go_on_and_load(checkpoint, model):
        opened.append(checkpoint.name)
        if len(opened) < 3:  # save the next checkpoint and remove the others, as a run does
            newest = list_checkpoints(checkpoints_dir)[-1]
            weights = load_file(newest.path / "model.safetensors")
            save_checkpoint(
                checkpoints_dir,
                Snapshot(weights, {}),
                newest.meta.model_copy(
                    update={"global_step": newest.meta.global_step + 1, "loss": None}
                ),
            )
            prune(checkpoints_dir, keep=1, protected=())
            for other in list_checkpoints(checkpoints_dir)[:-1]:
                shutil.rmtree(other.path)
        load_weights(checkpoint, model)

    monkeypatch.setattr(models, "load_weights", go_on_and_load)
    succeeded(publish(trained, *command))
    newest = find_checkpoint(checkpoints_dir, "latest")
    assert len(set(opened)) == 3 and opened[-1] == newest.name
    card = (tmp_path / "export/README.md").read_text()
    assert f"| step | {newest.meta.global_step + 1} of 10 |" in card

    content = bytearray((newest.path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (newest.path / "model.safetensors").write_bytes(content)
    assert "has changed since it was written" in error_line(publish(trained, *command))


# --- model cards


def card_of(workplace, **train):
    """Return the card of a run that says that it was trained with these settings."""
    target = load_model("tiny", runs_dir=workplace.runs_dir)
    meta = target.checkpoint.meta
    meta = meta.model_copy(update={"settings": meta.settings | train})
    target = replace(target, checkpoint=replace(target.checkpoint, meta=meta))
    return model_card(target, PublishRequest("tiny", datasets_dir=workplace.datasets_dir))


def words_of(card):
    return " ".join(card.split())


def test_the_card_has_all_results(trained, tmp_path):
    run_dir, output = trained.runs_dir / "tiny", tmp_path / "export"
    checkpoint = find_checkpoint(run_dir / "checkpoints", "best")
    measured = {
        "checkpoint": checkpoint.name,
        "global_step": checkpoint.meta.global_step,
        "dataset": "tiny",
        "split": "validation",
        "start_token": 16,
        "num_tokens": 320,
    }
    benchmark = measured | {"dataset": None, "benchmark": "blimp", "split": "train"}
    lines = [
        measured | {"loss": 9.5},
        measured | {"loss": 5.25, "perplexity": 190.5},
        measured | {"checkpoint": "another", "loss": 1.0},
        {"junk": 1},
        measured | {"split": "train", "loss": 0.5},  # of tokens trained on
        benchmark | {"accuracy": 0.5, "questions_from": "nyu-mll/blimp"},
        benchmark | {"accuracy": 0.25, "questions_from": "own|.jsonl", "split": None},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "evaluations.jsonl").write_text(text + '{"half')
    config = run_dir / "train.json"  # a later one, which is not that of the training
    config.write_text(config.read_text().replace('"tiny"', '"other"').replace("0.01", "0.123"))
    succeeded(publish(trained, "tiny", "--output", str(output), "--license", "apache-2.0"))
    card = ModelCard.load(output / "README.md")
    assert card.data.license == "apache-2.0" and card.data.library_name == "transformers"
    results = card.data.eval_results
    assert {found.metric_name: found.metric_value for found in results} == {
        "validation loss during training (nats per token)": checkpoint.loss,
        "loss (nats per token), 320 tokens from token 16": 5.25,
        "perplexity, 320 tokens from token 16": 190.5,
        "accuracy": 0.5,
        "accuracy, questions of own|.jsonl": 0.25,
    }
    for wanted in (
        f"{checkpoint.meta.tokens:,} tokens of `tiny`",
        "14,976 parameters",
        f"step | {checkpoint.meta.global_step + 1} of 10",
        '"learning_rate": 0.01',
        "(loss-chart.png)",
        "| global batch | 2 x 1 x 1 sequences of 16 tokens |",
        "| 5.250000 |",
    ):
        assert wanted in card.text, wanted


@pytest.mark.parametrize(
    ("start", "name"),
    [
        ("{root}/secret-place/gpt2-weights", "gpt2-weights"),
        ("exports/mine", "mine"),
        ("someone/gpt", "someone/gpt"),
    ],
)
@pytest.mark.parametrize("place", [".", "elsewhere"])
def test_no_path_of_the_machine_is_in_a_card(trained, monkeypatch, start, name, place):
    """Also a relative path of the place of training, when the command is given elsewhere."""
    for folder in ("exports/mine", "elsewhere"):
        (trained.root / folder).mkdir(parents=True)
    monkeypatch.chdir(trained.root / place)
    card = card_of(trained, init_from=start.format(root=trained.root))
    assert 'pipeline("text-generation", model=".")' in card
    assert f"trained from the weights of `{name}` on" in words_of(card)
    assert f'"init_from": "{name}"' in card
    assert all(part not in card for part in (str(trained.root), "secret-place", "exports/"))


CARD_OF_MINE = "---\nlicense: cc-by-4.0\nlanguage:\n- de\n- pt-BR\n---\n"


def test_licence_and_languages_are_those_of_the_dataset(tmp_path):
    for name in (
        "gpjt/fineweb-gpt2-tokens",
        "gpjt/fineweb-edu-gpt2-tokens",
        "HuggingFaceFW/fineweb",
    ):
        assert declared_of(name, tmp_path) == ("odc-by", ["en"])
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine/README.md"
    for card, *wanted in (
        (CARD_OF_MINE, "cc-by-4.0", ["de", "pt-BR"]),
        (CARD_OF_MINE.replace("cc-by-4.0", "unknown"), None, []),  # nobody has filled it in
        (CARD_OF_MINE.replace("cc-by-4.0", "'a: b'"), None, []),
        (CARD_OF_MINE.replace("de\n", "'<b>'\n"), "cc-by-4.0", []),
        ("---\nlicense: mit\nlanguage: nl\n---\n", "mit", ["nl"]),
        ("---\nlicense: [\n---\n", None, []),
        ("no front matter", None, []),
        ("---\nlicense: [mit, gpl]\nlanguage: 7\n---\n", None, []),
    ):
        path.write_text(card)
        assert declared_of("mine", tmp_path) == tuple(wanted), card
    (tmp_path / "README.md").write_text(CARD_OF_MINE)
    path.unlink()
    path.symlink_to(tmp_path / "README.md")
    for name in (
        "..",
        "../mine/..",
        ".",
        "",
        str(tmp_path),
        "mine",
        "nix",
        "fineweb",
        "fineweb2",
        "fineweb-gpt2-tokens",
        "someone/fineweb",
    ):
        assert declared_of(name, tmp_path) == (None, [])


def test_a_run_has_the_licence_of_its_dataset_only_if_trained_from_scratch(trained):
    (trained.datasets_dir / "tiny/README.md").write_text(CARD_OF_MINE)
    for start, licence in ((None, "cc-by-4.0"), ("someone/gpt", None)):
        data = ModelCard(card_of(trained, init_from=start)).data
        assert (data.license, data.language) == (licence, ["de", "pt-BR"])


@pytest.mark.parametrize(
    ("prompts", "shown"),
    [
        (["Once 😀\n"], "Once 😀\n"),
        (["", "a"], "a"),
        ([], "The "),
        ("x", "The "),
        (["b" * 99], "b" * 60),
    ],
)
def test_the_example_of_a_card_has_the_prompt_of_the_run(trained, prompts, shown):
    target = load_model("tiny", runs_dir=trained.runs_dir)
    settings = target.checkpoint.meta.settings | {"sample_prompts": prompts}
    checkpoint = replace(
        target.checkpoint, meta=target.checkpoint.meta.model_copy(update={"settings": settings})
    )
    card = model_card(replace(target, checkpoint=checkpoint), PublishRequest(source="tiny"))
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    strings = [each.value for each in ast.walk(ast.parse(code)) if isinstance(each, ast.Constant)]
    assert shown in strings


def test_what_was_written_into_a_card_stays_there(trained):
    succeeded(publish(trained, "tiny", "--gguf"))
    export_dir = trained.runs_dir / "tiny/export"
    path = export_dir / "README.md"
    own = "\n## Limits\n\nIt knows nothing.\n\n## GGUF\n\nMy words.\n"
    path.write_text(path.read_text() + own)
    with_own = path.read_text()
    for options, has_files in ((["--gguf"], True), ([], False), (["--gguf"], True)):
        succeeded(publish(trained, str(export_dir), *options))
        text = path.read_text()
        assert own in text and ("model-F16.gguf" in text) is has_files
        assert text.count("## GGUF") == 1 + has_files
        if options and text.index("model-F16.gguf") < text.index("## Limits"):
            assert text == with_own


@pytest.mark.parametrize(
    "summary",
    [
        '{"batch": {"x": 1}}',
        '{"batch": [1]}',
        '{"machine": "x"}',
        "junk",
        "",
        '{"tokens_per_second": "x"}',
        json.dumps({"train": {"dataset": "a|b\nc"}}),
        json.dumps({"train": {"dataset": HOSTILE}}),
        json.dumps({"train": {"dataset": "tiny", "init_from": HOSTILE}}),
        json.dumps({"machine": dict.fromkeys(("device", "torch"), HOSTILE)}),
    ],
)
def test_damaged_and_hostile_records_never_break_a_card(trained, summary):
    run_dir = trained.runs_dir / "tiny"
    target = load_model("tiny", runs_dir=trained.runs_dir)
    begin = f'{{"checkpoint": "{target.checkpoint.name}", "global_step": 1, '
    evaluations = [
        '"loss": 1.5, "num_tokens": "x"}\n',
        '"loss": 1.5, "num_tokens": 3, "start_token": null}\n',
        '"loss": "x"}\n',
        '"loss": NaN}\n',
        '"loss": 1.5, "dataset": ["a"]}\n',
        '"loss": 1.5, "dataset": "a|b\\nc", "split": {"a": 1}}\n',
        f'"loss": 1.5, "dataset": {json.dumps(HOSTILE)}}}\n',
        f'"accuracy": 0.5, "benchmark": {json.dumps(HOSTILE)}}}\n',
    ]
    (run_dir / "evaluations.jsonl").write_text(begin + begin.join(evaluations))
    (run_dir / "summary.json").write_text(summary)
    card = model_card(target, PublishRequest("tiny"))
    ModelCard(card)  # parses its front matter
    rows = [line for line in card.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 3 for line in rows)
    assert active_parts(card) <= CHARTS


@pytest.mark.parametrize("goes_on", [True, False])
def test_the_card_says_that_training_goes_on(trained, goes_on):
    run = load_run(trained.runs_dir, "tiny")
    if goes_on:
        run.summary_path.write_text('{"status": "running"}')
        write_heartbeat(run.heartbeat_path, phase="training", step=7, seconds=1.0, parent=1)
    target = load_model("tiny", runs_dir=trained.runs_dir)
    card = words_of(model_card(target, PublishRequest("tiny")))
    assert ("so far: these are the weights after step" in card) == goes_on


# --- GGUF files


def target_of(model, tmp_path, /, *, tokenizer="bytes", **changes):
    """Return a model with a tokenizer: `gpt2`, `bytes`, or `own` for one in a file."""
    if tokenizer != "own":
        return LoadedModel("mine", model, tokenizer)
    path = write_tokenizer(tmp_path / "tokenizer", **changes) / "tokenizer.json"
    return LoadedModel("mine", model, choose_tokenizer(str(path)).name, tokenizer_path=path)


def exported(target, tmp_path, *, chat_template=None):
    return write_export(
        target,
        tmp_path / "export",
        Extras("tags: ddp-train", chat_template=chat_template, with_gguf=True),
    )


def fields_of(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


SPACED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size"),
    [("bytes", 264), ("own", 310), pytest.param("gpt2", 50304, marks=pytest.mark.thorough)],
)
def test_each_id_has_its_token(tmp_path, tokenizer, vocab_size):
    target = target_of(random_model(**SHAPE, vocab_size=vocab_size), tmp_path, tokenizer=tokenizer)
    fields = fields_of(exported(target, tmp_path, chat_template="{{ x }}") / "model-F16.gguf")
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.chat_template"] == "{{ x }}"
    assert fields["tokenizer.ggml.bos_token_id"] == fields["tokenizer.ggml.eos_token_id"]
    assert not fields["tokenizer.ggml.add_bos_token"]
    ours, tokens = target.load_tokenizer(), fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    bytes_of = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
    assert len(tokens) == len(kinds) == len(set(tokens)) == vocab_size
    for number in range(ours.n_vocab):
        if number != ours.eot_token:
            found = bytes(bytes_of[letter] for letter in tokens[number])
            assert found == ours.decode_single_token_bytes(number) and kinds[number] == 1
    assert tokens[ours.eot_token] == "<|endoftext|>" and kinds[ours.eot_token] == 3
    assert set(kinds[ours.n_vocab :]) == {5} and fields["tokenizer.ggml.merges"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("tied", "bias", "emb_dim"), [(True, False, 64), (False, True, 24)]
)  # 24 is no multiple of a block of 32
def test_transformers_loads_the_gguf_files(tmp_path, tied, bias, emb_dim):
    model = random_model(
        **SHAPE | {"context_length": 1024, "emb_dim": emb_dim},
        vocab_size=264,
        tie_weights=tied,
        qkv_bias=bias,
    )
    output, tokens = exported(target_of(model, tmp_path), tmp_path), torch.arange(40).view(2, 20)
    for name, kind in GGUF_FILES.items():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(output, gguf_file=name).eval()
        assert (model(tokens) - theirs(tokens).logits).abs().max() < (
            0.03 if kind == "Q8_0" else 0.002
        )
        assert theirs.config.eos_token_id == 256
        for tensor in gguf.GGUFReader(output / name).tensors:
            is_matrix = len(tensor.shape) == 2 and tensor.name != "position_embd.weight"
            fits = tensor.shape[0] % 32 == 0
            assert tensor.tensor_type.name == ("F32" if not is_matrix else kind if fits else "F16")


@pytest.mark.parametrize(
    ("of_model", "changes"),
    [
        (False, {"pre_tokenizer": SPACED}),
        (False, {"normalizer": {"type": "NFC"}}),
        (False, {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}),
        (True, {"ignore_merges": True}),
        (True, {"byte_fallback": True}),
        (True, {"continuing_subword_prefix": "##", "merges": []}),
        (True, {"end_of_word_suffix": "</w>", "merges": []}),
        (True, {"vocab": {"a": 0, "b": 1}, "merges": []}),
    ],
)
def test_a_tokenizer_that_gguf_cannot_hold_is_refused(tmp_path, of_model, changes):
    if of_model:
        parts = json.loads((write_tokenizer(tmp_path) / "tokenizer.json").read_text())
        changes = {"model": parts["model"] | changes}
    target = target_of(random_model(vocab_size=300), tmp_path, tokenizer="own", **changes)
    with pytest.raises(UserError, match="not a byte-level BPE that works as GPT-2's"):
        exported(target, tmp_path)
    assert not (tmp_path / "export").exists()


def test_models_that_gguf_cannot_hold_are_refused(tmp_path):
    model = random_model(vocab_size=257)
    with torch.no_grad():
        model.blocks[0].mlp.up.weight[0, 0] = 1e5
    for refused, message in (
        (model, "up to 100000, too large for 16-bit"),
        (random_model(vocab_size=200), "has 257 entries, the model 200"),
    ):
        with pytest.raises(UserError, match=message):
            exported(target_of(refused, tmp_path), tmp_path)


def test_publish_writes_gguf_files_under_the_name_of_the_card(trained, tmp_path, monkeypatch):
    output, again = tmp_path / "export", tmp_path / "again"
    succeeded(publish(trained, "tiny", "--output", str(output), "--gguf"))
    succeeded(publish(trained, str(output), "--output", str(again), "--gguf"))
    for name in GGUF_FILES:
        assert f"`{name}`" in (output / "README.md").read_text()
        for place in (output, again):
            assert fields_of(place / name)["general.name"] == "tiny"
    succeeded(publish(trained, "tiny", "--output", str(output)))  # replaces it
    assert not list(output.glob("*.gguf")) and "GGUF" not in (output / "README.md").read_text()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = publish(trained, "tiny", "--output", str(tmp_path / "nix"), "--gguf")
    assert "needs the package gguf" in error_line(result) and not (tmp_path / "nix").exists()


def test_tokens_load_with_safetensors_alone(workplace):
    path = workplace.add_dataset() / "train.safetensors"
    code = (
        "import sys\nfrom safetensors import safe_open\n"
        f"with safe_open({str(path)!r}, framework='numpy') as file:\n"
        "    print(file.get_slice('tokens')[2:5].tolist())\n"
        "assert not {'torch', 'tokens'} & sys.modules.keys()\n"
    )
    shown = process_succeeded(run_command(sys.executable, "-c", code)).stdout
    assert json.loads(shown) == TokenFile(path).read(2, 5).tolist()
