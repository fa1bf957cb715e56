import errno
import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, pipeline

from basics import failpoints
from basics.errors import UserError
from basics.files import lock_directory
from checkpointing import Snapshot, find_checkpoint, list_checkpoints, prune, save_checkpoint
from lab.publish import export, upload
from lab.publish.export import Extras, write_export
from lab.publish.tokenizer_files import write_tokenizer_files
from tests.support.lab_cli import error_line, publish, succeeded
from tests.support.models import random_model
from tests.support.tokenizers import write_tokenizer
from tests.support.tuning import add_tunable_run, tune
from tests.support.upload_server import taking_uploads
from tests.support.workplace import run_command
from tests.support.workplace import succeeded as process_succeeded
from tokens.token_file import TokenFile
from tokens.tokenizer import choose_tokenizer, load_tokenizer
from trainer import models
from trainer.models import LoadedModel, load_model

EXPORTED = {"README.md", "config.json", "generation_config.json", "model.safetensors",
            "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"}
CHARTS = {"loss-chart.png", "grad-norm-chart.png", "learning-rate-chart.png"}


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
def test_an_export_is_a_standard_gpt2_with_its_tokenizer_and_card(trained, tmp_path):
    output = tmp_path / "export"
    result = succeeded(publish(trained, "tiny", "--output", str(output)))
    assert names_in(output) == EXPORTED | CHARTS and f"written to {output}" in result.stdout
    ours = load_model("tiny", runs_dir=trained.runs_dir).model
    theirs = GPT2LMHeadModel.from_pretrained(output).eval()
    tokens = torch.arange(30).view(2, 15)
    assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-4
    text = "naïve 😀 text\n"
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.encode(text) == list(text.encode()) and tokenizer.eos_token_id == 256
    generated = pipeline("text-generation", model=str(output))(
        "ab", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert generated.startswith("ab") and len(generated) > 2


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_transformers_loads_the_tokenizers(name, tmp_path):
    write_tokenizer_files(tmp_path, name, context_length=1024)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(name)
    for text in ("Hello, it's  me\n\n\tdef f(x):", "中文 😀 žluť\u00a0x", " "):
        assert theirs.encode(text) == ours.encode_ordinary(text)
        assert theirs.decode(theirs.encode(text)) == text
    assert (theirs.eos_token_id, len(theirs)) == (ours.eot_token, ours.n_vocab)
    assert theirs.model_max_length == 1024


def test_an_existing_repository_keeps_its_visibility(trained, tmp_path, hub):
    for options, is_private, found in (((), False, "public; add --public"),
                                       (("--public",), True, "private; omit --public")):
        hub.repositories["model", "someone/tiny"] = {"private": is_private, "files": {}}
        result = publish(trained, "tiny", "someone/tiny", *options, **hub.environment(tmp_path))
        assert f"already exists and is {found}" in uploading_error(result)
        assert hub.files("model", "someone/tiny") == {} and not hub.large_files


def test_a_model_is_uploaded(trained, tmp_path, hub):
    export_dir = trained.runs_dir / "tiny/export"
    for options, kind in (((), "private"), (("--public",), "public")):
        name = f"someone/{kind}"
        dry = succeeded(publish(trained, "tiny", name, *options, "--dry-run",
                                **hub.environment(tmp_path)))
        assert f"would upload to the {kind} model repository {name}" in dry.stdout
        size = (export_dir / "model.safetensors").stat().st_size
        assert f"{size:>15,} bytes  model.safetensors" in dry.stdout
        assert ("model", name) not in hub.repositories
        result = succeeded(publish(trained, "tiny", name, *options, **hub.environment(tmp_path)))
        assert f"hub, {kind}: {hub.endpoint}/{name}" in result.stdout
        assert hub.repositories["model", name]["private"] is (kind == "private")
        files = hub.files("model", name)
        assert files == files_of(export_dir) and files.keys() == EXPORTED | CHARTS
        assert f'model="{name}"' in files["README.md"].decode()


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
    for token, message in (("", "uploading needs a token; set HF_TOKEN"),
                           ("hf_wrong", "set HF_TOKEN")):
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
    assert files == {name: (directory / name).read_bytes() for name in (
        "README.md", "train.safetensors", "validation.safetensors")}
    assert "name the REPOSITORY" in error_line(publish(workplace, str(directory)))
    assert "apply only to models" in error_line(publish(workplace, *command, "--license", "mit"))


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
            write_export(no_tokenizer(), tmp_path / "export", "ddp-train", Extras(charts_dir))
        (charts_dir / "loss-chart.png").unlink()
        assert not (tmp_path / "export").exists()


def test_an_export_replaces_an_earlier_one_and_nothing_else(trained, tmp_path):
    output = tmp_path / "export"
    for _ in range(2):
        succeeded(publish(trained, "tiny", "--output", str(output)))
    assert names_in(tmp_path) == {"export"}
    for added, message in (("thesis.txt", "holds other files (thesis.txt)"), (".git", "(.git)")):
        (output / added).write_text("years of work")
        before = names_in(output)
        assert message in error_line(publish(trained, "tiny", "--output", str(output)))
        assert names_in(output) == before
        (output / added).unlink()
    (output / "README.md").write_text("Somebody else's model, of the same files.")
    assert "a model from elsewhere" in error_line(publish(trained, "tiny", "--output", str(output)))


def test_one_command_at_a_time_writes_an_export(tmp_path):
    output = write_export(no_tokenizer(), tmp_path / "export", "tags: ddp-train")
    work_dir = tmp_path / ".export.ddp-train-export"
    work_dir.mkdir()
    lock = lock_directory(work_dir)
    with pytest.raises(UserError, match="another lab publish or lab tune is writing it"):
        write_export(no_tokenizer(), output, "tags: ddp-train, new")
    os.close(lock)
    assert (output / "README.md").read_text() == "tags: ddp-train"
    for place in ("new", "old"):  # that a kill left
        shutil.copytree(output, work_dir / place, dirs_exist_ok=True)
    write_export(no_tokenizer(), output, "tags: ddp-train, new")
    assert (output / "README.md").read_text() == "tags: ddp-train, new"
    assert names_in(tmp_path) == {"export"}


def test_an_export_is_on_the_disk_before_it_replaces_another(tmp_path, monkeypatch):
    written: list[str] = []
    output, rename = tmp_path / "export", Path.rename
    write_export(no_tokenizer(), output, "tags: ddp-train")
    monkeypatch.setattr(export, "fsync", lambda path: written.append(path.name))
    monkeypatch.setattr(Path, "rename", lambda path, target: written.append(
        f"{path.name} to {target.name}") or rename(path, target))
    write_export(no_tokenizer(), output, "tags: ddp-train")
    assert {*written[:-4]} == names_in(output)
    assert written[-4:] == ["new", "export to old", "new to export", tmp_path.name]


def test_an_export_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    output = write_export(no_tokenizer(), tmp_path / "export", "tags: ddp-train")
    before = files_of(output)

    for error in (OSError(errno.ENOSPC, "No space left on device"),
                  SafetensorError("I/O error: No space left on device (os error 28)")):
        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(export, "write_tensors", fail)
        with pytest.raises(UserError, match="export: cannot be written: No space left") as caught:
            write_export(no_tokenizer(), output, "tags: ddp-train, new")
        assert caught.value.status == 4
        assert names_in(tmp_path) == {"export"} and files_of(output) == before


def test_a_user_error_is_one_line(trained, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "file").write_text("mine")
    for arguments, message in (
            (("nix",), "no such run"), (("../tiny",), "not a plain name"),
            ((".",), "not a plain name"),
            (("tiny", "nix"), "'nix' is not the name of a repository; give owner/name"),
            (("tiny", "some/one", "--checkpoint", "nix"), "no checkpoint 'nix'"),
            (("tiny", "--output", str(tmp_path / "link")), "is not a directory"),
            (("tiny", "--output", str(tmp_path / "file")), "is not a directory")):
        assert message in error_line(publish(trained, *arguments))
    assert (tmp_path / "file").read_text() == "mine" and names_in(tmp_path / "elsewhere") == set()
    assert not (trained.runs_dir / "tiny/export").exists()


def test_a_tuned_model_is_published_with_its_template_and_card(workplace, tuned, tmp_path, hub):
    before, output = files_of(tuned), tmp_path / "export"
    result = publish(workplace, str(tuned), "--output", str(output), "--license", "cc-by-4.0")
    assert f"written to {output}" in succeeded(result).stdout and files_of(tuned) == before
    changed = {name for name, content in files_of(output).items() if content != before[name]}
    assert changed == {"README.md"} and files_of(output).keys() == before.keys()
    card, old = (ModelCard.load(place / "README.md") for place in (output, tuned))
    assert card.text.split() == old.text.split() and str(tmp_path) not in card.content
    assert card.data.to_dict() == old.data.to_dict() | {"license": "cc-by-4.0"}
    assert AutoTokenizer.from_pretrained(output).chat_template
    for repository in ("someone/tuned", "someone/again"):
        succeeded(publish(workplace, str(tuned), repository, "--language", "en",
                          **hub.environment(tmp_path)))
        files = hub.files("model", repository)
        assert files == files_of(tuned)
        assert files["model.safetensors"] == before["model.safetensors"]
        card = ModelCard(files["README.md"].decode())
        assert f'model="{repository}")' in card.text and card.data.language == ["en"]
        assert card.text.count("model=") == 1
    (tuned / "README.md").write_text("---\ntags: [ddp-train\n---\nx")
    assert "not a model card" in error_line(publish(workplace, str(tuned)))
    (tuned / "README.md").write_text("Somebody else's model.")
    assert "not a plain name" in error_line(publish(workplace, str(tuned)))


def test_an_export_can_be_published_again(trained, tmp_path):
    succeeded(publish(trained, "tiny"))
    card = "---\ntags:\n- ddp-train\n---\n\nx\n"
    for place in (trained.runs_dir / "tiny/export",
                  write_export(no_tokenizer(), tmp_path / "without a tokenizer", card)):
        before = files_of(place)
        succeeded(publish(trained, str(place)))
        assert files_of(place) == before


def test_a_kill_while_an_export_is_replaced_loses_nothing(trained, monkeypatch):
    succeeded(publish(trained, "tiny"))
    place = trained.runs_dir / "tiny/export"
    before = files_of(place)
    with monkeypatch.context() as patched:
        patched.setattr(export.shutil, "rmtree", lambda *_, **__: None)  # as if killed
        patched.setenv(failpoints.VARIABLE, "export.rename:raise")
        assert isinstance(publish(trained, str(place)).exception, RuntimeError)
    assert not place.exists()
    succeeded(publish(trained, str(place)))
    assert files_of(place) == before
    assert [path.name for path in place.parent.glob(".*export*")] == []


def test_a_run_that_removes_what_is_read_is_read_again_and_damage_is_an_error(trained, tmp_path,
                                                                              monkeypatch):
    checkpoints_dir = trained.runs_dir / "tiny/checkpoints"
    load_weights, opened = models.load_weights, []
    command = "tiny", "--checkpoint", "latest", "--output", str(tmp_path / "export")

    def go_on_and_load(checkpoint, model):
        opened.append(checkpoint.name)
        if len(opened) < 3:  # save the next checkpoint and remove the others, as a run does
            newest = list_checkpoints(checkpoints_dir)[-1]
            weights = load_file(newest.path / "model.safetensors")
            save_checkpoint(checkpoints_dir, Snapshot(weights, {}), newest.meta.model_copy(
                update={"global_step": newest.meta.global_step + 1, "loss": None}))
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


def test_a_tokenizer_that_is_removed_after_the_weights_were_read_is_read_again(trained, tmp_path,
                                                                               monkeypatch):
    checkpoints_dir = trained.runs_dir / "tiny/checkpoints"
    newest = list_checkpoints(checkpoints_dir)[-1]
    own = write_tokenizer(tmp_path / "own", vocab_size=257)
    weights, exported = load_file(newest.path / "model.safetensors"), []

    def save(number):
        save_checkpoint(checkpoints_dir, Snapshot(weights, {}), newest.meta.model_copy(update={
            "global_step": newest.meta.global_step + number,
            "tokenizer": choose_tokenizer(str(own)).name,
            "tokenizer_file": (own / "tokenizer.json").read_bytes()}))

    def go_on_and_write(target, *arguments):
        exported.append(target.checkpoint.name)
        if len(exported) == 1:
            save(2)
            shutil.rmtree(target.checkpoint.path)
        return write_export(target, *arguments)

    save(1)
    monkeypatch.setattr(upload, "write_export", go_on_and_write)
    succeeded(publish(trained, "tiny", "--checkpoint", "latest"))
    assert len(set(exported)) == 2
    assert (trained.runs_dir / "tiny/export/tokenizer.json").read_bytes() == (
        own / "tokenizer.json").read_bytes()


def test_an_export_can_be_fine_tuned(trained, tmp_path):
    output = tmp_path / "export"
    succeeded(publish(trained, "tiny", "--output", str(output)))
    model = AutoModelForCausalLM.from_pretrained(output).train()
    tokens = torch.arange(32).view(2, 16) % 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    model.save_pretrained(tmp_path / "tuned")
    back = load_model(str(tmp_path / "tuned"), runs_dir=trained.runs_dir)
    with torch.no_grad():
        difference = back.model(tokens) - model.eval()(tokens).logits
    assert difference.abs().max() < 1e-4 and back.tokenizer_name == "bytes"


def test_tokens_load_with_safetensors_alone(workplace):
    path = workplace.add_dataset() / "train.safetensors"
    code = ("import sys\nfrom safetensors import safe_open\n"
            f"with safe_open({str(path)!r}, framework='numpy') as file:\n"
            "    print(file.get_slice('tokens')[2:5].tolist())\n"
            "assert not {'torch', 'tokens'} & sys.modules.keys()\n")
    shown = process_succeeded(run_command(sys.executable, "-c", code)).stdout
    assert json.loads(shown) == TokenFile(path).read(2, 5).tolist()
