from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, pipeline

from basics.errors import UserError
from checkpointing import find_checkpoint
from lab.publish import export
from lab.publish.export import write_export
from lab.publish.model_card import CardFacts, model_card
from lab.targets import load_target
from tests.support.upload_server import UploadHub, taking_uploads
from tests.support.workplace import Workplace, forked, run_command, succeeded, train_tiny
from tokens.token_file import TokenFile
from tokens.tokenizer import load_tokenizer

EXPORTED = {"README.md", "config.json", "generation_config.json", "model.safetensors",
            "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"}
CHARTS = {"loss-chart.png", "grad-norm-chart.png", "learning-rate-chart.png"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return train_tiny(tmp_path_factory.mktemp("published"), usd_per_hour=36.0)


@pytest.fixture
def hub() -> Iterator[UploadHub]:
    with taking_uploads() as hub:
        yield hub


def publish(workplace: Workplace, *arguments: str, **environment: str) -> CompletedProcess[str]:
    return forked("lab/__main__.py",
                  ["publish", *arguments, "--runs-dir", str(workplace.runs_dir)],
                  environment={"HF_TOKEN": "", **environment})


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@torch.no_grad()
def test_an_export_is_a_stock_gpt2_with_its_tokenizer_and_card(
    trained: Workplace, tmp_path: Path
) -> None:
    output = tmp_path / "export"
    result = succeeded(publish(trained, "tiny", "--output", str(output)))
    assert names_in(output) == EXPORTED | CHARTS and f"written to {output}" in result.stdout
    ours = load_target("tiny", runs_dir=trained.runs_dir).model
    theirs = GPT2LMHeadModel.from_pretrained(output).eval()
    tokens = torch.arange(30).view(2, 15)
    assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-4
    text = "naïve 😀 text\n"
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.encode(text) == list(text.encode()) and tokenizer.eos_token_id == 256
    generated = pipeline("text-generation", model=str(output))(
        "ab", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert generated.startswith("ab") and len(generated) > 2


@pytest.mark.parametrize("text", ["Hello, it's  me\n\n\tdef f(x):", "中文 😀 žluť\u00a0x", " "])
@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_transformers_reads_the_tokenizers(name: str, text: str, tmp_path: Path) -> None:
    from lab.publish.tokenizer_files import write_tokenizer_files

    write_tokenizer_files(tmp_path, name, context_length=1024)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(name)
    assert theirs.encode(text) == ours.encode_ordinary(text)
    assert theirs.decode(theirs.encode(text)) == text
    assert (theirs.eos_token_id, len(theirs)) == (ours.eot_token, ours.n_vocab)
    assert theirs.model_max_length == 1024


def test_the_card_tells_what_was_trained_not_what_the_configs_say_by_now(
    trained: Workplace, tmp_path: Path
) -> None:
    path = trained.runs_dir / "tiny/train.json"
    text = path.read_text()
    path.write_text(text.replace('"tiny"', '"other"').replace("0.01", "0.123"))
    target = load_target("tiny", runs_dir=trained.runs_dir)
    path.write_text(text)
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
])
def test_damaged_records_never_break_a_card(trained: Workplace, file: str, text: str) -> None:
    path = trained.runs_dir / "tiny" / file
    before = path.read_text() if path.exists() else None
    target = load_target("tiny", runs_dir=trained.runs_dir)
    name = target.checkpoint.name
    path.write_text(text if file == "summary.json"
                    else f'{{"checkpoint": "{name}", "global_step": 1, {text}}}\n')
    try:
        card = model_card(target, CardFacts("tiny", "tiny"))
    finally:
        path.unlink()
        if before is not None:
            path.write_text(before)
    ModelCard(card)  # its front matter can be read
    rows = [line for line in card.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 3 for line in rows)


def test_the_card_tells_what_was_measured(trained: Workplace, tmp_path: Path) -> None:
    run_dir, output = trained.runs_dir / "tiny", tmp_path / "export"
    checkpoint = find_checkpoint(run_dir / "checkpoints", "best")
    measured = {"checkpoint": checkpoint.name, "global_step": checkpoint.meta.global_step,
                "dataset": "tiny", "split": "validation", "start_token": 16, "num_tokens": 320}
    (run_dir / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [
        measured | {"loss": 9.5}, measured | {"loss": 5.25, "perplexity": 190.5},
        measured | {"checkpoint": "another", "loss": 1.0}, {"junk": 1}]) + '{"half')
    succeeded(publish(trained, "tiny", "--output", str(output), "--license", "apache-2.0"))
    card = ModelCard.load(output / "README.md")
    facts = card.data.to_dict()
    assert facts["license"] == "apache-2.0" and facts["library_name"] == "transformers"
    results = {found.metric_name: found.metric_value for found in card.data.eval_results}
    assert results == {
        "validation loss while training (nats a token)": checkpoint.meta.loss,
        "loss (nats a token), 320 tokens from token 16": 5.25,
        "perplexity, 320 tokens from token 16": 190.5,
    }
    for wanted in (f"{checkpoint.meta.tokens:,} tokens of `tiny`", "14,976 parameters",
                   f"step | {checkpoint.meta.global_step + 1} of 10", "| US$ | ",
                   '"learning_rate": 0.01', "![Training and validation loss](loss-chart.png)",
                   "| global batch | 2 x 1 x 1 sequences of 16 tokens |", "| 5.250000 |"):
        assert wanted in card.text, wanted
    (run_dir / "evaluations.jsonl").unlink()


@pytest.mark.parametrize("public", [False, True])
def test_what_is_there_already_stays_as_private_as_it_is(
    trained: Workplace, tmp_path: Path, hub: UploadHub, public: bool
) -> None:
    hub.repositories["model", "someone/tiny"] = {"private": public, "files": {}}
    result = publish(trained, "tiny", "someone/tiny", "--output", str(tmp_path / "export"),
                     *["--public"] * public, **hub.environment(tmp_path))
    found = "private: leave out --public" if public else "public: say --public"
    assert result.returncode == 2 and f"is there already, and {found}" in result.stderr
    assert hub.files("model", "someone/tiny") == {} and not hub.large_files


@pytest.mark.parametrize("public", [False, True])
def test_a_model_goes_to_the_hub(trained: Workplace, tmp_path: Path, hub: UploadHub,
                                 public: bool) -> None:
    output = tmp_path / "export"
    result = succeeded(publish(trained, "tiny", "someone/tiny", "--output", str(output),
                               *["--public"] * public, **hub.environment(tmp_path)))
    assert f"{'public' if public else 'private'}: {hub.endpoint}/someone/tiny" in result.stdout
    assert hub.repositories["model", "someone/tiny"]["private"] is not public
    assert hub.files("model", "someone/tiny") == {
        path.name: path.read_bytes() for path in output.iterdir()}
    assert 'model="someone/tiny"' in hub.files("model", "someone/tiny")["README.md"].decode()


@pytest.mark.parametrize(("place", "fault"), [
    ("/lfs/", (99, 400)), ("/commit/", (99, 503)), ("/commit/", (99, 0)),
])
def test_a_broken_upload_can_be_repeated(
    trained: Workplace, tmp_path: Path, hub: UploadHub, place: str, fault: tuple[int, int]
) -> None:
    hub.faults[place] = fault
    command = "tiny", "someone/tiny", "--output", str(tmp_path / "export")
    environment = hub.environment(tmp_path)
    result = publish(trained, *command, **environment)
    assert result.returncode == 2 and result.stderr.splitlines()[-1].startswith(
        "Error: someone/tiny on the Hugging Face hub: "), result.stderr
    assert "Traceback" not in result.stderr
    assert hub.files("model", "someone/tiny") == {}
    hub.faults.clear()
    succeeded(publish(trained, *command, **environment))
    assert set(hub.files("model", "someone/tiny")) == EXPORTED | CHARTS
    assert set(hub.received.values()) == {1}  # what had arrived was not sent again


def test_passing_trouble_is_passed_over(trained: Workplace, tmp_path: Path,
                                        hub: UploadHub) -> None:
    hub.faults |= {"/lfs/": (1, 503), "/commit/": (1, 500), "/api/repos/create": (1, 429)}
    succeeded(publish(trained, "tiny", "someone/tiny", "--output", str(tmp_path / "export"),
                      **hub.environment(tmp_path)))
    assert set(hub.files("model", "someone/tiny")) == EXPORTED | CHARTS


def test_a_dataset_goes_to_the_hub_as_it_is(workplace: Workplace, tmp_path: Path,
                                            hub: UploadHub) -> None:
    directory = workplace.add_dataset()
    (directory / "README.md").write_text("---\nlicense: mit\n---\n")
    (directory / ".train.safetensors.scan.json").write_text("{}")
    (directory / "notes.txt").write_text("mine")
    environment = hub.environment(tmp_path)
    dry = succeeded(publish(workplace, str(directory), "someone/words", "--dry-run", **environment))
    assert "nothing was sent" in dry.stdout and hub.paths == []
    succeeded(publish(workplace, str(directory), "someone/words", **environment))
    for arguments, message in (((), "name the REPOSITORY"),
                               (("someone/words", "--license", "mit"), "are for models")):
        result = publish(workplace, str(directory), *arguments)
        assert result.returncode == 2 and message in result.stderr
    files = hub.files("dataset", "someone/words")
    assert set(files) == {"README.md", "train.safetensors", "validation.safetensors"}
    assert files["train.safetensors"] == (directory / "train.safetensors").read_bytes()


def test_a_dry_run_sends_nothing(trained: Workplace, tmp_path: Path, hub: UploadHub) -> None:
    output = tmp_path / "export"
    result = succeeded(publish(trained, "tiny", "someone/tiny", "--dry-run", "--output",
                               str(output), **hub.environment(tmp_path)))
    assert hub.paths == [] and names_in(output) == EXPORTED | CHARTS
    assert "would go to someone/tiny on the Hugging Face hub, a private model" in result.stdout
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
        result = publish(trained, "tiny", "--output", str(output))
        assert result.returncode == 2 and message in result.stderr
        assert names_in(output) == before
        (output / added).unlink()
    (output / "README.md").write_text("Somebody else's model, of the same files.")
    result = publish(trained, "tiny", "--output", str(output))
    assert result.returncode == 2 and "a model that is not from here" in result.stderr


def test_an_export_that_cannot_be_written_leaves_the_earlier_one(
    trained: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, output = load_target("tiny", runs_dir=trained.runs_dir), tmp_path / "export"
    write_export(target, output, "tags: ddp-train")
    for error in (OSError(errno.ENOSPC, "No space left on device"),
                  SafetensorError("Error while serializing: No space left on device")):
        monkeypatch.setattr(export, "save_file", lambda *_, error=error: raise_(error))
        with pytest.raises(UserError, match="export: cannot be written: No space left") as caught:
            write_export(target, output, "tags: ddp-train")
        assert caught.value.status == 4
        assert names_in(tmp_path) == {"export"} and (output / "model.safetensors").is_file()


def raise_(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("name", ["link", "file"])
def test_an_output_that_is_no_directory_is_refused(trained: Workplace, tmp_path: Path,
                                                   name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "file").write_text("mine")
    result = publish(trained, "tiny", "--output", str(tmp_path / name))
    assert result.returncode == 2 and "is not a directory" in result.stderr
    assert (tmp_path / "file").read_text() == "mine" and names_in(tmp_path / "elsewhere") == set()


@pytest.mark.parametrize(("arguments", "message"), [
    (("nix",), "no such run"),
    (("tiny", "nix"), "'nix' is not a repository's name; wanted owner/name"),
    (("tiny", "some/one", "--checkpoint", "nix"), "no checkpoint 'nix'"),
    (("tiny", "some/one"), "uploading needs a token; set HF_TOKEN"),
    (("../tiny",), "not a plain name"),
    ((".",), "not a plain name"),
])
def test_mistakes_are_one_line(trained: Workplace, tmp_path: Path, arguments: tuple[str, ...],
                               message: str) -> None:
    result = publish(trained, *arguments, "--output", str(tmp_path / "export"),
                     HF_HOME=str(tmp_path))
    assert result.returncode == 2 and message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_token_that_is_refused_is_one_line(trained: Workplace, tmp_path: Path,
                                             hub: UploadHub) -> None:
    result = publish(trained, "tiny", "someone/tiny", "--output", str(tmp_path / "export"),
                     **hub.environment(tmp_path, token="hf_wrong"))
    assert result.returncode == 2 and "set HF_TOKEN" in result.stderr
    assert result.stderr.count("\n") == 1


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
    model.save_pretrained(tmp_path / "tuned")  # and it comes back
    back = load_target(str(tmp_path / "tuned"), runs_dir=trained.runs_dir)
    with torch.no_grad():
        difference = back.model(tokens) - model.eval()(tokens).logits
    assert difference.abs().max() < 1e-4 and back.tokenizer_name == "bytes"


def test_tokens_load_with_safetensors_alone(trained: Workplace) -> None:
    path = trained.datasets_dir / "tiny/train.safetensors"
    code = ("import sys\nfrom safetensors import safe_open\n"
            f"with safe_open({str(path)!r}, framework='numpy') as file:\n"
            "    print(file.get_slice('tokens')[2:5].tolist())\n"
            "assert not {'torch', 'token_dataset'} & sys.modules.keys()\n")
    shown = succeeded(run_command(sys.executable, "-c", code)).stdout
    assert json.loads(shown) == TokenFile(path).read(2, 5).tolist()
