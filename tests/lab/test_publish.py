from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import Result
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, pipeline

from basics.directory_lock import lock_directory
from basics.errors import UserError
from checkpointing import find_checkpoint
from lab.publish import export
from lab.publish.export import write_export
from lab.publish.model_card import CardFacts, model_card
from lab.publish.tokenizer_files import write_tokenizer_files
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.markdown import HOSTILE, active_parts
from tests.support.models import random_model
from tests.support.upload_server import UploadHub, taking_uploads
from tests.support.workplace import Workplace, run_command
from tests.support.workplace import succeeded as process_succeeded
from tokens.token_file import TokenFile
from tokens.tokenizer import load_tokenizer
from trainer.models import LoadedModel, load_model

EXPORTED = {"README.md", "config.json", "generation_config.json", "model.safetensors",
            "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"}
CHARTS = {"loss-chart.png", "grad-norm-chart.png", "learning-rate-chart.png"}


@pytest.fixture
def hub() -> Iterator[UploadHub]:
    with taking_uploads() as hub:
        yield hub


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait between attempts, neither here nor in the hub client."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def publish(workplace: Workplace, *arguments: str, **environment: str) -> Result:
    return run_lab("publish", *arguments, "--runs-dir", str(workplace.runs_dir),
                   **{"HF_TOKEN": "", **environment})


def uploading_error(result: Result, *, status: int = 2) -> str:
    """Return the error line of an upload that failed after the files were listed."""
    assert isinstance(result.exception, UserError), result.output + repr(result.exception)
    assert "bytes  model.safetensors" in result.stdout and result.exception.status == status
    return result.exception.line()


def raise_(error: Exception) -> None:
    raise error


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@torch.no_grad()
def test_an_export_is_a_standard_gpt2_with_its_tokenizer_and_card(
    trained: Workplace, tmp_path: Path
) -> None:
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
def test_transformers_loads_the_tokenizers(name: str, tmp_path: Path) -> None:
    write_tokenizer_files(tmp_path, name, context_length=1024)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(name)
    for text in ("Hello, it's  me\n\n\tdef f(x):", "中文 😀 žluť\u00a0x", " "):
        assert theirs.encode(text) == ours.encode_ordinary(text)
        assert theirs.decode(theirs.encode(text)) == text
    assert (theirs.eos_token_id, len(theirs)) == (ours.eot_token, ours.n_vocab)
    assert theirs.model_max_length == 1024


def test_the_card_says_from_which_weights_a_run_was_trained(trained: Workplace) -> None:
    summary_path = trained.runs_dir / "tiny/summary.json"
    summary = json.loads(summary_path.read_text())
    for source, words in ((None, "trained from scratch on"),
                          ("owner/name", "trained from the weights of `owner/name` on")):
        summary["train"]["init_from"] = source
        summary_path.write_text(json.dumps(summary))
        target = load_model("tiny", runs_dir=trained.runs_dir)
        assert words in " ".join(model_card(target, CardFacts("tiny", "tiny")).split())


def test_a_card_describes_the_training_not_a_later_config(trained: Workplace) -> None:
    path = trained.runs_dir / "tiny/train.json"
    path.write_text(path.read_text().replace('"tiny"', '"other"').replace("0.01", "0.123"))
    target = load_model("tiny", runs_dir=trained.runs_dir)
    card = model_card(target, CardFacts("tiny", "tiny"))
    assert "tokens of `tiny`" in card and '"learning_rate": 0.01' in card and "other" not in card


@pytest.mark.parametrize(("file", "text"), [
    ("summary.json", '{"batch": {"x": 1}}'), ("summary.json", '{"batch": [1]}'),
    ("summary.json", '{"machine": "x"}'), ("summary.json", '{"tokens_per_second": "x"}'),
    ("summary.json", "junk"), ("summary.json", '{"train": {"dataset": "a|b\\nc"}}'),
    ("evaluations.jsonl", '"loss": 1.5, "num_tokens": "x"'),
    ("evaluations.jsonl", '"loss": 1.5, "num_tokens": 3, "start_token": null'),
    ("evaluations.jsonl", '"loss": "x"'), ("evaluations.jsonl", '"loss": NaN'),
    ("evaluations.jsonl", '"loss": 1.5, "dataset": "a|b\\nc", "split": {"a": 1}'),
    ("evaluations.jsonl", '"loss": 1.5, "dataset": ["a"]'),
    ("summary.json", json.dumps({"train": {"dataset": HOSTILE}})),
    ("summary.json", json.dumps({"train": {"dataset": "tiny", "init_from": HOSTILE}})),
    ("summary.json", json.dumps({"machine": dict.fromkeys(("device", "torch"), HOSTILE)})),
    ("evaluations.jsonl", f'"loss": 1.5, "dataset": {json.dumps(HOSTILE)}'),
    ("evaluations.jsonl", f'"accuracy": 0.5, "benchmark": {json.dumps(HOSTILE)}'),
])
def test_damaged_records_never_break_a_card(trained: Workplace, file: str, text: str) -> None:
    path = trained.runs_dir / "tiny" / file
    target = load_model("tiny", runs_dir=trained.runs_dir)
    name = target.checkpoint.name
    path.write_text(text if file == "summary.json"
                    else f'{{"checkpoint": "{name}", "global_step": 1, {text}}}\n')
    card = model_card(target, CardFacts("tiny", "tiny"))
    ModelCard(card)  # parses its front matter
    rows = [line for line in card.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 3 for line in rows)
    assert active_parts(card) <= CHARTS


def test_the_card_has_all_results(trained: Workplace, tmp_path: Path) -> None:
    run_dir, output = trained.runs_dir / "tiny", tmp_path / "export"
    checkpoint = find_checkpoint(run_dir / "checkpoints", "best")
    measured = {"checkpoint": checkpoint.name, "global_step": checkpoint.meta.global_step,
                "dataset": "tiny", "split": "validation", "start_token": 16, "num_tokens": 320}
    (run_dir / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [
        measured | {"loss": 9.5}, measured | {"loss": 5.25, "perplexity": 190.5},
        measured | {"checkpoint": "another", "loss": 1.0}, {"junk": 1},
        measured | {"split": "train", "loss": 0.5},  # of tokens trained on
        measured | {"dataset": None, "benchmark": "blimp", "split": "train", "accuracy": 0.5,
                    "questions_from": "nyu-mll/blimp"},
        measured | {"dataset": None, "benchmark": "blimp", "split": None, "accuracy": 0.25,
                    "questions_from": "own|.jsonl"}]) + '{"half')
    succeeded(publish(trained, "tiny", "--output", str(output), "--license", "apache-2.0"))
    card = ModelCard.load(output / "README.md")
    facts = card.data.to_dict()
    assert facts["license"] == "apache-2.0" and facts["library_name"] == "transformers"
    results = {found.metric_name: found.metric_value for found in card.data.eval_results}
    assert results == {
        "validation loss during training (nats per token)": checkpoint.loss,
        "loss (nats per token), 320 tokens from token 16": 5.25,
        "perplexity, 320 tokens from token 16": 190.5,
        "accuracy": 0.5, "accuracy, questions of own|.jsonl": 0.25,
    }
    splits = {found.metric_name: found.dataset_split for found in card.data.eval_results}
    assert splits["accuracy"] == "train" and splits["accuracy, questions of own|.jsonl"] is None
    for wanted in (f"{checkpoint.meta.tokens:,} tokens of `tiny`", "14,976 parameters",
                   f"step | {checkpoint.meta.global_step + 1} of 10", "| US$ | ",
                   '"learning_rate": 0.01', "![Training and validation loss](loss-chart.png)",
                   "| global batch | 2 x 1 x 1 sequences of 16 tokens |", "| 5.250000 |"):
        assert wanted in card.text, wanted


@pytest.mark.parametrize("public", [False, True])
def test_an_existing_repository_keeps_its_visibility(
    trained: Workplace, tmp_path: Path, hub: UploadHub, public: bool
) -> None:
    hub.repositories["model", "someone/tiny"] = {"private": public, "files": {}}
    result = publish(trained, "tiny", "someone/tiny", "--output", str(tmp_path / "export"),
                     *["--public"] * public, **hub.environment(tmp_path))
    found = "private; omit --public" if public else "public; add --public"
    assert f"already exists and is {found}" in uploading_error(result)
    assert hub.files("model", "someone/tiny") == {} and not hub.large_files


@pytest.mark.parametrize("public", [False, True])
def test_a_model_is_uploaded(trained: Workplace, tmp_path: Path, hub: UploadHub,
                                 public: bool) -> None:
    output = tmp_path / "export"
    result = succeeded(publish(trained, "tiny", "someone/tiny", "--output", str(output),
                               *["--public"] * public, **hub.environment(tmp_path)))
    assert f"hub, {'public' if public else 'private'}: {hub.endpoint}/someone/tiny" in result.stdout
    assert hub.repositories["model", "someone/tiny"]["private"] is not public
    assert hub.files("model", "someone/tiny") == {
        path.name: path.read_bytes() for path in output.iterdir()}
    assert 'model="someone/tiny"' in hub.files("model", "someone/tiny")["README.md"].decode()


@pytest.mark.parametrize(("place", "fault"), [
    ("/lfs/", (99, 400)), ("/commit/", (99, 503)), ("/commit/", (99, 0)),
])
def test_a_broken_upload_can_be_repeated(
    trained: Workplace, tmp_path: Path, hub: UploadHub, no_pauses: None, place: str,
    fault: tuple[int, int],
) -> None:
    hub.faults[place] = fault
    command = "tiny", "someone/tiny", "--output", str(tmp_path / "export")
    environment = hub.environment(tmp_path)
    result = publish(trained, *command, **environment)
    line = uploading_error(result, status=2 if fault[1] == 400 else 1)  # others may pass
    assert line.startswith("Error: someone/tiny on the Hugging Face hub: ")
    assert hub.files("model", "someone/tiny") == {}
    hub.faults.clear()
    succeeded(publish(trained, *command, **environment))
    assert set(hub.files("model", "someone/tiny")) == EXPORTED | CHARTS
    assert set(hub.received.values()) == {1}  # received files were not sent again


def test_transient_errors_of_the_hub_are_retried(trained: Workplace, tmp_path: Path,
                                                 hub: UploadHub, no_pauses: None) -> None:
    hub.faults |= {"/lfs/": (1, 503), "/commit/": (1, 500), "/api/repos/create": (1, 429)}
    succeeded(publish(trained, "tiny", "someone/tiny", "--output", str(tmp_path / "export"),
                      **hub.environment(tmp_path)))
    assert set(hub.files("model", "someone/tiny")) == EXPORTED | CHARTS


def test_a_dataset_is_uploaded_unchanged(workplace: Workplace, tmp_path: Path,
                                         hub: UploadHub) -> None:
    directory = workplace.add_dataset()
    (directory / "README.md").write_text("---\nlicense: mit\n---\n")
    (directory / ".train.safetensors.scan.json").write_text("{}")
    (directory / "notes.txt").write_text("mine")
    environment = hub.environment(tmp_path)
    dry = succeeded(publish(workplace, str(directory), "someone/dataset", "--dry-run",
                            **environment))
    assert "nothing uploaded" in dry.stdout and hub.paths == []
    succeeded(publish(workplace, str(directory), "someone/dataset", **environment))
    for arguments, message in (((), "name the REPOSITORY"),
                               (("someone/dataset", "--license", "mit"), "apply only to models")):
        assert message in error_line(publish(workplace, str(directory), *arguments))
    files = hub.files("dataset", "someone/dataset")
    assert set(files) == {"README.md", "train.safetensors", "validation.safetensors"}
    assert files["train.safetensors"] == (directory / "train.safetensors").read_bytes()


def test_a_dry_run_uploads_nothing(trained: Workplace, tmp_path: Path, hub: UploadHub) -> None:
    output = tmp_path / "export"
    result = succeeded(publish(trained, "tiny", "someone/tiny", "--dry-run", "--output",
                               str(output), **hub.environment(tmp_path)))
    assert hub.paths == [] and names_in(output) == EXPORTED | CHARTS
    assert "would upload to the private model repository someone/tiny" in result.stdout
    size = (output / "model.safetensors").stat().st_size
    assert f"{size:>15,} bytes  model.safetensors" in result.stdout


def test_an_export_replaces_an_earlier_one_and_nothing_else(
    trained: Workplace, tmp_path: Path
) -> None:
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


def no_tokenizer(tmp_path: Path) -> LoadedModel:
    return LoadedModel("mine", random_model(vocab_size=61), None)


def test_one_command_at_a_time_writes_an_export(tmp_path: Path) -> None:
    output = write_export(no_tokenizer(tmp_path), tmp_path / "export", "tags: ddp-train")
    work_dir = tmp_path / ".export.ddp-train-export"
    work_dir.mkdir()
    lock = lock_directory(work_dir)
    with pytest.raises(UserError, match="another lab publish or lab tune is writing it"):
        write_export(no_tokenizer(tmp_path), output, "tags: ddp-train, new")
    shutil.move(output, work_dir / "old")  # as while the other one replaces it
    with pytest.raises(UserError, match="another lab publish or lab tune is writing it"):
        export.check_output(output)
    os.close(lock)
    export.check_output(output)
    assert (output / "README.md").read_text() == "tags: ddp-train"
    assert names_in(tmp_path) == {"export"}


@pytest.mark.parametrize("kind", ["file", "card", "link"])
@pytest.mark.parametrize("place", ["new", "old"])
def test_leftovers_of_others_are_not_removed(tmp_path: Path, kind: str, place: str) -> None:
    leftover = tmp_path / ".export.ddp-train-export" / place
    (other := tmp_path / "other").mkdir()
    (other / {"file": "thesis.txt"}.get(kind, "README.md")).write_text("years of work")
    leftover.parent.mkdir()
    if kind == "link":
        leftover.symlink_to(other)
    else:
        shutil.copytree(other, leftover)
    before = names_in(leftover)
    with pytest.raises(UserError, match=f"{place}: is not from lab publish; move it away"):
        write_export(no_tokenizer(tmp_path), tmp_path / "export", "tags: ddp-train")
    assert names_in(leftover) == before and not (tmp_path / "export").exists()


@pytest.mark.parametrize("left", [(), ("README.md",), ("README.md", "config.json"),
                                  ("model.safetensors",)])
def test_parts_that_a_kill_left_are_removed(tmp_path: Path, left: tuple[str, ...]) -> None:
    for place in ("new", "old"):
        (leftover := tmp_path / ".export.ddp-train-export" / place).mkdir(parents=True)
        for name in left:
            (leftover / name).write_text("tags: ddp-train")
    (tmp_path / "export").mkdir()
    write_export(no_tokenizer(tmp_path), tmp_path / "export", "tags: ddp-train")
    assert names_in(tmp_path) == {"export"}


def test_an_export_is_on_the_disk_before_it_replaces_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    output, rename = tmp_path / "export", Path.rename
    write_export(no_tokenizer(tmp_path), output, "tags: ddp-train")
    monkeypatch.setattr(export, "fsync", lambda path: written.append(path.name))
    monkeypatch.setattr(Path, "rename", lambda path, target: written.append(
        f"{path.name} to {target.name}") or rename(path, target))
    write_export(no_tokenizer(tmp_path), output, "tags: ddp-train")
    assert {*written[:-4]} == names_in(output)
    assert written[-4:] == ["new", "export to old", "new to export", tmp_path.name]


def test_a_model_without_a_tokenizer_is_published_again(tmp_path: Path) -> None:
    card = "---\ntags:\n- ddp-train\n---\n\nx\n"
    output = write_export(no_tokenizer(tmp_path), tmp_path / "export", card)
    before = names_in(output)
    succeeded(publish(Workplace(tmp_path), str(output)))
    assert names_in(output) == before and "tokenizer.json" not in before


def test_an_export_that_cannot_be_written_leaves_the_earlier_one(
    trained: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, output = load_model("tiny", runs_dir=trained.runs_dir), tmp_path / "export"
    write_export(target, output, "tags: ddp-train")
    for error in (OSError(errno.ENOSPC, "No space left on device"),
                  SafetensorError("I/O error: No space left on device (os error 28)")):
        monkeypatch.setattr(export, "write_tensors", lambda *_, error=error: raise_(error))
        with pytest.raises(UserError, match="export: cannot be written: No space left") as caught:
            write_export(target, output, "tags: ddp-train")
        assert caught.value.status == 4
        assert names_in(tmp_path) == {"export"} and (output / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["link", "file"])
def test_an_output_that_is_not_a_directory_is_refused(trained: Workplace, tmp_path: Path,
                                                   name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "file").write_text("mine")
    result = publish(trained, "tiny", "--output", str(tmp_path / name))
    assert "is not a directory" in error_line(result)
    assert (tmp_path / "file").read_text() == "mine" and names_in(tmp_path / "elsewhere") == set()


@pytest.mark.parametrize(("arguments", "message"), [
    (("nix",), "no such run"),
    (("tiny", "nix"), "'nix' is not the name of a repository; give owner/name"),
    (("tiny", "some/one", "--checkpoint", "nix"), "no checkpoint 'nix'"),
    (("../tiny",), "not a plain name"),
    ((".",), "not a plain name"),
])
def test_a_user_error_is_one_line(trained: Workplace, tmp_path: Path, arguments: tuple[str, ...],
                                  message: str) -> None:
    result = publish(trained, *arguments, "--output", str(tmp_path / "export"))
    assert message in error_line(result)


@pytest.mark.parametrize(("token", "message"), [
    ("", "uploading needs a token; set HF_TOKEN"),
    ("hf_wrong", "set HF_TOKEN"),
])
def test_uploading_needs_a_valid_token(trained: Workplace, tmp_path: Path, hub: UploadHub,
                                       token: str, message: str) -> None:
    result = publish(trained, "tiny", "someone/tiny", "--output", str(tmp_path / "export"),
                     **hub.environment(tmp_path, token=token))
    assert message in uploading_error(result) and not hub.repositories


def test_an_export_can_be_fine_tuned(trained: Workplace, tmp_path: Path) -> None:
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


def test_tokens_load_with_safetensors_alone(workplace: Workplace) -> None:
    path = workplace.add_dataset() / "train.safetensors"
    code = ("import sys\nfrom safetensors import safe_open\n"
            f"with safe_open({str(path)!r}, framework='numpy') as file:\n"
            "    print(file.get_slice('tokens')[2:5].tolist())\n"
            "assert not {'torch', 'tokens'} & sys.modules.keys()\n")
    shown = process_succeeded(run_command(sys.executable, "-c", code)).stdout
    assert json.loads(shown) == TokenFile(path).read(2, 5).tolist()
